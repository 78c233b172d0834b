//! What a peer sends, for `fuzz/`: parsers that are nobody else's business. Only with `--cfg fuzzing`.

/// A message between owner and user of shared memory.
///
/// # Panics
/// When what was understood does not come back the same.
pub fn shm_message(bytes: &[u8]) {
    crate::shm::fuzz_message(bytes);
}
