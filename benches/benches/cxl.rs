//! A slice over a pool beside `memcpy`, in both modes. Each iteration is at another place of 128 MiB, so that
//! the pool's bytes are not in the cache; the private buffer is.
//!
//! The pool is a memory file: its memory is DRAM. That of a CXL device is farther away.
#![allow(missing_docs, reason = "criterion's macros make public items")]
#![allow(unsafe_code, reason = "registers memory that it allocates")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use te_core::{
    Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
    Slice, Token, Transport, copy_bytes,
};
use te_cxl::{Claim, Coherence, Config, CxlTransport, FormatOptions, Mount, Pool, Seat};

const KIB: u32 = 1 << 10;
const LENGTHS: [u32; 3] = [4 * KIB, 64 * KIB, 1024 * KIB];
const EXTENTS: u32 = 64;
const BYTES: u64 = EXTENTS as u64 * (2 << 20);
const REGION: RegionId = RegionId::new(0, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);

/// An owner with one large region, a peer that has attached it, and the peer's buffer.
struct Ends {
    peer: CxlTransport,
    _owner: CxlTransport,
    there: MemSpan,
    here: MemSpan,
    at: u64,
}

fn file() -> OwnedFd {
    let dir = std::env::var_os("XDG_RUNTIME_DIR").unwrap_or_else(|| "/dev/shm".into());
    let path = std::path::Path::new(&dir).join(format!("snowskin-bench-{}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.expect("a file in memory");
    std::fs::remove_file(&path).expect("our own file");
    file.set_len(BYTES + (4 << 20)).expect("room");
    file.into()
}

impl Ends {
    fn new(coherence: Coherence) -> Self {
        let fd = file();
        Pool::format_fd(fd.try_clone().expect("a descriptor"), FormatOptions::default()).expect("room");
        let open = |slot| {
            let pool = Pool::open_fd(fd.try_clone().expect("a descriptor"), coherence, None).expect("a pool");
            let mount = Mount { pool: Arc::clone(&pool), seat: Some(Seat { slot, epoch: 1 }) };
            let config = Config { coherence, ..Config::default() };
            (pool, CxlTransport::new(config, vec![mount]).expect("a fresh page"))
        };
        let ((owner_pool, mut owner), (_, mut peer)) = (open(0), open(1));
        let claim = Claim { first: 0, count: EXTENTS, incarnation: 1, epoch: 1, key: [1; 16] };
        let there = owner_pool.claim(claim).expect("extents that no process owns");
        let private = Box::into_raw(vec![0x5a_u8; LENGTHS[2] as usize].into_boxed_slice());
        let here = MemSpan::new(private.cast(), LENGTHS[2] as usize);
        // SAFETY: the pool is mapped for as long as the transports hold it, the buffer is never freed, and no
        // reference to either is made.
        unsafe {
            std::ptr::write_bytes(there.as_ptr(), 0x11, there.len());
            owner.register(REGION, there, Access::all()).expect("a fresh transport");
            peer.register(REGION, here, Access::LOCAL).expect("a fresh transport");
        }
        let mut blob = [0; 256];
        let len = owner.export(REGION, &mut blob).expect("a region with remote rights");
        peer.attach(REMOTE, &blob[..len]).expect("a fresh transport");
        let mut ends = Self { peer, _owner: owner, there, here, at: 0 };
        // Every page of the peer's mapping is touched once: no iteration waits for the kernel.
        (0..BYTES / u64::from(LENGTHS[2])).for_each(|_| ends.slice(Op::Write, LENGTHS[2]));
        ends
    }

    /// Another place in the region, which is not in the cache.
    fn place(&mut self, len: u32) -> u64 {
        self.at = (self.at + u64::from(len)) % (BYTES - u64::from(LENGTHS[2]));
        self.at - self.at % u64::from(len)
    }

    fn slice(&mut self, op: Op, len: u32) {
        let remote = RemoteOffset::new(REMOTE, self.place(len));
        let slice = Slice { token: Token(1), local: RegionOffset::new(REGION, 0), remote, len, op };
        let mut out = [Completion::applied(Token(0))];
        assert_eq!(self.peer.submit(&[slice]), Ok(1));
        assert_eq!((self.peer.poll(Instant::ZERO, &mut out), out[0].result), (1, Ok(())));
    }

    fn memcpy(&mut self, op: Op, len: u32) {
        let there = self.there.as_ptr().wrapping_add(self.place(len) as usize);
        let (from, to) = match op {
            Op::Read => (there, self.here.as_ptr()),
            Op::Write => (self.here.as_ptr(), there),
        };
        // SAFETY: both ranges are mapped, and do not overlap.
        unsafe { copy_bytes(from, to, len as usize) };
    }
}

fn cxl(criterion: &mut Criterion) {
    let (mut flush, mut hardware) = (Ends::new(Coherence::Flush), Ends::new(Coherence::Hardware));
    for (op, verb) in [(Op::Write, "write"), (Op::Read, "read")] {
        let mut group = criterion.benchmark_group(format!("cxl {verb}"));
        for len in LENGTHS {
            group.throughput(Throughput::Bytes(u64::from(len)));
            let name = |what| format!("{what} {} KiB", len / KIB);
            group.bench_function(name("memcpy"), |bencher| bencher.iter(|| hardware.memcpy(op, len)));
            group.bench_function(name("flush"), |bencher| bencher.iter(|| flush.slice(op, len)));
            group.bench_function(name("hardware"), |bencher| bencher.iter(|| hardware.slice(op, len)));
        }
        group.finish();
    }
}

criterion_group!(benches, cxl);
criterion_main!(benches);
