//! The messages of a local client to a node, and the node's responses.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| store_client::local::fuzzing::message(bytes));
