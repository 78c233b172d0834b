//! Requests and statuses of Mooncake's data port: every request is some request and is written as the same
//! but for what does not count; a status is written as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_mooncake::header::{REQUEST_BYTES, Request, STATUS_BYTES, Status};

fuzz_target!(|bytes: &[u8]| {
    if let Some(bytes) = bytes.first_chunk::<REQUEST_BYTES>() {
        let request = Request::parse(bytes);
        let written = request.to_bytes();
        assert_eq!((Request::parse(&written), &written[..16]), (request, &bytes[..16]));
        assert_eq!(written[17..], [0; 7]);
    }
    if let Some(bytes) = bytes.first_chunk::<STATUS_BYTES>()
        && let Some(status) = Status::parse(bytes)
    {
        assert_eq!(status.to_bytes(), *bytes);
    }
});
