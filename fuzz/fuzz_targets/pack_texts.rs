//! The record of the owner of a directory of packs, and what a store answers: the first byte says which.
#![no_main]

use libfuzzer_sys::fuzz_target;
use store_client::disk::fuzzing;

fuzz_target!(|bytes: &[u8]| match bytes.split_first() {
    Some((0, rest)) => fuzzing::owner(rest),
    Some((1, rest)) => fuzzing::answer(rest),
    _ => {}
});
