//! How a sample is shown: figures with graphs, and one of several tables below.

use std::collections::VecDeque;

use super::screen::Key;
use super::{Frame, NodeRow};
use crate::commands::admin::{SegmentRow, masters_table, segment_table, share, task_table};
use crate::output::{Align, Table, Tone, counted, figure, printable, thousands, width};
use crate::size::ByteSize;

/// Most samples that a graph shows.
const SAMPLES_MAX: usize = 60;
/// A graph with fewer samples is not shown.
const SAMPLES_MIN: usize = 8;
/// The levels of a graph.
const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Most removed nodes that are remembered; the latest ones are kept.
const GONE_MAX: usize = 8;
/// A node that is silent for longer will soon be removed, milliseconds: heartbeats come every few seconds.
const SILENT_MS: u64 = 5_000;

/// What is shown, and the state that it needs.
pub(super) struct View {
    master: String,
    coloured: bool,
    frame: Option<Frame>,
    samples: [VecDeque<f64>; 5],
    /// Nodes that have disappeared.
    gone: VecDeque<NodeRow>,
    /// Lost nodes and lost objects at the first sample.
    lost_before: Option<(u64, u64)>,
    tab: Tab,
    order: Order,
    paused: bool,
    help: bool,
    /// Why there is no newer sample.
    away: Option<String>,
}

/// The tables at the bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tab {
    Nodes,
    Segments,
    Tenants,
    Tasks,
    Rails,
    Masters,
}

impl Tab {
    const ALL: [Self; 6] =
        [Self::Nodes, Self::Segments, Self::Tenants, Self::Tasks, Self::Rails, Self::Masters];

    const fn name(self) -> &'static str {
        match self {
            Self::Nodes => "nodes",
            Self::Segments => "segments",
            Self::Tenants => "tenants",
            Self::Tasks => "tasks",
            Self::Rails => "rails",
            Self::Masters => "masters",
        }
    }
}

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Name,
    Used,
    Size,
}

impl Order {
    const fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Used => "share used",
            Self::Size => "size",
        }
    }
}

impl View {
    pub(super) fn new(master: String, coloured: bool) -> Self {
        Self {
            master,
            coloured,
            frame: None,
            samples: Default::default(),
            gone: VecDeque::new(),
            lost_before: None,
            tab: Tab::Nodes,
            order: Order::Name,
            paused: false,
            help: false,
            away: None,
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Takes a new sample.
    pub(super) fn note(&mut self, frame: &Frame) {
        self.away = None;
        let values = [
            // Without requests there is no rate, which differs from a rate of 0.
            frame.hit_rate.map_or(f64::NAN, |rate| rate * 100.0),
            frame.read_gb_s * 1e9,
            frame.written_gb_s * 1e9,
            frame.puts_s,
            frame.evictions_s,
        ];
        // The first sample has no rates.
        let is_since = frame.seconds > 0.0;
        for (samples, value) in self.samples.iter_mut().zip(values).filter(|_| is_since) {
            if samples.len() == SAMPLES_MAX {
                samples.pop_front();
            }
            samples.push_back(value);
        }
        if let Some(before) = &self.frame {
            let is_there = |node: &NodeRow| frame.node_list.iter().any(|now| now.node == node.node);
            self.gone.extend(before.node_list.iter().filter(|node| !is_there(node)).cloned());
            // A node that returns under its name is not shown as gone.
            self.gone.retain(|node| frame.node_list.iter().all(|now| now.name != node.name));
            let many = self.gone.len().saturating_sub(GONE_MAX);
            self.gone.drain(..many);
        }
        let lost = (frame.stats.nodes_expired_total, frame.stats.objects_lost_total);
        self.lost_before.get_or_insert(lost);
        self.frame = Some(frame.clone());
    }

    /// Notes that there is no new sample. Returns whether that was unknown so far.
    pub(super) fn lost(&mut self, why: &str) -> bool {
        self.away.replace(why.to_owned()).is_none_or(|before| before != why)
    }

    pub(super) fn press(&mut self, key: Key) {
        let turn = |by: usize| {
            let at = Tab::ALL.iter().position(|tab| *tab == self.tab).unwrap_or(0);
            Tab::ALL[(at + by) % Tab::ALL.len()]
        };
        match key {
            Key::Quit | Key::Suspend => {}
            Key::Pause => self.paused = !self.paused,
            Key::Help => self.help = !self.help,
            Key::Next => self.tab = turn(1),
            Key::Previous => self.tab = turn(Tab::ALL.len() - 1),
            Key::Sort => {
                self.order = match self.order {
                    Order::Name => Order::Used,
                    Order::Used => Order::Size,
                    Order::Size => Order::Name,
                }
            }
        }
    }

    /// The whole frame, for lines of this many columns.
    pub(super) fn text(&self, columns: usize) -> String {
        let Some(frame) = &self.frame else { return String::new() };
        let paint = |tone: Tone, text: &str| tone.paint(text, self.coloured);
        let mut out = paint(Tone::Strong, &format!("snowskin, master {}", printable(&self.master)));
        if self.paused {
            out += &paint(Tone::Warning, "   paused: press p to continue");
        }
        out += "\n\n";
        if let Some(why) = &self.away {
            out += &paint(Tone::Bad, "The master does not answer; retrying. The figures below are old.");
            out += &format!("\n{}\n\n", wrapped(&printable(why), columns));
        }
        if self.help {
            return out + HELP;
        }
        out += &self.figures(frame, columns);
        out += "\n";
        for tab in Tab::ALL {
            let name =
                if tab == self.tab { format!("[{}]", tab.name()) } else { format!(" {} ", tab.name()) };
            out += &paint(if tab == self.tab { Tone::Strong } else { Tone::Faint }, &name);
            out.push(' ');
        }
        let taken: usize = Tab::ALL.iter().map(|tab| tab.name().len() + 3).sum();
        let keys = match self.tab {
            Tab::Nodes | Tab::Segments => format!(" by {}; ?: keys", self.order.name()),
            Tab::Tenants | Tab::Tasks | Tab::Rails | Tab::Masters => " ?: keys".to_owned(),
        };
        let fits = [keys.as_str(), " ?: keys"].into_iter().find(|keys| taken + keys.len() <= columns);
        let keys = fits.unwrap_or_default();
        out += &paint(Tone::Faint, keys);
        out += "\n";
        out += &match self.tab {
            Tab::Nodes => self.nodes(frame, columns),
            Tab::Segments => segment_table(&self.sorted(frame), columns),
            Tab::Tenants => tenants(frame, columns),
            Tab::Tasks => tasks(frame, columns),
            Tab::Rails => rails(frame, columns),
            Tab::Masters => match &frame.masters {
                Some(said) => masters_table(said, columns),
                None => "give the --http address of a master with --masters ADDR:PORT\n".to_owned(),
            },
        };
        out
    }

    fn figures(&self, frame: &Frame, columns: usize) -> String {
        let stats = &frame.stats;
        let size = |bytes| ByteSize(bytes).approximate();
        let percent =
            |rate: Option<f64>| rate.map_or_else(|| "–".into(), |rate| format!("{:.1} %", rate * 100.0));
        let ever = (stats.gets_total > 0).then(|| stats.get_hits_total as f64 / stats.gets_total as f64);
        let [hits, read, written, puts, evictions] = &self.samples;
        let (gets_s, puts_s) = (each(frame.gets_s), each(frame.puts_s));
        let gb = |value: f64| bytes_each(value * 1e9);
        let rows = [
            ["hit rate".to_owned(), percent(frame.hit_rate), format!("overall {}", percent(ever))],
            ["gets".to_owned(), gets_s, gb(frame.read_gb_s)],
            ["puts".to_owned(), puts_s, gb(frame.written_gb_s)],
            [String::new(), String::new(), "puts".to_owned()],
            ["evictions".to_owned(), each(frame.evictions_s), String::new()],
        ];
        let graphs = [
            (hits, (|value| format!("{} %", figure(value))) as fn(f64) -> String),
            (read, bytes_each),
            (written, bytes_each),
            (puts, each),
            (evictions, each),
        ];
        // Graphs share a column, so that simultaneous events are above each other.
        let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Right)]);
        rows.iter().for_each(|row| table.row(row.iter().map(String::as_str)));
        let scales = graphs.map(|(samples, unit)| scale(samples, SAMPLES_MAX, unit));
        let taken = table.width() + 4 + scales.iter().map(|scale| width(scale)).max().unwrap_or(0);
        let room = columns.saturating_sub(taken).min(SAMPLES_MAX);
        let mut table = Table::new(&[
            ("", Align::Left),
            ("", Align::Right),
            ("", Align::Right),
            ("", Align::Left),
            ("", Align::Left),
        ]);
        for ([name, value, more], (samples, unit)) in rows.into_iter().zip(graphs) {
            let more = [name, value, more];
            if room < SAMPLES_MIN {
                table.row(more);
            } else {
                table.row(more.into_iter().chain([graph(samples, room), scale(samples, room, unit)]));
            }
        }
        let mut out = table.render();

        let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
        let held = stats.quarantined_bytes + stats.deferred_bytes;
        table.row([
            "used".to_owned(),
            share(stats.used_bytes, stats.capacity_bytes),
            format!(
                "{} of {}, {}, {} not yet free",
                size(stats.used_bytes),
                size(stats.capacity_bytes),
                counted(stats.objects, "object"),
                size(held)
            ),
        ]);
        if stats.disks > 0 {
            table.row(disks(stats));
        }
        table.row([
            "no room".to_owned(),
            thousands(stats.puts_no_room_total),
            "puts failed for lack of space".into(),
        ]);
        out += &table.render();
        let lost = (stats.nodes_expired_total, stats.objects_lost_total);
        let line =
            format!("lost       {} removed, with {}\n", counted(lost.0, "node"), counted(lost.1, "object"));
        let tone = match lost {
            lost if self.lost_before.is_some_and(|before| lost.0 > before.0 || lost.1 > before.1) => {
                Tone::Bad
            }
            (0, 0) => Tone::Plain,
            _ => Tone::Warning,
        };
        out + &tone.paint(line.trim_end(), self.coloured) + "\n"
    }

    fn nodes(&self, frame: &Frame, columns: usize) -> String {
        let mut rows: Vec<(&NodeRow, bool)> = frame.node_list.iter().map(|node| (node, true)).collect();
        rows.sort_by(|(a, _), (b, _)| {
            self.compare((&a.name, a.used_bytes, a.capacity_bytes), (&b.name, b.used_bytes, b.capacity_bytes))
        });
        rows.extend(self.gone.iter().map(|node| (node, false)));
        let mut table = Table::new(&[
            ("node", Align::Left),
            ("capacity", Align::Right),
            ("used", Align::Right),
            ("", Align::Right),
            ("silent for", Align::Right),
            ("", Align::Left),
        ]);
        for (node, there) in &rows {
            let silent = format!("{} s", figure(node.silent_ms as f64 / 1e3));
            table.row([
                printable(&node.name),
                ByteSize(node.capacity_bytes).approximate(),
                ByteSize(node.used_bytes).approximate(),
                share(node.used_bytes, node.capacity_bytes),
                if *there { silent } else { "–".to_owned() },
                if *there { String::new() } else { "gone".to_owned() },
            ]);
        }
        let text = table.render_in(columns);
        let mut lines = text.lines();
        let mut out = lines.next().unwrap_or_default().to_owned() + "\n";
        for (line, (node, there)) in lines.zip(&rows) {
            let tone = match there {
                false => Tone::Bad,
                true if node.silent_ms > SILENT_MS => Tone::Warning,
                true => Tone::Plain,
            };
            out += &tone.paint(line, self.coloured);
            out.push('\n');
        }
        match rows.is_empty() {
            true => "no node lends memory: start one with `snowskin node --memory 1GiB`\n".to_owned(),
            false => out,
        }
    }

    fn sorted(&self, frame: &Frame) -> Vec<SegmentRow> {
        let mut rows = frame.segment_list.clone();
        rows.sort_by(|a, b| {
            self.compare((&a.name, a.used_bytes, a.capacity_bytes), (&b.name, b.used_bytes, b.capacity_bytes))
        });
        rows
    }

    /// Compares two rows: name, bytes used, capacity.
    fn compare(&self, a: (&str, u64, u64), b: (&str, u64, u64)) -> std::cmp::Ordering {
        let full = |(_, used, capacity): (&str, u64, u64)| {
            u128::from(used) * u128::from(u64::MAX) / u128::from(capacity.max(1))
        };
        match self.order {
            Order::Name => a.0.cmp(b.0),
            Order::Used => full(b).cmp(&full(a)),
            Order::Size => b.2.cmp(&a.2),
        }
    }
}

/// The tier below memory.
fn disks(stats: &store_core::Stats) -> [String; 3] {
    let size = |bytes| ByteSize(bytes).approximate();
    let away = match stats.disks_away {
        0 => String::new(),
        away => format!(", {} of {} away", thousands(away), counted(stats.disks, "disk")),
    };
    let line = format!(
        "{} of {}, {}, {} waiting, {} of hits{away}",
        size(stats.disk_object_bytes),
        size(stats.disk_capacity_bytes),
        counted(stats.disk_objects, "object"),
        size(stats.disk_backlog_bytes),
        share(stats.disk_hits_total, stats.get_hits_total),
    );
    ["on disks".to_owned(), share(stats.disk_object_bytes, stats.disk_capacity_bytes), line]
}

const HELP: &str = "  q, Esc           quit
  p, space         pause and continue
  tab, arrows      next table: nodes, segments, tenants, tasks, rails, masters
  s                sort by name, share used, size
  ?                show or hide this help

Graphs show the last 60 samples, or as many as fit, the latest on the right.
The scale is beside each graph. A hit rate has gaps where there were no requests.
";

fn tasks(frame: &Frame, columns: usize) -> String {
    let counts = &frame.task_counts;
    let sum = format!(
        "{} in progress, {} waiting, {} done, {} failed, {} canceled; {} copied\n",
        thousands(counts.processing),
        thousands(counts.pending),
        thousands(counts.done_total),
        thousands(counts.failed_total),
        thousands(counts.canceled_total),
        ByteSize(counts.copied_bytes_total).approximate()
    );
    match frame.tasks.is_empty() {
        true => sum,
        false => sum + &task_table(&frame.tasks, &frame.segment_list, columns),
    }
}

fn tenants(frame: &Frame, columns: usize) -> String {
    if frame.tenants.is_empty() {
        return "no tenants, or the list needs the admin secret\n".to_owned();
    }
    let mut table = Table::new(&[
        ("tenant", Align::Left),
        ("objects", Align::Right),
        ("used", Align::Right),
        ("quota", Align::Right),
        ("evicted", Align::Right),
        ("refused", Align::Right),
    ]);
    for row in &frame.tenants {
        table.row([
            printable(&row.name),
            thousands(row.objects),
            ByteSize(row.used_bytes).approximate(),
            row.quota_bytes.map_or_else(|| "none".to_owned(), |bytes| ByteSize(bytes).approximate()),
            thousands(row.evictions_total),
            thousands(row.refusals_total),
        ]);
    }
    table.render_in(columns)
}

fn rails(frame: &Frame, columns: usize) -> String {
    if frame.rails.is_empty() {
        return "no rails: give a node's --http address with --rails ADDR:PORT\n".to_owned();
    }
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
    table.render_in(columns)
}

/// A graph of one line with this many columns, the latest sample on the right, scaled to its highest sample.
fn graph(samples: &VecDeque<f64>, columns: usize) -> String {
    let most = most(samples, columns);
    let step = |value: f64| match most {
        _ if value.is_nan() => ' ',
        0.0 => STEPS[0],
        most => STEPS[((value / most * 7.0).round() as usize).min(7)],
    };
    let blank = std::iter::repeat_n(' ', columns.saturating_sub(samples.len()));
    blank.chain(latest(samples, columns).map(step)).collect()
}

/// The scale of such a graph.
fn scale(samples: &VecDeque<f64>, columns: usize, unit: fn(f64) -> String) -> String {
    let most = most(samples, columns);
    if most == 0.0 { String::new() } else { format!("0–{}", unit(most)) }
}

fn latest(samples: &VecDeque<f64>, columns: usize) -> impl Iterator<Item = f64> {
    samples.iter().copied().skip(samples.len().saturating_sub(columns))
}

fn most(samples: &VecDeque<f64>, columns: usize) -> f64 {
    latest(samples, columns).fold(0.0, f64::max)
}

/// The words, in lines of at most this many columns.
fn wrapped(text: &str, columns: usize) -> String {
    let (mut out, mut taken) = (String::new(), 0);
    for word in text.split(' ') {
        let room = columns.saturating_sub(taken);
        match taken {
            0 => {}
            _ if width(word) < room => out.push(' '),
            _ => out.push('\n'),
        }
        taken = if width(word) < room && taken > 0 { taken + 1 + width(word) } else { width(word) };
        out += word;
    }
    out
}

/// A rate per second.
fn each(per_s: f64) -> String {
    format!("{}/s", figure(per_s))
}

/// A rate in bytes per second.
fn bytes_each(per_s: f64) -> String {
    let (unit, name) = match per_s {
        v if v >= 1e9 => (1e9, "GB"),
        v if v >= 1e6 => (1e6, "MB"),
        v if v >= 1e3 => (1e3, "kB"),
        _ => (1.0, "B"),
    };
    format!("{} {name}/s", figure(per_s / unit))
}

#[cfg(test)]
mod tests {
    use super::super::Lists;
    use super::*;
    use store_core::Stats;

    fn node(number: &str, name: &str) -> NodeRow {
        NodeRow {
            node: number.into(),
            name: name.into(),
            capacity_bytes: 1 << 20,
            used_bytes: 1 << 19,
            silent_ms: 100,
        }
    }

    fn frame(nodes: Vec<NodeRow>) -> Frame {
        let lists = Lists { node_list: nodes, ..Lists::default() };
        Frame::new(1.0, Stats::default(), None, lists)
    }

    #[test]
    fn graphs_are_as_wide_as_all_others_and_scaled_to_their_highest_sample() {
        assert_eq!(graph(&VecDeque::from([0.0, 0.0]), 60).trim_start(), "▁▁");
        let samples = VecDeque::from([0.0, 3.5e9, f64::NAN, 7e9]);
        assert_eq!(graph(&samples, 10), "      ▁▅ █");
        assert_eq!(scale(&samples, 10, bytes_each), "0–7.00 GB/s");
        // The latest samples are those that fit.
        let samples = VecDeque::from([8.0, 1.0, 2.0]);
        assert_eq!((graph(&samples, 2).as_str(), scale(&samples, 2, each).as_str()), ("▅█", "0–2.00/s"));
    }

    #[test]
    fn graphs_stand_in_one_column_and_end_with_their_scale_where_the_terminal_does() {
        let mut view = View::new("m:1".into(), false);
        let name = "a-node-with-a-name-that-is-longer-than-any-terminal-is-wide-and-then-some";
        let mut busy = frame(vec![node("1", name)]);
        (busy.gets_s, busy.read_gb_s, busy.evictions_s, busy.written_gb_s) = (123_456.0, 2.0, 7.0, 12.5);
        (busy.hit_rate, busy.puts_s) = (Some(0.5), 4321.0);
        for _ in 0..SAMPLES_MAX {
            view.note(&busy);
        }
        for columns in [60, 80, 120, 500] {
            let text = view.text(columns);
            let graphs: Vec<(usize, usize)> = text
                .lines()
                .filter(|line| line.contains(STEPS))
                .map(|line| {
                    let start = line.chars().take_while(|c| !STEPS.contains(c)).count();
                    (start, line.chars().filter(|c| STEPS.contains(c)).count())
                })
                .collect();
            assert!(graphs.len() == 5 && graphs.iter().all(|at| *at == graphs[0]), "{graphs:?}:\n{text}");
            assert!(graphs[0].1 >= SAMPLES_MIN && graphs[0].1 <= SAMPLES_MAX, "{graphs:?}");
            let longest = text.lines().map(width).max().unwrap_or(0);
            assert!(longest <= columns && text.contains("0–12.5 GB/s"), "{longest} of {columns}:\n{text}");
        }
        assert!(view.text(500).contains(name) && !view.text(80).contains(name));
    }

    #[test]
    fn why_the_master_does_not_answer_can_be_read_to_its_end() {
        assert_eq!(wrapped("one two three four", 9), "one two\nthree\nfour");
        assert_eq!(wrapped("one two three four", 10), "one two\nthree four");
        assert_eq!(wrapped("a-long-word b", 4), "a-long-word\nb");
    }

    #[test]
    fn rates_of_bytes_have_a_unit_in_which_they_can_be_read() {
        assert_eq!(
            [0.0, 900.0, 4_096.0, 12.5e6, 3.5e9].map(bytes_each),
            ["0 B/s", "900 B/s", "4.10 kB/s", "12.5 MB/s", "3.50 GB/s"]
        );
    }

    #[test]
    fn a_frame_of_an_empty_store_names_the_next_command() {
        let mut view = View::new("m:1".into(), false);
        view.note(&frame(vec![]));
        let text = view.text(80);
        assert!(text.contains("snowskin node") && text.contains("hit rate"), "{text}");
        assert!(!text.contains('\u{1b}'), "no colour was requested");
    }

    #[test]
    fn tiers_are_shown_when_there_are_disks_and_masters_when_they_are_asked() {
        let mut view = View::new("m:1".into(), false);
        let mut tiers = frame(vec![node("1", "a")]);
        view.note(&tiers);
        assert!(!view.text(80).contains("on disks"));
        (tiers.stats.disks, tiers.stats.disks_away) = (2, 1);
        (tiers.stats.disk_object_bytes, tiers.stats.disk_capacity_bytes) = (1 << 20, 4 << 20);
        (tiers.stats.disk_hits_total, tiers.stats.get_hits_total) = (1, 4);
        let said = r#"{"id":"1","role":"leading","serving":true,"lineage":7,"term":3,"lsn":90,"masters":[
            {"id":"1","rpc":"h:1","leads":true,"in_sync":true,"stage":null,"lsn":90},
            {"id":"2","rpc":"h:2","leads":false,"in_sync":true,"stage":"follows","lsn":88}]}"#;
        tiers.masters = Some(serde_json::from_str(said).expect("as a master says it"));
        view.note(&tiers);
        let text = view.text(120);
        assert!(text.contains("25.0 %  1.0 MiB of 4.0 MiB") && text.contains("1 of 2 disks away"), "{text}");
        view.press(Key::Previous);
        let text = view.text(120);
        let line = text.lines().find(|line| line.contains("h:2")).expect("a line");
        assert!(text.contains("lineage 7, term 3") && line.trim_end().ends_with(" 2"), "{text}");
    }

    #[test]
    fn a_node_that_went_stays_in_red_until_it_is_back_under_its_name() {
        let mut view = View::new("m:1".into(), true);
        view.note(&frame(vec![node("1", "a"), node("2", "b")]));
        assert!(!view.text(80).contains("gone"));
        view.note(&frame(vec![node("1", "a")]));
        let text = view.text(80);
        let line = text.lines().find(|line| line.contains("gone")).expect("a line");
        assert!(line.starts_with("\u{1b}[31;1mb"), "{line:?}");
        view.note(&frame(vec![node("1", "a"), node("3", "b")]));
        assert!(!view.text(80).contains("gone"));
    }

    #[test]
    fn keys_turn_tables_sort_them_pause_and_help() {
        let mut view = View::new("m:1".into(), false);
        view.note(&frame(vec![node("1", "b"), node("2", "a")]));
        let first = |view: &View| {
            view.text(80)
                .lines()
                .filter(|line| line.starts_with(['a', 'b']))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert!(first(&view)[0].starts_with('a'), "by name");
        view.press(Key::Next);
        assert!(view.text(80).contains("[segments]"));
        view.press(Key::Previous);
        view.press(Key::Previous);
        assert!(view.text(80).contains("[masters]") && view.text(80).contains("--masters"));
        view.press(Key::Previous);
        assert!(view.text(80).contains("[rails]") && view.text(80).contains("--rails"));
        view.press(Key::Next);
        view.press(Key::Sort);
        view.press(Key::Next);
        assert!(view.text(80).contains("[nodes]") && view.text(80).contains("by share used"));
        view.press(Key::Pause);
        assert!(view.is_paused() && view.text(80).contains("paused"));
        view.press(Key::Help);
        assert!(view.text(80).contains("tab, arrows"));
    }
}
