//! Lists of segments, nodes and settings from the master.

use std::collections::HashMap;

use serde::Serialize;
use store_client::{DiskKind, RpcConnection};
use store_core::message::{self, DrainStatus, ListNodes, NodeInfo, SegmentState};
use store_core::{NodeId, SegmentNo};

use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit};
use crate::output::{Align, Table, figure, printable, thousands};
use crate::size::ByteSize;
use crate::{Outcome, output};

const SEGMENTS_HELP: &str = "Examples:
  snowskin admin segments
  snowskin admin segments --json | jq '.[] | select(.state != \"active\")'";
const NODES_HELP: &str = "Examples:
  snowskin admin nodes
  snowskin admin nodes --json | jq 'max_by(.silent_ms)'";
/// List the segments with node, address, fill level and state
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{SEGMENTS_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Segments {
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// List the nodes with the memory that they lend and the time since their last heartbeat
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{NODES_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Nodes {
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// A segment, for tables and JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SegmentRow {
    pub(crate) segment: SegmentNo,
    pub(crate) name: String,
    /// `memory`, `cxl`: memory in a CXL pool, `disk`, or `shared`: a directory of packs.
    pub(crate) kind: &'static str,
    pub(crate) endpoint: String,
    pub(crate) node: String,
    pub(crate) state: &'static str,
    pub(crate) capacity_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) free_bytes_largest: u64,
}

#[derive(Debug, Serialize)]
struct NodeRow {
    node: String,
    /// Display name of the node: the names of its segments.
    name: String,
    /// Identifiers are texts in JSON, because numbers above 2^53 are not exact in many languages.
    incarnation: String,
    segments: u32,
    capacity_bytes: u64,
    used_bytes: u64,
    silent_ms: u64,
}

impl NodeRow {
    fn new(info: NodeInfo, segments: &[SegmentRow]) -> Self {
        let node = node_name(info.node);
        Self {
            name: called(&node, segments),
            node,
            incarnation: info.incarnation.to_string(),
            segments: info.segments,
            capacity_bytes: info.capacity,
            used_bytes: info.used,
            silent_ms: info.silent_ms,
        }
    }
}

/// Display name of a node: the names of its segments, or its number when it has none.
pub(crate) fn called(node: &str, segments: &[SegmentRow]) -> String {
    let names: Vec<&str> =
        segments.iter().filter(|row| row.node == node).map(|row| row.name.as_str()).collect();
    if names.is_empty() { node.to_owned() } else { names.join(", ") }
}

/// Display name of a segment: its name, or its number when it does not exist any more.
pub(crate) fn segment_called(no: SegmentNo, segments: &[SegmentRow]) -> String {
    segments
        .iter()
        .find(|row| row.segment == no)
        .map_or_else(|| format!("no. {no}, gone"), |row| row.name.clone())
}

/// Text form of a node's number.
pub(crate) fn node_name(node: NodeId) -> String {
    format!("{node:016x}")
}

/// Requests all segments of memory and storage, with their states.
pub(crate) fn ask_segments(rpc: &mut RpcConnection) -> anyhow::Result<Vec<SegmentRow>> {
    let mut rows = ask_all(rpc)?;
    rows.retain(|row| [MEMORY, CXL, STORAGE].contains(&row.kind));
    Ok(rows)
}

const MEMORY: &str = "memory";
const CXL: &str = "cxl";
const STORAGE: &str = "storage";

/// What a segment is.
fn kind_of(info: &message::SegmentInfo<'_>) -> &'static str {
    match (info.shared.is_empty(), info.stage.is_empty()) {
        (true, true) if info.location == te_core::Location::Pool.into() => CXL,
        (true, true) if info.location.is_storage() => STORAGE,
        (true, true) => MEMORY,
        (true, false) => DiskKind::Local.name(),
        (false, _) => DiskKind::Shared.name(),
    }
}

/// Requests all segments, disks included.
fn ask_all(rpc: &mut RpcConnection) -> anyhow::Result<Vec<SegmentRow>> {
    let states: HashMap<SegmentNo, SegmentState> = {
        let ((), drains) = rpc.call::<DrainStatus>(&(), std::iter::empty()).map_err(no_master)?;
        drains.flatten().map(|drain| (drain.segment, drain.state)).collect()
    };
    let ((), found) = rpc.call::<message::Segments>(&(), std::iter::empty()).map_err(no_master)?;
    let row = |info: message::SegmentInfo<'_>| SegmentRow {
        segment: info.segment,
        name: info.name.to_owned(),
        kind: kind_of(&info),
        endpoint: info.endpoint.to_owned(),
        node: node_name(info.node),
        state: states.get(&info.segment).copied().unwrap_or_default().name(),
        capacity_bytes: info.len,
        used_bytes: info.used,
        free_bytes_largest: info.free_bytes_largest,
    };
    Ok(found.flatten().map(row).collect())
}

pub(super) fn segments(args: &Segments) -> Outcome {
    let rows = ask_all(&mut args.master.connect()?)?;
    if args.json {
        output::print_json(&rows)?;
    } else {
        output::print(&segment_table(&rows, usize::MAX))?;
    }
    Ok(Exit::Ok)
}

/// A table of segments, within `columns` columns if possible.
pub(crate) fn segment_table(rows: &[SegmentRow], columns: usize) -> String {
    if rows.is_empty() {
        return "no node lends memory: start one with `snowskin node --memory 1GiB`\n".to_owned();
    }
    let mut table = Table::new(&[
        ("segment", Align::Left),
        ("kind", Align::Left),
        ("state", Align::Left),
        ("capacity", Align::Right),
        ("used", Align::Right),
        ("", Align::Right),
        ("largest free", Align::Right),
        ("endpoint", Align::Left),
        ("no", Align::Right),
    ]);
    for row in rows {
        table.row([
            printable(&row.name),
            row.kind.to_owned(),
            row.state.to_owned(),
            ByteSize(row.capacity_bytes).approximate(),
            ByteSize(row.used_bytes).approximate(),
            share(row.used_bytes, row.capacity_bytes),
            ByteSize(row.free_bytes_largest).approximate(),
            printable(&row.endpoint),
            row.segment.to_string(),
        ]);
    }
    table.render_in(columns)
}

pub(super) fn nodes(args: &Nodes) -> Outcome {
    let mut rpc = args.master.connect()?;
    let segments = ask_segments(&mut rpc)?;
    let ((), found) = rpc.call::<ListNodes>(&(), std::iter::empty()).map_err(no_master)?;
    let rows: Vec<NodeRow> = found.map(|info| NodeRow::new(info, &segments)).collect();
    if args.json {
        output::print_json(&rows)?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[
        ("node", Align::Left),
        ("segments", Align::Right),
        ("capacity", Align::Right),
        ("used", Align::Right),
        ("", Align::Right),
        ("silent for", Align::Right),
    ]);
    for row in &rows {
        table.row([
            printable(&row.name),
            thousands(row.segments.into()),
            ByteSize(row.capacity_bytes).approximate(),
            ByteSize(row.used_bytes).approximate(),
            share(row.used_bytes, row.capacity_bytes),
            format!("{} s", figure(row.silent_ms as f64 / 1e3)),
        ]);
    }
    output::print(&table.render())?;
    Ok(Exit::Ok)
}

/// `12.3 %`.
pub(crate) fn share(part: u64, of: u64) -> String {
    if of == 0 { "–".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / of as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_segment_follows_from_where_it_is() {
        let storage = store_core::MemoryLocation::storage(4_096);
        for (location, stage, kind) in [
            (te_core::Location::Host.into(), "", "memory"),
            (te_core::Location::Pool.into(), "", "cxl"),
            (storage.unwrap_or_default(), "", "storage"),
            (te_core::Location::Host.into(), "127.0.0.1:1", "disk"),
        ] {
            let info = message::SegmentInfo {
                segment: SegmentNo::new(1),
                node: NodeId::new(7),
                incarnation: store_core::Incarnation::default(),
                name: "a",
                endpoint: "127.0.0.1:1",
                base: 0,
                len: 1 << 20,
                location,
                export: message::Export { engine: 0, region: 0 },
                stage,
                shared: "",
                extent_bytes: 0,
                used: 0,
                free_bytes_largest: 1 << 20,
            };
            assert_eq!(kind_of(&info), kind);
        }
    }

    #[test]
    fn names_of_others_cannot_drive_the_terminal() {
        let row = SegmentRow {
            kind: "memory",
            segment: SegmentNo::new(1),
            name: "evil\u{1b}[2J".into(),
            endpoint: "h:1\u{7}".into(),
            node: node_name(NodeId::new(7)),
            state: "active",
            capacity_bytes: 1 << 20,
            used_bytes: 1 << 19,
            free_bytes_largest: 1 << 18,
        };
        let text = segment_table(&[row], usize::MAX);
        assert!(!text.contains(['\u{1b}', '\u{7}']) && text.contains("50.0 %"), "{text}");
    }
}
