//! Moves slices through te-rdma on a provider that does nothing, to count instructions:
//!
//! ```text
//! cargo build --profile bench -p benches --example rdma_slices
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null target/release/examples/rdma_slices 1000
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null target/release/examples/rdma_slices 2000
//! ```
//!
//! The difference of the two counts, divided by the 1000 rounds × 128 slices between them, is the cost of one
//! slice of 4 KiB from `submit` to its completion, with the target polled as well. A second argument `sim`
//! includes the simulated provider; `read` uses READs instead of WRITEs.
#![allow(clippy::print_stdout, reason = "prints its result")]

use benches::{InstantVerbs, Pair, slices};
use te_core::{Op, Transport};
use te_rdma::sim::{DeviceConfig, SimConfig, SimFabric};
use te_rdma::{Config, RdmaTransport};

const SLICES: u32 = 128;
const SLICE_BYTES: u32 = 4096;

fn main() {
    let rounds = std::env::args().nth(1).and_then(|rounds| rounds.parse().ok()).unwrap_or(1000);
    let wants = |what: &str| std::env::args().skip(2).any(|arg| arg == what);
    let op = if wants("read") { Op::Read } else { Op::Write };
    let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
    let config = || Config { proof_ms_max: 0, ..Config::default() };
    let device = || fabric.device(DeviceConfig::default());
    if wants("sim") {
        let open = || RdmaTransport::new(device(), config()).expect("a simulated port");
        run(open(), open(), op, rounds);
    } else {
        let open = || RdmaTransport::new(InstantVerbs::new(device()), config()).expect("a simulated port");
        run(open(), open(), op, rounds);
    }
}

fn run<T: Transport>(initiator: T, target: T, op: Op, rounds: u32) {
    let mut pair = Pair::new(initiator, target, (SLICES * SLICE_BYTES) as usize);
    let batch = slices(op, SLICES, SLICE_BYTES);
    // Connects and exchanges keys before the count begins.
    pair.round(&batch);
    let began = std::time::Instant::now();
    (0..rounds).for_each(|_| pair.round(&batch));
    let nanos = began.elapsed().as_nanos() as f64 / f64::from(rounds * SLICES);
    println!("{rounds} rounds of {SLICES} slices of {SLICE_BYTES} B, {op:?}: {nanos:.1} ns per slice");
}
