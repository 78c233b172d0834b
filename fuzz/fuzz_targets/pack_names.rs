//! Names in a directory of packs or in a bucket, addresses of buckets, and paths of directories.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| store_client::disk::fuzzing::name(bytes));
