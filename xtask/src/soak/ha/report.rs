//! What was measured, and whether it is good enough.

use super::clients::Numbers;
use super::plan::Fault;
use crate::stats;
use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Of the cold objects that were on disks before a node was killed, this share has to be there again.
const DISK_BACK_MIN: f64 = 0.999;

/// After so many kills of nodes, some object must have been on a disk.
const DEATHS_MANY: u64 = 5;

/// Lists of times, µs, by name.
pub(super) type Times = BTreeMap<&'static str, Vec<u64>>;

#[derive(Default)]
pub(super) struct Report {
    pub(super) seed: u64,
    pub(super) arbiter: &'static str,
    pub(super) profile: String,
    pub(super) masters: usize,
    pub(super) nodes: usize,
    pub(super) clients: usize,
    pub(super) node_mib: u64,
    pub(super) disk_mib: u64,
    pub(super) length: Duration,
    /// Kills that were asked for.
    pub(super) wanted: Option<u64>,
    pub(super) interrupted: bool,
    pub(super) faults: BTreeMap<Fault, u64>,
    pub(super) times: Times,
    /// Sums over all audits.
    pub(super) audits: Numbers,
    pub(super) flips: Numbers,
    /// Bits that were flipped in the disks of nodes that did not run.
    pub(super) flips_at_rest: u64,
    /// Operations that failed, by the fault during which they did, and their kind.
    pub(super) failed: BTreeMap<&'static str, u64>,
    pub(super) late_answers: u64,
    pub(super) counts: Numbers,
    /// The master's counters at the end.
    pub(super) stats: Value,
    /// Why the soak failed, other than by its counters.
    pub(super) complaints: Vec<String>,
}

/// The smallest of the sorted figures that is at least as large as `share` of them; 0: there are none.
pub(super) fn percentile(figures: &[u64], share: f64) -> u64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable();
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0)
}

fn ms(us: u64) -> f64 {
    us as f64 / 1_000.0
}

impl Report {
    fn audited(&self, name: &str) -> u64 {
        self.audits.get(name).copied().unwrap_or(0)
    }

    fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    fn flipped(&self, name: &str) -> u64 {
        self.flips.get(name).copied().unwrap_or(0)
    }

    pub(super) fn kills(&self) -> u64 {
        self.faults.iter().filter(|(fault, _)| fault.is_kill()).map(|(_, count)| count).sum()
    }

    /// Objects that were lost by a fault of masters, or although a replica in memory or on a disk was spared.
    fn lost(&self) -> u64 {
        self.audited("lost") + self.audited("lost_by_masters")
    }

    /// Bytes that no client has put, wherever they were read.
    fn wrong(&self) -> u64 {
        // Those of audits, of reads during the load, of probers and of flips: each is complained about.
        self.count("wrong").max(self.audited("wrong")).max(self.flipped("served"))
    }

    fn resurrected(&self) -> u64 {
        self.count("resurrected").max(self.audited("resurrected"))
    }

    /// Whether the soak has passed.
    pub(super) fn judge(&self) -> Result<()> {
        ensure!(self.lost() == 0, "{} acknowledged objects are lost", self.lost());
        ensure!(self.count("lost") == 0, "{} acknowledged objects are lost", self.count("lost"));
        ensure!(self.resurrected() == 0, "{} removed or replaced objects came back", self.resurrected());
        ensure!(self.wrong() == 0, "{} reads returned wrong bytes", self.wrong());
        let stale = self.count("stale");
        ensure!(
            stale == 0,
            "{stale} reads returned an earlier version than was acknowledged before they began"
        );
        let late = self.late_answers;
        ensure!(late == 0, "{late} answers of a master that had been deposed while it was stopped");
        let unreadable = self.audited("failed");
        ensure!(unreadable == 0, "{unreadable} objects could not be read for seconds");
        let (cold, missing) = (self.audited("cold_after_node"), self.audited("cold_lost_after_node"));
        ensure!(
            missing as f64 <= cold as f64 * (1.0 - DISK_BACK_MIN),
            "{missing} of {cold} objects on disks were gone after their node was killed"
        );
        if let Some(complaint) = self.complaints.first() {
            bail!("{complaint}");
        }
        let deaths = self.faults.get(&Fault::KillNode).copied().unwrap_or(0);
        ensure!(
            self.disk_mib == 0 || deaths < DEATHS_MANY || cold > 0,
            "nothing was on a disk whenever a node was killed: raise --churn-mib-s"
        );
        ensure!(self.count("acked_puts") > 0 && self.audited("read") > 0, "nothing was stored and read");
        if let Some(wanted) = self.wanted.filter(|_| !self.interrupted) {
            ensure!(self.kills() >= wanted, "{} of {wanted} kills", self.kills());
        }
        Ok(())
    }

    pub(super) fn json(&self) -> Value {
        let mut fields = Map::new();
        let mut add = |name: &str, value: Value| {
            fields.insert(name.to_owned(), value);
        };
        add("kills", json!(self.kills()));
        add("acked_puts", json!(self.count("acked_puts")));
        add("acked_removes", json!(self.count("acked_removes")));
        add("lost", json!(self.lost()));
        add("resurrected", json!(self.resurrected()));
        add("wrong_bytes", json!(self.wrong()));
        add("stale_reads", json!(self.count("stale")));
        add("late_answers", json!(self.late_answers));
        add("arbiter", json!(self.arbiter));
        add("seed", json!(self.seed));
        add("minutes", json!(self.length.as_secs_f64() / 60.0));
        add("passed", json!(self.judge().is_ok()));
        add("failure", json!(self.judge().err().map(|error| error.to_string())));
        add("interrupted", json!(self.interrupted));
        add("program", json!(self.profile));
        let shape = json!({
            "masters": self.masters, "nodes": self.nodes, "clients": self.clients,
            "node_mib": self.node_mib, "disk_mib": self.disk_mib,
        });
        add("cluster", shape);
        let faults: BTreeMap<&str, u64> = self.faults.iter().map(|(fault, n)| (fault.name(), *n)).collect();
        add("faults", json!(faults));
        for (name, times) in &self.times {
            for (suffix, share) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
                add(&format!("{name}_ms_{suffix}"), json!(ms(percentile(times, share))));
            }
            add(&format!("{name}_samples"), json!(times.len()));
        }
        add("audits", json!(self.audits));
        add("disk_expected", json!(self.audited("cold_after_node")));
        add("disk_missing", json!(self.audited("cold_lost_after_node")));
        add("flips", json!(self.flipped("flips")));
        add("flips_detected", json!(self.flipped("detected")));
        add("flips_served", json!(self.flipped("served")));
        add("flips_undetermined", json!(self.flipped("undetermined")));
        add("flips_at_rest", json!(self.flips_at_rest));
        add("failed_operations", json!(self.failed));
        add("counts", json!(self.counts));
        add("master_stats", self.stats.clone());
        add("complaints", json!(self.complaints));
        Value::Object(fields)
    }

    pub(super) fn text(&self) -> String {
        let mut rows =
            vec![["no answer for, ms", "p50", "p99", "max", "samples"].map(str::to_owned).to_vec()];
        for (name, times) in &self.times {
            let mut row = vec![(*name).to_owned()];
            row.extend([0.5, 0.99, 1.0].map(|share| format!("{:.1}", ms(percentile(times, share)))));
            row.push(times.len().to_string());
            rows.push(row);
        }
        let list = |counts: &mut dyn Iterator<Item = (String, u64)>| {
            let all = counts.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ");
            if all.is_empty() { "none".to_owned() } else { all }
        };
        let numbers = |numbers: &Numbers| list(&mut numbers.iter().map(|(name, n)| (name.clone(), *n)));
        let faults = list(&mut self.faults.iter().map(|(fault, n)| (fault.to_string(), *n)));
        let failed = list(&mut self.failed.iter().map(|(name, n)| ((*name).to_owned(), *n)));
        let verdict = match self.judge() {
            Ok(()) => "0 lost, 0 resurrected, 0 wrong bytes".to_owned(),
            Err(error) => format!("FAILED: {error}"),
        };
        format!(
            "ran for {} with {} masters ({}), {} nodes, seed {}, {}\nfaults: {faults}\naudits: {}\n\
             flips: {}, and {} at rest\nfailed operations: {failed}\ncounted: {}\n\n{}\n{}{verdict}",
            stats::duration(self.length),
            self.masters,
            self.arbiter,
            self.nodes,
            self.seed,
            self.profile,
            numbers(&self.audits),
            numbers(&self.flips),
            self.flips_at_rest,
            numbers(&self.counts),
            stats::table(&rows),
            self.complaints.iter().map(|complaint| format!("{complaint}\n")).collect::<String>(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(pairs: &[(&str, u64)]) -> Numbers {
        pairs.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
    }

    fn set(numbers: &mut Numbers, name: &str, number: u64) {
        numbers.insert(name.to_owned(), number);
    }

    fn good() -> Report {
        Report {
            audits: numbers(&[("read", 5), ("cold_after_node", 2_000), ("cold_lost_after_node", 2)]),
            counts: numbers(&[("acked_puts", 7)]),
            wanted: Some(2),
            faults: BTreeMap::from([(Fault::KillLeader, 2), (Fault::Switchover, 3)]),
            ..Report::default()
        }
    }

    #[test]
    fn percentiles_are_figures_that_occurred() {
        let figures: Vec<u64> = (1..=200).rev().collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| percentile(&figures, share)), [1, 100, 198, 200]);
        assert_eq!(percentile(&[7], 0.99), 7);
        assert_eq!(percentile(&[], 0.5), 0);
    }

    #[test]
    fn each_of_these_findings_fails_a_soak() {
        assert!(good().judge().is_ok(), "{:?}", good().judge());
        let fails = |change: fn(&mut Report)| {
            let mut report = good();
            change(&mut report);
            let json = report.json();
            assert_eq!(json["passed"], false, "{json}");
            report.judge().expect_err("it fails").to_string()
        };
        let lost = fails(|report| set(&mut report.audits, "lost", 1));
        assert_eq!(lost, "1 acknowledged objects are lost");
        fails(|report| set(&mut report.audits, "lost_by_masters", 1));
        fails(|report| set(&mut report.counts, "lost", 1));
        fails(|report| set(&mut report.audits, "resurrected", 1));
        fails(|report| set(&mut report.counts, "wrong", 1));
        fails(|report| set(&mut report.flips, "served", 1));
        fails(|report| set(&mut report.counts, "stale", 1));
        fails(|report| report.late_answers = 1);
        fails(|report| set(&mut report.audits, "failed", 1));
        fails(|report| set(&mut report.audits, "cold_lost_after_node", 3));
        fails(|report| report.complaints.push("not whole".to_owned()));
        fails(|report| report.wanted = Some(3));
        fails(|report| {
            report.disk_mib = 1;
            report.faults.insert(Fault::KillNode, DEATHS_MANY);
            report.audits.remove("cold_after_node");
            report.audits.remove("cold_lost_after_node");
        });
        fails(|report| report.counts.clear());
    }

    #[test]
    fn an_interrupted_soak_reports_what_was_measured() {
        let mut report = good();
        (report.wanted, report.interrupted) = (Some(1_000), true);
        report.times.insert("failover", vec![500_000, 700_000]);
        let json = report.json();
        assert_eq!((&json["passed"], &json["kills"], &json["lost"]), (&json!(true), &json!(2), &json!(0)));
        assert_eq!((&json["failover_ms_p50"], &json["failover_ms_p99"]), (&json!(500.0), &json!(700.0)));
        assert!(report.text().contains("failover"));
    }
}
