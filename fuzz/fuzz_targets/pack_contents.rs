//! Superblocks, headers and footers of disks and packs, with valid checksums, and what the tools make of them:
//! the first byte says which.
#![no_main]

use libfuzzer_sys::fuzz_target;
use store_client::disk::fuzzing;

fuzz_target!(|bytes: &[u8]| match bytes.split_first() {
    Some((0, rest)) => fuzzing::superblocks(rest),
    Some((1, rest)) => fuzzing::pack(rest),
    Some((2, rest)) => fuzzing::disk(rest),
    _ => {}
});
