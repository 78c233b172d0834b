//! What one Conductor is given by another, and the index of a snapshot: what is read is written as the same.
#![no_main]

use conductor_core::knowledge::{Knowledge, Said, Settings};
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

fn check(bytes: &[u8]) {
    if let Ok(said) = Said::read(bytes) {
        let mut out = Vec::new();
        said.write(&mut out);
        assert_eq!(Said::read(&out), Ok(said));
    }
    if let Ok((knowledge, positions)) = Knowledge::restore(bytes, Settings::default()) {
        let position = |id| positions.iter().find(|(of, _)| *of == id).and_then(|(_, position)| *position);
        let mut out = Vec::new();
        knowledge.snapshot(position, &mut out);
        let (again, _) = Knowledge::restore(&out, Settings::default()).expect("our own snapshot");
        assert!(again.digests() == knowledge.digests());
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    // With its checksum, so that what is behind that is reached.
    check(&[bytes, &xxh3_64(bytes).to_le_bytes()].concat());
});
