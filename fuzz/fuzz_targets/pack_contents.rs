//! Superblocks, headers and footers of disks and packs, with valid checksums, and what the tools make of
//! them: the first byte says which.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| store_client::disk::fuzzing::contents(bytes));
