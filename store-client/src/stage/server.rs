//! [`StageServer`]: a node's stage service.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use mio::net::TcpListener;
use mio::{Interest, Poll, Waker};
use te_core::Secret;
use te_engine::SharedRegion;
use te_host::fork::Mark;

use super::STAGE_ALIGNMENT;
use super::config::{StageConfig, StageError};
use super::serving::{LISTENER, Serving, WAKE};
use super::source::{Hub, StageSource};

/// Serves readers of a node's disks on a thread of its own. Dropping it stops it; memory that a disk may
/// still write stays mapped until the disk is finished with it.
pub struct StageServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    hub: Arc<Hub>,
    thread: Option<JoinHandle<()>>,
    mark: Mark,
}

/// What the service's thread shares with its owner.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    pub(super) counters: Mutex<StageCounters>,
}

/// What a [`StageServer`] has counted since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StageCounters {
    /// Connections at present.
    pub connections: u64,
    /// Connections that were refused, because there were too many or they could not prove the cluster
    /// secret.
    pub connections_refused_total: u64,
    /// Connections that were closed because of an invalid message.
    pub broken_total: u64,
    /// Requests.
    pub requests_total: u64,
    /// Objects in them.
    pub objects_total: u64,
    /// Objects that were staged and announced to their readers.
    pub staged_total: u64,
    /// Bytes of staging memory that they took.
    pub staged_bytes_total: u64,
    /// Objects that were refused at once: the queue or the staging memory was full, or the length is
    /// impossible.
    pub refused_total: u64,
    /// Objects that were not read before the deadline.
    pub busy_total: u64,
    /// Objects that the disk could not read.
    pub failed_total: u64,
    /// Staged objects that were not released before the end of their window.
    pub expired_total: u64,
    /// Objects that are being read, those in quarantine included.
    pub reading: u64,
    /// Objects that are staged.
    pub tickets: u64,
    /// Staging memory, bytes.
    pub memory_bytes: u64,
    /// Staging memory that is in use, bytes.
    pub memory_used_bytes: u64,
    /// Buffers that were put in quarantine, because the disk may write them although the deadline is over.
    pub quarantined_total: u64,
    /// Bytes in quarantine.
    pub quarantined_bytes: u64,
    /// Bytes that are not used any more, because a read was dropped unfinished.
    pub lost_bytes: u64,
}

impl StageServer {
    /// Listens and starts the thread.
    ///
    /// `memory` is the staging memory. The caller has allocated it with the node's engine, for reading by
    /// peers (`Access::REMOTE_READ`), and names it to the master when it mounts the disks. Nothing but this
    /// service and its jobs writes it, as long as either exists. Since no peer can write it, it need not be
    /// exported anew when the node mounts its disks again.
    ///
    /// If `cluster` is set, readers have to prove that they know it.
    ///
    /// # Errors
    /// See [`StageError`].
    pub fn start(
        config: StageConfig,
        memory: SharedRegion,
        cluster: Secret,
        source: Arc<dyn StageSource>,
    ) -> Result<Self, StageError> {
        config.validate()?;
        let (addr, len) = (memory.span().as_ptr().addr() as u64, memory.len() as u64);
        if !addr.is_multiple_of(STAGE_ALIGNMENT) || len < STAGE_ALIGNMENT {
            return Err(StageError::Memory { addr, len });
        }
        let address = config.listen;
        let failed = |source| StageError::Listen { address, source };
        let mut listener = TcpListener::bind(address).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let poll = Poll::new().map_err(StageError::System)?;
        let waker = Waker::new(poll.registry(), WAKE).map_err(StageError::System)?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE).map_err(StageError::System)?;
        let hub = Arc::new(Hub::new(waker, memory));
        let shared = Arc::new(Shared::default());
        let serving =
            Serving::new(config, cluster, listener, poll, source, Arc::clone(&hub), Arc::clone(&shared));
        let thread = thread::Builder::new()
            .name("snowskin-stage".into())
            .spawn(move || serving.run())
            .map_err(StageError::System)?;
        Ok(Self { addr, shared, hub, thread: Some(thread), mark: Mark::new() })
    }

    /// Where it listens. A node that listens at all addresses announces another one to the master, with this
    /// port.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The staging memory.
    #[must_use]
    pub fn memory(&self) -> &SharedRegion {
        self.hub.region()
    }

    /// Its counters, as of its thread's latest turn.
    #[must_use]
    pub fn counters(&self) -> StageCounters {
        *self.shared.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes all connections and ends the thread. Jobs that are not finished are not waited for.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.mark.is_forked() {
            // The thread belongs to the parent.
            std::mem::forget(thread);
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.hub.wake();
        let _ = thread.join();
    }
}

impl Drop for StageServer {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for StageServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StageServer").field("addr", &self.addr).finish_non_exhaustive()
    }
}
