//! `snowskin disk verify`: reads everything on a disk.

use std::ops::ControlFlow;
use std::time::Instant;

use serde::Serialize;
use store_client::disk::{Damage, Sharing, verify};

use super::inspect::Report;
use super::{DiskArg, failure};
use crate::Outcome;
use crate::exit::{EXIT_CODES, Exit};
use crate::global::Global;
use crate::output::{self, counted, rounded, thousands};
use crate::progress::Bar;
use crate::size::{ByteSize, GIB};
use crate::sys;

/// Most damaged parts that are named for people.
const NAMED_MAX: usize = 20;

const AFTER_HELP: &str =
    "Every object is read, and its data and trailer are compared with its checksums; headers, footers and \
    superblocks too. The disk must not be open elsewhere, because extents are overwritten in service. Nothing \
    is changed: damaged objects are refused by every reader, and go with their extent. The exit code is 4 \
    when something is damaged. Packs in a bucket do not change, and are verified while a node writes others, too; \
    a store that does not answer, or refuses, ends it with exit code 1.

Examples:
  snowskin disk verify /var/lib/snowskin/disk
  snowskin disk verify s3://kv-cache/prod
  snowskin disk verify ./disk --json | jq '.damage[] | select(.kind == \"object\") | .key'";

/// Verify every byte on a disk
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    #[command(flatten)]
    disk: DiskArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Verified {
    verified: u64,
    damaged: u64,
    read_bytes: u64,
    seconds: f64,
    complete: bool,
    #[serde(flatten)]
    disk: Report,
}

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    let quiet = global.quiet || args.json;
    let file = args.disk.open_to_read(Sharing::Readers, quiet)?;
    let start = Instant::now();
    let mut bar = None;
    let result = verify(file.volume(), |so_far| {
        let bar = bar.get_or_insert_with(|| Bar::new(so_far.of, "objects", quiet));
        bar.set(so_far.objects);
        if so_far.damaged > 0 {
            bar.message(format!("{} damaged", thousands(so_far.damaged)));
        }
        if sys::interrupted().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    drop(bar);
    let mut result = result.map_err(failure)?;
    let seconds = start.elapsed().as_secs_f64();
    let in_use = file.settle(&mut result.survey.damage)?;
    let disk = Report::new(&args.disk, &file, in_use, &result.survey);
    let damaged = result.survey.damage.iter().filter(|it| matches!(it, Damage::Object(_))).count() as u64;
    let (verified, read_bytes) = (result.objects, result.bytes);
    let parts = disk.damage.len();
    if args.json {
        let complete = result.complete;
        let seconds = rounded(seconds);
        output::print_json(&Verified { verified, damaged, read_bytes, seconds, complete, disk })?;
    } else {
        for row in disk.damage.iter().take(NAMED_MAX) {
            eprintln!("snowskin: {}", row.text());
        }
        if parts > NAMED_MAX {
            eprintln!("snowskin: and {} more: --json names all", thousands((parts - NAMED_MAX) as u64));
        }
        let of =
            if result.complete { String::new() } else { format!(" of {}", thousands(result.survey.objects)) };
        output::print(&format!(
            "{} verified{of}, {} damaged, {} read in {seconds:.1} s ({:.2} GiB/s); {} damaged in all\n",
            counted(verified, "object"),
            thousands(damaged),
            ByteSize(read_bytes).approximate(),
            read_bytes as f64 / GIB / seconds.max(1e-9),
            counted(parts as u64, "part"),
        ))?;
    }
    match sys::interrupted().filter(|_| !result.complete) {
        Some(exit) => Ok(exit),
        None if parts > 0 => Ok(Exit::Verification),
        None => Ok(Exit::Ok),
    }
}
