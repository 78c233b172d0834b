//! A simulated fabric: one seed, virtual time, and every way in which a network fails.
//!
//! ```text
//!   SimTransport ─┐                          ┌─ links: latency, bandwidth, loss, reorder, down
//!   SimTransport ─┼── one world, one clock ──┼─ nodes: incarnation, dead, restarted, stalled, slow
//!   SimTransport ─┘     (SimNet)             └─ packets: WRITEs that land up to a minute after they timed out
//! ```
//!
//! Time moves when a transport is polled with a later `now`, or when [`SimNet::advance_to`] is called;
//! nothing here reads a clock. Equal seeds and equal calls give equal histories. One-sided operations do not
//! need the target to be polled; at a [stalled](SimNet::stall) target they wait until it continues.
//!
//! ```
//! use te_core::sim::{SimConfig, SimNet};
//! use te_core::{Access, Completion, MemSpan, Memory, Op, RegionId, RemoteRegionId, RegionOffset, RemoteOffset, Slice, Token, Transport};
//!
//! let net = SimNet::new(42, SimConfig::CALM);
//! let (mut here, mut there) = (net.node(), net.node());
//! let (mut from, mut to) = (vec![7u8; 4096], vec![0u8; 4096]);
//! let (local, remote, remote_region) = (RegionId::new(0, 1), RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both buffers outlive the transports' use of them, and are not touched until it has ended.
//! unsafe {
//!     here.register(local, MemSpan::new(from.as_mut_ptr(), from.len()), Access::LOCAL).unwrap();
//!     there.register(remote, MemSpan::new(to.as_mut_ptr(), to.len()), Access::REMOTE_WRITE).unwrap();
//! }
//! let mut blob = [0; 64];
//! let blob_bytes = there.export(remote, &mut blob).unwrap();
//! here.attach(remote_region, &blob[..blob_bytes]).unwrap();
//!
//! let slice = Slice { token: Token(1), local: RegionOffset::new(local, 0), remote: RemoteOffset::new(remote_region, 0), len: 4096, op: Op::Write };
//! assert_eq!(here.submit(&[slice]), Ok(1));
//! let mut done = [Completion::applied(Token(0)); 4];
//! while here.poll(net.next_event().unwrap_or(net.now()), &mut done) == 0 {}
//! assert_eq!(done[0], Completion::applied(Token(1)));
//! there.deregister(remote).unwrap();
//! assert_eq!(to, from);
//! ```

mod blob;
mod config;
mod lock;
mod slab;
mod transport;
mod world;

use alloc::sync::Arc;

use crate::Instant;
use lock::SpinLock;
use world::World;

pub use config::{LinkConfig, SimConfig};
pub use transport::SimTransport;

/// The fabric that all nodes of one simulation share. A handle: clones are the same network.
#[derive(Clone)]
pub struct SimNet {
    world: Arc<SpinLock<World>>,
}

/// A node, by the order in which it was added. It keeps its number when it restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// The number of events of each kind so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimCounters {
    /// Slices that were accepted.
    pub submitted: u64,
    /// Slices and fences that ended `Applied`.
    pub applied: u64,
    /// Slices that ended `NotApplied`.
    pub not_applied: u64,
    /// Slices and fences that ended `Unknown`.
    pub unknown: u64,
    /// Packets that were lost, requests and responses.
    pub lost: u64,
    /// Requests that the target refused (L6).
    pub refused: u64,
    /// WRITEs that landed after their initiator had ended them.
    pub landed_late: u64,
    /// WRITEs that a fence discarded.
    pub fenced_off: u64,
    /// Nodes that were killed.
    pub killed: u64,
    /// Payload bytes that were copied.
    pub bytes: u64,
}

impl SimNet {
    /// A network without nodes at time zero. `seed` determines every random draw.
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> Self {
        Self { world: Arc::new(SpinLock::new(World::new(seed, config))) }
    }

    /// Adds a node, connected to all others, and returns its transport. Dropping the transport kills the
    /// node.
    #[must_use]
    pub fn node(&self) -> SimTransport {
        let mut world = self.world.lock();
        let id = world.add_node();
        SimTransport::new(self.clone(), id, world.nodes[id.0 as usize].incarnation)
    }

    /// The latest time that any caller has passed.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::from_nanos(self.world.lock().now)
    }

    /// The time of the next event.
    #[must_use]
    pub fn next_event(&self) -> Option<Instant> {
        self.world.lock().next_event().map(Instant::from_nanos)
    }

    /// Processes all events until `to`.
    pub fn advance_to(&self, to: Instant) {
        self.world.lock().advance_to(to.as_nanos());
    }

    /// Moves to the next event; false when there is none.
    pub fn advance_to_next(&self) -> bool {
        let mut world = self.world.lock();
        let next = world.next_event();
        next.into_iter().for_each(|at| world.advance_to(at));
        next.is_some()
    }

    /// Kills the node's process: its memory is lost, and it does not respond. What it has put on the wire may
    /// still land.
    pub fn kill(&self, node: NodeId) {
        self.world.lock().kill(node);
    }

    /// Starts a new process in the node's place, with a new incarnation and no regions. The old transport is
    /// dead from now on.
    #[must_use]
    pub fn restart(&self, node: NodeId) -> SimTransport {
        let incarnation = self.world.lock().restart(node);
        SimTransport::new(self.clone(), node, incarnation)
    }

    /// Whether the node's process is alive.
    #[must_use]
    pub fn is_alive(&self, node: NodeId) -> bool {
        self.world.lock().nodes.get(node.0 as usize).is_some_and(|node| node.alive)
    }

    /// Stops the node's service (true) or continues it (false). What arrives meanwhile waits, and is served
    /// then.
    pub fn stall(&self, node: NodeId, stalled: bool) {
        self.world.lock().stall(node, stalled);
    }

    /// Makes bytes from and to the node take `factor` times as long; 1 is full speed.
    pub fn set_slow(&self, node: NodeId, factor: u32) {
        self.world.lock().set_slow(node, factor);
    }

    /// Changes one direction between two nodes, for what is sent from now on.
    pub fn set_link(&self, from: NodeId, to: NodeId, config: LinkConfig) {
        self.world.lock().set_link(from, to, config);
    }

    /// Takes both directions down: what is on the wire is lost, new slices end with `Rail`.
    pub fn link_down(&self, a: NodeId, b: NodeId) {
        self.world.lock().set_link_up(a, b, false);
    }

    /// Brings both directions up.
    pub fn link_up(&self, a: NodeId, b: NodeId) {
        self.world.lock().set_link_up(a, b, true);
    }

    /// Takes the link down at `down_at` and up at `up_at`.
    pub fn flap(&self, a: NodeId, b: NodeId, down_at: Instant, up_at: Instant) {
        let mut world = self.world.lock();
        world.set_link_up_at(a, b, false, down_at.as_nanos());
        world.set_link_up_at(a, b, true, up_at.as_nanos());
    }

    /// Breaks the connection between two nodes once: operations that wait on it end with `Rail`, what is on
    /// the wire may land.
    pub fn cut(&self, a: NodeId, b: NodeId) {
        self.world.lock().cut(a, b);
    }

    /// The number of slices and fences that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.world.lock().operations_in_flight()
    }

    /// The number of WRITEs on their way to `node` for which no initiator waits any more.
    #[must_use]
    pub fn orphaned_writes(&self, node: NodeId) -> usize {
        self.world.lock().orphaned_writes(node)
    }

    /// The number of events of each kind so far.
    #[must_use]
    pub fn counters(&self) -> SimCounters {
        self.world.lock().counters
    }
}

impl core::fmt::Debug for SimNet {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SimNet").field("now", &self.now()).field("counters", &self.counters()).finish()
    }
}

#[cfg(test)]
mod tests;
