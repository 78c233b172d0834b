//! The cases, by subject. The name of each is a sentence that must hold.

mod access;
mod cancel;
mod capacity;
mod checksum;
mod completion;
mod content;
mod death;
mod expel;
mod export;
mod fence;
mod kinds;
mod late;
mod volatile;

use super::Case;

pub(super) const CASES: &[Case] = crate::conformance_tests!(@for table ());
