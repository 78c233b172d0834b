//! What needs real time: an engine that has nothing to do must use no CPU for one second. The only test of
//! this binary, because it measures the CPU time of the process.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::time::Duration;

use common::*;
use te_core::{Access, Op};

#[test]
fn an_idle_engine_uses_no_cpu() {
    for (name, fabrics) in each_fabric() {
        let (here, there) = (engine(fabrics), engine(fabrics));
        // Connected, used once, and then idle.
        let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
        let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
        let segment = here.open_segment(there.name()).unwrap();
        let one = request(Op::Write, (local.id(), 0), segment, remote.addr(), 4096);
        here.submit(&[one], None).unwrap().wait(None).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let before = cpu_ticks();
        std::thread::sleep(Duration::from_secs(1));
        let used = cpu_ticks() - before;
        // Ticks of 10 ms; a worker that spins uses 100 of them.
        assert!(used <= 3, "{name}: two idle engines used {used} ticks of CPU in one second");
    }
}

/// User and system time of this process, in ticks of 10 ms.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = fields.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}
