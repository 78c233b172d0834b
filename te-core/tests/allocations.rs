//! Zero allocations on the data path: batch table, slicer, route and `MultiTransport` over a million slices.

use std::alloc::System;

use te_core::testkit::{CountingAlloc, NullTransport, allocations, is_counting};
use te_core::{
    Access, BatchTable, Completion, Delay, Fault, FaultConfig, HealthConfig, HealthRoute, Instant, MemSpan,
    MultiTransport, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Slicer, Status,
    Throttle, Token, Trace, TransferRequest, Transport,
};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);
const SLICE_BYTES: u32 = 4096;
const SLICES: u64 = 1 << 20;
const SLICES_A_BATCH: u64 = 1024;

/// Drives `slices` slices in batches through the table and `transport`; gives the allocations after the first
/// batch.
fn drive(transport: &mut impl Transport, slices: u64) -> u64 {
    let mut memory = vec![0u8; 4096];
    // SAFETY: no transport here touches memory.
    unsafe { transport.register(REGION, MemSpan::new(memory.as_mut_ptr(), memory.len()), Access::all()) }
        .expect("registered");
    let mut blob = [0; 256];
    let len = transport.export(REGION, &mut blob).expect("exported");
    transport.attach(REMOTE_REGION, &blob[..len]).expect("attached");

    let mut table = BatchTable::new(4, 16);
    let request = TransferRequest {
        op: Op::Write,
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len: SLICES_A_BATCH / 8 * u64::from(SLICE_BYTES),
    };
    let blank = Slice {
        token: Token(0),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len: 0,
        op: Op::Read,
    };
    let mut cut = [blank; 128];
    let mut ends = [Completion::applied(Token(0)); 128];
    let (mut done, mut warm, mut now) = (0u64, 0, 0u64);
    while done < slices {
        if done == SLICES_A_BATCH {
            warm = allocations();
        }
        let batch = table.create([request; 8].into_iter(), Slicer::new(SLICE_BYTES)).expect("room");
        while !table.progress(batch).expect("live").status.is_terminal() {
            let count = table.next(batch, &mut cut).expect("live");
            let accepted = transport.submit(&cut[..count]).expect("valid");
            table.accepted(&cut[..accepted]);
            now += 50_000;
            let count = transport.poll(Instant::from_nanos(now), &mut ends);
            for end in &ends[..count] {
                table.complete(end);
            }
        }
        assert_eq!(table.progress(batch).expect("live").status, Status::Completed);
        table.free(batch).expect("terminal");
        done += SLICES_A_BATCH;
    }
    allocations() - warm
}

fn multi() -> MultiTransport<NullTransport, HealthRoute> {
    let route = HealthRoute::new(&[100, 100, 150], HealthConfig::default());
    let rails = ["a", "b", "c"]
        .map(|name| NullTransport::new(256).named(name).with_slice_bytes(SLICE_BYTES, u32::MAX));
    MultiTransport::new(rails, route, 512).expect("three rails")
}

#[test]
fn a_million_slices_through_three_rails_allocate_nothing() {
    assert!(is_counting());
    let mut multi = multi();
    assert_eq!(drive(&mut multi, SLICES), 0);
    let ended: u64 = (0..3).map(|rail| multi.route().health(rail).expect("a rail").slices_ended).sum();
    assert_eq!(ended, SLICES);
    assert!((0..3).all(|rail| multi.route().health(rail).is_some_and(|health| health.slices_ended > 0)));
}

#[test]
fn decorators_allocate_nothing_either() {
    let mut faults = FaultConfig::default();
    faults.submit_refused_ppm = 10_000;
    let slow = Throttle::new(multi(), 100_000_000_000, 1 << 20);
    let late = Delay::new(slow, core::time::Duration::from_micros(60));
    let mut traced = Trace::new(Fault::new(late, 1, faults), 100);
    assert_eq!(drive(&mut traced, 1 << 17), 0);
}
