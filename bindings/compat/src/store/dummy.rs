//! Stores that leave all transfers to the node on this machine, as Mooncake's "dummy" clients do: they have
//! no engine, no connection to the master, and no memory in the store.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use store_client::Address;
use store_client::local::{LocalConfig, LocalError, default_path};

use super::setup::Inner;
use super::{CLOSE_MAX, Store};
use crate::clients::Clients;
use crate::codes::{StoreCode, store as code};

/// Least and most memory that is shared with the node, per client, bytes. Objects pass through it.
const ARENA_BYTES: std::ops::RangeInclusive<u64> = (64 << 20)..=(1 << 30);
/// How long a node that has just been started may take until its socket is there.
const START_MAX: Duration = Duration::from_secs(2);
const START_STEP: Duration = Duration::from_millis(20);
/// Alignment of what [`Store::alloc_from_pool`] gives out, bytes.
const ALIGNMENT: u64 = 4096;

/// Memory that callers take parts of. Parts are not given back.
pub(super) struct Pool {
    memory: Option<(NonNull<u8>, Layout)>,
    /// Where the next part begins at the earliest, and where the memory ends.
    free: Mutex<(u64, u64)>,
}

#[allow(unsafe_code, reason = "memory that callers use by its address")]
// SAFETY: the value owns the memory and never touches it between allocation and release.
unsafe impl Send for Pool {}
#[allow(unsafe_code, reason = "memory that callers use by its address")]
// SAFETY: as above; the part that is used is counted under a lock.
unsafe impl Sync for Pool {}

impl Pool {
    /// `None`: there is not so much memory. Pages are used from their first use on.
    fn new(bytes: u64) -> Option<Self> {
        if bytes == 0 {
            return Some(Self { memory: None, free: Mutex::new((0, 0)) });
        }
        // With a larger alignment the allocator would zero, and so use, every page at once.
        let layout = Layout::array::<u128>(usize::try_from(bytes.checked_add(ALIGNMENT)? / 16).ok()?).ok()?;
        #[allow(unsafe_code, reason = "memory that callers use by its address")]
        // SAFETY: the layout is not empty.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let start = memory.addr().get() as u64;
        Some(Self { memory: Some((memory, layout)), free: Mutex::new((start, start + layout.size() as u64)) })
    }

    fn take(&self, bytes: u64) -> Option<u64> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, end) = *free;
        let addr = start.checked_next_multiple_of(ALIGNMENT)?;
        let next = addr.checked_add(bytes).filter(|next| bytes > 0 && *next <= end)?;
        *free = (next, end);
        Some(addr)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some((memory, layout)) = self.memory {
            #[allow(unsafe_code, reason = "memory that callers use by its address")]
            // SAFETY: allocated with this layout, released once. Callers use parts no longer than the store
            // is set up.
            unsafe {
                dealloc(memory.as_ptr(), layout);
            }
        }
    }
}

impl Store {
    /// Connects to the node at `HOST:PORT`, which is a process on this machine: 0, -600 for an address that
    /// is none, -1 if no node answers there. `pool` bytes can be taken by
    /// [`alloc_from_pool`](Self::alloc_from_pool).
    pub fn setup_dummy(&self, pool: u64, local_buffer: u64, address: &str) -> StoreCode {
        if self.shared.mark.is_forked() {
            return code::UNAVAILABLE_IN_CURRENT_STATUS;
        }
        let _changing = self.shared.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = self.take() {
            before.close(CLOSE_MAX);
        }
        self.set(connect(pool, local_buffer, address))
    }

    /// Whether the store was set up by [`setup_dummy`](Self::setup_dummy).
    #[must_use]
    pub fn is_dummy(&self) -> bool {
        self.inner().is_ok_and(|inner| inner.pool.is_some())
    }

    /// The address of memory that stays until the store is closed; 0 if there is not so much left, or the
    /// store was not set up by [`setup_dummy`](Self::setup_dummy).
    #[must_use]
    pub fn alloc_from_pool(&self, bytes: u64) -> u64 {
        let inner = self.inner().ok();
        let pool = inner.as_ref().and_then(|inner| inner.pool.as_ref());
        pool.and_then(|pool| pool.take(bytes)).unwrap_or(0)
    }
}

fn connect(pool: u64, local_buffer: u64, address: &str) -> Result<Inner, StoreCode> {
    let refuse = |what: &dyn std::fmt::Display| log::error!("setup_dummy: {address}: {what}");
    let port =
        address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok()).filter(|port| *port > 0);
    let port = port.ok_or_else(|| {
        refuse(&"not HOST:PORT, the address of a node on this machine");
        code::INVALID_PARAMS
    })?;
    let pool = Pool::new(pool).ok_or_else(|| {
        refuse(&format!("there is no memory for a pool of {pool} bytes"));
        code::INVALID_PARAMS
    })?;
    let mut config = LocalConfig::new(default_path(&Address::Tcp(format!("127.0.0.1:{port}"))));
    config.arena_bytes = local_buffer.clamp(*ARENA_BYTES.start(), *ARENA_BYTES.end());
    let until = Instant::now() + START_MAX;
    let clients = loop {
        match Clients::connect_local(config.clone()) {
            Ok(clients) => break clients,
            Err(LocalError::Connect { .. }) if Instant::now() < until => std::thread::sleep(START_STEP),
            Err(error) => {
                refuse(&error);
                return Err(code::INTERNAL_ERROR);
            }
        }
    };
    Ok(Inner::of_node(clients, address.to_owned(), local_buffer, pool))
}
