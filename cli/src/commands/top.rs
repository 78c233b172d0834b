//! `snowskin top`: a store while it works.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use store_client::RpcConnection;
use store_core::Stats;
use store_core::message::{ListNodes, ReadStats};

use crate::commands::admin::{SegmentRow, ask_segments, segment_table, share};
use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, figure, printable, rounded, thousands};
use crate::size::ByteSize;
use crate::{Outcome, output, sys};

const AFTER_HELP: &str = "Examples:
  snowskin top
  snowskin top --rails 10.0.0.7:9004 --rails 10.0.0.8:9004    with the rails of two nodes (their --http)
  snowskin top --once
  snowskin top --json | jq .hit_rate

Bytes a second are those of objects that readers found and writers committed, as the master counts them: no \
byte passes it.";

/// Longest answer of a node to `/metrics`, bytes.
const METRICS_BYTES_MAX: u64 = 4 << 20;
/// How long a node may take for it.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);
/// Samples that the little graphs show.
const SAMPLES_MAX: usize = 60;
/// The steps of such a graph.
const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Show the cluster live: capacity, hit rate, throughput, evictions, nodes, rails
///
/// Until Ctrl-C. Where stdout is no terminal, one frame after another.
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
}

#[derive(Clone, Debug, Serialize)]
struct NodeRow {
    node: String,
    capacity_bytes: u64,
    used_bytes: u64,
    silent_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct RailRow {
    of: String,
    rail: String,
    bytes_total: f64,
    gb_s: f64,
    errors_total: f64,
    state: &'static str,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    if !(0.05..=3600.0).contains(&args.interval) {
        return Err(Failure::usage("--interval: choose from 0.05 to 3600 seconds").into());
    }
    let interval = Duration::from_secs_f64(args.interval);
    let mut rpc = args.master.connect()?;
    let live = !args.once && !args.json && sys::terminal_size().is_some();
    let _screen = if live { Some(Screen::open()?) } else { None };
    let mut history = History::default();
    let mut before = look(args, &mut rpc, None)?;
    loop {
        if let Some(exit) = sys::wait_for_interrupt(Some(interval)) {
            return Ok(exit);
        }
        let frame = match look(args, &mut rpc, Some(&before)) {
            Ok(frame) => frame,
            // A master that restarts is back in a moment: what is shown stays, and says that it is old.
            Err(error) if live => {
                print_over(&format!("{}\n\n{error:#}\n", "the master does not answer; asking again"))?;
                // Whatever became of the connection, the next look dials anew.
                if let Ok(again) = args.master.connect() {
                    rpc = again;
                }
                continue;
            }
            Err(error) => return Err(error),
        };
        history.note(&frame.1);
        if args.json {
            output::print_json(&frame.1)?;
        } else {
            let text = render(&frame.1, &history, &args.master.address().to_string());
            if live { print_over(&text)? } else { output::print(&(text + "\n"))? }
        }
        if args.once {
            return Ok(Exit::Ok);
        }
        before = frame;
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
    let node_list = {
        let ((), nodes) = rpc.call::<ListNodes>(&(), std::iter::empty()).map_err(no_master)?;
        let row = |info: store_core::message::NodeInfo| NodeRow {
            node: format!("{:016x}", info.node),
            capacity_bytes: info.capacity,
            used_bytes: info.used,
            silent_ms: info.silent_ms,
        };
        nodes.map(row).collect()
    };
    let segment_list = ask_segments(rpc)?;
    let mut rails = Vec::new();
    for of in &args.rails {
        match fetch(of).map(|text| rails_in(of, &text)) {
            Ok(found) => rails.extend(found),
            Err(error) => tracing::warn!("{of}: {error:#}"),
        }
    }
    let seconds = before.map_or(0.0, |(at, _)| now.duration_since(*at).as_secs_f64());
    Ok((now, Frame::new(seconds, stats, before.map(|(_, frame)| frame), node_list, segment_list, rails)))
}

impl Frame {
    fn new(
        seconds: f64,
        stats: Stats,
        before: Option<&Self>,
        node_list: Vec<NodeRow>,
        segment_list: Vec<SegmentRow>,
        mut rails: Vec<RailRow>,
    ) -> Self {
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
        }
    }
}

/// What the little graphs show.
#[derive(Debug, Default)]
struct History {
    read: VecDeque<f64>,
    written: VecDeque<f64>,
    evictions: VecDeque<f64>,
}

impl History {
    fn note(&mut self, frame: &Frame) {
        let samples = [
            (&mut self.read, frame.read_gb_s),
            (&mut self.written, frame.written_gb_s),
            (&mut self.evictions, frame.evictions_s),
        ];
        for (samples, value) in samples {
            if samples.len() == SAMPLES_MAX {
                samples.pop_front();
            }
            samples.push_back(value);
        }
    }
}

/// A graph of one line, scaled to its highest sample.
fn graph(samples: &VecDeque<f64>) -> String {
    let most = samples.iter().copied().fold(0.0, f64::max);
    let step = |value: f64| match most {
        0.0 => STEPS[0],
        most => STEPS[((value / most * 7.0).round() as usize).min(7)],
    };
    samples.iter().map(|value| step(*value)).collect()
}

fn render(frame: &Frame, history: &History, master: &str) -> String {
    let stats = &frame.stats;
    let size = |bytes| ByteSize(bytes).approximate();
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
    let mut row = |name: &str, value: String, note: String| table.row([name.to_owned(), value, note]);
    row(
        "used",
        share(stats.used_bytes, stats.capacity_bytes),
        format!(
            "{} of {}, {} objects, {} held back",
            size(stats.used_bytes),
            size(stats.capacity_bytes),
            thousands(stats.objects),
            size(stats.quarantined_bytes + stats.deferred_bytes)
        ),
    );
    let percent =
        |rate: Option<f64>| rate.map_or_else(|| "–".into(), |rate| format!("{:.1} %", rate * 100.0));
    let ever = (stats.gets_total > 0).then(|| stats.get_hits_total as f64 / stats.gets_total as f64);
    row("hit rate", percent(frame.hit_rate), format!("{} since the master started", percent(ever)));
    row(
        "gets",
        format!("{}/s", figure(frame.gets_s)),
        format!("{} GB/s  {}", figure(frame.read_gb_s), graph(&history.read)),
    );
    row(
        "puts",
        format!("{}/s", figure(frame.puts_s)),
        format!("{} GB/s  {}", figure(frame.written_gb_s), graph(&history.written)),
    );
    row("evictions", format!("{}/s", figure(frame.evictions_s)), graph(&history.evictions));
    row("no room", thousands(stats.puts_no_room_total), "puts that found none".into());
    row(
        "lost",
        thousands(stats.nodes_expired_total),
        format!("nodes given up, {} objects with them", thousands(stats.objects_lost_total)),
    );
    let mut text = format!("snowskin, master {}\n\n{}\n", printable(master), table.render());
    let mut table = Table::new(&[
        ("node", Align::Left),
        ("capacity", Align::Right),
        ("used", Align::Right),
        ("", Align::Right),
        ("silent for", Align::Right),
    ]);
    for node in &frame.node_list {
        table.row([
            node.node.clone(),
            size(node.capacity_bytes),
            size(node.used_bytes),
            share(node.used_bytes, node.capacity_bytes),
            format!("{} s", figure(node.silent_ms as f64 / 1e3)),
        ]);
    }
    text += &table.render();
    text += "\n";
    if !frame.rails.is_empty() {
        let mut table = Table::new(&[
            ("rail", Align::Left),
            ("of", Align::Left),
            ("GB/s", Align::Right),
            ("errors", Align::Right),
            ("", Align::Left),
        ]);
        for rail in &frame.rails {
            table.row([
                printable(&rail.rail),
                printable(&rail.of),
                figure(rail.gb_s),
                figure(rail.errors_total),
                rail.state.to_owned(),
            ]);
        }
        text += &table.render();
        text += "\n";
    }
    text + &segment_table(&frame.segment_list)
}

/// The other screen of the terminal, until it is dropped.
struct Screen;

impl Screen {
    fn open() -> anyhow::Result<Self> {
        output::print("\u{1b}[?1049h\u{1b}[?25l")?;
        Ok(Self)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody to tell that it failed.
        let _ = output::print("\u{1b}[?25h\u{1b}[?1049l");
    }
}

/// Writes over what is there, no more than fits.
fn print_over(text: &str) -> anyhow::Result<()> {
    let (columns, lines) = sys::terminal_size().unwrap_or((80, 24));
    let mut out = "\u{1b}[H".to_owned();
    for line in text.lines().take(lines.saturating_sub(1)) {
        out.extend(line.chars().take(columns));
        out += "\u{1b}[K\r\n";
    }
    output::print(&(out + "\u{1b}[J"))
}

/// The text of `/metrics`.
fn fetch(of: &str) -> anyhow::Result<String> {
    let addr = of.to_socket_addrs()?.next().context("no such address")?;
    let mut stream = TcpStream::connect_timeout(&addr, METRICS_TIMEOUT)?;
    stream.set_read_timeout(Some(METRICS_TIMEOUT))?;
    stream.set_write_timeout(Some(METRICS_TIMEOUT))?;
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {of}\r\n\r\n")?;
    let mut text = String::new();
    stream.take(METRICS_BYTES_MAX).read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no HTTP answer")?;
    anyhow::ensure!(head.split(' ').nth(1) == Some("200"), "{}", head.lines().next().unwrap_or(""));
    Ok(body.to_owned())
}

/// The rails that a text of metrics tells of.
fn rails_in(of: &str, text: &str) -> Vec<RailRow> {
    let mut rails: BTreeMap<String, RailRow> = BTreeMap::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("snowskin_engine_rail_") else { continue };
        let Some((name, rest)) = rest.split_once('{') else { continue };
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let Ok(value) = value.trim().parse::<f64>() else { continue };
        let label = |name: &str| {
            let (_, rest) = labels.split_once(&format!("{name}=\""))?;
            Some(rest.split('"').next()?.to_owned())
        };
        let Some(rail) = label("rail") else { continue };
        let rail = match label("device").filter(|device| !device.is_empty()) {
            Some(device) => format!("{rail} {device}"),
            None => rail,
        };
        let row = rails.entry(rail.clone()).or_insert_with(|| RailRow {
            of: of.to_owned(),
            rail,
            bytes_total: 0.0,
            gb_s: 0.0,
            errors_total: 0.0,
            state: "",
        });
        match name {
            "bytes_total" => row.bytes_total += value,
            "errors_total" => row.errors_total += value,
            "paused" if value > 0.0 => row.state = "paused",
            "slow" if value > 0.0 && row.state.is_empty() => row.state = "slow",
            _ => {}
        }
    }
    rails.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rails_are_read_from_metrics_and_nothing_else_is() {
        let text = "# TYPE snowskin_engine_rail_bytes counter\n\
                    snowskin_engine_rail_bytes_total{rail=\"tcp\",device=\"\"} 4096\n\
                    snowskin_engine_rail_bytes_total{rail=\"rdma\",device=\"mlx5_0\"} 1e3\n\
                    snowskin_engine_rail_errors_total{rail=\"rdma\",device=\"mlx5_0\"} 2\n\
                    snowskin_engine_rail_paused{rail=\"rdma\",device=\"mlx5_0\"} 1\n\
                    snowskin_engine_rail_bytes_total{rail=\"x\"} nonsense\n\
                    snowskin_engine_rail_bytes_total{rail=\"broken\n\
                    snowskin_master_gets_total 5\n";
        let rails = rails_in("n:1", text);
        let seen: Vec<_> = rails
            .iter()
            .map(|rail| (rail.rail.as_str(), rail.bytes_total, rail.errors_total, rail.state))
            .collect();
        assert_eq!(seen, [("rdma mlx5_0", 1000.0, 2.0, "paused"), ("tcp", 4096.0, 0.0, "")]);
    }

    #[test]
    fn rates_are_since_the_look_before_and_a_restarted_master_makes_none_of_them_negative() {
        let stats = |gets, hits, bytes| Stats {
            gets_total: gets,
            get_hits_total: hits,
            get_bytes_total: bytes,
            ..Stats::default()
        };
        let first = Frame::new(0.0, stats(100, 50, 0), None, vec![], vec![], vec![]);
        assert_eq!((first.gets_s, first.hit_rate), (0.0, None));
        let second = Frame::new(2.0, stats(120, 65, 4_000_000_000), Some(&first), vec![], vec![], vec![]);
        assert_eq!((second.gets_s, second.hit_rate, second.read_gb_s), (10.0, Some(0.75), 2.0));
        let restarted = Frame::new(1.0, stats(3, 3, 7), Some(&second), vec![], vec![], vec![]);
        assert_eq!((restarted.gets_s, restarted.hit_rate, restarted.read_gb_s), (0.0, None, 0.0));
    }

    #[test]
    fn graphs_are_scaled_to_their_highest_sample() {
        assert_eq!(graph(&VecDeque::from([0.0, 0.0])), "▁▁");
        assert_eq!(graph(&VecDeque::from([0.0, 3.5, 7.0])), "▁▅█");
    }

    #[test]
    fn a_frame_of_an_empty_store_says_how_to_go_on() {
        let frame = Frame::new(1.0, Stats::default(), None, vec![], vec![], vec![]);
        let text = render(&frame, &History::default(), "m:1");
        assert!(text.contains("snowskin node") && text.contains("hit rate"), "{text}");
    }
}
