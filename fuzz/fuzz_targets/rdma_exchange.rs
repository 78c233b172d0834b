//! The parsers of RDMA control connections and of its export: a prefix of a frame never gives another result
//! than the whole, and accepted frames are within the protocol's limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fmt::Debug;
use te_rdma::wire::{
    self, Chunking, FRAME_BYTES_MAX, FrameError, LIVE_MAX, QPS_MAX, Request, Response, Step,
};

type Parsed<T> = Result<Step<T>, FrameError>;

/// With fewer bytes a parser requests more than it has, or already returns its result for the whole.
fn grows<'a, T: PartialEq + Debug>(bytes: &'a [u8], parse: fn(&'a [u8]) -> Parsed<T>) -> Parsed<T> {
    let whole = parse(bytes);
    if let Ok(Step::Frame(_, used)) = &whole {
        assert!(*used <= bytes.len() && *used <= FRAME_BYTES_MAX);
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
        0 => drop(grows(bytes, wire::parse_hello)),
        1 => drop(grows(bytes, wire::parse_welcome)),
        2 => match grows(bytes, wire::parse_request) {
            Ok(Step::Frame(Request::Connect { port, qps, .. }, _)) => {
                assert!((1..=QPS_MAX).contains(&qps.len()));
                assert!(port.gid_kind < wire::GID_KINDS);
                assert!(qps.iter().all(|qp| qp.number.get() < 1 << 24));
            }
            Ok(Step::Frame(Request::Fence { live, .. }, _)) => assert!(live.len() <= LIVE_MAX),
            _ => {}
        },
        3 => {
            if let Ok(Step::Frame(Response::Resolved { of, keys, .. }, _)) =
                grows(bytes, wire::parse_response)
            {
                let Some(chunking) = Chunking::new(of.base.get(), of.len.get(), of.chunk_bytes.get()) else {
                    panic!("chunks that cannot be were accepted")
                };
                assert!(u64::from(of.first.get()) + keys.len() as u64 <= chunking.count());
                let (last, rest) = chunking.locate(of.len.get() - 1);
                assert_eq!((last + 1, rest), (chunking.count(), 1));
            }
        }
        _ => {
            if let Ok(export) = wire::parse_export(bytes) {
                let mut again = [0; wire::EXPORT_BYTES_MAX];
                let written = export.write(&mut again);
                // An address has more than one encoding: the encoding that is written parses as the same
                // address.
                assert_eq!(written.map(|len| wire::parse_export(&again[..len])), Some(Ok(export)));
            }
        }
    }
});
