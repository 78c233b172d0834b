//! Measures the CPU time of an idle master over half a second of real time. Alone in its binary, because it
//! measures its own process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{assert_greets, connect, start};

#[test]
fn an_idle_master_uses_no_cpu_time() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    assert_greets(&mut stream);
    let before = cpu_ticks();
    std::thread::sleep(Duration::from_millis(500));
    let ticks = cpu_ticks() - before;
    // A tick is 10 ms; a thread that spins would have taken 50.
    assert!(ticks <= 5, "{ticks} ticks of 10 ms in half a second");
    drop(master);
}

/// User and system time of this process.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}
