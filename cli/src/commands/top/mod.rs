//! `snowskin top`: a store while it works.
//!
//! ```text
//!   look (mod) ──▶ Frame ──▶ view (tables, graphs, tones) ──▶ screen (the terminal, keys)
//!     rails: what nodes say of theirs
//! ```

mod rails;
mod screen;
mod view;

use std::time::{Duration, Instant};

use serde::Serialize;
use store_client::RpcConnection;
use store_core::Stats;
use store_core::message::{ListNodes, ReadStats, TenantList};

use crate::commands::admin::{SegmentRow, TaskRow, ask_segments, ask_tasks, called};
use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::rounded;
use crate::{Outcome, output, sys};
use rails::RailRow;
use screen::{Key, Screen};
use view::View;

const AFTER_HELP: &str = "Examples:
  snowskin top
  snowskin top --rails 10.0.0.7:9004 --rails 10.0.0.8:9004    with the rails of two nodes (their --http)
  snowskin top --once
  snowskin top --json | jq .hit_rate

Bytes a second are those of objects that readers found and writers committed, as the master counts them: no \
byte passes it.";

/// Tasks that are looked at.
const TASKS_MAX: usize = 100;

/// Show the cluster live: capacity, hit rate, throughput, evictions, nodes, rails
///
/// Until q or Ctrl-C; ? lists the keys. Where stdout is no terminal, one frame after another. NO_COLOR turns colours off.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Seconds from one look to the next.
    #[arg(long, default_value_t = 1.0, value_name = "S")]
    interval: f64,
    /// Look twice, show that, and end.
    #[arg(long)]
    once: bool,
    /// Where a node or client serves /metrics: show its rails, too.
    #[arg(long, value_name = "ADDR:PORT")]
    rails: Vec<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object a look.
    #[arg(long)]
    json: bool,
}

/// What was seen, and what it is since the look before.
#[derive(Clone, Debug, Serialize)]
struct Frame {
    seconds: f64,
    #[serde(flatten)]
    stats: Stats,
    /// Since the look before; none: nobody asked.
    hit_rate: Option<f64>,
    gets_s: f64,
    puts_s: f64,
    evictions_s: f64,
    read_gb_s: f64,
    written_gb_s: f64,
    node_list: Vec<NodeRow>,
    segment_list: Vec<SegmentRow>,
    rails: Vec<RailRow>,
    tenants: Vec<TenantRow>,
    tasks: Vec<TaskRow>,
}

#[derive(Clone, Debug, Serialize)]
struct TenantRow {
    name: String,
    objects: u64,
    used_bytes: u64,
    quota_bytes: Option<u64>,
    evictions_total: u64,
    refusals_total: u64,
}

#[derive(Clone, Debug, Serialize)]
struct NodeRow {
    node: String,
    name: String,
    capacity_bytes: u64,
    used_bytes: u64,
    silent_ms: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    if !(0.05..=3600.0).contains(&args.interval) {
        return Err(Failure::usage("--interval: choose from 0.05 to 3600 seconds").into());
    }
    let interval = Duration::from_secs_f64(args.interval);
    let mut rpc = args.master.connect()?;
    let live = !args.once && !args.json && sys::terminal_size().is_some();
    let screen = if live { Some(Screen::open()?) } else { None };
    let mut view = View::new(args.master.address().to_string(), output::is_coloured());
    let mut before = look(args, &mut rpc, None)?;
    loop {
        if let Some(exit) = pause(screen.as_ref(), &mut view, interval)? {
            return Ok(exit);
        }
        let frame = match look(args, &mut rpc, Some(&before)) {
            Ok(frame) => frame,
            // A master that restarts is back in a moment: what is shown stays, and says that it is old.
            Err(error) if live => {
                view.lost(&format!("{error:#}"));
                if let Some(screen) = &screen {
                    screen.show(&view.text())?;
                }
                // Whatever became of the connection, the next look dials anew.
                if let Ok(again) = args.master.connect() {
                    rpc = again;
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        view.note(&frame.1);
        match &screen {
            _ if args.json => output::print_json(&frame.1)?,
            Some(screen) => screen.show(&view.text())?,
            None => output::print(&(view.text() + "\n"))?,
        }
        if args.once {
            return Ok(Exit::Ok);
        }
        before = frame;
    }
}

/// Sleeps until the next look, and does what keys ask for meanwhile. Says how to end, if so.
fn pause(screen: Option<&Screen>, view: &mut View, interval: Duration) -> anyhow::Result<Option<Exit>> {
    let end = Instant::now() + interval;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let Some(screen) = screen else { return Ok(sys::wait_for_interrupt(Some(left))) };
        let key = screen.wait(left);
        if let Some(exit) = sys::interrupted() {
            return Ok(Some(exit));
        }
        match key {
            Some(Key::Quit) => return Ok(Some(Exit::Ok)),
            Some(key) => view.press(key),
            None => {}
        }
        if key.is_some() {
            screen.show(&view.text())?;
        } else if Instant::now() >= end && !view.is_paused() {
            return Ok(None);
        }
        if Instant::now() >= end && view.is_paused() {
            // Nothing to do but wait for a key.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Asks for everything; rates are since the look before.
fn look(
    args: &Args,
    rpc: &mut RpcConnection,
    before: Option<&(Instant, Frame)>,
) -> anyhow::Result<(Instant, Frame)> {
    let stats = rpc.call::<ReadStats>(&(), std::iter::empty()).map_err(no_master)?.0;
    let now = Instant::now();
    let segment_list = ask_segments(rpc)?;
    let node_list = {
        let ((), nodes) = rpc.call::<ListNodes>(&(), std::iter::empty()).map_err(no_master)?;
        let row = |info: store_core::message::NodeInfo| NodeRow {
            name: called(&format!("{:016x}", info.node), &segment_list),
            node: format!("{:016x}", info.node),
            capacity_bytes: info.capacity,
            used_bytes: info.used,
            silent_ms: info.silent_ms,
        };
        nodes.map(row).collect()
    };
    // Without tenants there is one, and who is no admin sees none.
    let tenants = match rpc.call::<TenantList>(&(), std::iter::empty()) {
        Ok(((), found)) => found.filter_map(Result::ok).map(TenantRow::from).collect(),
        Err(_) => Vec::new(),
    };
    let tasks = ask_tasks(rpc, None, TASKS_MAX)?;
    let mut rails = Vec::new();
    for of in &args.rails {
        match rails::ask(of) {
            Ok(found) => rails.extend(found),
            Err(error) => tracing::warn!("{of}: {error:#}"),
        }
    }
    let seconds = before.map_or(0.0, |(at, _)| now.duration_since(*at).as_secs_f64());
    let lists = Lists { node_list, segment_list, rails, tenants, tasks };
    Ok((now, Frame::new(seconds, stats, before.map(|(_, frame)| frame), lists)))
}

/// What there is several of.
#[derive(Default)]
struct Lists {
    node_list: Vec<NodeRow>,
    segment_list: Vec<SegmentRow>,
    rails: Vec<RailRow>,
    tenants: Vec<TenantRow>,
    tasks: Vec<TaskRow>,
}

impl From<store_core::message::TenantUsage<'_>> for TenantRow {
    fn from(usage: store_core::message::TenantUsage<'_>) -> Self {
        Self {
            name: usage.name.to_owned(),
            objects: usage.objects,
            used_bytes: usage.bytes,
            quota_bytes: usage.quota_bytes,
            evictions_total: usage.evictions_total,
            refusals_total: usage.refusals_total,
        }
    }
}

impl Frame {
    fn new(
        seconds: f64,
        stats: Stats,
        before: Option<&Self>,
        lists: Lists,
    ) -> Self {
        let Lists { node_list, segment_list, mut rails, tenants, tasks } = lists;
        let last = before.map_or(stats, |before| before.stats);
        // A master that was restarted counts from 0 again.
        let rate = |now: u64, last: u64| {
            if seconds > 0.0 { now.saturating_sub(last) as f64 / seconds } else { 0.0 }
        };
        for rail in &mut rails {
            let was = before.and_then(|before| {
                before.rails.iter().find(|was| (&was.of, &was.rail) == (&rail.of, &rail.rail))
            });
            if let Some(was) = was.filter(|_| seconds > 0.0) {
                rail.gb_s = rounded((rail.bytes_total - was.bytes_total).max(0.0) / seconds / 1e9);
            }
        }
        let gets = stats.gets_total.saturating_sub(last.gets_total);
        let hits = stats.get_hits_total.saturating_sub(last.get_hits_total);
        Self {
            seconds: rounded(seconds),
            hit_rate: (gets > 0).then(|| rounded(hits as f64 / gets as f64)),
            gets_s: rounded(rate(stats.gets_total, last.gets_total)),
            puts_s: rounded(rate(stats.put_ends_total, last.put_ends_total)),
            evictions_s: rounded(rate(stats.evictions_total, last.evictions_total)),
            read_gb_s: rounded(rate(stats.get_bytes_total, last.get_bytes_total) / 1e9),
            written_gb_s: rounded(rate(stats.put_bytes_total, last.put_bytes_total) / 1e9),
            stats,
            node_list,
            segment_list,
            rails,
            tenants,
            tasks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_since_the_look_before_and_a_restarted_master_makes_none_of_them_negative() {
        let stats = |gets, hits, bytes| Stats {
            gets_total: gets,
            get_hits_total: hits,
            get_bytes_total: bytes,
            ..Stats::default()
        };
        let frame = |seconds, stats, before| Frame::new(seconds, stats, before, Lists::default());
        let first = frame(0.0, stats(100, 50, 0), None);
        assert_eq!((first.gets_s, first.hit_rate), (0.0, None));
        let second = frame(2.0, stats(120, 65, 4_000_000_000), Some(&first));
        assert_eq!((second.gets_s, second.hit_rate, second.read_gb_s), (10.0, Some(0.75), 2.0));
        let restarted = frame(1.0, stats(3, 3, 7), Some(&second));
        assert_eq!((restarted.gets_s, restarted.hit_rate, restarted.read_gb_s), (0.0, None, 0.0));
    }
}
