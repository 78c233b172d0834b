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
//! slots return only with a polled completion. It is not a model of performance: its times are whatever
//! [`LinkConfig`] says.
//!
//! With [`Pace::Timed`] time moves only in [`SimFabric::advance_to`]; equal seeds and equal calls give equal
//! histories. With [`Pace::Immediate`] each poll of any device lets everything arrive first.
//!
//! What real devices do and this one does on purpose: a queue pair's own numbers repeat from device to
//! device; local and remote keys differ; destroying a queue pair loses its unpolled completions; packets that
//! left before a queue pair went to error or was destroyed still land, unless the *target's* queue pair is in
//! error or gone.
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

/// The fabric that all devices of one simulation share. A handle: clones are the same fabric.
#[derive(Clone)]
pub struct SimFabric {
    world: Arc<Mutex<World>>,
}

impl SimFabric {
    /// A fabric without devices. `seed` names its history.
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

    /// When something will happen next; `None`: nothing is under way.
    #[must_use]
    pub fn next_event(&self) -> Option<Instant> {
        self.lock().next_wake().map(Instant::from_nanos)
    }

    /// Lets time pass. Never goes back.
    pub fn advance_to(&self, now: Instant) {
        self.lock().run_until(now.as_nanos());
    }

    /// Lets time pass until nothing is under way.
    pub fn run_until_idle(&self) {
        self.lock().run_until_idle();
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> SimCounters {
        self.lock().counters
    }

    /// Changes the link from one port to another, from the next packet on. Each direction is a link of its
    /// own.
    pub fn set_link(&self, from: PortId, to: PortId, link: LinkConfig) {
        self.lock().links[from.0][to.0] = link;
    }

    /// The link as it is set.
    #[must_use]
    pub fn link(&self, from: PortId, to: PortId) -> LinkConfig {
        self.lock().links[from.0][to.0]
    }

    /// Takes a port down or up: its owner gets an event, nothing passes meanwhile. Packets that arrive while
    /// it is down are lost.
    pub fn set_port(&self, port: PortId, active: bool) {
        self.lock().set_port(port.0, active);
    }

    /// Changes an entry of the GID table. Queue pairs that use the old one reach no peer any more.
    pub fn set_gid(&self, port: PortId, index: u32, gid: Option<([u8; 16], GidKind)>) {
        self.lock().set_gid(port.0, index as usize, gid);
    }

    /// The device fails for good: `DeviceFatal`, then EIO to every call but those that take things down.
    pub fn kill(&self, port: PortId) {
        self.lock().kill_device(port.0);
    }

    /// Puts a queue pair, by number, in error from outside and notifies its owner.
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

    /// The next `count` queue pairs cannot be made.
    pub fn fail_qp_creations(&self, port: PortId, errno: i32, count: u32) {
        self.lock().devices[port.0].faults.qp_creations = Some((errno, count)).filter(|_| count != 0);
    }

    /// The next `count` steps of queue pairs fail.
    pub fn fail_qp_steps(&self, port: PortId, errno: i32, count: u32) {
        self.lock().devices[port.0].faults.qp_steps = Some((errno, count)).filter(|_| count != 0);
    }

    /// Whether the neighbours of `port` say where they are. While they do not, connecting a queue pair waits,
    /// in real time: for ten seconds, then it fails with `ETIMEDOUT`.
    pub fn set_neighbours(&self, port: PortId, answer: bool) {
        let neighbour = self.lock().devices[port.0].neighbour.clone();
        neighbour.set(answer);
    }

    /// Calls that wait for a neighbour of `port` at this moment.
    #[must_use]
    pub fn waiting_for_neighbours(&self, port: PortId) -> u32 {
        let neighbour = self.lock().devices[port.0].neighbour.clone();
        neighbour.waiting()
    }

    /// The next `count` requests that arrive at `port` are turned away.
    pub fn refuse_requests(&self, port: PortId, refusal: Refusal, count: u32) {
        self.lock().devices[port.0].faults.refusal = Some((refusal, count)).filter(|_| count != 0);
    }

    /// The next `count` packets that reach queue pairs of `port` in error are carried out all the same, as
    /// devices may do with what they have in their hands when a queue pair is put in error. Queue pairs that
    /// are destroyed take nothing.
    pub fn linger_in_error(&self, port: PortId, count: u32) {
        self.lock().devices[port.0].faults.lingering = count;
    }

    /// After `after` more good completions on `port`, one that went well is reported with `status` instead;
    /// its queue pair is in error.
    pub fn corrupt_status(&self, port: PortId, after: u32, status: WcStatus) {
        self.lock().devices[port.0].faults.status = Some((after, status));
    }

    /// Queue pairs of a device that exist now.
    #[must_use]
    pub fn qp_count(&self, port: PortId) -> u32 {
        self.lock().devices[port.0].qp_count()
    }

    /// Registrations of a device that exist now.
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
