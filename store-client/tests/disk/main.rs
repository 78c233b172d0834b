//! Disks over real files: objects go there and come back, survive processes that die, and damage is found.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bench_disk;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod flips;
mod limits;
mod round_trip;

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = common::role() else { return };
    match role[0].as_str() {
        "writer" => crash::be_writer(&role),
        "holder" => limits::be_holder(&role),
        "limited" => limits::be_limited(&role),
        _ => {}
    }
}
