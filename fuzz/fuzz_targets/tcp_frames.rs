//! The parsers of the TCP fabric: a prefix of a frame never gives another result than the whole, and accepted
//! frames are within the protocol's limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fmt::Debug;
use te_tcp::frame::{self, ENTRIES_MAX, FrameError, HEAD_BYTES_MAX, Request, Response, Step};

type Parsed<T> = Result<Step<T>, FrameError>;

/// With fewer bytes a parser requests more than it has, or already returns its result for the whole.
fn grows<'a, T: PartialEq + Debug>(bytes: &'a [u8], parse: fn(&'a [u8]) -> Parsed<T>) -> Parsed<T> {
    let whole = parse(bytes);
    if let Ok(Step::Frame(_, head_bytes)) = &whole {
        assert!(*head_bytes <= bytes.len() && *head_bytes <= HEAD_BYTES_MAX.max(64));
    }
    let shorter = (0..bytes.len().min(64)).chain([bytes.len() / 2, bytes.len().saturating_sub(1)]);
    for len in shorter.filter(|len| *len < bytes.len()) {
        match parse(&bytes[..len]) {
            Ok(Step::Need(needed)) => assert!(needed > len, "asks for {needed} of {len}"),
            early => assert_eq!(early, whole, "with {len} of {} bytes", bytes.len()),
        }
    }
    whole
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    match which % 5 {
        0 => drop(grows(bytes, frame::parse_hello)),
        1 => drop(grows(bytes, frame::parse_welcome)),
        2 => match grows(bytes, frame::parse_request) {
            Ok(Step::Frame(
                Request::Read { operations, .. } | Request::Write { operations, .. },
                head_bytes,
            )) => {
                assert!((1..=ENTRIES_MAX).contains(&operations.len()));
                assert!(head_bytes > size_of_val(operations));
            }
            Ok(Step::Frame(Request::Fence { connections, .. }, _)) => {
                assert!(connections.len() <= ENTRIES_MAX)
            }
            _ => {}
        },
        3 => match grows(bytes, frame::parse_response) {
            Ok(Step::Frame(Response::Data { entries, .. }, _)) => {
                assert!((1..=ENTRIES_MAX).contains(&entries.len()));
            }
            Ok(Step::Frame(Response::Ack { statuses, .. }, _)) => {
                assert!((1..=ENTRIES_MAX).contains(&statuses.len()));
            }
            _ => {}
        },
        _ => {
            if let Ok(export) = frame::parse_export(bytes) {
                let mut out = [0; frame::EXPORT_BYTES_MAX];
                let len = export.write(&mut out).expect("room for the longest");
                assert_eq!(frame::parse_export(&out[..len]), Ok(export));
            }
        }
    }
});
