//! What a block of device memory costs in a stager beside the copy itself: slots, hops and their ends. The
//! driver is a fake one, whose copies are those of the CPU: no figure is one of a GPU.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use benches::{SLOT_BYTES, fake_gpu};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use te_core::device::{Devices, Hop, HopDirection, HopEnd, Stager};
use te_core::{MemSpan, Token};

const KIB: u32 = 1 << 10;
const LENGTHS: [u32; 3] = [4 * KIB, 16 * KIB, SLOT_BYTES];
const COUNTS: [usize; 2] = [1, 128];

/// Copies `count` blocks between slots and device memory, all under way at a time.
fn round(stager: &mut dyn Stager, device: MemSpan, (count, len): (usize, u32), direction: HopDirection) {
    let mut slots = Vec::with_capacity(count);
    let mut hops = Vec::with_capacity(count);
    for at in 0..count {
        let slot = stager.take().expect("as many slots as the ring has");
        let device = device.part(at as u64 * u64::from(len), u64::from(len)).expect("room");
        hops.push(Hop { token: Token(at as u64), slot: slot.index, offset: 0, device, direction });
        slots.push(slot);
    }
    let mut ends = [HopEnd { token: Token(0), result: Ok(()) }; 128];
    let (mut begun, mut ended) = (0, 0);
    while ended < count {
        begun += stager.start(&hops[begun..]).expect("valid hops");
        let now = stager.poll(&mut ends);
        ends[..now].iter().for_each(|end| end.result.expect("the fake driver does not fail"));
        ended += now;
    }
    slots.into_iter().for_each(|slot| stager.give_back(slot));
}

fn stager(criterion: &mut Criterion) {
    let Some((gpu, location)) = fake_gpu() else { return };
    let mut stager = gpu.stager(location).expect("a stager of the fake driver");
    let bytes = COUNTS[1] * SLOT_BYTES as usize;
    let memory = gpu.allocate(location, bytes).expect("memory of the fake driver");
    for (direction, verb) in [(HopDirection::ToDevice, "to device"), (HopDirection::ToHost, "to host")] {
        let mut group = criterion.benchmark_group(format!("gpu stager, fake driver, software cost {verb}"));
        for (len, count) in LENGTHS.into_iter().flat_map(|len| COUNTS.map(|count| (len, count))) {
            group.throughput(Throughput::Elements(count as u64));
            let name = format!("{count} blocks of {} KiB", len / KIB);
            group.bench_function(name, |bencher| {
                bencher.iter(|| round(&mut *stager, memory.span(), (count, len), direction));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, stager);
criterion_main!(benches);
