//! The metrics of a node's disks.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::signed;
use crate::disk::{CLASSES, Times};
use crate::node::DiskReport;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    path: String,
    kind: &'static str,
}

/// Labels of a family that distinguishes something else as well.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfClass {
    path: String,
    kind: &'static str,
    class: &'static str,
}

/// A gauge of each disk: its name, what it is, and its value.
type Value = (&'static str, &'static str, fn(&DiskReport) -> u64);

const GAUGES: [Value; 9] = [
    ("ready", "1 while the master knows the disk and everything on it", |disk| disk.ready.into()),
    ("objects", "Objects on the disk", |disk| disk.stats.objects),
    ("refused_files", "Files in a directory of packs that are none, and are not used", |disk| disk.refused),
    ("capacity_bytes", "Bytes of all extents of the disk", |disk| {
        u64::from(disk.stats.geometry.extents()) * u64::from(disk.stats.geometry.extent_bytes())
    }),
    ("free_extents", "Extents that nothing is written to yet", |disk| disk.stats.free_extents),
    ("bad_extents", "Extents that are not used any more because of errors", |disk| disk.stats.bad_extents),
    ("tombstones", "Removals that the disk keeps", |disk| disk.stats.tombstones),
    ("queue_bytes", "Bytes of objects that wait to be written or read", |disk| disk.stats.queue_bytes),
    ("memory_bytes", "Memory that the node needs for what is on the disk, bytes", |disk| {
        disk.stats.memory_bytes
    }),
];

const COUNTERS: [Value; 4] = [
    ("read_bytes", "Bytes of objects that were read for readers", |disk| {
        disk.stats.counters.staged_bytes_total
    }),
    ("reclaimed_extents", "Extents whose objects were given up to make room", |disk| {
        disk.stats.counters.reclaimed_total
    }),
    ("queue_refused", "Requests refused because a queue was full, or the disk did not answer", |disk| {
        disk.stats.counters.busy_total + disk.stats.unsent_total
    }),
    ("torn", "Objects that recovery found incomplete", |disk| disk.stats.counters.torn_total),
];

pub(super) fn register(registry: &mut Registry, disks: &[DiskReport]) {
    let labels = |disk: &DiskReport| Labels { path: path(disk), kind: disk.kind.name() };
    for (name, help, value) in GAUGES {
        let family = Family::<Labels, Gauge>::default();
        for disk in disks {
            family.get_or_create(&labels(disk)).set(signed(value(disk)));
        }
        registry.register(format!("disk_{name}"), help, family);
    }
    for (name, help, value) in COUNTERS {
        let family = Family::<Labels, Counter>::default();
        for disk in disks {
            family.get_or_create(&labels(disk)).inc_by(value(disk));
        }
        registry.register(format!("disk_{name}"), help, family);
    }
    let (written, errors) = (Family::<OfClass, Counter>::default(), Family::<OfClass, Counter>::default());
    for disk in disks {
        let counters = &disk.stats.counters;
        let count = |family: &Family<OfClass, Counter>, class, value| {
            let labels = OfClass { path: path(disk), kind: disk.kind.name(), class };
            family.get_or_create(&labels).inc_by(value);
        };
        count(&written, "object", counters.object_bytes_total);
        count(&written, "pad", counters.pad_bytes_total);
        count(&written, "header", counters.header_bytes_total);
        count(&errors, "read", counters.read_errors_total);
        count(&errors, "write", counters.write_errors_total);
    }
    registry.register("disk_written_bytes", "Bytes written to the disk", written);
    registry.register("disk_errors", "Reads and writes that failed", errors);
    let times = disks.iter().flat_map(|disk| {
        let stats = &disk.stats;
        let classes = [("read", stats.reads), ("write", stats.writes), ("sync", stats.syncs)];
        classes.map(|(class, times)| (OfClass { path: path(disk), kind: disk.kind.name(), class }, times))
    });
    registry.register_collector(Box::new(AllTimes(times.collect())));
}

fn path(disk: &DiskReport) -> String {
    disk.path.display().to_string()
}

/// How long the operations of each disk took.
#[derive(Debug)]
struct AllTimes(Vec<(OfClass, Times)>);

impl Collector for AllTimes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help =
            "Time of a read, write or sync of a disk, its wait in the driver's queue included, seconds";
        let mut family = encoder.encode_descriptor("disk_io_seconds", help, None, MetricType::Histogram)?;
        for (labels, times) in &self.0 {
            let buckets: Vec<(f64, u64)> = (0..CLASSES).map(|n| (bound(n), times.classes[n])).collect();
            let sum_s = times.total.as_secs_f64();
            family.encode_family(labels)?.encode_histogram::<NoLabelSet>(
                sum_s,
                times.count,
                &buckets,
                None,
            )?;
        }
        Ok(())
    }
}

/// The upper bound of a class, seconds.
fn bound(class: usize) -> f64 {
    if class + 1 == CLASSES { f64::MAX } else { (1_u64 << class) as f64 / 1e6 }
}
