//! The state of the fake driver. Each loaded copy of the library has its own, so tests do not disturb each
//! other: each loads a copy of the file.
//!
//! What is like a GPU: device memory that the CPU cannot touch under the addresses that callers have; streams
//! that run by themselves, late, and in their order; contexts; errors that end a context. What is not: an
//! exported dma-buf is a memfd, which no NIC registers as device memory; nothing is fast; the kernel is not
//! executed from its text, but known by the names of its entries.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::stream::Stream;

pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const NOT_INITIALIZED: c_int = 3;
pub(crate) const NO_DEVICE: c_int = 100;
pub(crate) const INVALID_DEVICE: c_int = 101;
pub(crate) const INVALID_CONTEXT: c_int = 201;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_FOUND: c_int = 500;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
pub(crate) const ALREADY_REGISTERED: c_int = 712;
pub(crate) const MISALIGNED_ADDRESS: c_int = 716;
pub(crate) const NOT_PERMITTED: c_int = 800;
pub(crate) const NOT_SUPPORTED: c_int = 801;
pub(crate) const CAPTURE_UNSUPPORTED: c_int = 900;

/// Not one of the driver's attributes: whether devices reach each other's memory.
pub(crate) const PEER_ACCESS: c_int = -1;

/// Memory of a device, mapped at one address.
pub(crate) struct Mapping {
    pub(crate) bytes: usize,
    /// Where the fake itself has it, readable and writable.
    pub(crate) own: usize,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) device: c_int,
    /// The allocation or reservation that it belongs to.
    pub(crate) range: (u64, usize),
    pub(crate) is_legacy: bool,
    pub(crate) is_managed: bool,
    pub(crate) is_foreign: bool,
    /// No other process can open it.
    pub(crate) is_private: bool,
    pub(crate) handle_types: u32,
    pub(crate) gpu_direct: bool,
    pub(crate) buffer_id: u64,
    pub(crate) block_id: u64,
    pub(crate) origin: Origin,
    /// The process, address and number of opened memory.
    pub(crate) remote: (u32, u64, u64),
    /// Whether devices may write it.
    pub(crate) is_writable: bool,
}

/// Where memory came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// This process allocated it, or mapped it by virtual memory management.
    Own,
    /// Another process allocated it, and this one has opened it so often.
    Opened(u32),
}

/// Memory of `cuMemCreate`.
pub(crate) struct Physical {
    pub(crate) bytes: usize,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) device: c_int,
    pub(crate) handle_types: u32,
    pub(crate) gpu_direct: bool,
    pub(crate) block_id: u64,
    /// Handles that were not released.
    pub(crate) handles: u32,
}

pub(crate) struct State {
    pub(crate) version: c_int,
    pub(crate) devices: c_int,
    pub(crate) seed: u64,
    pub(crate) delay_us_max: u64,
    pub(crate) is_initialized: bool,
    pub(crate) is_stalled: bool,
    /// Attributes of mappings are not known, and refused.
    pub(crate) has_few_attributes: bool,
    /// A stream of the application captures.
    pub(crate) is_capturing: bool,
    /// Whether memory that is allocated now is of another context than the primary one.
    pub(crate) is_foreign: bool,
    /// Allocations of `cuMemAlloc` cannot be shared, as those of pools.
    pub(crate) is_private: bool,
    /// The NVLink domain of this process; 0: it has no IMEX channel.
    pub(crate) domain: u64,
    /// Bytes of synchronous copies that have not arrived.
    pub(crate) pending: Vec<(u64, Vec<u8>)>,
    /// The error that ended the contexts.
    pub(crate) sticky: c_int,
    pub(crate) attributes: HashMap<c_int, c_int>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) reservations: BTreeMap<u64, usize>,
    pub(crate) physical: BTreeMap<u64, Physical>,
    /// The length, and whether devices may only read.
    pub(crate) pinned: BTreeMap<usize, (usize, bool)>,
    pub(crate) streams: HashMap<usize, Arc<Stream>>,
    /// Each event: whether it was recorded, and what has to be done before it is over.
    pub(crate) events: HashMap<usize, Option<(Arc<Stream>, u64)>>,
    pub(crate) modules: Vec<usize>,
    /// Entries that were launched before.
    pub(crate) launched: Vec<usize>,
    pub(crate) retained: HashMap<c_int, u64>,
    pub(crate) next_id: u64,
    /// Where memory was freed last, which is where the next of the same length goes.
    pub(crate) freed: Option<(usize, usize)>,
}

impl State {
    pub(crate) fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Objects that were made and not given back.
    pub(crate) fn live(&self) -> [(&'static str, usize); 8] {
        let retained: u64 = self.retained.values().sum();
        [
            ("mappings", self.mappings.len()),
            ("reservations", self.reservations.len()),
            ("handles", self.physical.values().map(|physical| physical.handles as usize).sum()),
            ("pinned ranges", self.pinned.len()),
            ("streams", self.streams.len()),
            ("events", self.events.len()),
            ("modules", self.modules.len()),
            ("contexts", retained as usize),
        ]
    }
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state, under its lock.
pub(crate) struct Locked(MutexGuard<'static, Option<State>>);

pub(crate) fn state() -> Locked {
    let mut guard = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(|| State {
        version: if crate::IS_CUDA { 13_000 } else { 70_000_000 },
        devices: 1,
        seed: 1,
        delay_us_max: 60,
        is_initialized: false,
        is_stalled: false,
        has_few_attributes: false,
        is_capturing: false,
        is_foreign: false,
        is_private: false,
        domain: 0,
        pending: Vec::new(),
        sticky: 0,
        attributes: HashMap::new(),
        mappings: BTreeMap::new(),
        reservations: BTreeMap::new(),
        physical: BTreeMap::new(),
        pinned: BTreeMap::new(),
        streams: HashMap::new(),
        events: HashMap::new(),
        modules: Vec::new(),
        launched: Vec::new(),
        retained: HashMap::new(),
        next_id: 0x1000,
        freed: None,
    });
    Locked(guard)
}

impl std::ops::Deref for Locked {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_ref().expect("`state` made it")
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("`state` made it")
    }
}
