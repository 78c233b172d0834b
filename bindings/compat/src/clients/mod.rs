//! [`Clients`]: clients of the store for many threads, and memory by raw address.
//!
//! A [`Client`] is used by one thread at a time and polls its own engine: no call pays a thread switch. So
//! that threads do not wait for each other, another client is connected while all are in use, up to a limit.
//! The clients of a pool are either all of the cluster, or all of the node on this machine.

mod any;
mod raw;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use store_client::local::{LocalConfig, LocalError};
use store_client::{Client, ClientConfig, ConnectError, DeviceError, MemSpan, RegionId, StoreError};
use te_core::device::Devices;
use te_engine::RegisterError;

pub use any::{Any, Origin};
pub use raw::{Place, Span, overlap, total};

/// Most clients of a store.
const CLIENTS_MAX: usize = 8;
/// How long the end of a registration waits for the calls and transfers that still use the buffer.
const REMOVAL_MAX: Duration = Duration::from_secs(5);
/// Time between two looks at what a removal waits for.
const REMOVAL_LOOK: Duration = Duration::from_millis(2);

/// The clients of a store, and the buffers that are registered with all of them.
pub struct Clients {
    origin: Origin,
    state: Mutex<State>,
    changed: Condvar,
    /// The devices whose memory callers may pass by its address.
    devices: Option<Arc<dyn Devices>>,
}

struct State {
    idle: Vec<Worker>,
    /// Clients that exist, those in use included.
    count: usize,
    is_closed: bool,
    /// Registered buffers by first address.
    buffers: BTreeMap<u64, Buffer>,
    /// Buffers that were taken out of `buffers` and that a client may still have registered.
    leaving: Vec<(u64, Buffer)>,
    /// Grows with each change of `buffers`.
    version: u64,
}

/// A buffer of the caller. The same memory that is registered again is another buffer: it may be mapped to
/// other pages by then.
#[derive(Clone)]
struct Buffer {
    len: u64,
    /// Every client that has registered the buffer has a clone.
    hold: Arc<()>,
}

impl Buffer {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.hold, &other.hold)
    }

    /// Whether a client has registered it. `here` is the number of clones that are not those of clients.
    fn is_held(&self, here: usize) -> bool {
        Arc::strong_count(&self.hold) > here
    }
}

/// A client, and the buffers that it has registered.
pub struct Worker {
    /// The client.
    pub client: Any,
    registered: BTreeMap<u64, (Buffer, RegionId)>,
    /// Registrations that are to end, and that the engine still uses.
    leaving: Vec<(Buffer, RegionId)>,
    /// Memory that is registered for one call, by first address.
    lent: BTreeMap<u64, (Buffer, RegionId)>,
    devices: Option<Arc<dyn Devices>>,
    version: u64,
    /// It was cut off from the nodes: it is replaced.
    is_lost: bool,
}

/// A worker during one call. Its drop returns it.
pub struct Lent<'p> {
    pool: &'p Clients,
    worker: Option<Worker>,
}

impl Clients {
    /// With one client, which shows that the master answers.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(config: ClientConfig) -> Result<Self, ConnectError> {
        let client = Client::connect(config.clone())?;
        Ok(Self::with(Origin::Cluster(Box::new(config)), Any::Cluster(Box::new(client))))
    }

    /// With one client of the node on this machine, which shows that it answers.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn connect_local(config: LocalConfig) -> Result<Self, LocalError> {
        let client = store_client::LocalClient::connect(config.clone())?;
        Ok(Self::with(Origin::Local(config), Any::Local(Box::new(client))))
    }

    fn with(origin: Origin, client: Any) -> Self {
        let devices = client.devices();
        let idle = vec![Worker::new(client, devices.clone())];
        let state = State {
            idle,
            count: 1,
            is_closed: false,
            buffers: BTreeMap::new(),
            leaving: Vec::new(),
            version: 0,
        };
        Self { origin, state: Mutex::new(state), changed: Condvar::new(), devices }
    }

    /// A further client of the cluster, which the pool does not count. `None`: this pool has clients of the
    /// node on this machine.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn another(&self) -> Result<Option<Client>, ConnectError> {
        match &self.origin {
            Origin::Cluster(config) => Client::connect(config.as_ref().clone()).map(Some),
            Origin::Local(_) => Ok(None),
        }
    }

    /// A further client that the pool does not count, for a caller that keeps it. Before each use it is
    /// [refreshed](Self::refresh), and also when a buffer was unregistered.
    ///
    /// # Errors
    /// `Closed`; `Connect`, `Local`.
    pub fn dedicated(&self) -> Result<Worker, ClientsError> {
        if self.lock().is_closed {
            return Err(ClientsError::Closed);
        }
        Ok(Worker::new(Any::connect(&self.origin)?, self.devices.clone()))
    }

    /// Has a [dedicated](Self::dedicated) client register and unregister what has changed.
    pub fn refresh(&self, worker: &mut Worker) {
        let state = self.lock();
        if !worker.is_in_sync(state.version) {
            let (buffers, version) = (state.buffers.clone(), state.version);
            drop(state);
            worker.sync(&buffers, version);
        }
    }

    /// A worker for this call; waits for one while the most are in use.
    ///
    /// # Errors
    /// `Closed` after [`close`](Self::close), `Connect` or `Local` if a further client cannot connect.
    pub fn lend(&self) -> Result<Lent<'_>, ClientsError> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return Err(ClientsError::Closed);
            }
            if let Some(worker) = state.idle.pop() {
                return Ok(self.lent(state, worker));
            }
            if state.count < CLIENTS_MAX {
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.count += 1;
        drop(state);
        // Other calls go on while this one connects.
        match Any::connect(&self.origin) {
            Ok(client) => Ok(self.lent(self.lock(), Worker::new(client, self.devices.clone()))),
            Err(error) => {
                self.lock().count -= 1;
                self.changed.notify_all();
                Err(error)
            }
        }
    }

    fn lent<'p>(&'p self, state: MutexGuard<'_, State>, mut worker: Worker) -> Lent<'p> {
        if !worker.is_in_sync(state.version) {
            let buffers = state.buffers.clone();
            let version = state.version;
            drop(state);
            worker.sync(&buffers, version);
        }
        Lent { pool: self, worker: Some(worker) }
    }

    /// Registers a buffer with all clients.
    ///
    /// # Errors
    /// `NoMemory`, `Overlap`, `Closed`.
    ///
    /// # Safety
    /// The buffer stays mapped until [`remove_buffer`](Self::remove_buffer) returned `Ok`, or the pool is gone.
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn add_buffer(&self, addr: u64, len: u64) -> Result<(), ClientsError> {
        let span = Span { addr, len };
        let is_memory = || self.is_device(span) || crate::sys::is_readable(addr, len);
        if total(&[span]).is_none_or(|len| len == 0) || !is_memory() {
            return Err(ClientsError::NoMemory { addr, len });
        }
        let mut state = self.lock();
        if state.is_closed {
            return Err(ClientsError::Closed);
        }
        let before = state.buffers.range(..addr + len).next_back();
        if let Some((&at, of)) = before.filter(|(at, of)| *at + of.len > addr) {
            return Err(ClientsError::Overlap { addr: at, len: of.len });
        }
        state.buffers.insert(addr, Buffer { len, hold: Arc::new(()) });
        state.version += 1;
        let (buffers, version) = (state.buffers.clone(), state.version);
        // One client at least shows whether the memory can be registered; the others follow at their next
        // use.
        let Some(mut worker) = state.idle.pop() else { return Ok(()) };
        drop(state);
        worker.sync(&buffers, version);
        // The removal below waits for every clone but its own.
        drop(buffers);
        // A client of the node on this machine copies host memory when it is used.
        let is_copied = matches!(worker.client, Any::Local(_)) && !self.is_device(span);
        let registered = worker.registered.contains_key(&addr) || is_copied;
        let mut state = self.lock();
        state.idle.push(worker);
        self.changed.notify_one();
        drop(state);
        if !registered {
            // Another client may have registered it meanwhile.
            self.remove_buffer(addr, || {})?;
            return Err(ClientsError::NoMemory { addr, len });
        }
        Ok(())
    }

    /// Ends the registration of a buffer with all clients. Those that are in use end it when their call is
    /// over: this waits for them, at most 5 s. `refresh` is called meanwhile, again and again, and has
    /// [dedicated](Self::dedicated) clients end theirs.
    ///
    /// # Errors
    /// `NotRegistered` if no registered buffer begins there; `Busy` if a client still uses it: no call uses
    /// it from here on, but the memory must stay mapped until a further call returned `Ok`.
    pub fn remove_buffer(&self, addr: u64, refresh: impl FnMut()) -> Result<(), ClientsError> {
        self.remove_buffer_within(addr, REMOVAL_MAX, refresh)
    }

    pub(crate) fn remove_buffer_within(
        &self,
        addr: u64,
        limit: Duration,
        mut refresh: impl FnMut(),
    ) -> Result<(), ClientsError> {
        let mut state = self.lock();
        if let Some(buffer) = state.buffers.remove(&addr) {
            state.leaving.push((addr, buffer));
            state.version += 1;
        } else if !state.leaving.iter().any(|(at, _)| *at == addr) {
            return Err(ClientsError::NotRegistered { addr });
        }
        drop(state);
        let until = Instant::now() + limit;
        loop {
            self.sync_idle();
            refresh();
            let mut state = self.lock();
            // One clone is in `leaving`; one more in each copy of `buffers` that was made before.
            state.leaving.retain(|(at, buffer)| *at != addr || buffer.is_held(1));
            let Some((_, buffer)) = state.leaving.iter().find(|(at, _)| *at == addr) else { return Ok(()) };
            if Instant::now() >= until {
                return Err(ClientsError::Busy { addr, len: buffer.len });
            }
            // A client that is returned wakes this; what an engine still uses does not.
            drop(self.changed.wait_timeout(state, REMOVAL_LOOK).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Has the clients that are not in use register and unregister what has changed.
    fn sync_idle(&self) {
        let mut state = self.lock();
        let version = state.version;
        let (stale, current) = std::mem::take(&mut state.idle)
            .into_iter()
            .partition(|worker: &Worker| !worker.is_in_sync(version));
        state.idle = current;
        drop(state);
        for worker in stale {
            self.give_back(worker);
        }
    }

    fn is_device(&self, span: Span) -> bool {
        is_device(self.devices.as_ref(), span)
    }

    /// How many bytes there are from an address to the end of the registered buffer in which it lies. `None`:
    /// it lies in none.
    pub fn room(&self, addr: u64) -> Option<u64> {
        let state = self.lock();
        let (&base, Buffer { len, .. }) = state.buffers.range(..=addr).next_back()?;
        (addr - base < *len).then(|| len - (addr - base))
    }

    fn give_back(&self, mut worker: Worker) {
        let mut state = self.lock();
        if !worker.is_in_sync(state.version) {
            let (buffers, version) = (state.buffers.clone(), state.version);
            drop(state);
            worker.sync(&buffers, version);
            drop(buffers);
            state = self.lock();
        }
        if worker.is_lost || state.is_closed {
            state.count -= 1;
            drop(state);
            drop(worker);
        } else {
            state.idle.push(worker);
            drop(state);
        }
        self.changed.notify_all();
    }

    /// Refuses further calls, waits for those under way, at most `limit`, and disconnects all clients.
    pub fn close(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        state.is_closed = true;
        self.changed.notify_all();
        loop {
            let idle = std::mem::take(&mut state.idle);
            state.count -= idle.len();
            let left = until.saturating_duration_since(Instant::now());
            if state.count == 0 || left.is_zero() {
                drop(state);
                drop(idle);
                return;
            }
            drop(idle);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Worker {
    const fn new(client: Any, devices: Option<Arc<dyn Devices>>) -> Self {
        Self {
            client,
            registered: BTreeMap::new(),
            leaving: Vec::new(),
            lent: BTreeMap::new(),
            devices,
            version: 0,
            is_lost: false,
        }
    }

    /// Registers, until [`end_lending`](Self::end_lending), the memory of those items that name memory of a
    /// device which is not registered. The CPU cannot copy it, so all of such an item is registered.
    ///
    /// # Errors
    /// The memory cannot be registered: it leaves its allocation, or this client moves host memory alone.
    ///
    /// # Safety
    /// The memory stays mapped until the call of the caller returns, and nothing else accesses it.
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn lend_devices<'s>(
        &mut self,
        items: impl IntoIterator<Item = &'s [Span]>,
    ) -> Result<(), StoreError> {
        if self.devices.as_ref().is_none_or(|devices| devices.kinds().is_empty()) {
            return Ok(());
        }
        for item in items {
            let spans: Vec<Span> = raw::joined(item)
                .into_iter()
                .filter(|span| self.find(span.addr, span.len).is_none())
                .collect();
            if !spans.iter().any(|span| is_device(self.devices.as_ref(), *span)) {
                continue;
            }
            let Any::Cluster(client) = &mut self.client else {
                return Err(StoreError::DeviceMemory(DeviceError::NoEngine));
            };
            for Span { addr, len } in spans {
                // SAFETY: the caller's promise; the registration ends with the call, or the memory is held.
                let region = unsafe { client.register(MemSpan::new(addr as *mut u8, len as usize)) }?;
                self.lent.insert(addr, (Buffer { len, hold: Arc::new(()) }, region));
            }
        }
        Ok(())
    }

    /// Whether one of the spans is memory of a device.
    #[must_use]
    pub fn names_device(&self, spans: &[Span]) -> bool {
        spans.iter().any(|span| is_device(self.devices.as_ref(), *span))
    }

    /// Ends the registrations for one call. What a device that hangs may still access is tried again later.
    pub fn end_lending(&mut self) {
        if !self.lent.is_empty() {
            self.leaving.extend(std::mem::take(&mut self.lent).into_values());
            self.end_leaving();
        }
    }

    fn end_leaving(&mut self) {
        let Any::Cluster(client) = &mut self.client else { return };
        // What the engine still uses is tried again.
        self.leaving.retain(|(buffer, region)| match client.unregister(*region) {
            Ok(()) | Err(StoreError::Memory(RegisterError::NotFound)) => false,
            Err(error) => {
                log::debug!("a buffer of {} bytes is still registered with a client: {error}", buffer.len);
                true
            }
        });
    }

    /// Whether it has registered what is to be registered, and nothing else.
    const fn is_in_sync(&self, version: u64) -> bool {
        self.version == version && self.leaving.is_empty()
    }

    /// Registers and unregisters what differs from `buffers`. What a client cannot register passes through
    /// its own memory, and so does everything of a client of the node on this machine.
    fn sync(&mut self, buffers: &BTreeMap<u64, Buffer>, version: u64) {
        self.version = version;
        if matches!(self.client, Any::Local(_)) {
            return;
        }
        self.registered.retain(|addr, (buffer, region)| {
            let stays = buffers.get(addr).is_some_and(|wanted| wanted.is(buffer));
            if !stays {
                self.leaving.push((buffer.clone(), *region));
            }
            stays
        });
        self.end_leaving();
        let Any::Cluster(client) = &mut self.client else { return };
        for (&addr, buffer) in buffers {
            if self.registered.contains_key(&addr) {
                continue;
            }
            let len = buffer.len;
            let span = MemSpan::new(addr as *mut u8, len as usize);
            #[allow(unsafe_code, reason = "registers memory that the pool's caller keeps mapped")]
            // SAFETY: the promise of `add_buffer` lasts until `remove_buffer` has returned `Ok`, which it
            // does when no clone of the buffer is left in `registered` or `leaving` of any client; the store
            // names parts of it only in calls whose callers promise that no reference to them exists.
            let registered = unsafe { client.register(span) };
            match registered {
                Ok(region) => drop(self.registered.insert(addr, (buffer.clone(), region))),
                Err(error) => log::error!("register_buffer: {len} bytes at {addr:#x}: {error}"),
            }
        }
    }

    /// The region and the offset of a span that lies in one registered buffer.
    pub fn find(&self, addr: u64, len: u64) -> Option<(RegionId, u64)> {
        let within = |buffers: &BTreeMap<u64, (Buffer, RegionId)>| {
            let (&base, (buffer, region)) = buffers.range(..=addr).next_back()?;
            let offset = addr - base;
            (offset.checked_add(len)? <= buffer.len).then_some((*region, offset))
        };
        within(&self.registered).or_else(|| within(&self.lent))
    }

    /// Whether it was cut off from the nodes, and is not used again.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// To be called with each error of the client: one that was cut off is not used again.
    pub fn note(&mut self, error: &StoreError) {
        self.is_lost |= matches!(error, StoreError::Expelled);
    }
}

/// Whether the first or the last byte of a span is memory of a device.
fn is_device(devices: Option<&Arc<dyn Devices>>, Span { addr, len }: Span) -> bool {
    let Some(devices) = devices.filter(|devices| !devices.kinds().is_empty()) else { return false };
    let last = addr.saturating_add(len.saturating_sub(1));
    [addr, last].into_iter().any(|byte| devices.locate(byte as *mut u8, 1).is_some())
}

impl std::ops::Deref for Lent<'_> {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        self.worker.as_ref().expect("it is there until the drop")
    }
}

impl std::ops::DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Worker {
        self.worker.as_mut().expect("it is there until the drop")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            worker.end_lending();
            self.pool.give_back(worker);
        }
    }
}

/// Why there is no client for a call, or a buffer was not registered.
#[derive(Debug)]
#[non_exhaustive]
pub enum ClientsError {
    /// The store was closed.
    Closed,
    /// A client is needed, and cannot connect.
    Connect(ConnectError),
    /// A client of the node on this machine is needed, and cannot connect.
    Local(LocalError),
    /// The bytes are not memory that the CPU can read, or that a client can register.
    NoMemory {
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
    /// The buffer overlaps a registered one.
    Overlap {
        /// First address of the registered one.
        addr: u64,
        /// Its length, bytes.
        len: u64,
    },
    /// No registered buffer begins at this address.
    NotRegistered {
        /// The address.
        addr: u64,
    },
    /// A call or a transfer still uses the buffer, whose registration is to end.
    Busy {
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
}

impl fmt::Display for ClientsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the store is closed: connect another"),
            Self::Connect(error) => error.fmt(f),
            Self::Local(error) => error.fmt(f),
            Self::NoMemory { addr, len } => write!(
                f,
                "{len} bytes at {addr:#x} are not memory that can be registered: check address and length"
            ),
            Self::Overlap { addr, len } => write!(
                f,
                "the buffer overlaps the {len} bytes that are registered at {addr:#x}: use those, or unregister \
                 them first"
            ),
            Self::NotRegistered { addr } => {
                write!(
                    f,
                    "no registered buffer begins at {addr:#x}: it was never registered, or has been unregistered"
                )
            }
            Self::Busy { addr, len } => write!(
                f,
                "the buffer of {len} bytes at {addr:#x} is still used: keep it mapped, and unregister it again"
            ),
        }
    }
}

impl std::error::Error for ClientsError {}
