//! Private parsers of what a peer sends, for the targets in `fuzz/`. Only with `--cfg fuzzing`.

/// Parses a frame of the control port, as a request and as an answer.
///
/// # Panics
/// If what was parsed is not the same after it was encoded and parsed again.
pub fn control_frame(bytes: &[u8]) {
    crate::control::fuzz_frame(bytes);
}
