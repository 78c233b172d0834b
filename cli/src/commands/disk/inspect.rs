//! `snowskin disk inspect`: what is on a disk.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use store_client::disk::{Damage, RefusedPack, Sharing, Survey, inspect, is_bucket};
use store_core::disk::format::VERSION;

use super::{DiskArg, Opened, failure, uuid_text};
use crate::Outcome;
use crate::exit::{EXIT_CODES, Exit};
use crate::global::Global;
use crate::output::{self, Align, Table, brief, rounded, thousands};
use crate::progress::Bar;
use crate::size::ByteSize;

const AFTER_HELP: &str =
    "Reads superblocks, footers and headers, changes nothing, and verifies no data: that is `snowskin disk \
    verify`. A disk that a node has open is read all the same; the figures are then of different moments, and \
    what is being written looks damaged. The exit code is 4 when something is damaged on a disk that is not in use. \
    Of packs in a bucket, `in_use` says whether something has changed while they were read; the settings of the \
    store are in the environment, as for nodes.

Examples:
  snowskin disk inspect /var/lib/snowskin/disk
  snowskin disk inspect /dev/nvme1n1 --json | jq .objects
  snowskin disk inspect s3://kv-cache/prod";

/// Show what is on a disk
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
pub(super) struct Report {
    path: String,
    in_use: bool,
    version: u16,
    uuid: String,
    bytes: u64,
    block_bytes: u32,
    extent_bytes: u32,
    extents: Extents,
    superblock_serial: u64,
    written_bytes: u64,
    written_object_bytes: u64,
    write_amplification: f64,
    objects: u64,
    object_bytes: u64,
    objects_by_lineage: BTreeMap<u64, u64>,
    newest_lineage: Option<u64>,
    newest_sequence: Option<u64>,
    removed: u64,
    tombstones: u64,
    bad_extents: Vec<u32>,
    pub(super) damage: Vec<DamageRow>,
}

#[derive(Serialize)]
struct Extents {
    total: u32,
    closed: u64,
    open: u64,
    free: u64,
    bad: u64,
}

#[derive(Serialize)]
pub(super) struct DamageRow {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    locator: Option<u64>,
    text: String,
}

impl DamageRow {
    fn new(damage: &Damage) -> Self {
        let row = |kind, text: String| Self {
            kind,
            slot: None,
            offset: None,
            key: None,
            tenant: None,
            generation: None,
            locator: None,
            text,
        };
        match damage {
            Damage::Superblock => {
                row("superblock", "one of the two superblocks is not valid; the other one is used".into())
            }
            Damage::Footer { slot } => Self {
                slot: Some(*slot),
                ..row("footer", format!("extent {slot}: the footer is damaged; its headers say the same"))
            },
            Damage::Header { slot, offset } => Self {
                slot: Some(*slot),
                offset: Some((*offset).into()),
                ..row("header", format!("extent {slot}: the header at {offset} is damaged"))
            },
            Damage::Missing { slot, synced_to } => Self {
                slot: Some(*slot),
                offset: Some((*synced_to).into()),
                ..row(
                    "missing",
                    "headers are missing that were synced: a node will not trust this disk".into(),
                )
            },
            Damage::Object(found) => {
                let key = String::from_utf8_lossy(&found.object.key).into_owned();
                Self {
                    tenant: Some(found.object.tenant),
                    generation: Some(found.object.generation),
                    locator: Some(found.locator),
                    ..row("object", format!("{}: the bytes do not fit the checksum", brief(&key)))
                }
                .with_key(key)
            }
            Damage::Unreadable { at, error } => {
                Self { offset: Some(*at), ..row("unreadable", format!("offset {at}: {error}")) }
            }
            other => row("other", format!("{other:?}")),
        }
    }

    /// A file that is not a pack of its directory.
    fn of_file(refused: &RefusedPack) -> Self {
        let (kind, text) = ("file", refused.to_string());
        let (slot, offset, key, tenant, generation, locator) = (None, None, None, None, None, None);
        Self { kind, slot, offset, key, tenant, generation, locator, text }
    }

    fn with_key(self, key: String) -> Self {
        Self { key: Some(key), ..self }
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }
}

impl Report {
    pub(super) fn new(args: &DiskArg, opened: &Opened, in_use: bool, survey: &Survey) -> Self {
        let path = opened.path(args.path());
        let Survey { superblock, .. } = survey;
        let bytes = opened.bytes();
        let refused = opened.refused().iter().map(DamageRow::of_file);
        let amplification = match superblock.object_bytes {
            0 => 0.0,
            bytes => superblock.written_bytes as f64 / bytes as f64,
        };
        Self {
            path: path.display().to_string(),
            in_use,
            version: VERSION,
            uuid: uuid_text(&superblock.disk),
            bytes,
            block_bytes: superblock.geometry.block_bytes(),
            extent_bytes: superblock.geometry.extent_bytes(),
            extents: Extents {
                total: superblock.geometry.extents(),
                closed: survey.closed,
                open: survey.open,
                free: survey.free,
                bad: survey.bad,
            },
            superblock_serial: superblock.serial,
            written_bytes: superblock.written_bytes,
            written_object_bytes: superblock.object_bytes,
            write_amplification: rounded(amplification),
            objects: survey.objects,
            object_bytes: survey.object_bytes,
            objects_by_lineage: survey.lineages.clone(),
            newest_lineage: survey.newest.map(|extent| extent.lineage),
            newest_sequence: survey.newest.map(|extent| extent.sequence),
            removed: survey.removed,
            tombstones: survey.tombstones,
            bad_extents: superblock.bad.iter().copied().collect(),
            damage: survey.damage.iter().map(DamageRow::new).chain(refused).collect(),
        }
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&[("", Align::Left), ("", Align::Left)]);
        let size = |bytes: u64| format!("{} ({})", ByteSize(bytes).approximate(), thousands(bytes));
        let Extents { total, closed, open, free, bad } = self.extents;
        let in_use = match self.in_use {
            true if is_bucket(Path::new(&self.path)) => ", changed while it was read",
            true => ", in use by another process",
            false => "",
        };
        table.row(["disk".to_owned(), format!("{}{in_use}", self.uuid)]);
        table.row(["size".to_owned(), size(self.bytes)]);
        table.row(["blocks".to_owned(), format!("{} bytes", self.block_bytes)]);
        let of = ByteSize(self.extent_bytes.into());
        let states = format!("{closed} full, {open} open, {free} free, {bad} bad");
        table.row(["extents".to_owned(), format!("{} of {of}: {states}", thousands(total.into()))]);
        table
            .row(["objects".to_owned(), format!("{}, {}", thousands(self.objects), size(self.object_bytes))]);
        table.row(["removed".to_owned(), thousands(self.removed)]);
        table.row(["tombstones".to_owned(), thousands(self.tombstones)]);
        let lineage = |(lineage, objects): (&u64, &u64)| format!("{lineage}: {}", thousands(*objects));
        let lineages: Vec<String> = self.objects_by_lineage.iter().map(lineage).collect();
        table.row(["by lineage".to_owned(), lineages.join(", ")]);
        table.row(["written".to_owned(), format!("{} in all its time", size(self.written_bytes))]);
        table.row(["superblock".to_owned(), format!("number {}", self.superblock_serial)]);
        table.render()
    }
}

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    let quiet = global.quiet || args.json;
    let file = args.disk.open_to_read(Sharing::Anyone, quiet)?;
    let bar = file.is_remote().then(|| Bar::spinner("reading headers", quiet));
    let survey = inspect(file.volume()).map_err(failure);
    drop(bar);
    let mut survey = survey?;
    let in_use = file.settle(&mut survey.damage)?;
    let report = Report::new(&args.disk, &file, in_use, &survey);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.table())?;
        report.damage.iter().for_each(|row| eprintln!("snowskin: {}", row.text()));
    }
    let sound = report.damage.is_empty() || report.in_use && !file.is_remote();
    Ok(if sound { Exit::Ok } else { Exit::Verification })
}
