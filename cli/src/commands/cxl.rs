//! `snowskin cxl`: pools of CXL memory that several hosts map.

use std::path::{Path, PathBuf};

use serde::Serialize;
use te_cxl::{FormatOptions, Inspection, Pool, PoolError};

use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::counted;
use crate::size::ByteSize;
use crate::{Outcome, output};

const AFTER_FORMAT: &str =
    "A devdax device has its size. A file has to have its size before: `truncate -s 16GiB FILE`. A pool that \
    is there is not touched without --force.

Examples:
  snowskin cxl format /dev/dax0.0
  snowskin cxl format /dev/dax0.0 --extent 1GiB --peers 128";

const AFTER_INSPECT: &str = "Nothing is changed, and the pool may be in use.

Examples:
  snowskin cxl inspect /dev/dax0.0
  snowskin cxl inspect /dev/dax0.0 --json";

/// Make and inspect pools of CXL memory that several hosts map
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Format(FormatArgs),
    Inspect(InspectArgs),
}

/// Make a pool of a devdax device or a file
///
/// Its contents are lost. Each host that maps the device then sees the same pool.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_FORMAT}\n\n{EXIT_CODES}"))]
struct FormatArgs {
    /// The devdax device, or the file.
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Bytes of an extent, which has one owner: a multiple of 2MiB.
    #[arg(long, default_value = "2MiB", value_name = "SIZE")]
    extent: ByteSize,
    /// Processes that can use the pool at a time, 1 to 1,024.
    #[arg(long, default_value_t = 64, value_name = "N")]
    peers: u32,
    /// Overwrite a pool that is there already.
    #[arg(short, long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Show what is in a pool: its extents with their owners, and its peers
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_INSPECT}\n\n{EXIT_CODES}"))]
struct InspectArgs {
    /// The devdax device, or the file.
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A pool.
#[derive(Serialize)]
struct Shown {
    path: String,
    uuid: String,
    bytes: u64,
    extent_bytes: u64,
    extents: u32,
    peers_max: u32,
    /// Only of an inspection.
    #[serde(skip_serializing_if = "Option::is_none")]
    owners: Option<Vec<Owner>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peers: Option<Vec<Peer>>,
    /// Extents whose record cannot be understood.
    #[serde(skip_serializing_if = "Option::is_none")]
    damaged: Option<u32>,
}

/// Extents that follow each other and have the same owner.
#[derive(Serialize)]
struct Owner {
    first: u32,
    count: u32,
    owned: bool,
    /// In hexadecimal, because JSON has no integers of 64 bits.
    incarnation: String,
    epoch: u64,
}

#[derive(Serialize)]
struct Peer {
    slot: u32,
    present: bool,
    /// In hexadecimal.
    identity: String,
    epoch: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (shown, json) = match &args.what {
        What::Format(args) => {
            let options =
                FormatOptions { extent_bytes: args.extent.bytes(), peers: args.peers, force: args.force };
            let superblock =
                Pool::format(&args.path, options).map_err(|error| failure(&args.path, &error))?;
            (Shown::of(&args.path, &superblock), args.json)
        }
        What::Inspect(args) => {
            let found = Pool::inspect(&args.path).map_err(|error| failure(&args.path, &error))?;
            (Shown::inspected(&args.path, &found), args.json)
        }
    };
    if json {
        output::print_json(&shown)?;
    } else {
        output::print(&shown.text())?;
    }
    Ok(Exit::Ok)
}

fn failure(path: &Path, error: &PoolError) -> Failure {
    let failure = Failure::failed(format!("{}: {error}", path.display()));
    match error {
        PoolError::Setting { .. } => Failure::usage(format!("{}: {error}", path.display())),
        PoolError::Formatted { .. } => {
            failure.hint("--force overwrites it: then what hosts have there is lost")
        }
        PoolError::NotAPool => failure.hint("`snowskin cxl format` makes one"),
        _ => failure,
    }
}

fn hex(number: u64) -> String {
    format!("{number:016x}")
}

impl Shown {
    fn of(path: &Path, superblock: &te_cxl::pool::format::Superblock) -> Self {
        Self {
            path: path.display().to_string(),
            uuid: superblock.uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
            bytes: superblock.size,
            extent_bytes: superblock.extent_bytes,
            extents: superblock.extents,
            peers_max: superblock.peers,
            owners: None,
            peers: None,
            damaged: None,
        }
    }

    fn inspected(path: &Path, found: &Inspection) -> Self {
        let mut owners: Vec<Owner> = Vec::new();
        for record in found.owners.iter().flatten() {
            let same = |owner: &&mut Owner| {
                owner.first + owner.count == record.extent
                    && (owner.owned, owner.epoch) == (record.owned, record.epoch)
                    && owner.incarnation == hex(record.incarnation)
            };
            match owners.last_mut().filter(same) {
                Some(owner) => owner.count += 1,
                None => owners.push(Owner {
                    first: record.extent,
                    count: 1,
                    owned: record.owned,
                    incarnation: hex(record.incarnation),
                    epoch: record.epoch,
                }),
            }
        }
        // An extent that never had an owner has a record without one.
        owners.retain(|owner| owner.owned || owner.epoch > 0);
        let peers = found.peers.iter().flatten();
        let peers = peers.map(|peer| Peer {
            slot: peer.slot,
            present: peer.present,
            identity: hex(peer.identity),
            epoch: peer.epoch,
        });
        Self {
            owners: Some(owners),
            peers: Some(peers.collect()),
            damaged: Some(found.owners.iter().filter(|owner| owner.is_none()).count() as u32),
            ..Self::of(path, &found.superblock)
        }
    }

    fn text(&self) -> String {
        let Self { path, uuid, bytes, extent_bytes, extents, peers_max, .. } = self;
        let mut text = format!(
            "{}: pool {uuid}, {}, {} of {}, for up to {}\n",
            output::printable(path),
            ByteSize(*bytes).approximate(),
            counted((*extents).into(), "extent"),
            ByteSize(*extent_bytes),
            counted((*peers_max).into(), "peer"),
        );
        for Owner { first, count, owned, incarnation, epoch } in self.owners.iter().flatten() {
            let last = first + count - 1;
            let what = if *owned { "owner" } else { "free; the last owner was" };
            text += &format!("  extents {first} to {last}: {what} {incarnation}, epoch {epoch}\n");
        }
        for Peer { slot, present, identity, epoch } in self.peers.iter().flatten() {
            let what = if *present { "peer" } else { "left:" };
            text += &format!("  page {slot}: {what} {identity}, epoch {epoch}\n");
        }
        if let Some(damaged) = self.damaged.filter(|damaged| *damaged > 0) {
            text += &format!("  {} cannot be understood\n", counted(damaged.into(), "owner record"));
        }
        text
    }
}
