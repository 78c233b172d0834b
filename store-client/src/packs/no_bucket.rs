//! Buckets without the feature `s3`: their nodes read them.

use super::{NotRead, PackRead};
use crate::disk::{AlignedBuffer, BucketFault};

#[derive(Default)]
pub(super) struct Buckets;

impl Buckets {
    #[expect(clippy::unused_self, reason = "the same call as with the feature")]
    pub(super) fn read(&self, read: &PackRead) -> Result<AlignedBuffer, NotRead> {
        log::debug!("{}: {}", read.directory.display(), BucketFault::NoFeature);
        Err(NotRead::NotMounted)
    }
}
