//! What the tests share: pools in memory files, and owners and peers of them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(dead_code, reason = "no test uses all of it")]

use std::cell::Cell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use te_core::{
    Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
    Slice, Token, Transport, VolatileSpan,
};
use te_cxl::{Claim, Coherence, Config, CxlTransport, FormatOptions, Mount, Pool, Seat};

pub(crate) const KEY: [u8; 16] = [0x4B; 16];
pub(crate) const MIB: u64 = 1 << 20;

/// A pool in a memory file that every descriptor of this process reaches.
pub(crate) struct PoolFile {
    pub(crate) fd: OwnedFd,
    epoch: Cell<u64>,
}

impl PoolFile {
    /// With `SNOWSKIN_CXL_DEVICE`, the pool is on that device, which one test at a time can use.
    pub(crate) fn new(bytes: u64, peers: u32) -> Self {
        let device = std::env::var_os("SNOWSKIN_CXL_DEVICE");
        let fd = match &device {
            Some(path) => File::options().read(true).write(true).open(path).unwrap().into(),
            None => {
                let fd = memfd_create("pool", MFdFlags::MFD_CLOEXEC).unwrap();
                ftruncate(&fd, bytes.try_into().unwrap()).unwrap();
                fd
            }
        };
        let options = FormatOptions { peers, force: device.is_some(), ..FormatOptions::default() };
        Pool::format_fd(fd.try_clone().unwrap(), options).unwrap();
        Self { fd, epoch: Cell::new(0) }
    }

    /// A mapping of its own, as another host has it.
    pub(crate) fn open(&self, coherence: Coherence) -> Arc<Pool> {
        Pool::open_fd(self.fd.try_clone().unwrap(), coherence, None).unwrap()
    }

    /// The next epoch, as a master would count them.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.set(self.epoch.get() + 1);
        self.epoch.get()
    }

    pub(crate) fn claim(&self, first: u32, count: u32, incarnation: u64) -> Claim {
        Claim { first, count, incarnation, epoch: self.epoch(), key: KEY }
    }

    /// A transport over one mapping of its own.
    pub(crate) fn transport(
        &self,
        coherence: Coherence,
        slot: u32,
        identity: u64,
    ) -> (Arc<Pool>, CxlTransport) {
        let pool = self.open(coherence);
        let seat = Some(Seat { slot, epoch: self.epoch() });
        // As many slices of one line as the suite's regions have room for, twice.
        let config = Config { coherence, identity, inflight_max: 512, ..Config::default() };
        let transport = CxlTransport::new(config, vec![Mount { pool: pool.clone(), seat }]).unwrap();
        (pool, transport)
    }
}

/// Registers memory that stays mapped for as long as the test runs.
pub(crate) fn register(transport: &mut CxlTransport, id: RegionId, span: MemSpan, access: Access) {
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: the tests keep the memory mapped until their transports are dropped, and reach it by spans.
    unsafe { transport.register(id, span, access) }.unwrap();
}

/// Memory of the heap that is never freed.
pub(crate) fn leaked(len: usize, byte: u8) -> MemSpan {
    MemSpan::new(Box::into_raw(vec![byte; len].into_boxed_slice()).cast(), len)
}

/// Copies bytes out of a span.
pub(crate) fn peek(span: MemSpan, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: as in `register`.
    unsafe { VolatileSpan::new(span) }.read(offset, &mut bytes).unwrap();
    bytes
}

/// Copies bytes into a span.
pub(crate) fn poke(span: MemSpan, offset: u64, bytes: &[u8]) {
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: as in `register`.
    unsafe { VolatileSpan::new(span) }.write(offset, bytes).unwrap();
}

pub(crate) const REGION: RegionId = RegionId::new(0, 1);
pub(crate) const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);

pub(crate) fn slice(token: u64, op: Op, offset: u64, len: u32) -> Slice {
    Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, offset),
        remote: RemoteOffset::new(REMOTE, offset),
        len,
        op,
    }
}

pub(crate) fn export(transport: &CxlTransport, id: RegionId) -> Vec<u8> {
    let mut blob = vec![0; 256];
    let len = transport.export(id, &mut blob).unwrap();
    blob.truncate(len);
    blob
}

/// Carries out one slice in one poll.
pub(crate) fn run(transport: &mut CxlTransport, slice: Slice) -> Completion {
    assert_eq!(transport.submit(&[slice]), Ok(1));
    let mut out = [Completion::applied(Token(u64::MAX)); 2];
    assert_eq!(transport.poll(Instant::ZERO, &mut out), 1, "a slice ends in the poll that carries it out");
    assert_eq!(out[0].token, slice.token);
    out[0]
}

/// An owner of the first extents of a pool with one region over them, and a peer that has attached it.
pub(crate) struct Ends {
    pub(crate) file: PoolFile,
    pub(crate) owner_pool: Arc<Pool>,
    pub(crate) owner: CxlTransport,
    pub(crate) peer_pool: Arc<Pool>,
    pub(crate) peer: CxlTransport,
    /// The region, in the owner's mapping.
    pub(crate) there: MemSpan,
    /// The peer's private memory, of the same length.
    pub(crate) here: MemSpan,
}

impl Ends {
    pub(crate) fn new(coherence: Coherence) -> Self {
        let file = PoolFile::new(16 * MIB, 8);
        let (owner_pool, mut owner) = file.transport(coherence, 0, 0x2222);
        let (peer_pool, mut peer) = file.transport(coherence, 1, 0x1111);
        let there = owner_pool.claim(file.claim(0, 2, 7)).unwrap();
        let here = leaked(there.len(), 0x11);
        register(&mut owner, REGION, there, Access::all());
        register(&mut peer, REGION, here, Access::LOCAL);
        peer.attach(REMOTE, &export(&owner, REGION)).unwrap();
        Self { file, owner_pool, owner, peer_pool, peer, there, here }
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.peer.deregister(REGION).ok();
        self.owner.deregister(REGION).ok();
    }
}
