//! A simulated provider of verbs: several devices on one fabric in one process, with faults, from a seed.
//!
//! ```text
//!   SimDevice ─┐                       ┌─ queue pairs: order, packet numbers, retries, flush
//!   SimDevice ─┼── one fabric, one ────┼─ links: latency, loss, duplicates, down
//!   SimDevice ─┘   clock (SimFabric)   └─ packets that land after their sender has failed (L5)
//! ```
//!
//! It models what one-sided work over reliable connections can observe, following the InfiniBand Architecture
//! Specification, volume 1, chapter 9: packet numbers and acknowledgements, go-back-N, "receiver not ready",
//! access faults that put both ends in error, READ credits, completion queues that overrun, send queues whose
//! slots are free only after a completion was polled. It is not a model of performance: its times are those
//! of [`LinkConfig`].
//!
//! With [`Pace::Timed`] time moves only in [`SimFabric::advance_to`]; equal seeds and equal calls give equal
//! histories. With [`Pace::Immediate`] each poll of any device lets everything arrive first.
//!
//! As on real devices, numbers of queue pairs repeat from device to device; local and remote keys differ; a
//! destroyed queue pair loses its unpolled completions; packets that were sent before a queue pair went to
//! error or was destroyed still land, unless the *target's* queue pair is in error or destroyed.
//!
//! ```
//! use te_rdma::sim::{DeviceConfig, SimConfig, SimFabric};
//! use te_rdma::verbs::{GidKind, Verbs};
//!
//! let fabric = SimFabric::new(42, SimConfig::IMMEDIATE);
//! let device = fabric.device(DeviceConfig::default());
//! assert!(device.port().unwrap().active);
//! assert_eq!(device.gid(3).unwrap().unwrap().kind, GidKind::RoceV2);
//! ```

mod config;
mod device;
mod direct;
mod neighbour;
mod packet;
mod queue;
mod wire;
mod world;

use std::sync::{Arc, Mutex, MutexGuard};

use te_core::Instant;
use world::{World, locked};

use crate::sys::verbs::{AsyncEvent, GidKind, WcStatus};

pub use config::{DeviceConfig, LinkConfig, Pace, PortId, Refusal, SimConfig, SimCounters};
pub use device::SimDevice;

/// The fabric that all devices of one simulation share. Clones name the same fabric.
#[derive(Clone)]
pub struct SimFabric {
    world: Arc<Mutex<World>>,
}

impl SimFabric {
    /// A fabric without devices. `seed` determines its random decisions.
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> Self {
        Self { world: Arc::new(Mutex::new(World::new(seed, config))) }
    }

    /// Adds a device and opens it.
    #[must_use]
    pub fn device(&self, config: DeviceConfig) -> SimDevice {
        let device = self.lock().add_device(config);
        SimDevice::new(Arc::clone(&self.world), device)
    }

    /// The time on the fabric.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::from_nanos(self.lock().now)
    }

    /// The time of the next event; `None`: nothing is on the wire.
    #[must_use]
    pub fn next_event(&self) -> Option<Instant> {
        self.lock().next_wake().map(Instant::from_nanos)
    }

    /// Lets time pass until `now`. A time in the past changes nothing.
    pub fn advance_to(&self, now: Instant) {
        self.lock().run_until(now.as_nanos());
    }

    /// Lets time pass until nothing is on the wire.
    pub fn run_until_idle(&self) {
        self.lock().run_until_idle();
    }

    /// Counters since the fabric was made.
    #[must_use]
    pub fn counters(&self) -> SimCounters {
        self.lock().counters
    }

    /// Changes the link from one port to another, from the next packet on. The two directions are two links.
    pub fn set_link(&self, from: PortId, to: PortId, link: LinkConfig) {
        self.lock().links[from.0][to.0] = link;
    }

    /// The present setting of a link.
    #[must_use]
    pub fn link(&self, from: PortId, to: PortId) -> LinkConfig {
        self.lock().links[from.0][to.0]
    }

    /// Takes a port down (false) or up (true): its device raises an event. While it is down, nothing is sent
    /// and packets that arrive are lost.
    pub fn set_port_active(&self, port: PortId, active: bool) {
        self.lock().set_port(port.0, active);
    }

    /// Changes an entry of the GID table. Queue pairs that use the old entry reach no peer any more.
    pub fn set_gid(&self, port: PortId, index: u32, gid: Option<([u8; 16], GidKind)>) {
        self.lock().set_gid(port.0, index as usize, gid);
    }

    /// The device fails for good: it raises `DeviceFatal`, and every call but those that destroy something
    /// fails with EIO.
    pub fn kill(&self, port: PortId) {
        self.lock().kill_device(port.0);
    }

    /// Puts the queue pair with this number in error, and raises the event that reports it.
    pub fn fail_qp(&self, port: PortId, number: u32) {
        let mut world = self.lock();
        if let Some(qp) = world.qp_by_number(port.0, number) {
            world.qp_to_error(qp);
            world.devices[port.0].raise(AsyncEvent::QpError(number));
        }
    }

    /// The next `count` registrations fail with `errno`.
    pub fn fail_registrations(&self, port: PortId, errno: i32, count: u32) {
        self.lock().devices[port.0].faults.registrations = Some((errno, count)).filter(|_| count != 0);
    }

    /// The next `count` creations of queue pairs fail with `errno`.
    pub fn fail_qp_creations(&self, port: PortId, errno: i32, count: u32) {
        self.lock().devices[port.0].faults.qp_creations = Some((errno, count)).filter(|_| count != 0);
    }

    /// The next `count` state changes of queue pairs fail with `errno`.
    pub fn fail_qp_steps(&self, port: PortId, errno: i32, count: u32) {
        self.lock().devices[port.0].faults.qp_steps = Some((errno, count)).filter(|_| count != 0);
    }

    /// Whether the neighbours of `port` answer address resolution. While they do not, connecting a queue pair
    /// blocks in real time: for ten seconds, then it fails with `ETIMEDOUT`.
    pub fn set_neighbours_answer(&self, port: PortId, answer: bool) {
        let neighbour = self.lock().devices[port.0].neighbour.clone();
        neighbour.set(answer);
    }

    /// The number of calls that wait for a neighbour of `port` at this moment.
    #[must_use]
    pub fn waiting_for_neighbours(&self, port: PortId) -> u32 {
        let neighbour = self.lock().devices[port.0].neighbour.clone();
        neighbour.waiting()
    }

    /// The next `count` requests that arrive at `port` are refused.
    pub fn refuse_requests(&self, port: PortId, refusal: Refusal, count: u32) {
        self.lock().devices[port.0].faults.refusal = Some((refusal, count)).filter(|_| count != 0);
    }

    /// The next `count` packets that reach queue pairs of `port` in error are executed nevertheless: a device
    /// may do so with packets that it has begun to execute when a queue pair is put in error. Destroyed queue
    /// pairs execute nothing.
    pub fn linger_in_error(&self, port: PortId, count: u32) {
        self.lock().devices[port.0].faults.lingering = count;
    }

    /// After `after` more successful completions on `port`, the next success is reported with `status`
    /// instead, and its queue pair is in error.
    pub fn corrupt_status(&self, port: PortId, after: u32, status: WcStatus) {
        self.lock().devices[port.0].faults.status = Some((after, status));
    }

    /// The number of queue pairs of a device that exist now.
    #[must_use]
    pub fn qp_count(&self, port: PortId) -> u32 {
        self.lock().devices[port.0].qp_count()
    }

    /// The number of registrations of a device that exist now.
    #[must_use]
    pub fn mr_count(&self, port: PortId) -> u32 {
        self.lock().devices[port.0].mrs.live()
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        locked(&self.world)
    }
}

impl std::fmt::Debug for SimFabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimFabric").field("counters", &self.counters()).finish_non_exhaustive()
    }
}
