//! `--compare`: each policy and capacity is both simulated and replayed, and the hit rates are compared.

use serde::Serialize;

use super::report::Report;
use super::simulate::{Row as SimulatedRow, Tokens};
use crate::output::{Align, Table, rounded, thousands};

/// The results. Field names are those of the JSON output.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Comparison {
    /// Largest allowed difference, percentage points.
    pub(super) agree_within: f64,
    /// Whether all rows agree within that difference, and every byte was right.
    pub(super) agree: bool,
    pub(super) rows: Vec<Row>,
    pub(super) interrupted: bool,
}

/// One policy at one capacity.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) policy: &'static str,
    pub(super) capacity_blocks: u64,
    /// Capacity of the disks; this and what concerns disks: only with disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk_tokens: Option<u64>,
    pub(super) hit_rate_simulated: f64,
    pub(super) hit_rate: f64,
    /// Hit rate of the replay minus that of the simulation, percentage points.
    pub(super) points: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_hit_rate_simulated: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_hit_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk_writes_per_ref_simulated: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk_writes_per_ref: Option<f64>,
    pub(super) evicted: u64,
    pub(super) put_no_room: u64,
    pub(super) verify_failures: u64,
    pub(super) elapsed_s: f64,
}

impl Comparison {
    pub(super) fn new(agree_within: f64) -> Self {
        Self { agree_within, agree: true, rows: Vec::new(), interrupted: false }
    }

    /// Adds the results of both for one policy, capacity and disk; `at` is the index in the simulated row.
    pub(super) fn add(
        &mut self,
        simulated: &SimulatedRow,
        (at, capacity_blocks): (usize, u64),
        report: &Report,
    ) {
        let of = |rates: &[f64]| rates.get(at).copied();
        let hit_rate_simulated = of(&simulated.hit_rates).unwrap_or_default();
        let points = (report.hit_rate - hit_rate_simulated) * 100.0;
        self.agree &= points.abs() <= self.agree_within && report.verify_failures == 0;
        self.rows.push(Row {
            policy: simulated.policy,
            capacity_blocks,
            disk_tokens: simulated.disk_tokens,
            hit_rate_simulated,
            hit_rate: report.hit_rate,
            points: rounded(points),
            memory_hit_rate_simulated: of(&simulated.memory_hit_rates),
            memory_hit_rate: report.disk.as_ref().map(|disk| disk.memory_hit_rate),
            disk_writes_per_ref_simulated: of(&simulated.disk_writes_per_ref),
            disk_writes_per_ref: report.disk.as_ref().map(|disk| disk.disk_writes_per_ref),
            evicted: report.evicted,
            put_no_room: report.put_no_room,
            verify_failures: report.verify_failures,
            elapsed_s: report.elapsed_s,
        });
    }

    /// The table for people.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&[
            ("policy", Align::Left),
            ("blocks", Align::Right),
            ("simulated, %", Align::Right),
            ("moved, %", Align::Right),
            ("points", Align::Right),
            ("evicted", Align::Right),
            ("no space", Align::Right),
            ("wrong", Align::Right),
            ("", Align::Left),
        ]);
        for row in &self.rows {
            let far = row.points.abs() > self.agree_within || row.verify_failures > 0;
            let disk = row.disk_tokens.map(|tokens| format!(" + disk {}", Tokens::of(tokens)));
            table.row([
                format!("{}{}", row.policy, disk.unwrap_or_default()),
                thousands(row.capacity_blocks),
                format!("{:.2}", row.hit_rate_simulated * 100.0),
                format!("{:.2}", row.hit_rate * 100.0),
                format!("{:+.2}", row.points),
                thousands(row.evicted),
                thousands(row.put_no_room),
                thousands(row.verify_failures),
                if far { "<- apart".to_owned() } else { String::new() },
            ]);
            if let Some((simulated, real)) = row.memory_hit_rate_simulated.zip(row.memory_hit_rate) {
                let percent = |rate: f64| format!("{:.2}", rate * 100.0);
                let points = format!("{:+.2}", (real - simulated) * 100.0);
                let cells =
                    ["  of it in memory".into(), String::new(), percent(simulated), percent(real), points];
                table.row(cells.into_iter().chain(std::iter::repeat_n(String::new(), 4)));
            }
        }
        let verdict = match (self.interrupted, self.agree) {
            (true, _) => "Interrupted: not all combinations were compared.".to_owned(),
            (_, true) => format!("All agree within {} points.", self.agree_within),
            (_, false) => format!("Not all agree within {} points.", self.agree_within),
        };
        format!("{}\n{verdict}\n", table.render())
    }
}
