//! Peers that were expelled.

use std::collections::HashSet;

use te_core::{EXPELLED_MAX, Error, ErrorKind};

/// Identities that are let in no more. None is ever taken out: a process that was cut off does not come back.
#[derive(Debug, Default)]
pub(crate) struct Barred(HashSet<u64>);

impl Barred {
    /// Bars `peer`, once or again.
    ///
    /// # Errors
    /// `Full`.
    pub(crate) fn insert(&mut self, peer: u64) -> Result<(), Error> {
        if self.0.len() >= EXPELLED_MAX && !self.contains(peer) {
            return Err(Error::new(ErrorKind::Full));
        }
        self.0.insert(peer);
        Ok(())
    }

    pub(crate) fn contains(&self, peer: u64) -> bool {
        self.0.contains(&peer)
    }
}
