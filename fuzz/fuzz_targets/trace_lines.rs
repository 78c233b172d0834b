//! Lines of a request trace, a file that users supply.
#![no_main]

#[allow(dead_code, reason = "only the parser is under test")]
#[path = "../../cli/src/trace.rs"]
mod trace;

use libfuzzer_sys::fuzz_target;
use trace::{Limits, Request};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits { line_bytes_max: 32 << 10, ids_per_request_max: 100 };
    match Request::parse(bytes, &limits) {
        Ok(request) => {
            assert!(bytes.len() <= limits.line_bytes_max);
            assert!(request.hash_ids.len() <= limits.ids_per_request_max);
            assert!(request.timestamp.is_finite());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
