//! Mooncake's handshake frames and messages: a prefix of a frame never gives another result than the whole,
//! and what is accepted is written as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_fabric::Step;
use te_mooncake::frame::{self, FRAME_BYTES_LIMIT};
use te_mooncake::message::{self, RpcMeta};

fuzz_target!(|bytes: &[u8]| {
    let whole = frame::parse(bytes, FRAME_BYTES_LIMIT);
    for len in (0..bytes.len().min(32)).chain([bytes.len().saturating_sub(1)]) {
        match frame::parse(&bytes[..len.min(bytes.len())], FRAME_BYTES_LIMIT) {
            Ok(Step::Need(needed)) => assert!(needed > len || bytes.is_empty(), "asks for {needed} of {len}"),
            early => assert_eq!(early, whole, "with {len} of {} bytes", bytes.len()),
        }
    }
    let Ok(Step::Frame(parsed, len)) = whole else { return };
    assert_eq!(frame::write(parsed.kind, parsed.body), &bytes[..len]);
    if let Ok(notification) = message::parse_notify(parsed.body) {
        assert_eq!(message::check(parsed.body), Ok(()));
        let written = message::notify(&notification.name, &notification.message);
        assert_eq!(message::parse_notify(&written), Ok(notification));
    }
    if let Ok(meta) = RpcMeta::parse(parsed.body) {
        assert_eq!(RpcMeta::parse(&meta.to_json()), Ok(meta));
    }
});
