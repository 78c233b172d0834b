//! Transfers over TCP while the driver fails, stalls and dies: every slice ends once, no byte is wrong, and
//! all memory is given back.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "registers memory of the fake driver")]

mod common;

use std::sync::Arc;

use common::Fake;
use te_core::{
    ErrorKind, MemSpan, Memory, Op, Outcome, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice,
    Token, Transport,
};
use te_fabric::testkit::{ALL, Node, PATIENCE};
use te_tcp::{Config, TcpTransport};

const ON_DEVICE: RegionId = RegionId::new(1, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(1, 1);
const LEN: u32 = 6_000;
const SLICES: u64 = 32;
const BYTES: usize = LEN as usize * SLICES as usize;

/// A node with a fake driver, and a region of its memory.
struct Gpu {
    node: Node<TcpTransport>,
    fake: Arc<Fake>,
    span: MemSpan,
}

impl Gpu {
    fn new(fake: Fake) -> Self {
        let (span, gpu) = (fake.allocate(BYTES), fake.gpu(fake.config()));
        let transport = TcpTransport::with_devices(Config::default(), Arc::new(gpu)).unwrap();
        let mut node = Node::with(transport, 4_096, ALL);
        // SAFETY: memory of the fake driver lives as long as the driver, which is dropped after the node.
        unsafe { node.transport.register(ON_DEVICE, span, ALL) }.unwrap();
        Self { node, fake: Arc::new(fake), span }
    }

    fn pair() -> (Self, Self) {
        let (mut a, b) = (Self::new(Fake::cuda()), Self::new(Fake::hip()));
        a.node.transport.attach(REMOTE, &b.node.export_of(ON_DEVICE)).unwrap();
        (a, b)
    }

    fn part(&self, nth: u64) -> MemSpan {
        self.span.part(nth * u64::from(LEN), LEN.into()).unwrap()
    }

    fn is_free(&self) -> bool {
        self.node.transport.slots_taken() == 0
    }
}

/// Polls both until `is_so`.
fn drive(a: &mut Gpu, b: &mut Gpu, is_so: impl Fn(&Gpu, &Gpu) -> bool) {
    // timing: the drivers' streams run in threads
    let start = std::time::Instant::now();
    while !is_so(a, b) {
        if a.node.poll() + b.node.poll() == 0 {
            std::thread::yield_now();
        }
        // timing: only a hang takes as long
        assert!(start.elapsed() < PATIENCE, "it does not happen");
    }
}

/// A WRITE and a READ in turns, each of its own part of the memory.
fn slices(round: u64) -> Vec<Slice> {
    let slice = |nth: u64| Slice {
        token: Token(round * SLICES + nth),
        local: RegionOffset::new(ON_DEVICE, nth * u64::from(LEN)),
        remote: RemoteOffset::new(REMOTE, nth * u64::from(LEN)),
        len: LEN,
        op: if nth.is_multiple_of(2) { Op::Write } else { Op::Read },
    };
    (0..SLICES).map(slice).collect()
}

/// Submits a round, waits for its ends, and checks the bytes of those that were applied; returns how many.
fn round(a: &mut Gpu, b: &mut Gpu, nth: u64) -> usize {
    a.fake.fill(a.span, &[nth as u8 | 0x40; BYTES]);
    b.fake.fill(b.span, &[nth as u8 | 0x80; BYTES]);
    let batch = slices(nth);
    a.node.submit(&batch);
    let all = (nth + 1) * SLICES;
    drive(a, b, |a, _| a.node.done.len() as u64 == all);
    let mut applied = 0;
    for (at, slice) in batch.iter().enumerate() {
        let end = a.node.ended(slice.token.0).expect("all ended");
        if end.outcome == Outcome::Applied {
            assert_eq!(end.result, Ok(()));
            let byte = if slice.op == Op::Write { nth as u8 | 0x40 } else { nth as u8 | 0x80 };
            for end in [&*a, &*b] {
                assert!(end.fake.bytes(end.part(at as u64)) == [byte; LEN as usize], "{slice:?}");
            }
            applied += 1;
        }
    }
    drive(a, b, |a, b| a.is_free() && b.is_free());
    applied
}

#[test]
fn hops_that_fail_end_their_slices_once_and_the_next_ones_work() {
    let (mut a, mut b) = Gpu::pair();
    let (mut nth, mut failed) = (0, 0);
    for (function, of_cuda) in [
        ("cuMemcpyHtoDAsync_v2", true),
        ("cuMemcpyDtoHAsync_v2", true),
        ("cuMemcpyBatchAsync_v2", true),
        ("cuLaunchKernel", true),
        ("cuStreamWriteValue64_v2", true),
        ("cuCtxPushCurrent_v2", true),
        ("hipMemcpyHtoDAsync", false),
        ("hipMemcpyDtoHAsync", false),
        ("hipMemcpyBatchAsync", false),
        ("hipStreamWriteValue64", false),
        ("hipGetDevice", false),
    ] {
        for call in 1..4 {
            let fake = if of_cuda { &a.fake } else { &b.fake };
            fake.fail(function, call, 1);
            failed += SLICES as usize - round(&mut a, &mut b, nth);
            let fake = if of_cuda { &a.fake } else { &b.fake };
            fake.fail(function, 0, 0);
            assert_eq!(round(&mut a, &mut b, nth + 1), SLICES as usize, "{function}");
            nth += 2;
        }
    }
    assert!(failed > 10, "{failed} slices met a failure");
    for end in [&mut a, &mut b] {
        assert_eq!(end.node.transport.deregister(ON_DEVICE), Ok(()));
    }
}

#[test]
fn when_a_device_dies_every_slice_ends_and_memory_is_given_back() {
    for dies_here in [true, false] {
        let (mut a, mut b) = Gpu::pair();
        assert_eq!(round(&mut a, &mut b, 0), SLICES as usize);
        let dying = if dies_here { &a.fake } else { &b.fake };
        dying.set("stalled", 1);
        a.node.submit(&slices(1));
        for _ in 0..50 {
            a.node.poll();
            b.node.poll();
        }
        let dying = if dies_here { &a.fake } else { &b.fake };
        dying.set("sticky", 719).set("stalled", 0);
        drive(&mut a, &mut b, |a, _| a.node.done.len() as u64 == 2 * SLICES);
        let ended = |nth: u64| a.node.ended(SLICES + nth).expect("all ended");
        assert!((0..SLICES).any(|nth| ended(nth).result.is_err()));
        drive(&mut a, &mut b, |a, b| a.is_free() && b.is_free());
        for end in [&mut a, &mut b] {
            assert_eq!(end.node.transport.deregister(ON_DEVICE), Ok(()));
        }
    }
}

#[test]
fn memory_is_busy_while_the_device_may_touch_it() {
    let (mut a, mut b) = Gpu::pair();
    assert_eq!(round(&mut a, &mut b, 0), SLICES as usize);
    a.fake.set("stalled", 1);
    a.node.submit(&slices(1));
    for _ in 0..50 {
        a.node.poll();
        b.node.poll();
    }
    slices(1).iter().for_each(|slice| _ = a.node.transport.cancel(slice.token));
    for _ in 0..50 {
        a.node.poll();
        b.node.poll();
    }
    let refused = a.node.transport.deregister(ON_DEVICE).map_err(|error| error.kind);
    assert_eq!(refused, Err(ErrorKind::Busy), "hops run");
    a.fake.set("stalled", 0);
    drive(&mut a, &mut b, |a, _| a.node.done.len() as u64 == 2 * SLICES);
    drive(&mut a, &mut b, |a, b| a.is_free() && b.is_free());
    assert_eq!(a.node.transport.deregister(ON_DEVICE), Ok(()));
}
