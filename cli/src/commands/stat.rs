//! `snowskin stat`: shows the cluster, or one object.

use std::collections::BTreeSet;

use serde::Serialize;
use store_client::RpcConnection;
use store_core::message::{Get, LeaseRange, LeaseWanted, ReadStats, Segments};
use store_core::{Key, SegmentNo, Stats, unbound};

use crate::commands::{MasterArg, check_key, no_master, refused};
use crate::exit::{EXIT_CODES, Exit};
use crate::output::{Align, Table, counted, printable, rounded, thousands};
use crate::size::ByteSize;
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin stat                     capacity, nodes, objects
  snowskin stat greeting            size, checksum and replicas of one object
  watch -n1 snowskin stat
  snowskin stat --json | jq .used_bytes";

/// Show the cluster, or the replicas of one object
///
/// Without a key: capacity and contents of the cluster. With a key: where the object is. The lease that this
/// takes is returned at once.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Key of the object to show.
    key: Option<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Segment {
    segment: SegmentNo,
    name: String,
    endpoint: String,
    node: String,
    /// `*` for host memory, `cpu:N` or `cuda:N` where it is known.
    location: String,
    capacity_bytes: u64,
    used_bytes: u64,
    utilisation: f64,
    free_bytes_largest: u64,
}

#[derive(Serialize)]
struct ClusterView<'a> {
    master: &'a str,
    /// Identifiers are texts in JSON, because numbers above 2^53 are not exact in many languages.
    lineage: String,
    term: String,
    /// The lineage, by its former name.
    epoch: String,
    #[serde(flatten)]
    stats: Stats,
    segment_list: &'a [Segment],
}

#[derive(Serialize)]
struct ObjectView<'a> {
    key: &'a str,
    bytes: u64,
    checksum: String,
    generation: String,
    replicas: Vec<ReplicaView>,
}

#[derive(Serialize)]
struct ReplicaView {
    segment: String,
    endpoint: String,
    address: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    args.key.as_deref().map_or(Ok(()), check_key)?;
    let mut rpc = args.master.connect()?;
    match &args.key {
        Some(key) => object(args, key, &mut rpc)?,
        None => cluster(args, &mut rpc)?,
    }
    Ok(Exit::Ok)
}

fn cluster(args: &Args, rpc: &mut RpcConnection) -> anyhow::Result<()> {
    let stats = rpc.call::<ReadStats>(&(), std::iter::empty()).map_err(no_master)?.0;
    let segments = segments(rpc, &[])?;
    let master = args.master.address().to_string();
    if args.json {
        let (lineage, term) = (rpc.welcome().lineage.to_string(), rpc.welcome().term.to_string());
        let (epoch, segment_list) = (lineage.clone(), &segments[..]);
        let view = ClusterView { master: &master, lineage, term, epoch, stats, segment_list };
        return output::print_json(&view);
    }
    output::print(&render_cluster(&master, &stats, &segments))
}

fn render_cluster(master: &str, stats: &Stats, segments: &[Segment]) -> String {
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
    let mut row = |name: &str, value: String, note: String| table.row([name.to_owned(), value, note]);
    let size = |bytes| ByteSize(bytes).approximate();
    row(
        "nodes",
        thousands(stats.nodes),
        format!("{}, master {}", counted(stats.segments, "segment"), printable(master)),
    );
    row("capacity", size(stats.capacity_bytes), String::new());
    row("used", size(stats.used_bytes), share(stats.used_bytes, stats.capacity_bytes));
    row(
        "objects",
        thousands(stats.objects),
        format!("{} of data, {} leased", size(stats.object_bytes), stats.objects_leased),
    );
    row("being written", thousands(stats.objects_processing), String::new());
    row(
        "gets",
        thousands(stats.gets_total),
        format!("{} found", share(stats.get_hits_total, stats.gets_total)),
    );
    row(
        "puts",
        thousands(stats.put_ends_total),
        format!("{} found no space", thousands(stats.puts_no_room_total)),
    );
    row("evicted", thousands(stats.evictions_total), format!("{} of data", size(stats.evicted_bytes_total)));
    row("not yet free", size(stats.quarantined_bytes + stats.deferred_bytes), held_note(stats));
    for (bytes, why) in held(stats) {
        row("", size(bytes), why.into());
    }
    if stats.held_dead_writer_bytes > 0 {
        let why = "of writers that ended or hang: free as soon as their nodes have cut them off";
        row("soon free", size(stats.held_dead_writer_bytes), why.into());
    }
    row("master's memory", size(stats.memory_bytes), per_object(stats));
    let mut text = table.render();
    if segments.is_empty() {
        text += "\nNo node lends memory yet: `snowskin node --memory 1GiB`\n";
        return text;
    }
    let mut table = Table::new(&[
        ("segment", Align::Left),
        ("capacity", Align::Right),
        ("used", Align::Right),
        ("", Align::Right),
        ("largest free", Align::Right),
        ("endpoint", Align::Left),
    ]);
    for segment in segments {
        table.row([
            printable(&segment.name),
            size(segment.capacity_bytes),
            size(segment.used_bytes),
            share(segment.used_bytes, segment.capacity_bytes),
            size(segment.free_bytes_largest),
            printable(&segment.endpoint),
        ]);
    }
    text + "\n" + &table.render()
}

fn held_note(stats: &Stats) -> String {
    match stats.quarantined_bytes + stats.deferred_bytes {
        0 => String::new(),
        _ => "in total, of which:".to_owned(),
    }
}

/// Space that is allocated but holds no object, and why; only reasons that apply.
fn held(stats: &Stats) -> impl Iterator<Item = (u64, &'static str)> {
    let all = [
        (stats.deferred_bytes, "removed while leased: free when those leases end"),
        (
            stats.quarantined_bytes.saturating_sub(stats.held_unknown_writer_bytes),
            "abandoned puts: free when their writers have finished or are cut off",
        ),
        (
            stats.held_unknown_writer_bytes,
            "writers without an identity: free when they have finished, or when the node mounts its memory \
            again",
        ),
    ];
    all.into_iter().filter(|(bytes, _)| *bytes > 0)
}

fn object(args: &Args, key: &str, rpc: &mut RpcConnection) -> anyhow::Result<()> {
    let (first, found) = {
        let (lease, mut objects) =
            rpc.call::<Get>(&LeaseWanted::Quick, [Key(key.as_bytes())].into_iter()).map_err(no_master)?;
        (lease.first, objects.next().unwrap_or(Err(store_core::ErrorCode::InternalError)))
    };
    let object = found.map_err(|code| refused(key, &code.into()))?;
    // Showing an object must not keep it from being removed.
    rpc.return_leases(LeaseRange { first, count: 1 });
    let wanted: BTreeSet<SegmentNo> = object.replicas.iter().map(|replica| replica.segment).collect();
    let segments = segments(rpc, &wanted.into_iter().collect::<Vec<_>>())?;
    let replicas: Vec<ReplicaView> = object
        .replicas
        .iter()
        .map(|replica| {
            let segment = segments.iter().find(|segment| segment.segment == replica.segment);
            ReplicaView {
                segment: segment.map_or_else(|| "gone".to_owned(), |segment| segment.name.clone()),
                endpoint: segment.map(|segment| segment.endpoint.clone()).unwrap_or_default(),
                address: format!("{:#x}", replica.addr),
            }
        })
        .collect();
    let view = ObjectView {
        key,
        bytes: object.len,
        checksum: format!("crc32c:{:08x}", unbound(object.checksum, key.as_bytes(), object.generation)),
        generation: object.generation.to_string(),
        replicas,
    };
    if args.json {
        return output::print_json(&view);
    }
    let mut table = Table::new(&[("", Align::Left), ("", Align::Left)]);
    table.row(["key".to_owned(), printable(key)]);
    table.row(["bytes".to_owned(), thousands(view.bytes)]);
    table.row(["checksum".to_owned(), view.checksum.clone()]);
    table.row(["generation".to_owned(), view.generation.clone()]);
    for replica in &view.replicas {
        let place = format!(
            "{} at {} {}",
            printable(&replica.segment),
            printable(&replica.endpoint),
            replica.address
        );
        table.row(["replica".to_owned(), place]);
    }
    output::print(&table.render())
}

fn segments(rpc: &mut RpcConnection, which: &[SegmentNo]) -> anyhow::Result<Vec<Segment>> {
    let ((), found) = rpc.call::<Segments>(&(), which.iter().copied()).map_err(no_master)?;
    Ok(found
        .flatten()
        .map(|info| Segment {
            segment: info.segment,
            name: info.name.to_owned(),
            endpoint: info.endpoint.to_owned(),
            node: format!("{:016x}", info.node),
            location: info.location.to_string(),
            capacity_bytes: info.len,
            used_bytes: info.used,
            utilisation: rounded(info.used as f64 / info.len.max(1) as f64),
            free_bytes_largest: info.free_bytes_largest,
        })
        .collect())
}

fn share(part: u64, of: u64) -> String {
    if of == 0 { "–".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / of as f64) }
}

/// With fewer objects, the memory per object says little.
const OBJECTS_MIN: u64 = 10_000;

fn per_object(stats: &Stats) -> String {
    match stats.objects {
        0 => String::new(),
        // With fewer objects, most of the master's memory is the fixed part.
        1..OBJECTS_MIN => String::new(),
        n => format!("{} B per object", stats.memory_bytes / n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_cluster_names_the_next_command() {
        let text = render_cluster("m:1", &Stats::default(), &[]);
        assert!(text.contains("snowskin node") && text.contains("–"), "{text}");
    }

    #[test]
    fn names_of_others_cannot_drive_the_terminal() {
        let segment = Segment {
            segment: SegmentNo::new(1),
            name: "evil\u{1b}[2J".into(),
            endpoint: "h:1".into(),
            node: String::new(),
            location: "*".to_owned(),
            capacity_bytes: 1 << 20,
            used_bytes: 1 << 19,
            utilisation: 0.5,
            free_bytes_largest: 1 << 18,
        };
        let text = render_cluster("m:1", &Stats::default(), &[segment]);
        assert!(!text.contains('\u{1b}') && text.contains("50.0 %") && text.contains("256"), "{text}");
    }
}
