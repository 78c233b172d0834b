//! What a look is shown as: figures with their graphs, and one of several tables below.

use std::collections::VecDeque;

use super::screen::Key;
use super::{Frame, NodeRow};
use crate::commands::admin::{SegmentRow, segment_table, share, task_table};
use crate::output::{Align, Table, Tone, figure, printable, thousands};
use crate::size::ByteSize;

/// Samples that the little graphs show.
const SAMPLES_MAX: usize = 60;
/// The steps of such a graph.
const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Nodes that went are remembered, the latest.
const GONE_MAX: usize = 8;
/// A node that is silent for longer is near to being given up, milliseconds: it is heard of every few seconds.
const SILENT_MS: u64 = 5_000;

/// What is shown, and what is remembered for it.
pub(super) struct View {
    master: String,
    coloured: bool,
    frame: Option<Frame>,
    samples: [VecDeque<f64>; 5],
    /// Nodes that were there, and are not.
    gone: VecDeque<NodeRow>,
    /// What was lost when the first look was taken: nodes, objects.
    lost_before: Option<(u64, u64)>,
    tab: Tab,
    order: Order,
    paused: bool,
    help: bool,
    /// Why there is no newer frame.
    away: Option<String>,
}

/// The tables below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tab {
    Nodes,
    Segments,
    Tenants,
    Tasks,
    Rails,
}

impl Tab {
    const ALL: [Self; 5] = [Self::Nodes, Self::Segments, Self::Tenants, Self::Tasks, Self::Rails];

    const fn name(self) -> &'static str {
        match self {
            Self::Nodes => "nodes",
            Self::Segments => "segments",
            Self::Tenants => "tenants",
            Self::Tasks => "tasks",
            Self::Rails => "rails",
        }
    }
}

/// By what rows are sorted.
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

    /// A new look.
    pub(super) fn note(&mut self, frame: &Frame) {
        self.away = None;
        let values =
            [frame.hit_rate.unwrap_or(0.0) * 100.0, frame.read_gb_s, frame.written_gb_s, frame.puts_s, frame.evictions_s];
        for (samples, value) in self.samples.iter_mut().zip(values) {
            if samples.len() == SAMPLES_MAX {
                samples.pop_front();
            }
            samples.push_back(value);
        }
        if let Some(before) = &self.frame {
            let is_there = |node: &NodeRow| frame.node_list.iter().any(|now| now.node == node.node);
            self.gone.extend(before.node_list.iter().filter(|node| !is_there(node)).cloned());
            // What comes back under its name is a new life of the same.
            self.gone.retain(|node| frame.node_list.iter().all(|now| now.name != node.name));
            let many = self.gone.len().saturating_sub(GONE_MAX);
            self.gone.drain(..many);
        }
        let lost = (frame.stats.nodes_expired_total, frame.stats.objects_lost_total);
        self.lost_before.get_or_insert(lost);
        self.frame = Some(frame.clone());
    }

    /// There is no new look.
    pub(super) fn lost(&mut self, why: &str) {
        self.away = Some(why.to_owned());
    }

    pub(super) fn press(&mut self, key: Key) {
        let turn = |by: usize| {
            let at = Tab::ALL.iter().position(|tab| *tab == self.tab).unwrap_or(0);
            Tab::ALL[(at + by) % Tab::ALL.len()]
        };
        match key {
            Key::Quit => {}
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

    /// All of it.
    pub(super) fn text(&self) -> String {
        let Some(frame) = &self.frame else { return String::new() };
        let paint = |tone: Tone, text: &str| tone.paint(text, self.coloured);
        let mut out = paint(Tone::Strong, &format!("snowskin, master {}", printable(&self.master)));
        if self.paused {
            out += &paint(Tone::Uneasy, "   paused: p goes on");
        }
        out += "\n\n";
        if let Some(why) = &self.away {
            out += &paint(Tone::Bad, "the master does not answer; asking again. What follows is old");
            out += &format!("\n{}\n\n", printable(why));
        }
        if self.help {
            return out + HELP;
        }
        out += &self.figures(frame);
        out += "\n";
        for tab in Tab::ALL {
            let name = if tab == self.tab { format!("[{}]", tab.name()) } else { format!(" {} ", tab.name()) };
            out += &paint(if tab == self.tab { Tone::Strong } else { Tone::Faint }, &name);
            out.push(' ');
        }
        out += &paint(Tone::Faint, &format!("  by {}; ? for keys", self.order.name()));
        out += "\n";
        out += &match self.tab {
            Tab::Nodes => self.nodes(frame),
            Tab::Segments => segment_table(&self.sorted(frame)),
            Tab::Tenants => tenants(frame),
            Tab::Tasks if frame.tasks.is_empty() => "no tasks\n".to_owned(),
            Tab::Tasks => task_table(&frame.tasks, &frame.segment_list),
            Tab::Rails => rails(frame),
        };
        out
    }

    fn figures(&self, frame: &Frame) -> String {
        let stats = &frame.stats;
        let size = |bytes| ByteSize(bytes).approximate();
        let percent =
            |rate: Option<f64>| rate.map_or_else(|| "–".into(), |rate| format!("{:.1} %", rate * 100.0));
        let ever = (stats.gets_total > 0).then(|| stats.get_hits_total as f64 / stats.gets_total as f64);
        let [hits, read, written, puts, evictions] = &self.samples;
        // Graphs stand in one column, so that what happens at one time stands one above the other.
        let mut table = Table::new(&[
            ("", Align::Left),
            ("", Align::Right),
            ("", Align::Right),
            ("", Align::Left),
            ("", Align::Left),
        ]);
        let mut row = |name: &str, value: String, more: String, samples: &VecDeque<f64>, unit: &str| {
            table.row([name.to_owned(), value, more, graph(samples), scale(samples, unit)]);
        };
        row("hit rate", percent(frame.hit_rate), format!("ever {}", percent(ever)), hits, "%");
        let gb = |value: f64| format!("{} GB/s", figure(value));
        row("gets", format!("{}/s", figure(frame.gets_s)), gb(frame.read_gb_s), read, "GB/s");
        row("puts", format!("{}/s", figure(frame.puts_s)), gb(frame.written_gb_s), written, "GB/s");
        row("", String::new(), "puts".into(), puts, "/s");
        row("evictions", format!("{}/s", figure(frame.evictions_s)), String::new(), evictions, "/s");
        let mut out = table.render();

        let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
        let held = stats.quarantined_bytes + stats.deferred_bytes;
        table.row([
            "used".to_owned(),
            share(stats.used_bytes, stats.capacity_bytes),
            format!(
                "{} of {}, {} objects, {} held back",
                size(stats.used_bytes),
                size(stats.capacity_bytes),
                thousands(stats.objects),
                size(held)
            ),
        ]);
        table.row(["no room".to_owned(), thousands(stats.puts_no_room_total), "puts that found none".into()]);
        out += &table.render();
        let lost = (stats.nodes_expired_total, stats.objects_lost_total);
        let line =
            format!("lost       {} nodes given up, {} objects with them\n", thousands(lost.0), thousands(lost.1));
        let tone = match lost {
            lost if self.lost_before.is_some_and(|before| lost.0 > before.0 || lost.1 > before.1) => Tone::Bad,
            (0, 0) => Tone::Plain,
            _ => Tone::Uneasy,
        };
        out + &tone.paint(line.trim_end(), self.coloured) + "\n"
    }

    fn nodes(&self, frame: &Frame) -> String {
        let mut rows: Vec<(&NodeRow, bool)> = frame.node_list.iter().map(|node| (node, true)).collect();
        rows.sort_by(|(a, _), (b, _)| self.compare((&a.name, a.used_bytes, a.capacity_bytes), (&b.name, b.used_bytes, b.capacity_bytes)));
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
        let text = table.render();
        let mut lines = text.lines();
        let mut out = lines.next().unwrap_or_default().to_owned() + "\n";
        for (line, (node, there)) in lines.zip(&rows) {
            let tone = match there {
                false => Tone::Bad,
                true if node.silent_ms > SILENT_MS => Tone::Uneasy,
                true => Tone::Plain,
            };
            out += &tone.paint(line, self.coloured);
            out.push('\n');
        }
        match rows.is_empty() {
            true => "no node lends memory: `snowskin node --memory 1GiB`\n".to_owned(),
            false => out,
        }
    }

    fn sorted(&self, frame: &Frame) -> Vec<SegmentRow> {
        let mut rows = frame.segment_list.clone();
        rows.sort_by(|a, b| self.compare((&a.name, a.used_bytes, a.capacity_bytes), (&b.name, b.used_bytes, b.capacity_bytes)));
        rows
    }

    /// Name, bytes used, capacity.
    fn compare(&self, a: (&str, u64, u64), b: (&str, u64, u64)) -> std::cmp::Ordering {
        let full = |(_, used, capacity): (&str, u64, u64)| u128::from(used) * u128::from(u64::MAX) / u128::from(capacity.max(1));
        match self.order {
            Order::Name => a.0.cmp(b.0),
            Order::Used => full(b).cmp(&full(a)),
            Order::Size => b.2.cmp(&a.2),
        }
    }
}

const HELP: &str = "  q, Esc           end
  p, space         pause, and go on
  tab, arrows      another table: nodes, segments, tenants, tasks, rails
  s                sort by name, share used, size
  ?                this, and back

Graphs show the last 60 looks, the latest on the right; beside each stand the least and the most that it shows.
";

fn tenants(frame: &Frame) -> String {
    if frame.tenants.is_empty() {
        return "no tenants, or none that an admin secret would show\n".to_owned();
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
    table.render()
}

fn rails(frame: &Frame) -> String {
    if frame.rails.is_empty() {
        return "no rails: name a node's --http with --rails ADDR:PORT\n".to_owned();
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
    table.render()
}

/// A graph of one line, the latest sample on the right, scaled to its highest sample.
fn graph(samples: &VecDeque<f64>) -> String {
    let most = samples.iter().copied().fold(0.0, f64::max);
    let step = |value: f64| match most {
        0.0 => STEPS[0],
        most => STEPS[((value / most * 7.0).round() as usize).min(7)],
    };
    let blank = std::iter::repeat_n(' ', SAMPLES_MAX.saturating_sub(samples.len()));
    blank.chain(samples.iter().map(|value| step(*value))).collect()
}

/// What the steps of a graph mean.
fn scale(samples: &VecDeque<f64>, unit: &str) -> String {
    let most = samples.iter().copied().fold(0.0, f64::max);
    if most == 0.0 { String::new() } else { format!("0–{} {unit}", figure(most)) }
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
        assert_eq!(graph(&VecDeque::from([0.0, 0.0])).trim_start(), "▁▁");
        let graph = graph(&VecDeque::from([0.0, 3.5, 7.0]));
        assert_eq!((graph.chars().count(), graph.trim_start()), (SAMPLES_MAX, "▁▅█"));
        assert_eq!(scale(&VecDeque::from([0.0, 3.5]), "GB/s"), "0–3.50 GB/s");
    }

    #[test]
    fn graphs_stand_in_one_column() {
        let mut view = View::new("m:1".into(), false);
        let mut busy = frame(vec![]);
        (busy.gets_s, busy.read_gb_s, busy.evictions_s, busy.written_gb_s) = (123_456.0, 2.0, 7.0, 12.5);
        view.note(&busy);
        let text = view.text();
        let ends: Vec<usize> = text
            .lines()
            .filter(|line| line.contains(STEPS))
            .map(|line| line.chars().take_while(|c| !STEPS.contains(c)).count())
            .collect();
        assert!(ends.len() == 5 && ends.iter().all(|end| *end == ends[0]), "{ends:?}:\n{text}");
    }

    #[test]
    fn a_frame_of_an_empty_store_says_how_to_go_on() {
        let mut view = View::new("m:1".into(), false);
        view.note(&frame(vec![]));
        let text = view.text();
        assert!(text.contains("snowskin node") && text.contains("hit rate"), "{text}");
        assert!(!text.contains('\u{1b}'), "no colour was asked for");
    }

    #[test]
    fn a_node_that_went_stays_in_red_until_it_is_back_under_its_name() {
        let mut view = View::new("m:1".into(), true);
        view.note(&frame(vec![node("1", "a"), node("2", "b")]));
        assert!(!view.text().contains("gone"));
        view.note(&frame(vec![node("1", "a")]));
        let text = view.text();
        let line = text.lines().find(|line| line.contains("gone")).expect("a line");
        assert!(line.starts_with("\u{1b}[31;1mb"), "{line:?}");
        view.note(&frame(vec![node("1", "a"), node("3", "b")]));
        assert!(!view.text().contains("gone"));
    }

    #[test]
    fn keys_turn_tables_sort_them_pause_and_help() {
        let mut view = View::new("m:1".into(), false);
        view.note(&frame(vec![node("1", "b"), node("2", "a")]));
        let first = |view: &View| view.text().lines().filter(|line| line.starts_with(['a', 'b'])).map(str::to_owned).collect::<Vec<_>>();
        assert!(first(&view)[0].starts_with('a'), "by name");
        view.press(Key::Next);
        assert!(view.text().contains("[segments]"));
        view.press(Key::Previous);
        view.press(Key::Previous);
        assert!(view.text().contains("[rails]") && view.text().contains("--rails"));
        view.press(Key::Sort);
        assert!(view.text().contains("by share used"));
        view.press(Key::Pause);
        assert!(view.is_paused() && view.text().contains("paused"));
        view.press(Key::Help);
        assert!(view.text().contains("tab, arrows"));
    }
}
