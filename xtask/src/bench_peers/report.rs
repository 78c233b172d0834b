//! Medians and ratios as text, as Markdown for the README, and as JSON.

use super::contest::{Bound, Contestant, Row};
use super::install::Peers;
use super::{Args, Sample, Samples};
use crate::stats::{self, Spread};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The results, ready to be printed.
pub(super) struct Report<'a> {
    pub(super) args: &'a Args,
    pub(super) rows: &'a [Row],
    pub(super) samples: &'a Samples,
    /// Contestants that failed at a row, and why.
    pub(super) failed: &'a BTreeMap<(String, Contestant), String>,
    pub(super) peers: &'a Peers,
}

impl Report<'_> {
    fn of(&self, row: &Row, contestant: Contestant) -> &[Sample] {
        self.samples.get(&row.name()).and_then(|row| row.get(&contestant)).map_or(&[], Vec::as_slice)
    }

    fn spread(&self, row: &Row, contestant: Contestant, of: fn(&Sample) -> f64) -> Spread {
        Spread::of(&self.of(row, contestant).iter().map(of).collect::<Vec<_>>())
    }

    /// `None`: one of the two did not take part.
    fn ratio(&self, row: &Row, bound: &Bound) -> Option<Spread> {
        let (ours, theirs) = (self.of(row, bound.ours), self.of(row, bound.theirs));
        let figures: Vec<f64> =
            ours.iter().zip(theirs).map(|(ours, theirs)| (bound.of.1)(ours) / (bound.of.1)(theirs)).collect();
        (!figures.is_empty()).then(|| Spread::of(&figures))
    }

    pub(super) fn print(&self) {
        println!(
            "\n{} rounds of {} s, congestion control {}, both ends on one machine",
            self.args.rounds, self.args.seconds, self.args.congestion
        );
        for (name, version) in &self.peers.versions {
            println!("  {name}: {version}");
        }
        for (name, why) in &self.peers.missing {
            println!("  {name}: left out, {why}");
        }
        for ((row, contestant), why) in self.failed {
            println!("  {contestant}: failed at {row}: {why}");
        }
        let heading =
            ["row", "who", "GB/s (min-max)", "items/s", "p50 us", "CPU-s/GiB", "items/CPU-s", "bytes/object"];
        let mut table = vec![heading.map(str::to_owned).to_vec()];
        for row in self.rows {
            for contestant in row.contestants() {
                if self.of(row, contestant).is_empty() {
                    continue;
                }
                let median = |of| self.spread(row, contestant, of).median;
                let gb_s = self.spread(row, contestant, |sample| sample.gb_s);
                let figure = |value: f64, digits: usize| match value {
                    0.0 => "-".to_owned(),
                    _ => format!("{value:.digits$}"),
                };
                table.push(vec![
                    row.name(),
                    contestant.to_string(),
                    match gb_s.median {
                        0.0 => "-".to_owned(),
                        _ => format!("{:.3} ({:.3}-{:.3})", gb_s.median, gb_s.min, gb_s.max),
                    },
                    figure(median(|sample| sample.items_s), 0),
                    figure(median(|sample| sample.p50_us), 1),
                    // Throughput has no meaning for objects of one byte.
                    if gb_s.median < 0.001 {
                        "-".to_owned()
                    } else {
                        figure(median(|sample| sample.cpu_s_per_gib), 3)
                    },
                    figure(median(|sample| sample.items_per_cpu_s), 0),
                    figure(median(|sample| sample.bytes_per_object), 0),
                ]);
            }
        }
        self.print_table(&table);

        let heading = ["row", "ours / theirs", "of", "median (min-max)", "bound", ""];
        let mut table = vec![heading.map(str::to_owned).to_vec()];
        for row in self.rows {
            for bound in row.bounds() {
                let Some(ratio) = self.ratio(row, &bound) else { continue };
                table.push(vec![
                    row.name(),
                    format!("{} / {}", bound.ours, bound.theirs),
                    bound.of.0.to_owned(),
                    format!("{:.2} ({:.2}-{:.2})", ratio.median, ratio.min, ratio.max),
                    bound.to_string(),
                    if bound.holds(ratio.median) { "ok" } else { "missed" }.to_owned(),
                ]);
            }
        }
        self.print_table(&table);
    }

    fn print_table(&self, table: &[Vec<String>]) {
        if !self.args.markdown {
            println!("\n{}", stats::table(table));
            return;
        }
        println!();
        for (index, row) in table.iter().enumerate() {
            println!("| {} |", row.join(" | "));
            if index == 0 {
                println!("|{}", "---|".repeat(row.len()));
            }
        }
    }

    pub(super) fn json(&self) -> Value {
        let spread = |spread: Spread| json!({"median": spread.median, "min": spread.min, "max": spread.max});
        let rows = self.rows.iter().map(|row| {
            let measured =
                row.contestants().into_iter().filter(|&one| !self.of(row, one).is_empty()).map(|one| {
                    json!({
                        "who": one.to_string(),
                        "gb_s": spread(self.spread(row, one, |sample| sample.gb_s)),
                        "items_s": spread(self.spread(row, one, |sample| sample.items_s)),
                        "p50_us": spread(self.spread(row, one, |sample| sample.p50_us)),
                        "cpu_s_per_gib": spread(self.spread(row, one, |sample| sample.cpu_s_per_gib)),
                        "items_per_cpu_s": spread(self.spread(row, one, |sample| sample.items_per_cpu_s)),
                        "bytes_per_object": spread(self.spread(row, one, |sample| sample.bytes_per_object)),
                    })
                });
            let ratios = row.bounds().into_iter().filter_map(|bound| {
                let ratio = self.ratio(row, &bound)?;
                Some(json!({
                    "ours": bound.ours.to_string(),
                    "theirs": bound.theirs.to_string(),
                    "of": bound.of.0,
                    "ratio": spread(ratio),
                    "bound": bound.to_string(),
                    "ok": bound.holds(ratio.median),
                }))
            });
            json!({
                "row": row.name(),
                "measured": measured.collect::<Vec<_>>(),
                "ratios": ratios.collect::<Vec<_>>(),
            })
        });
        json!({
            "rounds": self.args.rounds,
            "seconds": self.args.seconds,
            "congestion": self.args.congestion,
            "versions": self.peers.versions.iter().map(|(name, version)| json!([name, version])).collect::<Vec<_>>(),
            "failed": self.failed.iter().map(|((row, who), why)| json!([row, who.to_string(), why])).collect::<Vec<_>>(),
            "left_out": self.peers.missing.iter().map(|(name, why)| json!([name, why])).collect::<Vec<_>>(),
            "rows": rows.collect::<Vec<_>>(),
        })
    }
}
