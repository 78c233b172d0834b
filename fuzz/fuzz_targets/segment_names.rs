//! Entries of a directory of segment names, and connection strings: what parses is written and parsed again
//! as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_engine::MetadataSource;
use te_engine::metadata::{ENTRY_BYTES_MAX, Entry};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(entry) = Entry::parse("node-7", bytes) {
        assert!(bytes.len() <= ENTRY_BYTES_MAX);
        assert_eq!(Entry::parse("node-7", &entry.to_bytes()), Ok(entry));
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(source) = text.parse::<MetadataSource>() else { return };
    // A password is not written, so it cannot be parsed again.
    let written = source.to_string();
    assert!(written.contains(":***@") || written.parse() == Ok(source), "{written}");
});
