//! What a local client says to a node, and what a node answers.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| store_client::local::fuzzing::message(bytes));
