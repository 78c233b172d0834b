//! A target and an initiator in one process: 64 MiB are written in slices of 1 MiB and read back.
//!
//! `cargo run --release -p te-nvmeof --example own_target`

use std::time::Instant as Clock;

use te_core::{
    Access, Completion, Instant, Memory, Op, RegionId, RegionOffset, Registered, RemoteOffset,
    RemoteRegionId, Slice, Token, Transport,
};
use te_nvmeof::{Config, NvmeofTransport};

const BYTES: usize = 64 << 20;
const SLICE_BYTES: u32 = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
    let mut target = NvmeofTransport::new(Config::default())?;
    let mut initiator = NvmeofTransport::new(Config::default())?;
    let there = Registered::new(vec![0_u8; BYTES], region, Access::REMOTE_READ | Access::REMOTE_WRITE);
    let mut here = Registered::new(vec![7_u8; BYTES], region, Access::LOCAL);
    // SAFETY: both buffers stay registered until the process ends.
    unsafe {
        target.register(region, there.span(), Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        initiator.register(region, here.span(), Access::LOCAL)?;
    }
    let mut export = [0; 512];
    let len = target.export(region, &mut export)?;
    initiator.attach(remote, &export[..len])?;

    let epoch = Clock::now();
    for op in [Op::Write, Op::Read] {
        let slice = |at: u64| Slice {
            token: Token(at),
            local: RegionOffset::new(region, at * u64::from(SLICE_BYTES)),
            remote: RemoteOffset::new(remote, at * u64::from(SLICE_BYTES)),
            len: SLICE_BYTES,
            op,
        };
        let slices: Vec<Slice> = (0..(BYTES / SLICE_BYTES as usize) as u64).map(slice).collect();
        let (began, mut submitted, mut ended) = (Clock::now(), 0, 0);
        let mut out = [Completion::applied(Token(0)); 64];
        while ended < slices.len() {
            submitted += initiator.submit(&slices[submitted..])?;
            let now = Instant::ZERO + epoch.elapsed();
            target.poll(now, &mut []);
            let count = initiator.poll(now, &mut out);
            out[..count].iter().try_for_each(|end| end.result)?;
            ended += count;
        }
        let seconds = began.elapsed().as_secs_f64();
        println!("{op:?}: {} MiB in {:.1} ms", BYTES >> 20, seconds * 1e3);
    }
    // Dropping a registered buffer leaks it, which ends with the process.
    let intact = here.as_mut_slice().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 7));
    println!("{} is {}", target.nqn(), if intact { "intact" } else { "damaged" });
    Ok(())
}
