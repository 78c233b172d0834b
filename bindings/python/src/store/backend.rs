//! The client behind a store: one with an engine, or one of the node on this machine.
#![allow(unsafe_code, reason = "registers the memory of the pool")]

use std::sync::Arc;

use store_client::{
    BufferRange, Client, ClientConfig, Counters, DeviceError, Get, LocalClient, Located, MasterClient, Put,
    PutOptions, RegionId, RpcConnection, Sink, Store, StoreError,
};

use te_core::MemSpan;
use te_engine::RegisterError;

use crate::errors::Fault;
use crate::memory::Place;
use crate::pool::Pool;

/// Moves the bytes of a store.
pub(crate) enum Backend {
    Engine(Box<Engine>),
    Local(Box<Local>),
}

/// A client with an engine of its own.
pub(crate) struct Engine {
    /// Before `pool`: the engine is gone when the memory that is registered with it is unmapped.
    client: Client,
    config: ClientConfig,
    /// The chunks of the pool, as they are registered.
    regions: Vec<RegionId>,
    pool: Arc<Pool>,
}

/// A client of the node on this machine.
pub(crate) struct Local {
    client: LocalClient,
    /// For questions that concern the master alone.
    master: Option<RpcConnection>,
}

impl Backend {
    pub(crate) fn engine(client: Client, config: ClientConfig, pool: Arc<Pool>) -> Self {
        Self::Engine(Box::new(Engine { client, config, regions: Vec::new(), pool }))
    }

    pub(crate) fn local(client: LocalClient, master: Option<RpcConnection>) -> Self {
        Self::Local(Box::new(Local { client, master }))
    }

    /// The interface that all clients have.
    pub(crate) fn store(&mut self) -> &mut dyn Store {
        match self {
            Self::Engine(engine) => &mut engine.client,
            Self::Local(local) => &mut local.client,
        }
    }

    /// Questions that concern the master alone.
    ///
    /// # Errors
    /// A local client that was not told the master's address.
    pub(crate) fn master(&mut self) -> Result<MasterClient<'_>, Fault> {
        match self {
            Self::Engine(engine) => Ok(engine.client.master()),
            Self::Local(local) => match &mut local.master {
                Some(rpc) => Ok(MasterClient::new(rpc)),
                None => Err(Fault::argument(
                    "this store uses the node on this machine, which does not answer that: give connect() the \
                     address of the master, too",
                )),
            },
        }
    }

    /// Lengths of objects, bytes: one request for 1,024 of them. `None`: there is no such object.
    pub(crate) fn lengths(&mut self, keys: &[&[u8]]) -> Vec<Result<Option<u64>, StoreError>> {
        match self {
            Self::Engine(engine) => match engine.client.master().batch_locate(keys) {
                Ok(found) => {
                    let len = |found: Option<Located>| found.map(|object| object.len);
                    found.into_iter().map(|found| Ok(found.map(len)?)).collect()
                }
                Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
            },
            // The node on this machine is not asked for lengths: it returns them with the object.
            Self::Local(local) => {
                let mut len = |key: &&[u8]| Ok(local.client.get_buffer(key)?.map(|buffer| buffer.len()));
                keys.iter().map(&mut len).collect()
            }
        }
    }

    /// The client's counters; `None` for a client of the node on this machine.
    pub(crate) fn counters(&self) -> Option<Counters> {
        match self {
            Self::Engine(engine) => Some(engine.client.counters()),
            Self::Local(_) => None,
        }
    }

    /// Room for `len` bytes, to be read into.
    ///
    /// # Errors
    /// The pool or the arena is full; the engine refuses its memory.
    pub(crate) fn place(&mut self, len: u64) -> Result<Place, Fault> {
        match self {
            Self::Engine(engine) => engine.block(len),
            Self::Local(local) => Ok(Place::Arena(local.client.alloc(len)?)),
        }
    }

    /// A place as a destination; `None` when it is not of this client.
    pub(crate) fn sink<'p>(&self, place: &'p Place) -> Option<Sink<'p>> {
        match (self, place) {
            (Self::Engine(engine), Place::Block(block)) => {
                let region = *engine.regions.get(block.chunk())?;
                Some(Sink::Region(BufferRange { region, offset: block.offset(), len: block.len() }))
            }
            (Self::Local(_), Place::Arena(buffer)) => Some(Sink::Local(buffer.all())),
            _ => None,
        }
    }

    /// Registers memory of a GPU for one operation.
    ///
    /// # Errors
    /// This client moves host memory alone, or knows no such memory.
    ///
    /// # Safety
    /// The memory stays mapped until [`unregister`](Self::unregister) has returned true for the region.
    pub(crate) unsafe fn register(&mut self, span: MemSpan) -> Result<RegionId, StoreError> {
        match self {
            // SAFETY: the caller's promise; the CPU has no references to memory of a GPU.
            Self::Engine(engine) => unsafe { engine.client.register(span) },
            Self::Local(_) => Err(StoreError::DeviceMemory(DeviceError::NoEngine)),
        }
    }

    /// Ends a registration. Returns whether it has ended; otherwise a device that hangs may still touch the
    /// memory.
    pub(crate) fn unregister(&mut self, region: RegionId) -> bool {
        match self {
            // A region of an engine that was replaced is gone.
            Self::Engine(engine) => !matches!(
                engine.client.unregister(region),
                Err(StoreError::Memory(RegisterError::Busy { .. }))
            ),
            Self::Local(_) => true,
        }
    }

    /// A copy of bytes in memory of the pool, which is registered.
    ///
    /// # Errors
    /// As [`place`](Self::place).
    pub(crate) fn registered_copy(&mut self, bytes: &[u8]) -> Result<(Place, BufferRange), Fault> {
        let place = self.place(bytes.len() as u64)?;
        if let (Place::Block(block), Some(Sink::Region(range))) = (&place, self.sink(&place)) {
            // SAFETY: the block has room for the bytes, and belongs to this call alone.
            unsafe { te_core::copy_bytes(bytes.as_ptr(), block.addr() as *mut u8, bytes.len()) };
            let len = bytes.len() as u64;
            return Ok((place, BufferRange { len, ..range }));
        }
        Err(StoreError::DeviceMemory(DeviceError::NoEngine).into())
    }

    /// Stores objects. Each item has its own result.
    pub(crate) fn put(&mut self, items: &mut [Put<'_>], options: &PutOptions) {
        let _ = self.store().batch_put(items, options);
    }

    /// Reads objects. Each item has its own result.
    pub(crate) fn get(&mut self, items: &mut [Get<'_>]) {
        let _ = self.store().batch_get(items);
    }

    /// Continues after nodes have cut this client off: with a new engine, and the same memory.
    pub(crate) fn revive(&mut self) {
        let Self::Engine(engine) = self else { return };
        match engine.renewed() {
            Ok(()) => log::warn!("nodes had cut this client off: it continues with a new engine"),
            Err(fault) => {
                log::warn!("nodes have cut this client off, and it could not connect again: {fault}")
            }
        }
    }
}

impl Engine {
    fn block(&mut self, len: u64) -> Result<Place, Fault> {
        if let Some(block) = self.pool.take(len) {
            return Ok(Place::Block(block));
        }
        let (number, span) = self.pool.grow(len)?;
        debug_assert_eq!(number, self.regions.len(), "only this thread adds chunks");
        // SAFETY: the chunk stays mapped until the pool is dropped, which `self` keeps longer than the
        // client. Its bytes are lent to Python as raw memory; no reference to a range exists while a get
        // names it, because the block of the range belongs to the get.
        match unsafe { self.client.register(span) } {
            Ok(region) => self.regions.push(region),
            Err(error) => {
                self.pool.shrink();
                return Err(error.into());
            }
        }
        self.pool.take(len).map(Place::Block).ok_or_else(|| Fault::from(StoreError::Held))
    }

    fn renewed(&mut self) -> Result<(), Fault> {
        let mut client = Client::connect(self.config.clone())?;
        let mut regions = Vec::new();
        for span in self.pool.spans() {
            // SAFETY: as in `block`. The memory may be registered with the old engine as well, until it is
            // dropped below; nothing reads into it through that engine any more, because this thread carries
            // out its operations one after the other.
            regions.push(unsafe { client.register(span) }?);
        }
        self.regions = regions;
        // Drops the old client and its engine.
        self.client = client;
        Ok(())
    }
}
