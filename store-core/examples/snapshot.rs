//! Snapshots of a master with a million objects: how long it stands still, how long restoring takes, and how
//! many bytes an object takes. `cargo run --release -p store-core --example snapshot`.

use std::error::Error;
use std::io::Read;
use std::time::Instant as Clock;

use crc32c::crc32c;
use store_core::command_log::Recorder;
use store_core::message::{MountSegment, PutOptions};
use store_core::{AllocatorKind, Incarnation, Instant, Master, MasterConfig, NodeId, snapshot};

const OBJECTS: u64 = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    for allocator in AllocatorKind::ALL {
        let mut master = Master::new(MasterConfig { allocator: *allocator, ..MasterConfig::default() })?;
        let recorder = Recorder::new(&mut master);
        for node in 1..=3 {
            let name = format!("node-{node}");
            let segment = MountSegment {
                node: NodeId::new(node),
                incarnation: Incarnation::new(1),
                name: &name,
                endpoint: "127.0.0.1:9000",
                len: OBJECTS * 4096,
                ..MountSegment::default()
            };
            master.mount(Instant::ZERO, &segment)?;
        }
        for object in 0..OBJECTS {
            let key = format!("{:032x}", u128::from(object) * 0x9e37_79b9_7f4a_7c15);
            let put = master.put_start(Instant::ZERO, key.as_bytes(), 4096, &PutOptions::DEFAULT)?;
            master.put_end(Instant::ZERO, key.as_bytes(), put.generation, 0)?;
        }
        // The memory of the first round is used again: what the system takes to clear it is not measured.
        let mut file = Vec::with_capacity(200 * OBJECTS as usize);
        for _ in 0..5 {
            file.clear();
            let start = Clock::now();
            let written = recorder.snapshot(
                &master,
                std::iter::empty(),
                1,
                crc32c,
                &mut |chunk| -> Result<(), String> {
                    file.extend_from_slice(chunk);
                    Ok(())
                },
            )?;
            let wrote = start.elapsed();
            let (start, mut rest) = (Clock::now(), &file[..]);
            let (standby, _) = snapshot::restore(crc32c, &mut |to| rest.read(to))?;
            let restored = start.elapsed();
            assert_eq!(standby.master().stats().objects, OBJECTS);
            println!(
                "{allocator:>8}: written in {:5.1} ms, restored in {:5.1} ms, {:.1} bytes per object",
                wrote.as_secs_f64() * 1e3,
                restored.as_secs_f64() * 1e3,
                written.bytes as f64 / OBJECTS as f64
            );
        }
    }
    Ok(())
}
