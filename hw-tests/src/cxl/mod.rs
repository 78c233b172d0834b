//! Owners and peers of a CXL pool, in this process and in others.

mod roles;
mod store;

pub(crate) use roles::{own, poison, write};
pub(crate) use store::{store_node, store_peer, store_rounds};

use crate::sys::{Pages, register_part};
use anyhow::{Context as _, Result, ensure};
use std::path::Path;
use std::sync::Arc;
use te_core::testkit::pattern;
use te_core::{
    Access, Completion, Instant, MemSpan, Memory as _, Op, RegionId, RegionOffset, RemoteOffset,
    RemoteRegionId, Slice, Token, Transport as _,
};
use te_cxl::{Config, CxlTransport, Mount, Pool, Seat};

/// The key of every claim.
const KEY: [u8; 16] = [0x4b; 16];
/// The first region of an initiator.
const LOCAL: RegionId = RegionId::new(0, 1);

/// A peer of a pool, with memory of its own.
pub(crate) struct Guest {
    // Dropped before the memory that it refers to.
    transport: CxlTransport,
    memory: Pages,
    attached: u32,
    token: u64,
}

impl Guest {
    /// Maps the pool at `path`, and takes a page of it.
    ///
    /// # Errors
    /// The pool's, and the transport's.
    pub(crate) fn open(path: &Path, seat: Seat, bytes: usize) -> Result<Self> {
        let config = Config::default();
        let pool = Pool::open(path, config.coherence, None)?;
        let mut transport = CxlTransport::new(config, vec![Mount { pool, seat: Some(seat) }])?;
        let memory = Pages::new(bytes).context("no memory")?;
        register_part(&mut transport, LOCAL, memory.span(), Access::LOCAL)?;
        Ok(Self { transport, memory, attached: 0, token: 0 })
    }

    /// Attaches a region under a number that was not used before.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) fn attach(&mut self, blob: &[u8]) -> Result<RemoteRegionId> {
        self.attached += 1;
        let id = RemoteRegionId::new(self.attached % 1_024, self.attached);
        self.transport.attach(id, blob)?;
        Ok(id)
    }

    /// Detaches a region.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) fn detach(&mut self, id: RemoteRegionId) -> Result<()> {
        Ok(self.transport.detach(id)?)
    }

    /// Carries out one slice of the local memory's first `len` bytes.
    ///
    /// # Errors
    /// When it is refused, or does not end in one call of `poll`.
    pub(crate) fn run(&mut self, op: Op, id: RemoteRegionId, at: u64, len: u32) -> Result<Completion> {
        self.token += 1;
        let (local, remote) = (RegionOffset::new(LOCAL, 0), RemoteOffset::new(id, at));
        let slice = Slice { token: Token(self.token), local, remote, len, op };
        ensure!(self.transport.submit(&[slice])? == 1, "the transport has no room");
        let mut ended = [Completion::applied(Token(0))];
        let now = Instant::from_millis(self.token);
        ensure!(self.transport.poll(now, &mut ended) == 1, "the slice does not end in one call of `poll`");
        Ok(ended[0])
    }

    /// Writes the pattern of `seed`.
    ///
    /// # Errors
    /// As [`run`](Self::run), and when the slice fails.
    pub(crate) fn write(&mut self, seed: u64, id: RemoteRegionId, at: u64, len: u32) -> Result<()> {
        self.memory.write(&pattern(seed, len as usize));
        self.run(Op::Write, id, at, len)?.result.context("the write")?;
        Ok(())
    }

    /// Reads, and compares with the pattern of `seed`.
    ///
    /// # Errors
    /// As [`run`](Self::run), when the slice fails, and when a byte differs.
    pub(crate) fn expect(&mut self, seed: u64, id: RemoteRegionId, at: u64, len: u32) -> Result<()> {
        self.memory.write(&vec![0; len as usize]);
        self.run(Op::Read, id, at, len)?.result.context("the read")?;
        crate::nvmeof::same(&self.memory.read(len as usize), seed)
    }
}

/// An owner of a pool's extents.
pub(crate) struct Owner {
    transport: CxlTransport,
    pub(crate) pool: Arc<Pool>,
    /// The extents that it has claimed.
    pub(crate) memory: Option<MemSpan>,
    regions: u32,
}

impl Owner {
    /// Maps the pool at `path`.
    ///
    /// # Errors
    /// The pool's, and the transport's.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let config = Config::default();
        let pool = Pool::open(path, config.coherence, None)?;
        let transport = CxlTransport::new(config, vec![Mount { pool: pool.clone(), seat: None }])?;
        Ok(Self { transport, pool, memory: None, regions: 0 })
    }

    /// Claims one extent.
    ///
    /// # Errors
    /// The pool's.
    pub(crate) fn claim(&mut self, first: u32, epoch: u64) -> Result<MemSpan, te_cxl::PoolError> {
        let incarnation = u64::from(std::process::id()) << 32 | epoch;
        let claim = te_cxl::Claim { first, count: 1, incarnation, epoch, key: KEY };
        let memory = self.pool.claim(claim)?;
        self.memory = Some(memory);
        Ok(memory)
    }

    /// A part of what it has claimed.
    ///
    /// # Errors
    /// When there is no such part.
    pub(crate) fn part(&self, at: u64, len: u64) -> Result<MemSpan> {
        Ok(self.memory.context("nothing is claimed")?.part(at, len)?)
    }

    /// Registers a part; returns its number and its export.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) fn export(&mut self, at: u64, len: u64) -> Result<(RegionId, Vec<u8>)> {
        self.regions += 1;
        let id = RegionId::new(self.regions % 1_024, self.regions);
        let part = self.part(at, len)?;
        register_part(&mut self.transport, id, part, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let mut blob = vec![0; 512];
        let len = self.transport.export(id, &mut blob)?;
        blob.truncate(len);
        Ok((id, blob))
    }

    /// Takes a region back.
    ///
    /// # Errors
    /// The transport's: `Busy` while a peer is inside.
    pub(crate) fn deregister(&mut self, id: RegionId) -> Result<(), te_core::Error> {
        self.transport.deregister(id)
    }
}
