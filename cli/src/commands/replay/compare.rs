//! `--compare`: each policy and capacity is both simulated and replayed, and the hit rates are compared.

use serde::Serialize;
use store_core::EvictionPolicy;

use super::report::Report;
use super::simulate::Simulation;
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
    pub(super) hit_rate_simulated: f64,
    pub(super) hit_rate: f64,
    /// Hit rate of the replay minus that of the simulation, percentage points.
    pub(super) points: f64,
    pub(super) evicted: u64,
    pub(super) put_no_room: u64,
    pub(super) verify_failures: u64,
    pub(super) elapsed_s: f64,
}

impl Comparison {
    pub(super) fn new(agree_within: f64) -> Self {
        Self { agree_within, agree: true, rows: Vec::new(), interrupted: false }
    }

    /// Adds the results of both for one policy and capacity; `at` is the index in the simulation.
    pub(super) fn add(
        &mut self,
        policy: EvictionPolicy,
        (at, capacity_blocks): (usize, u64),
        simulation: &Simulation,
        report: &Report,
    ) {
        let simulated = simulation.rows.iter().find(|row| row.policy == policy.name());
        let simulated = simulated.and_then(|row| row.hit_rates.get(at)).copied().unwrap_or_default();
        let points = (report.hit_rate - simulated) * 100.0;
        self.agree &= points.abs() <= self.agree_within && report.verify_failures == 0;
        self.rows.push(Row {
            policy: policy.name(),
            capacity_blocks,
            hit_rate_simulated: simulated,
            hit_rate: report.hit_rate,
            points: rounded(points),
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
            table.row([
                row.policy.to_owned(),
                thousands(row.capacity_blocks),
                format!("{:.2}", row.hit_rate_simulated * 100.0),
                format!("{:.2}", row.hit_rate * 100.0),
                format!("{:+.2}", row.points),
                thousands(row.evicted),
                thousands(row.put_no_room),
                thousands(row.verify_failures),
                if far { "<- apart".to_owned() } else { String::new() },
            ]);
        }
        let verdict = match (self.interrupted, self.agree) {
            (true, _) => "Interrupted: not all combinations were compared.".to_owned(),
            (_, true) => format!("All agree within {} points.", self.agree_within),
            (_, false) => format!("Not all agree within {} points.", self.agree_within),
        };
        format!("{}\n{verdict}\n", table.render())
    }
}
