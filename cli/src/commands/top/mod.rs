//! `snowskin top`: a live view of a store.
//!
//! ```text
//!   sampler (mod, its own thread) ──▶ Frame ──▶ view (tables, graphs, tones) ──▶ screen (the terminal, keys)
//!     rails: metrics of nodes
//! ```
//!
//! A master or a node may take seconds to answer, or never answer: the thread that reads keys does not wait
//! for them.

mod rails;
mod screen;
mod view;

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use serde::Serialize;
use store_client::RpcConnection;
use store_core::Stats;
use store_core::message::{ListNodes, ReadStats, ReadTaskReport, TaskReport, TaskState, TenantList};

use crate::commands::admin::{
    MastersSaid, SegmentRow, TaskRow, ask_masters, ask_segments, ask_tasks, called,
};
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
  snowskin top --masters 10.0.0.5:9003                        with the masters of the cluster (their --http)
  snowskin top --once
  snowskin top --json | jq .hit_rate

Bytes per second are those of objects that readers found and writers committed, as the master counts them. \
No payload passes through the master.";

/// Most tasks that are shown: those in progress, waiting or failed.
const TASKS_MAX: usize = 100;

/// Show the cluster live: capacity, hit rate, throughput, evictions, tiers, nodes, rails, masters
///
/// Runs until q or Ctrl-C; ? lists the keys. If stdout is not a terminal, one frame is printed after another.
/// NO_COLOR turns colours off.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Seconds between two samples.
    #[arg(long, default_value_t = 1.0, value_name = "S")]
    interval: f64,
    /// Take two samples, show the result, and end.
    #[arg(long)]
    once: bool,
    /// Address at which a node or client serves /metrics: show its rails as well.
    #[arg(long, value_name = "ADDR:PORT")]
    rails: Vec<String>,
    /// HTTP address of a master: show all masters of its cluster as well.
    #[arg(long, value_name = "ADDR:PORT")]
    masters: Option<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON object per sample.
    #[arg(long)]
    json: bool,
}

/// Where samples are taken, besides the master.
#[derive(Clone, Debug)]
struct From {
    rails: Vec<String>,
    masters: Option<String>,
}

impl Args {
    fn from(&self) -> From {
        From { rails: self.rails.clone(), masters: self.masters.clone() }
    }
}

/// One sample, with rates since the sample before.
#[derive(Clone, Debug, Serialize)]
struct Frame {
    seconds: f64,
    #[serde(flatten)]
    stats: Stats,
    /// Hit rate since the sample before; `None`: there were no requests.
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
    task_counts: TaskReport,
    masters: Option<MastersSaid>,
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
    let first = sample(&args.from(), &mut rpc, None)?;
    let view = View::new(args.master.address().to_string(), output::is_coloured());
    match args.once || args.json || sys::terminal_size().is_none() {
        true => print_each(args, rpc, first, view, interval),
        false => show_live(args, rpc, first, view, interval),
    }
}

/// Prints one sample after the other.
fn print_each(
    args: &Args,
    mut rpc: RpcConnection,
    mut before: Sample,
    mut view: View,
    interval: Duration,
) -> Outcome {
    let columns = sys::terminal_size().map_or(LINE_COLUMNS, |(columns, _)| columns);
    loop {
        if let Some(exit) = sys::wait_for_interrupt(Some(interval)) {
            return Ok(exit);
        }
        before = sample(&args.from(), &mut rpc, Some(&before))?;
        if args.json {
            output::print_json(&before.1)?;
        } else {
            view.note(&before.1);
            output::print(&(view.text(columns) + "\n"))?;
        }
        if args.once {
            return Ok(Exit::Ok);
        }
    }
}

/// Columns when stdout is not a terminal.
const LINE_COLUMNS: usize = 120;

/// Shows samples on the alternate screen of a terminal, and reads keys.
fn show_live(args: &Args, rpc: RpcConnection, first: Sample, mut view: View, interval: Duration) -> Outcome {
    let mut screen = Screen::open()?;
    view.note(&first.1);
    let (ask, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let sampler = Sampler { master: args.master.clone(), from: args.from(), rpc, before: first };
    // The thread is not joined at the end, because it may be waiting for a master that does not answer.
    std::thread::Builder::new().name("sampler".to_owned()).spawn(move || sampler.work(&asked, &answer))?;
    // When the request for a sample was sent, if one is in progress, and when the next is due.
    let (mut waiting, mut due) = (None, Instant::now() + interval.min(FIRST_MAX));
    let mut stale = true;
    loop {
        if let Some(exit) = sys::interrupted() {
            return Ok(exit);
        }
        let now = Instant::now();
        while let Ok(answer) = answers.try_recv() {
            (waiting, due, stale) = (None, (due + interval).max(now), true);
            match answer {
                Ok(frame) => view.note(&frame),
                Err(error) => {
                    view.lost(&error);
                }
            }
        }
        match waiting {
            None if now >= due && !view.is_paused() => waiting = ask.send(()).is_ok().then_some(now),
            Some(since) if now >= since + PATIENCE => {
                stale |= view.lost(&format!("no answer for more than {} s", PATIENCE.as_secs()));
            }
            _ => {}
        }
        if stale || screen.is_resized() {
            screen.show(|columns| view.text(columns))?;
            stale = false;
        }
        let turn = match waiting {
            Some(_) => WAIT_MIN,
            None if view.is_paused() => TURN_MAX,
            None => due.saturating_duration_since(now).min(TURN_MAX),
        };
        for key in screen.wait(turn) {
            match key {
                Key::Quit => return Ok(Exit::Ok),
                Key::Suspend => screen = screen.suspend()?,
                key => view.press(key),
            }
            stale = true;
        }
    }
}

/// The first rates appear after at most this time, however long the interval is.
const FIRST_MAX: Duration = Duration::from_secs(1);
/// A sample that takes longer is reported.
const PATIENCE: Duration = Duration::from_secs(2);
/// Shortest wait for keys and samples. A change of the terminal's size is noticed after this time.
const WAIT_MIN: Duration = Duration::from_millis(20);
const TURN_MAX: Duration = Duration::from_millis(200);

/// Takes samples on request.
struct Sampler {
    master: MasterArg,
    from: From,
    rpc: RpcConnection,
    before: Sample,
}

impl Sampler {
    /// Takes a sample per request, until the other end of the channel is closed.
    fn work(mut self, asked: &Receiver<()>, answer: &Sender<Result<Frame, String>>) {
        for () in asked {
            let found = match sample(&self.from, &mut self.rpc, Some(&self.before)) {
                Ok(found) => {
                    self.before = found;
                    Ok(self.before.1.clone())
                }
                Err(error) => {
                    // The state of the old connection is unknown, so the next sample uses a new one.
                    if let Ok(again) = self.master.connect() {
                        self.rpc = again;
                    }
                    Err(format!("{error:#}"))
                }
            };
            if answer.send(found).is_err() {
                return;
            }
        }
    }
}

/// When a sample was taken, and the sample.
type Sample = (Instant, Frame);

/// Takes a sample; rates are since the one before.
fn sample(from: &From, rpc: &mut RpcConnection, before: Option<&Sample>) -> anyhow::Result<Sample> {
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
    // Without tenants there is only the default one, and without the admin secret none is listed.
    let tenants = match rpc.call::<TenantList>(&(), std::iter::empty()) {
        Ok(((), found)) => found.filter_map(Result::ok).map(TenantRow::from).collect(),
        Err(_) => Vec::new(),
    };
    // Successful tasks are only counted: a list of them would hide the others.
    let mut tasks = Vec::new();
    for state in [TaskState::Processing, TaskState::Pending, TaskState::Failed] {
        tasks.extend(ask_tasks(rpc, Some(state), TASKS_MAX - tasks.len())?);
    }
    let task_counts = rpc.call::<ReadTaskReport>(&(), std::iter::empty()).map_err(no_master)?.0;
    let mut rails = Vec::new();
    for of in &from.rails {
        match rails::ask(of) {
            Ok(found) => rails.extend(found),
            Err(error) => tracing::warn!("{of}: {error:#}"),
        }
    }
    let seconds = before.map_or(0.0, |(at, _)| now.duration_since(*at).as_secs_f64());
    let masters = from.masters.as_ref().and_then(|at| {
        let said = ask_masters(at);
        said.inspect_err(|error| tracing::warn!("{at}: {error:#}")).ok()
    });
    let lists = Lists { node_list, segment_list, rails, tenants, tasks, task_counts, masters };
    Ok((now, Frame::new(seconds, stats, before.map(|(_, frame)| frame), lists)))
}

/// The parts of a sample that are lists.
#[derive(Default)]
struct Lists {
    node_list: Vec<NodeRow>,
    segment_list: Vec<SegmentRow>,
    rails: Vec<RailRow>,
    tenants: Vec<TenantRow>,
    tasks: Vec<TaskRow>,
    task_counts: TaskReport,
    masters: Option<MastersSaid>,
}

impl std::convert::From<store_core::message::TenantUsage<'_>> for TenantRow {
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
    fn new(seconds: f64, stats: Stats, before: Option<&Self>, lists: Lists) -> Self {
        let Lists { node_list, segment_list, mut rails, tenants, tasks, task_counts, masters } = lists;
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
            task_counts,
            masters,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_since_the_sample_before_and_a_restarted_master_makes_none_of_them_negative() {
        let stats = |gets, hits, bytes| {
            let mut stats = Stats::default();
            (stats.gets_total, stats.get_hits_total, stats.get_bytes_total) = (gets, hits, bytes);
            stats
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
