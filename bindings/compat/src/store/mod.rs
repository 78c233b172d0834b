//! Mooncake's `MooncakeDistributedStore` (python.md 1.2–1.4): numbers in place of errors, and no call that
//! fails otherwise.
//!
//! ```text
//!   Store (handle) ──▶ Inner ──┬── Clients: a Client per call that is under way, up to 8
//!                              ├── Names: segments by name, for `preferred_segments`
//!                              └── Node: the memory that this process contributes
//! ```
//!
//! | File | What it has |
//! |---|---|
//! | `setup.rs` | from the arguments of `setup` to clients and node |
//! | `objects.rs` | puts, gets, ranges, existence, sizes, removal |
//! | `options.rs`, `names.rs` | `ReplicateConfig`, and the segments that it names |
//! | `sessions.rs` | puts and gets in steps |
//! | `places.rs`, `mounts.rs` | replicas, tasks; memory that is contributed later |
//! | `dummy.rs` | stores without an engine, through the node on this machine |

mod dummy;
mod mounts;
mod names;
mod objects;
mod options;
mod places;
mod sessions;
mod setup;
#[cfg(test)]
mod steps_tests;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use store_client::AsyncClient;
use te_host::fork::Mark;

pub use objects::{Bytes, Fill};
pub use options::{ReplicateConfig, SoftPin};
pub use places::{Progress, Replica, Task, TaskNumber};
pub use setup::SetupOptions;

pub use crate::clients::Span;
use crate::codes::{self, StoreCode, store as code};
use crate::config::StoreConfig;
use crate::env::Env;
use setup::Inner;

/// How long [`Store::close`] waits for calls under way and for the master.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// The object that `mooncake.store.MooncakeDistributedStore` wraps. Clones are handles to the same store; any
/// number of threads may use it. Before [`setup`](Self::setup) every call returns `INVALID_PARAMS` (-600), or
/// what stands for it.
///
/// ```
/// use snowskin_compat::store::{ReplicateConfig, SetupOptions, Store};
/// use store_master::{Config, MasterServer};
///
/// let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
/// let master = MasterServer::bind(config)?.spawn()?;
///
/// let store = Store::new();
/// let mut options = SetupOptions::default();
/// (options.local_hostname, options.metadata_server) = ("127.0.0.1".into(), "P2PHANDSHAKE".into());
/// options.master_server_addr = master.rpc_addr().to_string();
/// assert_eq!(store.setup(&options), 0);
/// assert_eq!(store.put(b"prompt/0", b"kv", &ReplicateConfig::default()), 0);
/// assert_eq!(store.get(b"prompt/0").as_deref(), Ok(b"kv".as_slice()));
/// assert_eq!(store.get(b"prompt/1").map(|_| ()), Err(-704));
/// assert_eq!(store.close(), 0);
/// master.stop()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

struct Shared {
    inner: RwLock<Option<Arc<Inner>>>,
    /// Held while the store is set up or closed.
    changing: Mutex<()>,
    mark: Mark,
}

impl Default for Store {
    fn default() -> Self {
        let shared = Shared { inner: RwLock::new(None), changing: Mutex::new(()), mark: Mark::new() };
        Self { shared: Arc::new(shared) }
    }
}

impl Store {
    /// A store that is not set up.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Connects to the master, and contributes memory if `global_segment_size` is not 0: 0, -600 for bad
    /// settings, -1 if the master cannot be reached. A store that is set up is closed first.
    pub fn setup(&self, options: &SetupOptions) -> StoreCode {
        self.setup_in(options, &Env::of_process())
    }

    /// As [`setup`](Self::setup), in an environment that the caller gives.
    pub fn setup_in(&self, options: &SetupOptions, env: &Env) -> StoreCode {
        if self.shared.mark.is_forked() {
            return code::UNAVAILABLE_IN_CURRENT_STATUS;
        }
        let _changing = self.shared.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = self.take() {
            before.close(CLOSE_MAX);
        }
        self.set(Inner::start(options, env))
    }

    /// Sets the store to what was started.
    fn set(&self, started: Result<Inner, StoreCode>) -> StoreCode {
        match started {
            Ok(inner) => {
                *self.shared.inner.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(inner));
                codes::OK
            }
            Err(code) => code,
        }
    }

    /// As `init_all(protocol, device_name, mount_segment_size)`: with the master at `127.0.0.1:50051`, for
    /// this host alone. -600 if the store is set up.
    pub fn init_all(&self, protocol: &str, device: &str, mount_segment_size: u64) -> StoreCode {
        if self.is_set_up() {
            return code::INVALID_PARAMS;
        }
        let options = SetupOptions {
            local_hostname: "localhost:12345".into(),
            metadata_server: "127.0.0.1:2379".into(),
            global_segment_size: mount_segment_size,
            local_buffer_size: 1 << 30,
            protocol: protocol.into(),
            rdma_devices: device.into(),
            ..SetupOptions::default()
        };
        self.setup(&options)
    }

    /// Whether the store is set up.
    #[must_use]
    pub fn is_set_up(&self) -> bool {
        !self.shared.mark.is_forked() && self.inner().is_ok()
    }

    /// Withdraws the contributed memory and disconnects: 0. Waits for calls under way, and at most 10 s.
    pub fn close(&self) -> StoreCode {
        self.close_within(CLOSE_MAX)
    }

    /// As [`close`](Self::close), and waits at most `limit`. What has not ended by then ends on a thread of
    /// its own.
    pub fn close_within(&self, limit: Duration) -> StoreCode {
        if self.shared.mark.is_forked() {
            return codes::OK;
        }
        let _changing = self.shared.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = self.take() {
            inner.close(limit);
        }
        codes::OK
    }

    /// 0: the master answers; 1: the store is not set up; 2: the master does not answer.
    pub fn health(&self) -> i32 {
        match self.inner() {
            Err(_) => 1,
            Ok(inner) => inner.health(),
        }
    }

    /// The name of this process in the store: `host:port`. Empty before `setup`.
    #[must_use]
    pub fn hostname(&self) -> String {
        self.inner().map_or_else(|_| String::new(), |inner| inner.name().to_owned())
    }

    /// `local_buffer_size` of the setup, bytes.
    #[must_use]
    pub fn local_buffer(&self) -> u64 {
        self.inner().map_or(0, |inner| inner.local_buffer())
    }

    /// A client for asynchronous callers, on a thread of its own: always the same one. `None` before `setup`,
    /// or if it cannot connect.
    #[must_use]
    pub fn client(&self) -> Option<AsyncClient> {
        self.inner().ok()?.async_client()
    }

    /// Registers a buffer, from and into which objects are then moved without a copy: 0, -600.
    ///
    /// # Safety
    /// The buffer stays mapped until [`unregister`](Self::unregister) or [`close`](Self::close) returned.
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn register(&self, addr: u64, len: u64) -> StoreCode {
        match self.inner() {
            // SAFETY: the caller's promise.
            Ok(inner) => unsafe { inner.register(addr, len) }.map_or_else(|code| code, |()| codes::OK),
            Err(code) => code,
        }
    }

    /// Ends the registration of a buffer: 0, -600 if no registered buffer begins there.
    pub fn unregister(&self, addr: u64) -> StoreCode {
        self.inner().and_then(|inner| inner.unregister(addr)).map_or_else(|code| code, |()| codes::OK)
    }

    fn inner(&self) -> Result<Arc<Inner>, StoreCode> {
        if self.shared.mark.is_forked() {
            return Err(code::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        let inner = self.shared.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or(code::INVALID_PARAMS)
    }

    fn take(&self) -> Option<Arc<Inner>> {
        self.shared.inner.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The last handle closes the store.
impl Drop for Shared {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.mark.is_forked() {
            // The locks and threads inside belong to the parent.
            std::mem::forget(inner);
        } else if let Some(inner) = inner {
            inner.close(CLOSE_MAX);
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("hostname", &self.hostname()).finish_non_exhaustive()
    }
}
