//! A simulated fabric: one seed, virtual time, and every way in which a network lets one down.
//!
//! ```text
//!   SimTransport ─┐                          ┌─ links: latency, bandwidth, loss, reorder, down
//!   SimTransport ─┼── one world, one clock ──┼─ nodes: incarnation, dead, restarted, stalled, slow
//!   SimTransport ─┘     (SimNet)             └─ packets: WRITEs that land up to a minute after they were given up
//! ```
//!
//! Time moves when somebody polls with a later `now`, or when [`SimNet::advance_to`] is called; nothing here reads a clock.
//! Equal seeds and equal calls give equal histories. What is sent one-sidedly needs no help from the target's poller; a
//! [stalled](SimNet::stall) target lets it wait at the door.
//!
//! ```
//! use te_core::sim::{SimConfig, SimNet};
//! use te_core::{Access, Completion, MemSpan, Memory, Op, RegionId, RemoteRegionId, RegionOffset, RemoteOffset, Slice, Token, Transport};
//!
//! let net = SimNet::new(42, SimConfig::CALM);
//! let (mut here, mut there) = (net.node(), net.node());
//! let (mut from, mut to) = (vec![7u8; 4096], vec![0u8; 4096]);
//! let (local, remote, segment) = (RegionId::new(0, 1), RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both buffers outlive the transports' use of them, and are not touched until it has ended.
//! unsafe {
//!     here.register(local, MemSpan::new(from.as_mut_ptr(), from.len()), Access::LOCAL).unwrap();
//!     there.register(remote, MemSpan::new(to.as_mut_ptr(), to.len()), Access::REMOTE_WRITE).unwrap();
//! }
//! let mut blob = [0; 64];
//! let blob_bytes = there.export(remote, &mut blob).unwrap();
//! here.attach(segment, &blob[..blob_bytes]).unwrap();
//!
//! let slice = Slice { token: Token(1), local: RegionOffset::new(local, 0), remote: RemoteOffset::new(segment, 0), len: 4096, op: Op::Write };
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

pub use crate::testkit::Rng;
pub use config::{LinkConfig, SimConfig};
pub use transport::SimTransport;

/// The fabric that all nodes of one simulation share. A handle: clones are the same network.
#[derive(Clone)]
pub struct SimNet {
    world: Arc<SpinLock<World>>,
}

/// A node, by the order in which it was added. It keeps its number over restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimCounters {
    /// Slices accepted.
    pub submitted: u64,
    /// Slices and fences that ended `Applied`.
    pub applied: u64,
    /// Slices that ended `NotApplied`.
    pub not_applied: u64,
    /// Slices and fences that ended `Unknown`.
    pub unknown: u64,
    /// Packets lost, requests and answers.
    pub lost: u64,
    /// Requests that the target refused (L6).
    pub refused: u64,
    /// WRITEs that landed after their initiator had given them up.
    pub landed_late: u64,
    /// WRITEs that a fence caught and threw away.
    pub fenced_off: u64,
    /// Nodes killed.
    pub killed: u64,
    /// Payload bytes copied.
    pub bytes: u64,
}

impl SimNet {
    /// A network without nodes at time zero. `seed` decides every draw.
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> Self {
        Self { world: Arc::new(SpinLock::new(World::new(seed, config))) }
    }

    /// Adds a node, connected to all others, and gives its transport. Dropping the transport kills the node.
    #[must_use]
    pub fn node(&self) -> SimTransport {
        let mut world = self.world.lock();
        let id = world.add_node();
        SimTransport::new(self.clone(), id, world.nodes[id.0 as usize].incarnation)
    }

    /// The latest time that anybody has named.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::from_nanos(self.world.lock().now)
    }

    /// When something happens next of its own accord.
    #[must_use]
    pub fn next_event(&self) -> Option<Instant> {
        self.world.lock().next_event().map(Instant::from_nanos)
    }

    /// Lets everything happen that is due until `to`.
    pub fn advance_to(&self, to: Instant) {
        self.world.lock().advance_to(to.as_nanos());
    }

    /// Jumps to the next event; false when there is none.
    pub fn advance_to_next(&self) -> bool {
        let mut world = self.world.lock();
        let next = world.next_event();
        next.into_iter().for_each(|at| world.advance_to(at));
        next.is_some()
    }

    /// The node's process dies: its memory is gone, it answers nothing. What it has put on the wire may still land.
    pub fn kill(&self, node: NodeId) {
        self.world.lock().kill(node);
    }

    /// A new process takes the node's place, under a new incarnation and with nothing registered. The old transport is
    /// dead from here on.
    #[must_use]
    pub fn restart(&self, node: NodeId) -> SimTransport {
        let incarnation = self.world.lock().restart(node);
        SimTransport::new(self.clone(), node, incarnation)
    }

    /// Whether the node's process lives.
    #[must_use]
    pub fn is_alive(&self, node: NodeId) -> bool {
        self.world.lock().nodes.get(node.0 as usize).is_some_and(|node| node.alive)
    }

    /// The node stops serving (true) or goes on (false). What arrives meanwhile waits at its door, and is served then.
    pub fn stall(&self, node: NodeId, stalled: bool) {
        self.world.lock().stall(node, stalled);
    }

    /// Bytes from and to the node take `factor` times as long; 1 is full speed.
    pub fn set_slow(&self, node: NodeId, factor: u32) {
        self.world.lock().set_slow(node, factor);
    }

    /// Changes one direction between two nodes, for what is sent from now on.
    pub fn set_link(&self, from: NodeId, to: NodeId, config: LinkConfig) {
        self.world.lock().set_link(from, to, config);
    }

    /// Both directions go down: what is on the wire is lost, new slices end with `Rail`.
    pub fn link_down(&self, a: NodeId, b: NodeId) {
        self.world.lock().set_link_up(a, b, false);
    }

    /// Both directions come back.
    pub fn link_up(&self, a: NodeId, b: NodeId) {
        self.world.lock().set_link_up(a, b, true);
    }

    /// The link goes down at `down_at` and comes back at `up_at`.
    pub fn flap(&self, a: NodeId, b: NodeId, down_at: Instant, up_at: Instant) {
        let mut world = self.world.lock();
        world.set_link_up_at(a, b, false, down_at.as_nanos());
        world.set_link_up_at(a, b, true, up_at.as_nanos());
    }

    /// The connection between two nodes breaks once: what waits on it ends with `Rail`, what is on the wire may land.
    pub fn cut(&self, a: NodeId, b: NodeId) {
        self.world.lock().cut(a, b);
    }

    /// Slices and fences that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.world.lock().operations_in_flight()
    }

    /// WRITEs on their way to `node` that nobody waits for any more.
    #[must_use]
    pub fn orphaned_writes(&self, node: NodeId) -> usize {
        self.world.lock().orphaned_writes(node)
    }

    /// What has happened so far.
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
