//! Paths, queries and ranges of the HTTP gateway.
#![no_main]

#[allow(dead_code, reason = "the gateway uses all of it")]
#[path = "../../cli/src/commands/gateway/parse.rs"]
mod parse;

use libfuzzer_sys::fuzz_target;
use parse::{Wanted, has_tag, percent_decode, percent_encode, query_pairs, wanted_range};

fuzz_target!(|bytes: &[u8]| {
    assert_eq!(percent_decode(&percent_encode(bytes)).as_deref(), Ok(bytes));
    let Some((&len, rest)) = bytes.split_first() else { return };
    let len = u64::from(len) + 1;
    let Ok(text) = std::str::from_utf8(rest) else { return };
    if let Wanted::Part(first, last) = wanted_range(text, len) {
        assert!(first <= last && last < len);
    }
    if let Ok(decoded) = percent_decode(text) {
        assert!(decoded.len() <= text.len());
    }
    if let Ok(pairs) = query_pairs(text) {
        assert!(pairs.len() <= text.len());
    }
    let _ = has_tag(text, "\"x\"");
    assert!(has_tag(&format!("{text},\"x\""), "\"x\""));
});
