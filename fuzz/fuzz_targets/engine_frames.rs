//! The messages that peers send to an engine besides descriptors: the frames of its control port, and those
//! of shared memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_core::grant::{MESSAGE_BYTES_MAX, Message};
use te_engine::fuzzing::control_frame;

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    match which % 2 {
        0 => control_frame(bytes),
        _ => grant_message(bytes),
    }
});

/// A message that parses is written as the same message.
fn grant_message(bytes: &[u8]) {
    let Ok(understood) = Message::decode(bytes) else { return };
    let mut out = [0; MESSAGE_BYTES_MAX];
    let len = understood.encode(&mut out);
    assert_eq!(Message::decode(&out[..len]), Ok(understood));
}
