//! What peers say to an engine beside its descriptor: the control port's frames, and the messages of shared memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_engine::fuzzing::control_frame;
use te_host::fuzzing::shm_message;

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    match which % 2 {
        0 => control_frame(bytes),
        _ => shm_message(bytes),
    }
});
