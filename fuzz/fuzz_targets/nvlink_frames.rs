//! What a peer gives to `te-nvlink`: exports, and the frames of control connections. What parses is written
//! as the same bytes, but for grants, whose rights have one spelling.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_nvlink::Export;
use te_nvlink::wire::{FRAME_BYTES_MAX, Frame};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(export) = Export::parse(bytes) {
        assert_eq!(&export.to_bytes()[..], bytes);
    }
    if let Ok(frame) = Frame::decode(bytes) {
        let mut out = [0; FRAME_BYTES_MAX];
        let len = frame.encode(&mut out);
        assert_eq!(Frame::decode(&out[..len]), Ok(frame));
        if matches!(frame, Frame::Part(_) | Frame::Open(_)) {
            assert_eq!(&out[..len], bytes);
        }
    }
});
