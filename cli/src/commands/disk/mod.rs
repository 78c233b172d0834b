//! `snowskin disk`: files and block devices for the SSD tier.

mod bench;
#[cfg(feature = "s3")]
mod bucket;
mod format;
mod inspect;
mod verify;

use std::path::{Path, PathBuf};
use std::time::Duration;

use store_client::disk::{
    Caching, Damage, DiskError, DiskEvent, DiskFile, DiskService, PackDirectory, RefusedPack, Sharing,
    Volume, check_bucket, is_bucket,
};

use crate::exit::{EXIT_CODES, Failure};
use crate::global::Global;
use crate::{Outcome, fail};

#[cfg(feature = "s3")]
use store_client::disk::PackBucketReader;

pub(crate) use format::format_file;

/// Longest wait for a disk that is opened or closed. A recovery reads at least one page per extent.
const PATIENCE: Duration = Duration::from_secs(120);

/// Format, inspect, verify and measure disks of the SSD tier
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Format(format::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Bench(bench::Args),
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    match &args.what {
        What::Format(args) => format::run(args),
        What::Inspect(args) => inspect::run(args, global),
        What::Verify(args) => verify::run(args, global),
        What::Bench(args) => bench::run(args, global),
    }
}

/// Which disk, and how it is read.
#[derive(Clone, Debug, clap::Args)]
struct DiskArg {
    /// File or block device; for inspect and verify also a directory of packs: DIR/CLUSTER/UUID, or
    /// s3://BUCKET/PREFIX/CLUSTER/UUID (feature `s3`; shorter where there is only one).
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Use the page cache, for tests on file systems without direct I/O. In service a disk never does.
    #[arg(long, hide_short_help = true)]
    buffered: bool,
}

impl DiskArg {
    fn path(&self) -> &Path {
        &self.path
    }

    /// The same, where it has to be a file or a device.
    fn local_path(&self) -> anyhow::Result<&Path> {
        if is_bucket(&self.path) {
            let text = format!("{}: not a file or a block device", self.path.display());
            return fail(
                Failure::usage(text).hint("a node makes packs in a bucket: `snowskin node --shared`"),
            );
        }
        Ok(&self.path)
    }

    const fn caching(&self) -> Caching {
        if self.buffered { Caching::Buffered } else { Caching::Direct }
    }

    /// `quiet`: no progress is shown.
    fn open_to_read(&self, sharing: Sharing, quiet: bool) -> anyhow::Result<Opened> {
        check_bucket(&self.path).map_err(failure)?;
        #[cfg(feature = "s3")]
        if is_bucket(&self.path) {
            return bucket::open(&self.path, quiet);
        }
        #[cfg(not(feature = "s3"))]
        let _ = quiet;
        if self.path.is_dir() {
            // First, because another directory has no owner either.
            let packs = PackDirectory::open_to_read(&self.path).map_err(failure)?;
            let in_use = !PackDirectory::is_free(&self.path);
            if in_use && sharing != Sharing::Anyone {
                let (path, by) = (self.path.clone(), PackDirectory::owner_of(&self.path));
                return Err(failure(DiskError::Owned { path, by: format!("node {by}") }));
            }
            return Ok(Opened::Packs { packs, in_use });
        }
        DiskFile::open_to_read(&self.path, self.caching(), sharing).map(Opened::Disk).map_err(failure)
    }
}

/// What is inspected.
enum Opened {
    Disk(DiskFile),
    Packs {
        packs: PackDirectory,
        in_use: bool,
    },
    #[cfg(feature = "s3")]
    Bucket(Box<PackBucketReader>),
}

impl Opened {
    fn volume(&self) -> &dyn Volume {
        match self {
            Self::Disk(file) => file,
            Self::Packs { packs, .. } => packs,
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => &**packs,
        }
    }

    /// Where it is, if that is not what was asked for.
    fn path<'a>(&'a self, asked: &'a Path) -> &'a Path {
        match self {
            Self::Disk(_) | Self::Packs { .. } => asked,
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => packs.path(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Disk(file) => file.bytes(),
            Self::Packs { packs, .. } => packs.bytes(),
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => packs.bytes(),
        }
    }

    /// Whether another process has it; of a bucket, whether it has changed while it was read. Damage that is
    /// none, because its extent was given up meanwhile, is removed where that can be known.
    fn settle(&self, damage: &mut Vec<Damage>) -> anyhow::Result<bool> {
        let _: &Vec<Damage> = damage;
        match self {
            Self::Disk(file) => Ok(file.is_in_use()),
            Self::Packs { in_use, .. } => Ok(*in_use),
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => packs.settle(damage).map_err(failure),
        }
    }

    /// Whether reads are requests to a store. Packs there do not change, so that damage always counts.
    const fn is_remote(&self) -> bool {
        match self {
            Self::Disk(_) | Self::Packs { .. } => false,
            #[cfg(feature = "s3")]
            Self::Bucket(_) => true,
        }
    }

    /// Files of a directory of packs that are none.
    fn refused(&self) -> &[RefusedPack] {
        match self {
            Self::Disk(_) => &[],
            Self::Packs { packs, .. } => packs.refused(),
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => packs.refused(),
        }
    }
}

/// What went wrong with a disk, with the exit code that it deserves.
fn failure(error: DiskError) -> anyhow::Error {
    let text = error.to_string();
    match error {
        DiskError::NoSize(_) => Failure::usage(text).hint("--size 64GiB").into(),
        DiskError::Geometry(_) => Failure::usage(text).hint("--size and --extent set both lengths").into(),
        DiskError::NotADisk(path) if is_bucket(&path) => Failure::failed(text)
            .hint("`snowskin node --shared` makes one: s3://BUCKET/PREFIX/CLUSTER/UUID")
            .into(),
        DiskError::NotADisk(_) => Failure::failed(text).hint("`snowskin disk format` makes one").into(),
        DiskError::NoDirectIo(_) => {
            Failure::failed(text).hint("--buffered does without, for tests alone").into()
        }
        _ => Failure::failed(text).into(),
    }
}

/// Waits until a disk is ready. What it announces is passed on.
fn ready(disk: &DiskService, path: &Path, mut adopted: impl FnMut(DiskEvent)) -> anyhow::Result<()> {
    loop {
        match disk.wait_event(PATIENCE) {
            Some(DiskEvent::Ready) => return Ok(()),
            Some(DiskEvent::Stopped(why)) => {
                return Err(Failure::failed(format!("{}: {why}", path.display())).into());
            }
            Some(DiskEvent::Closed { .. }) | None => {
                let text = format!("{}: the disk does not answer", path.display());
                return Err(Failure::failed(text).hint("look for errors of the device in `dmesg`").into());
            }
            Some(event) => adopted(event),
        }
    }
}

/// The name of a disk, in the usual form.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let [a, b, c, d, e] = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
    format!("{a}-{b}-{c}-{d}-{e}")
}
