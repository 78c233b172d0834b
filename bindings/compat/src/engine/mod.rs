//! Mooncake's `TransferEngine`: [`Session`] with typed results, and [`Engine`] with the numbers that
//! `mooncake.engine` returns (python.md 1.1).

mod batches;
mod error;
mod managed;
mod post;
mod regions;
mod report;
mod segments;
mod session;
mod setup;
mod slabs;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::{Arc, PoisonError, RwLock};

use te_core::Op;

pub use error::EngineError;
pub use post::{Request, State, TaskStatus};
pub use report::{RailLoad, topology_json};
pub use segments::SegmentNumber;
pub use session::{Copy, Notice, RegionSpan, Session};
pub use setup::Setup;
pub(crate) use setup::{listen_ip, ports_of, split_host};

use crate::codes;
use crate::env::Env;

/// The object that `mooncake.engine.TransferEngine` wraps: numbers in place of errors, and no call that
/// fails otherwise. Why a call failed is logged. Before [`initialize`](Self::initialize) every call returns
/// what it returns on failure.
///
/// Clones are handles to the same engine.
///
/// ```
/// use snowskin_compat::engine::{Copy, Engine};
/// use te_core::Op;
///
/// let (here, there) = (Engine::new(), Engine::new());
/// for engine in [&here, &there] {
///     assert_eq!(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0);
/// }
/// let (from, to) = (here.allocate_managed(4096), there.allocate_managed(4096));
/// let copy = Copy { local: from, remote: to, len: 4096 };
/// // SAFETY: the engine allocated the memory, and keeps it mapped.
/// assert_eq!(unsafe { here.transfer_sync(&there.session_name(), Op::Write, &[copy], None, "") }, 0);
/// assert_eq!(here.first_buffer(&there.session_name()), to);
/// ```
#[derive(Clone, Default)]
pub struct Engine {
    session: Arc<RwLock<Option<Arc<Session>>>>,
}

impl Engine {
    /// An engine that is not initialized.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts the engine: 0, or -1. One that runs already is replaced, as in Mooncake.
    pub fn initialize(&self, local_hostname: &str, metadata: &str, protocol: &str, device: &str) -> i32 {
        self.initialize_ext(local_hostname, metadata, protocol, device, "etcd")
    }

    /// As [`initialize`](Self::initialize); `metadata_type` is the scheme of a metadata string without one.
    pub fn initialize_ext(
        &self,
        local_hostname: &str,
        metadata: &str,
        protocol: &str,
        device: &str,
        metadata_type: &str,
    ) -> i32 {
        let setup =
            Setup::of_type(local_hostname, metadata, protocol, device, metadata_type, Env::of_process());
        self.start(setup)
    }

    /// Starts the engine with a setup: 0, or -1.
    pub fn start(&self, setup: Result<Setup, EngineError>) -> i32 {
        match setup.and_then(Session::start) {
            Ok(session) => {
                let mut place = self.session.write().unwrap_or_else(PoisonError::into_inner);
                let before = place.replace(Arc::new(session));
                // An engine that is replaced is stopped without the lock: that may take a second.
                drop(place);
                drop(before);
                codes::OK
            }
            Err(error) => {
                log::error!("the transfer engine was not initialized: {error}");
                codes::engine::INVALID_ARGUMENT
            }
        }
    }

    /// The session, if the engine is initialized.
    #[must_use]
    pub fn session(&self) -> Option<Arc<Session>> {
        self.session.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the engine, if no other handle to its session exists.
    pub fn close(&self) {
        drop(self.leave());
    }

    /// Lets go of the session. It is returned if this was the last handle: no peer reaches its memory any
    /// more, and dropping it stops the engine, which may take seconds.
    #[must_use = "dropping the session stops the engine"]
    pub fn leave(&self) -> Option<Session> {
        let session = self.session.write().unwrap_or_else(PoisonError::into_inner).take();
        let session = session.and_then(Arc::into_inner)?;
        session.revoke();
        Some(session)
    }

    /// The port for handshakes; 0 before `initialize`.
    #[must_use]
    pub fn rpc_port(&self) -> u16 {
        self.session().map_or(0, |session| session.rpc_port())
    }

    /// The name under which peers open this engine's memory; empty before `initialize`.
    #[must_use]
    pub fn session_name(&self) -> String {
        self.session().map_or_else(String::new, |session| session.name().to_owned())
    }

    /// Registers memory: 0, -1 (no memory), -7 (overlap), -302 (refused).
    ///
    /// # Safety
    /// As [`Session::register`].
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn register(&self, addr: u64, len: u64, location: &str) -> i32 {
        self.code("register_memory", |session| {
            // SAFETY: the caller's promise.
            unsafe { session.register(addr, len, location, true) }
        })
    }

    /// Ends a registration: 0, -3 (unknown), -4 (a transfer uses it).
    pub fn unregister(&self, addr: u64) -> i32 {
        self.code("unregister_memory", |session| session.unregister(addr))
    }

    /// Registers several pieces of memory, or none: as [`register`](Self::register); -1 if the lists differ
    /// in length.
    ///
    /// # Safety
    /// As [`Session::register`].
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn batch_register(&self, addrs: &[u64], lens: &[u64], location: &str) -> i32 {
        self.code("batch_register_memory", |session| {
            if addrs.len() != lens.len() {
                return Err(differ("addresses", addrs.len(), "capacities", lens.len()));
            }
            let spans: Vec<RegionSpan> =
                addrs.iter().zip(lens).map(|(&addr, &len)| RegionSpan { addr, len }).collect();
            // SAFETY: the caller's promise.
            unsafe { session.register_all(&spans, location) }
        })
    }

    /// Ends several registrations: 0, or the number of the first failure.
    pub fn batch_unregister(&self, addrs: &[u64]) -> i32 {
        self.code("batch_unregister_memory", |session| session.unregister_all(addrs))
    }

    /// Moves bytes and waits: 0, or -1. `hint` names the transport that the caller prefers; it is accepted
    /// and has no effect in Mooncake's default build.
    ///
    /// # Safety
    /// As [`Session::transfer`].
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn transfer_sync(
        &self,
        target: &str,
        op: Op,
        copies: &[Copy],
        notice: Option<&Notice>,
        hint: &str,
    ) -> i32 {
        let _ = hint;
        let moved = self.with(|session| {
            // SAFETY: the caller's promise.
            unsafe { session.transfer(target, op, copies, notice) }
        });
        match moved {
            Ok(()) => codes::OK,
            Err(error) => {
                let bytes = copies.iter().fold(0_u64, |bytes, copy| bytes.saturating_add(copy.len));
                log::warn!("{op:?} of {bytes} bytes with {target:?} failed: {error}");
                codes::engine::INVALID_ARGUMENT
            }
        }
    }

    /// Begins to move bytes: the id of the batch, or 0.
    ///
    /// # Safety
    /// As [`Session::begin`].
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn submit(&self, target: &str, op: Op, copies: &[Copy], hint: &str) -> u64 {
        let _ = hint;
        let begun = self.with(|session| {
            // SAFETY: the caller's promise.
            unsafe { session.begin(target, op, copies) }
        });
        begun.unwrap_or_else(|error| {
            log::warn!("{op:?} of {} ranges with {target:?} was not begun: {error}", copies.len());
            0
        })
    }

    /// Waits until all batches have ended, and frees them: 0 if all are complete, else -1.
    pub fn wait_batches(&self, batches: &[u64]) -> i32 {
        match self.with(|session| session.wait(batches)) {
            Ok(()) => codes::OK,
            Err(error) => {
                log::warn!("get_batch_transfer_status: {error}");
                codes::engine::INVALID_ARGUMENT
            }
        }
    }

    /// Checks a batch: 1 if it is complete (it is freed), 0 while it is under way, -1 if it failed (it is
    /// freed) or is unknown.
    pub fn check(&self, batch: u64) -> i32 {
        let checked = self.with(|session| {
            let state = session.batch_state(batch)?;
            if state.is_over() {
                session.free_batch(batch)?;
            }
            Ok(state)
        });
        match checked {
            Ok(State::Completed) => 1,
            Ok(State::Waiting | State::Pending) => 0,
            Ok(State::Failed) => -1,
            Err(error) => {
                log::warn!("transfer_check_status: {error}");
                -1
            }
        }
    }

    /// Allocates a buffer: its address, or 0.
    #[must_use]
    pub fn allocate_managed(&self, len: u64) -> u64 {
        self.with(|session| session.allocate_managed(len)).unwrap_or_else(|error| {
            log::error!("allocate_managed_buffer of {len} bytes: {error}");
            0
        })
    }

    /// Frees a buffer: 0, or -1. The length is that of the allocation.
    pub fn free_managed(&self, addr: u64, len: u64) -> i32 {
        match self.with(|session| session.free_managed(addr)) {
            Ok(()) => codes::OK,
            Err(error) => {
                log::warn!("free_managed_buffer of {len} bytes at {addr:#x}: {error}");
                codes::engine::INVALID_ARGUMENT
            }
        }
    }

    /// The address of the first buffer that a peer exports, or 0.
    #[must_use]
    pub fn first_buffer(&self, name: &str) -> u64 {
        let found = self.with(|session| session.first_buffer_address(name));
        found
            .unwrap_or_else(|error| {
                log::warn!("get_first_buffer_address: {error}");
                None
            })
            .unwrap_or(0)
    }

    /// Takes the messages of peers, each with its name. Bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn notifies(&self) -> Vec<(String, String)> {
        let taken = self.session().map(|session| session.take_notifications()).unwrap_or_default();
        let text = |bytes: Vec<u8>| match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        };
        taken.into_iter().map(|notification| (notification.name, text(notification.message))).collect()
    }

    /// Checks that a peer answers: 0, -1 before `initialize`, -200 otherwise.
    pub fn probe(&self, name: &str) -> i32 {
        self.code("send_probe", |session| session.probe(name))
    }

    /// The topology of this host as JSON; with `device`, of these devices alone. Needs no `initialize`.
    #[must_use]
    pub fn topology(device: Option<&str>) -> String {
        topology_json(&crate::env::device_list(device.unwrap_or_default()))
    }

    fn with<T>(&self, run: impl FnOnce(&Session) -> Result<T, EngineError>) -> Result<T, EngineError> {
        let session = self.session();
        let session = session
            .ok_or_else(|| EngineError::argument("the engine is not initialized: call initialize first"))?;
        run(&session)
    }

    fn code(&self, what: &str, run: impl FnOnce(&Session) -> Result<(), EngineError>) -> i32 {
        match self.with(run) {
            Ok(()) => codes::OK,
            Err(error) => {
                log::warn!("{what}: {error}");
                error.code()
            }
        }
    }
}

fn differ(a: &str, a_len: usize, b: &str, b_len: usize) -> EngineError {
    EngineError::argument(format!("{a_len} {a} and {b_len} {b}: give lists of one length"))
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("session", &self.session()).finish()
    }
}
