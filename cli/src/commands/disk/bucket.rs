//! Packs in a bucket, for `inspect` and `verify`.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use store_client::disk::{DiskError, PackBucketReader};

use super::{Opened, failure};
use crate::exit::Failure;
use crate::progress::Bar;
use crate::{fail, sys};

/// Directories that are named where there are several.
const NAMED_MAX: usize = 20;

/// Opens the directory at an address, or the only one below it.
pub(super) fn open(path: &Path, quiet: bool) -> anyhow::Result<Opened> {
    let directory = only(path)?;
    let mut bar = None;
    let packs = PackBucketReader::open(&directory, &mut |done, of| {
        bar.get_or_insert_with(|| Bar::new(of, "extents", quiet)).set(done);
        if sys::interrupted().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(bar);
    match packs {
        Ok(packs) => Ok(Opened::Bucket(Box::new(packs))),
        Err(error) => {
            Err(sys::interrupted().map_or_else(|| failure(error), |exit| Failure::silent(exit).into()))
        }
    }
}

fn only(path: &Path) -> anyhow::Result<PathBuf> {
    let found = PackBucketReader::find(path).map_err(failure)?;
    match found.as_slice() {
        [] => Err(failure(DiskError::NotADisk(path.to_owned()))),
        [one] => Ok(one.clone()),
        several => {
            let mut named: Vec<String> =
                several.iter().take(NAMED_MAX).map(|path| path.display().to_string()).collect();
            if several.len() > NAMED_MAX {
                named.push(format!("and {} more", several.len() - NAMED_MAX));
            }
            let text = format!("{}: there are {} directories of packs", path.display(), several.len());
            fail(Failure::usage(text).hint(format!("name one of them: {}", named.join(", "))))
        }
    }
}
