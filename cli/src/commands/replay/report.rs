//! The results of a replay, as a table and as JSON.

use std::time::Duration;

use serde::Serialize;

use super::driver::{Counters, Latencies};
use crate::commands::cluster::ClusterCpu;
use crate::output::{Align, Table, figure, printable, rounded, thousands};
use crate::size::{ByteSize, GIB};

/// All results. Field names are those of the JSON output.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) requests: u64,
    pub(super) block_refs: u64,
    pub(super) blocks_hit: u64,
    pub(super) hit_rate: f64,
    /// The same of the second half of the requests, if their number was known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) second_half_hit_rate: Option<f64>,
    pub(super) blocks_put: u64,
    pub(super) evicted: u64,
    pub(super) verify_failures: u64,
    pub(super) read_gib: f64,
    pub(super) written_gib: f64,
    pub(super) get_p50_us: f64,
    pub(super) get_p99_us: f64,
    pub(super) put_p50_us: f64,
    pub(super) put_p99_us: f64,
    pub(super) exists_p50_us: f64,
    pub(super) exists_p99_us: f64,
    pub(super) read_gib_s: f64,
    pub(super) write_gib_s: f64,
    pub(super) cpu_s_per_gib: f64,
    pub(super) cpu_client_s: f64,
    pub(super) cpu_master_s: f64,
    pub(super) cpu_nodes_s: f64,
    pub(super) elapsed_s: f64,
    pub(super) get_calls: u64,
    pub(super) put_calls: u64,
    pub(super) get_misses: u64,
    pub(super) get_failures: u64,
    pub(super) checksum_mismatches: u64,
    pub(super) put_exists: u64,
    pub(super) put_no_room: u64,
    pub(super) put_failures: u64,
    pub(super) nodes: u16,
    pub(super) nodes_lost: u16,
    pub(super) block_bytes: u64,
    pub(super) capacity_bytes: u64,
    pub(super) fabric: String,
    pub(super) interrupted: bool,
    /// Only with disks.
    #[serde(flatten)]
    pub(super) disk: Option<OnDisk>,
}

/// What a replay with disks reports as well.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct OnDisk {
    /// Bytes of all disks together.
    pub(super) disk_bytes: u64,
    /// Where they are kept, if the user has named a directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) disk_dir: Option<String>,
    /// Of the hits, those that were read from memory.
    pub(super) blocks_hit_memory: u64,
    pub(super) blocks_hit_disk: u64,
    pub(super) memory_hit_rate: f64,
    /// Blocks that the disk had and did not deliver in time, or damaged.
    pub(super) disk_misses: u64,
    /// Blocks copied to disks.
    pub(super) blocks_demoted: u64,
    pub(super) disk_writes_per_ref: f64,
    /// Blocks copied from disks into memory.
    pub(super) blocks_promoted: u64,
    /// How long requests waited for the disks.
    pub(super) disk_wait_s: f64,
}

impl OnDisk {
    /// Computes the results from the counts of the replay, its client and the master.
    pub(super) fn new(
        counters: &Counters,
        client: &store_client::Counters,
        before: &store_client::Stats,
        after: &store_client::Stats,
    ) -> Self {
        let refs = counters.block_refs.max(1) as f64;
        // What was read behind a hole is no hit.
        let on_disk = client.disk_hits.min(counters.blocks_hit);
        let in_memory = counters.blocks_hit - on_disk;
        let demoted = after.demotions_total - before.demotions_total;
        Self {
            blocks_hit_memory: in_memory,
            blocks_hit_disk: on_disk,
            memory_hit_rate: rounded(in_memory as f64 / refs),
            disk_misses: client.disk_misses,
            blocks_demoted: demoted,
            disk_writes_per_ref: rounded(demoted as f64 / refs),
            blocks_promoted: after.promotions_total - before.promotions_total,
            ..Self::default()
        }
    }

    /// Rows of the table: where the hits were.
    fn hit_rows(&self, hit_rate: f64) -> [[String; 3]; 2] {
        let row = |name: &str, blocks, rate: f64| {
            [name.to_owned(), thousands(blocks), format!("hit rate {rate:.4}")]
        };
        [
            row("    in memory", self.blocks_hit_memory, self.memory_hit_rate),
            row("    on disk", self.blocks_hit_disk, hit_rate - self.memory_hit_rate),
        ]
    }

    /// Rows of the table: what was copied.
    fn copy_rows(&self) -> [[String; 3]; 3] {
        let row = |name: &str, value, note| [name.to_owned(), value, note];
        let kept = self.disk_dir.as_ref().map(|dir| format!(" in {}", printable(dir)));
        let size = ByteSize(self.disk_bytes).approximate();
        let waited = format!("{} s", figure(self.disk_wait_s));
        [
            row(
                "copied to disk",
                thousands(self.blocks_demoted),
                format!("disks {size}{}", kept.unwrap_or_default()),
            ),
            row("promoted", thousands(self.blocks_promoted), "from disk to memory".to_owned()),
            row("waited", waited, "for the disks, which a replay without pauses outruns".to_owned()),
        ]
    }
}

impl Report {
    /// Computes the results from the counts. The caller fills in where the processes ran.
    pub(super) fn new(
        counters: &Counters,
        latencies: &Latencies,
        elapsed: Duration,
        cpu: ClusterCpu,
    ) -> Self {
        let (read_gib, written_gib) = (counters.bytes_read as f64 / GIB, counters.bytes_written as f64 / GIB);
        let per = |amount: f64, of: f64| if of > 0.0 { rounded(amount / of) } else { 0.0 };
        let us = |histogram: &crate::histogram::Histogram, q| rounded(histogram.quantile_us(q));
        Self {
            requests: counters.requests,
            block_refs: counters.block_refs,
            blocks_hit: counters.blocks_hit,
            hit_rate: rounded(counters.hit_rate()),
            second_half_hit_rate: None,
            blocks_put: counters.blocks_put,
            evicted: 0,
            verify_failures: counters.verify_failures,
            read_gib: rounded(read_gib),
            written_gib: rounded(written_gib),
            get_p50_us: us(&latencies.get, 0.5),
            get_p99_us: us(&latencies.get, 0.99),
            put_p50_us: us(&latencies.put, 0.5),
            put_p99_us: us(&latencies.put, 0.99),
            exists_p50_us: us(&latencies.exists, 0.5),
            exists_p99_us: us(&latencies.exists, 0.99),
            read_gib_s: per(read_gib, latencies.get.sum_s()),
            write_gib_s: per(written_gib, latencies.put.sum_s()),
            cpu_s_per_gib: per(cpu.total().as_secs_f64(), read_gib + written_gib),
            cpu_client_s: rounded(cpu.client.as_secs_f64()),
            cpu_master_s: rounded(cpu.master.as_secs_f64()),
            cpu_nodes_s: rounded(cpu.nodes.as_secs_f64()),
            elapsed_s: rounded(elapsed.as_secs_f64()),
            get_calls: latencies.get.count(),
            put_calls: latencies.put.count(),
            get_misses: counters.get_misses,
            get_failures: counters.get_failures,
            checksum_mismatches: 0,
            put_exists: counters.put_exists,
            put_no_room: counters.put_no_room,
            put_failures: counters.put_failures,
            nodes: 0,
            nodes_lost: 0,
            block_bytes: 0,
            capacity_bytes: 0,
            fabric: String::new(),
            interrupted: false,
            disk: None,
        }
    }

    /// The table for people. Counts that should be zero and are zero are left out.
    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&[("", Align::Left), ("", Align::Right), ("", Align::Left)]);
        let mut row = |name: &str, value: String, note: String| table.row([name.to_owned(), value, note]);
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let cut = if self.interrupted { "interrupted; so far" } else { "" };
        row("requests", thousands(self.requests), cut.to_owned());
        row("block references", thousands(self.block_refs), format!("{} each", ByteSize(self.block_bytes)));
        row("  hit", thousands(self.blocks_hit), format!("hit rate {:.4}", self.hit_rate));
        let disk = self.disk.as_ref();
        for [name, value, note] in disk.map(|disk| disk.hit_rows(self.hit_rate)).into_iter().flatten() {
            row(&name, value, note);
        }
        if let Some(rate) = self.second_half_hit_rate {
            row("    second half", String::new(), format!("hit rate {rate:.4}"));
        }
        row("  put", thousands(self.blocks_put), String::new());
        row(
            "evicted",
            thousands(self.evicted),
            format!("pool {}", ByteSize(self.capacity_bytes).approximate()),
        );
        for [name, value, note] in disk.map(OnDisk::copy_rows).into_iter().flatten() {
            row(&name, value, note);
        }
        row(
            "verify failures",
            thousands(self.verify_failures),
            "every byte that was read was compared".to_owned(),
        );
        for (name, count, note) in self.oddities() {
            if count > 0 {
                row(name, thousands(count), note.to_owned());
            }
        }
        let speed = |gib: f64, rate: f64| {
            (format!("{} GiB", figure(gib)), format!("{} GiB/s in calls", figure(rate)))
        };
        let (amount, rate) = speed(self.read_gib, self.read_gib_s);
        row("read", amount, rate);
        let (amount, rate) = speed(self.written_gib, self.write_gib_s);
        row("written", amount, rate);
        for (name, p50, p99) in [
            ("get, per batch call", self.get_p50_us, self.get_p99_us),
            ("put, per batch call", self.put_p50_us, self.put_p99_us),
            ("exists, per request", self.exists_p50_us, self.exists_p99_us),
        ] {
            row(name, format!("{} µs", figure(p50)), format!("p50; p99 {} µs", figure(p99)));
        }
        let all = self.cpu_client_s + self.cpu_master_s + self.cpu_nodes_s;
        let share = |part: f64| percent(if all > 0.0 { part / all } else { 0.0 });
        row(
            "CPU",
            format!("{} s/GiB", figure(self.cpu_s_per_gib)),
            format!(
                "client {} (with verification), master {}, nodes {}",
                share(self.cpu_client_s),
                share(self.cpu_master_s),
                share(self.cpu_nodes_s)
            ),
        );
        row(
            "time",
            format!("{} s", figure(self.elapsed_s)),
            format!("{} nodes, fabric {}", self.nodes, self.fabric),
        );
        table.render()
    }

    /// What should not happen: name, count and explanation.
    fn oddities(&self) -> [(&'static str, u64, &'static str); 8] {
        [
            ("missing at read", self.get_misses, "evicted between lookup and get"),
            (
                "damaged in the store",
                self.checksum_mismatches,
                "detected by the store's checksum, counted as misses",
            ),
            (
                "disk misses",
                self.disk.as_ref().map_or(0, |disk| disk.disk_misses),
                "the disk was too late or has failed",
            ),
            ("get failures", self.get_failures, "the store could not read them; counted as misses"),
            ("existed at put", self.put_exists, ""),
            (
                "put without space",
                self.put_no_room,
                "all blocks were leased: use a larger pool or a shorter --lease-ms",
            ),
            ("put failures", self.put_failures, "the store could not write them"),
            ("nodes lost", u64::from(self.nodes_lost), "ended during the replay; see above"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_from_counts_and_json_has_every_promised_field() {
        let counters = Counters {
            requests: 2,
            block_refs: 8,
            blocks_hit: 2,
            bytes_read: 1 << 30,
            bytes_written: 3 << 30,
            ..Counters::default()
        };
        let mut latencies = Latencies::default();
        latencies.get.record(Duration::from_secs(2));
        let cpu = ClusterCpu {
            client: Duration::from_secs(2),
            master: Duration::from_secs(1),
            nodes: Duration::from_secs(1),
        };
        let report = Report::new(&counters, &latencies, Duration::from_secs(9), cpu);
        assert_eq!((report.hit_rate, report.read_gib_s, report.cpu_s_per_gib), (0.25, 0.5, 1.0));
        let json = serde_json::to_value(&report).unwrap();
        for field in [
            "requests",
            "block_refs",
            "blocks_hit",
            "hit_rate",
            "blocks_put",
            "evicted",
            "verify_failures",
            "read_gib",
            "written_gib",
            "get_p50_us",
            "get_p99_us",
            "put_p50_us",
            "put_p99_us",
            "read_gib_s",
            "write_gib_s",
            "cpu_s_per_gib",
        ] {
            assert!(json[field].is_number(), "{field}");
        }
        let table = report.table();
        assert!(table.contains("hit rate 0.2500") && !table.contains("put failures"), "{table}");
        assert!(!table.contains("on disk") && json.get("disk_bytes").is_none(), "{table}");
    }

    #[test]
    fn with_disks_hits_are_told_apart_by_tier() {
        let counters = Counters { requests: 2, block_refs: 8, blocks_hit: 4, ..Counters::default() };
        let mut client = store_client::Counters::default();
        client.disk_hits = 3;
        let mut after = store_client::Stats::default();
        (after.demotions_total, after.promotions_total) = (6, 2);
        let before = store_client::Stats::default();
        let (latencies, cpu) = (Latencies::default(), ClusterCpu::default());
        let mut report = Report::new(&counters, &latencies, Duration::from_secs(1), cpu);
        report.disk = Some(OnDisk::new(&counters, &client, &before, &after));
        let json = serde_json::to_value(&report).unwrap();
        for (field, value) in [
            ("hit_rate", 0.5),
            ("memory_hit_rate", 0.125),
            ("blocks_hit_disk", 3.0),
            ("disk_writes_per_ref", 0.75),
            ("blocks_promoted", 2.0),
        ] {
            assert_eq!(json[field].as_f64(), Some(value), "{field}: {json}");
        }
        let table = report.table();
        for part in ["in memory", "hit rate 0.1250", "on disk", "hit rate 0.3750", "copied to disk"] {
            assert!(table.contains(part), "{part}: {table}");
        }
    }
}
