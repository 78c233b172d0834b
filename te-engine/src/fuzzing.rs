//! What a peer sends, for `fuzz/`: parsers that are nobody else's business. Only with `--cfg fuzzing`.

/// A control port's frame, as a request and as an answer.
///
/// # Panics
/// When what was understood does not come back the same.
pub fn control_frame(bytes: &[u8]) {
    crate::control::fuzz_frame(bytes);
}
