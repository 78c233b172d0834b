//! `snowskin disk format`: makes a disk.

use std::path::Path;

use serde::Serialize;
use store_client::disk::{Caching, DiskError, DiskFile, DiskOptions, DiskService, FormatOptions};

use super::{DiskArg, PATIENCE, failure, ready, uuid_text};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::counted;
use crate::size::ByteSize;
use crate::{Outcome, fail, output};

const AFTER_HELP: &str =
    "The whole size is allocated now, so that a full file system shows now and not when objects are written. \
    A file or device that has something else in it is not touched without --force; a disk that was formatted \
    before is formatted again, and its objects are lost.

Examples:
  snowskin disk format /var/lib/snowskin/disk --size 64GiB
  snowskin disk format /dev/nvme1n1
  snowskin disk format ./disk --size 1GiB --extent 16MiB --json";

/// Format a file or block device
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    #[command(flatten)]
    disk: DiskArg,
    /// Bytes of the disk. Default: the whole device, or the length of the file.
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteSize>,
    /// Bytes of an extent, which is written and given up as a whole: 128KiB to 1GiB. Default: 64MiB, and a
    /// sixty-fourth of a disk of less than 4GiB.
    #[arg(long, value_name = "SIZE")]
    extent: Option<ByteSize>,
    /// Overwrite whatever is there.
    #[arg(short, long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What was made.
#[derive(Serialize)]
pub(crate) struct Formatted {
    path: String,
    uuid: String,
    bytes: u64,
    extents: u32,
    extent_bytes: u32,
    block_bytes: u32,
    memory_align: u32,
    direct: bool,
}

pub(super) fn run(args: &Args) -> Outcome {
    let extent_bytes = match args.extent {
        None => None,
        Some(ByteSize(bytes)) => match u32::try_from(bytes) {
            Ok(bytes) => Some(bytes),
            Err(_) => return fail(Failure::usage("--extent: at most 1GiB is possible")),
        },
    };
    let options = FormatOptions {
        bytes: args.size.map(ByteSize::bytes),
        extent_bytes,
        force: args.force,
        caching: args.disk.caching(),
    };
    let formatted = format_file(args.disk.local_path()?, options, failure)?;
    if args.json {
        output::print_json(&formatted)?;
    } else {
        let Formatted { path, uuid, bytes, extents, extent_bytes, block_bytes, .. } = formatted;
        output::print(&format!(
            "{}: disk {uuid}, {}, {} of {}, blocks of {block_bytes} bytes\n",
            output::printable(&path),
            ByteSize(bytes).approximate(),
            counted(extents.into(), "extent"),
            ByteSize(extent_bytes.into()),
        ))?;
    }
    Ok(Exit::Ok)
}

/// Formats a file or a device. `failure` says what to do about an error.
pub(crate) fn format_file(
    path: &Path,
    options: FormatOptions,
    failure: impl Fn(DiskError) -> anyhow::Error + Copy,
) -> anyhow::Result<Formatted> {
    let direct = options.caching == Caching::Direct;
    let (file, geometry) = DiskFile::prepare(path, options).map_err(failure)?;
    let (bytes, memory_align) = (file.bytes(), file.memory_align());
    let disk = DiskService::format(file, geometry, DiskOptions::default(), 0).map_err(failure)?;
    ready(&disk, path, |_| {})?;
    let uuid = disk.stats().uuid;
    if !disk.close(PATIENCE) {
        return fail(Failure::failed(format!("{}: the superblock could not be synced", path.display())));
    }
    Ok(Formatted {
        path: path.display().to_string(),
        uuid: uuid_text(&uuid),
        bytes,
        extents: geometry.extents(),
        extent_bytes: geometry.extent_bytes(),
        block_bytes: geometry.block_bytes(),
        memory_align,
        direct,
    })
}
