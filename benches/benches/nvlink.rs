//! What `submit` and `poll` of te-nvlink cost per slice, between two regions of device memory. The driver is
//! a fake one, whose copies are those of the CPU: no figure is one of a GPU or of NVLink.
#![allow(missing_docs, reason = "criterion's macros make public items")]
#![allow(unsafe_code, reason = "registers memory that it allocates")]

use benches::{REGION, REMOTE_REGION, fake_gpu, slices};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use te_core::{Access, Completion, Instant, Memory, Op, Slice, Token, Transport};
use te_gpu::DeviceBuffer;
use te_nvlink::{Config, NvlinkTransport};

const KIB: u32 = 1 << 10;
const LENGTHS: [u32; 2] = [4 * KIB, 64 * KIB];
const COUNTS: [u32; 2] = [1, 128];
const BYTES: usize = (COUNTS[1] * LENGTHS[1]) as usize;

/// A peer that has attached the region of an owner, and their memory.
struct Ends {
    peer: NvlinkTransport,
    owner: NvlinkTransport,
    _memory: [DeviceBuffer; 2],
}

impl Ends {
    /// `None`: there is no fake driver.
    fn new() -> Option<Self> {
        let (gpu, location) = fake_gpu()?;
        let memory = [(); 2].map(|()| gpu.allocate(location, BYTES).expect("memory of the fake driver"));
        let open = || NvlinkTransport::new(Config::default(), gpu.clone()).expect("valid settings");
        let (mut peer, mut owner) = (open(), open());
        // SAFETY: the memory is dropped after the transports, and no reference to it is made.
        unsafe {
            peer.register(REGION, memory[0].span(), Access::LOCAL).expect("a fresh transport");
            owner.register(REGION, memory[1].span(), Access::all()).expect("a fresh transport");
        }
        let mut blob = [0; 256];
        let len = owner.export(REGION, &mut blob).expect("device memory that can be shared");
        peer.attach(REMOTE_REGION, &blob[..len]).expect("a fresh transport");
        let mut ends = Self { peer, owner, _memory: memory };
        // The grant, which only the first slice waits for.
        ends.round(&slices(Op::Write, 1, LENGTHS[0]));
        Some(ends)
    }

    fn round(&mut self, batch: &[Slice]) {
        let mut out = [Completion::applied(Token(0)); 128];
        let (mut begun, mut ended) = (0, 0);
        while ended < batch.len() {
            begun += self.peer.submit(&batch[begun..]).expect("valid slices");
            let now = self.peer.poll(Instant::ZERO, &mut out);
            out[..now].iter().for_each(|end| end.result.expect("the fake driver does not fail"));
            ended += now;
            if now == 0 {
                self.owner.poll(Instant::ZERO, &mut []);
            }
        }
    }
}

fn nvlink(criterion: &mut Criterion) {
    let Some(mut ends) = Ends::new() else { return };
    for (op, verb) in [(Op::Write, "write"), (Op::Read, "read")] {
        let mut group = criterion.benchmark_group(format!("nvlink {verb}, fake driver, submit and poll"));
        for (len, count) in LENGTHS.into_iter().flat_map(|len| COUNTS.map(|count| (len, count))) {
            let batch = slices(op, count, len);
            group.throughput(Throughput::Elements(u64::from(count)));
            let name = format!("{count} slices of {} KiB", len / KIB);
            group.bench_function(name, |bencher| bencher.iter(|| ends.round(&batch)));
        }
        group.finish();
    }
}

criterion_group!(benches, nvlink);
criterion_main!(benches);
