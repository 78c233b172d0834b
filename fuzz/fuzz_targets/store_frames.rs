//! A stream of the store's RPC: however it is split into reads, the parser returns the same frames and ends
//! with the same error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use store_core::{Frame, FrameBuffer, Header, WireError};

type Cut = (Vec<(Header, Vec<u8>)>, Option<WireError>);

fn at_once(mut stream: &[u8]) -> Cut {
    let mut frames = Vec::new();
    loop {
        match Frame::parse(stream) {
            Ok(Some((frame, len))) => {
                frames.push((frame.header, frame.body.to_vec()));
                stream = &stream[len..];
            }
            Ok(None) => return (frames, None),
            Err(error) => return (frames, Some(error)),
        }
    }
}

fn in_parts(stream: &[u8], part_bytes: usize) -> Cut {
    let mut buffer = FrameBuffer::new();
    let mut frames = Vec::new();
    for part in stream.chunks(part_bytes) {
        buffer.extend(part);
        loop {
            match buffer.next_frame() {
                Ok(Some(frame)) => frames.push((frame.header, frame.body.to_vec())),
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            }
        }
    }
    (frames, None)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&part_bytes, stream)) = bytes.split_first() else { return };
    assert_eq!(at_once(stream), in_parts(stream, usize::from(part_bytes).max(1)));
});
