//! What peers say to an engine beside its descriptor: the control port's frames, and the messages of shared memory.
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

/// What is understood of a message comes back the same.
fn grant_message(bytes: &[u8]) {
    let Ok(understood) = Message::decode(bytes) else { return };
    let mut out = [0; MESSAGE_BYTES_MAX];
    let len = understood.encode(&mut out);
    assert_eq!(Message::decode(&out[..len]), Ok(understood));
}
