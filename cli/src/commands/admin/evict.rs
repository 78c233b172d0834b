//! `snowskin admin evict`: explains what eviction does and why, and evicts on demand.

use serde::Serialize;
use store_core::message::{EvictNow, Evicted, EvictionReport, ExplainEviction, Kept, ReadStats, WhyKept};
use store_core::{ErrorCode, Key};

use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit};
use crate::output::{Align, Table, counted, printable, thousands};
use crate::size::ByteSize;
use crate::{Outcome, output, sys};

const AFTER_HELP: &str = "Examples:
  snowskin admin evict --explain
  snowskin admin evict --explain --next 3 greeting model/layer0
  snowskin admin evict --explain --json | jq .report.kept_hard_pinned
  snowskin admin evict --leave 10GiB";

/// Evict now, or explain what eviction did, what is next, and what is kept and why
///
/// With --leave or --leave-objects, the policy evicts objects until that limit is reached. Objects that are
/// leased, hard-pinned or being written stay.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["explain", "leave", "leave_objects"]))]
pub(super) struct Args {
    /// Explain, without evicting anything.
    #[arg(long, conflicts_with_all = ["leave", "leave_objects"])]
    explain: bool,
    /// Evict until at most this many bytes are allocated.
    #[arg(long, value_name = "SIZE")]
    leave: Option<ByteSize>,
    /// Evict until there are at most this many objects.
    #[arg(long, value_name = "N")]
    leave_objects: Option<u64>,
    /// List this many of the objects that would be evicted next.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=512))]
    next: u32,
    /// Explain whether these keys could be evicted now.
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Explanation {
    report: EvictionReport,
    next: Vec<Next>,
    keys: Vec<Answer>,
}

#[derive(Debug, Serialize)]
struct Left {
    objects: u64,
    bytes: u64,
    left_objects: u64,
    left_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Next {
    key: String,
    bytes: u64,
    objects: u32,
    leased: bool,
}

#[derive(Debug, Serialize)]
struct Answer {
    key: String,
    found: bool,
    kept: Option<&'static str>,
}

pub(super) fn run(args: &Args) -> Outcome {
    if args.explain { explain(args) } else { evict(args) }
}

/// Repeats the request until nothing is left to evict: each request is bounded, so that it does not delay
/// others.
fn evict(args: &Args) -> Outcome {
    sys::catch_interrupts();
    let leave = store_core::message::Evict {
        objects_max: args.leave_objects.unwrap_or(u64::MAX),
        used_bytes_max: args.leave.map_or(u64::MAX, ByteSize::bytes),
    };
    let mut rpc = args.master.connect()?;
    let mut all = Evicted { more: true, ..Evicted::default() };
    while all.more && sys::interrupted().is_none() {
        let now = rpc.call::<EvictNow>(&leave, std::iter::empty()).map_err(no_master)?.0;
        all = Evicted { objects: all.objects + now.objects, bytes: all.bytes + now.bytes, more: now.more };
    }
    let stats = rpc.call::<ReadStats>(&(), std::iter::empty()).map_err(no_master)?.0;
    if args.json {
        let Evicted { objects, bytes, .. } = all;
        output::print_json(&Left {
            objects,
            bytes,
            left_objects: stats.objects,
            left_bytes: stats.used_bytes,
        })?;
    } else {
        let (objects, bytes) = (counted(all.objects, "object"), ByteSize(all.bytes).approximate());
        output::print(&format!("evicted {objects}, {bytes}\n"))?;
    }
    if let Some(exit) = sys::interrupted() {
        return Ok(exit);
    }
    if stats.objects <= leave.objects_max && stats.used_bytes <= leave.used_bytes_max {
        return Ok(Exit::Ok);
    }
    eprintln!(
        "snowskin: {}, {}, not evicted: leased, pinned, being written, or their space is not yet free; \
        `snowskin admin evict --explain` counts them",
        counted(stats.objects, "object"),
        ByteSize(stats.used_bytes).approximate()
    );
    Ok(Exit::Failed)
}

fn explain(args: &Args) -> Outcome {
    let mut rpc = args.master.connect()?;
    let (report, next) = {
        let (report, next) =
            rpc.call::<ExplainEviction>(&args.next, std::iter::empty()).map_err(no_master)?;
        let row = |victim: store_core::message::NextVictim<'_>| Next {
            key: victim.key.to_string(),
            bytes: victim.len,
            objects: victim.company,
            leased: victim.leased,
        };
        (report, next.map(row).collect())
    };
    let mut keys = Vec::new();
    let batch = rpc.welcome().keys_per_batch_max.max(1) as usize;
    for asked in args.keys.chunks(batch) {
        let items = asked.iter().map(|key| Key(key.as_bytes()));
        let ((), results) = rpc.call::<WhyKept>(&(), items).map_err(no_master)?;
        for (key, result) in asked.iter().zip(results) {
            let kept = result.ok().flatten().map(reason);
            keys.push(Answer { key: key.clone(), found: result != Err(ErrorCode::ObjectNotFound), kept });
        }
    }
    let missing = keys.iter().any(|answer| !answer.found);
    let explanation = Explanation { report, next, keys };
    if args.json {
        output::print_json(&explanation)?;
    } else {
        output::print(&render(&explanation))?;
    }
    Ok(if missing { Exit::NotFound } else { Exit::Ok })
}

fn render(explanation: &Explanation) -> String {
    let report = &explanation.report;
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
    let mut row = |name: &str, value: String, note: String| table.row([name.to_owned(), value, note]);
    let size = |bytes| ByteSize(bytes).approximate();
    row("policy", report.policy.to_string(), "snowskin master --eviction".into());
    row(
        "used",
        size(report.used_bytes),
        format!(
            "eviction begins at {}, ends at {}",
            size(report.high_mark_bytes),
            size(report.low_mark_bytes)
        ),
    );
    row(
        "evicted",
        thousands(report.evictions_total),
        format!(
            "{}; {} examined, {} groups, {} soft pins",
            size(report.evicted_bytes_total),
            thousands(report.looks_total),
            thousands(report.groups_evicted_total),
            thousands(report.soft_pinned_evicted_total)
        ),
    );
    row("found nothing", thousands(report.starved_total), "times that nothing could be evicted".into());
    row("expired", thousands(report.expired_total), "time to live had ended".into());
    row("came back", thousands(report.returned_total), "put again soon after their eviction".into());
    row(
        "evictable",
        thousands(report.candidates),
        "objects and groups; leases are checked when an object is next".into(),
    );
    for (name, value, note) in [
        ("kept: leased", report.kept_leased, "leased when they were next"),
        ("kept: soft pin", report.kept_soft_pinned, "evicted when nothing else can be"),
        ("kept: hard pin", report.kept_hard_pinned, "never evicted"),
        ("kept: group", report.kept_by_group, "another object of their group is pinned or being written"),
        ("kept: unfinished", report.kept_unfinished, "being written"),
    ] {
        row(name, thousands(value), note.into());
    }
    let mut text = table.render();
    if !explanation.next.is_empty() {
        let mut table = Table::new(&[
            ("evicted next", Align::Left),
            ("bytes", Align::Right),
            ("objects", Align::Right),
            ("", Align::Left),
        ]);
        for next in &explanation.next {
            let note = if next.leased { "unless it is still leased then" } else { "" };
            table.row([
                printable(&next.key),
                thousands(next.bytes),
                thousands(next.objects.into()),
                note.to_owned(),
            ]);
        }
        text += "\n";
        text += &table.render();
    }
    if !explanation.keys.is_empty() {
        let mut table = Table::new(&[("key", Align::Left), ("", Align::Left)]);
        for answer in &explanation.keys {
            let state = match (answer.found, answer.kept) {
                (false, _) => "no such object",
                (true, None) => "could be evicted",
                (true, Some(reason)) => reason,
            };
            table.row([printable(&answer.key), state.to_owned()]);
        }
        text += "\n";
        text += &table.render();
    }
    text
}

const fn reason(kept: Kept) -> &'static str {
    match kept {
        Kept::Leased => "kept: leased",
        Kept::Unfinished => "kept: being written",
        Kept::SoftPinned => "kept: soft pin",
        Kept::HardPinned => "kept: hard pin",
        Kept::Group => "kept: group",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_named_and_keys_of_others_cannot_drive_the_terminal() {
        let next = Next { key: "evil\u{1b}[2J".into(), bytes: 5_000, objects: 2, leased: true };
        let answer = |found, kept| Answer { key: "k".into(), found, kept };
        let mut report = EvictionReport::default();
        report.kept_hard_pinned = 1_234;
        let text = render(&Explanation {
            report,
            next: vec![next],
            keys: vec![answer(true, Some(reason(Kept::Group))), answer(true, None), answer(false, None)],
        });
        assert!(!text.contains('\u{1b}'), "{text}");
        for part in ["trial", "1,234", "5,000", "kept: group", "could be evicted", "no such object"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
