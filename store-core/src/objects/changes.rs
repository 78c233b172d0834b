//! Which objects have changed, for a leader whose answers wait for its followers.

use alloc::vec::Vec;
use core::fmt;

/// The hashes of the keys whose objects have changed, if they are noted. No part of the state: it prints the
/// same whatever it holds.
#[derive(Default)]
pub(crate) struct Changes(Option<Vec<u64>>);

impl Changes {
    pub(crate) fn note_from_here(&mut self) {
        self.0 = Some(Vec::new());
    }

    pub(crate) const fn are_noted(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn note(&mut self, hash: u64) {
        if let Some(hashes) = &mut self.0 {
            hashes.push(hash);
        }
    }

    pub(crate) fn take(&mut self) -> impl Iterator<Item = u64> {
        self.0.iter_mut().flat_map(|hashes| hashes.drain(..))
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Changes")
    }
}
