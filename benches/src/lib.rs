//! Criterion benchmarks of every layer, and what they share.
//!
//! ```text
//! cargo bench -p benches                    all of them
//! cargo bench -p benches --bench core       one file
//! cargo bench -p benches -- multi           those whose name contains `multi`
//! cargo test --workspace --bench '*'        each once, to check that it runs (CI)
//! ```
//!
//! A benchmark that handles many slices per iteration declares them as its throughput: the time of an
//! iteration divided by the number of elements is the time per slice.
#![deny(unsafe_code)]

mod fake_gpu;
mod instant_verbs;
mod pair;
mod prompts;

pub use fake_gpu::{SLOT_BYTES, fake_gpu};
pub use instant_verbs::InstantVerbs;
pub use pair::Pair;
pub use prompts::{Events, Prompts, StoredEvent, mix};

use te_core::{Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token};

/// Region 0, first generation.
pub const REGION: RegionId = RegionId::new(0, 1);
/// Remote region 0, first generation.
pub const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);

/// `count` slices of `len` bytes, one after the other, with tokens from 0 on.
#[must_use]
pub fn slices(op: Op, count: u32, len: u32) -> Vec<Slice> {
    let slice = |index: u32| {
        let offset = u64::from(index) * u64::from(len);
        Slice {
            token: Token(u64::from(index)),
            local: RegionOffset::new(REGION, offset),
            remote: RemoteOffset::new(REMOTE_REGION, offset),
            len,
            op,
        }
    };
    (0..count).map(slice).collect()
}
