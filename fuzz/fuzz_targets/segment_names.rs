//! What a directory of segment names keeps, and connection strings: what is understood comes back the same.
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
    // A password is not written, so it cannot come back.
    let written = source.to_string();
    assert!(written.contains(":***@") || written.parse() == Ok(source), "{written}");
});
