//! The record of the owner of a directory of packs, and what a store answers: the first byte says which.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| store_client::disk::fuzzing::text(bytes));
