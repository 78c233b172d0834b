//! Metrics of the disks of all nodes, as the master sees them.

use prometheus_client::registry::Registry;
use store_core::Stats;

use super::{counter, gauge};

/// Registers the metrics. They are zero where no node has a disk.
pub(super) fn register(registry: &mut Registry, stats: &Stats) {
    for (name, help, value) in [
        ("disks", "Disks of nodes that are alive", stats.disks),
        ("disks_away", "Disks whose nodes are gone, and that are remembered", stats.disks_away),
        ("disk_capacity_bytes", "Bytes of the disks of nodes that are alive", stats.disk_capacity_bytes),
        ("disk_objects", "Objects on disks, also on those that are away", stats.disk_objects),
        ("disk_object_bytes", "Bytes of objects on disks, as they are stored", stats.disk_object_bytes),
        (
            "disk_tombstones",
            "Removed objects that nodes have not yet been confirmed to forget",
            stats.disk_tombstones,
        ),
        (
            "disk_backlog_bytes",
            "Bytes that are to be copied to disks before they are evicted, and are not there yet",
            stats.disk_backlog_bytes,
        ),
    ] {
        gauge(registry, name, help, value);
    }
    for (name, help, value) in [
        ("disk_hits", "Keys found by get on a disk alone", stats.disk_hits_total),
        ("demotions", "Objects copied to disks", stats.demotions_total),
        ("demoted_bytes", "Bytes of objects copied to disks", stats.demoted_bytes_total),
        (
            "demotions_failed",
            "Copies to disks that failed, or whose object was gone when they ended",
            stats.demotions_failed_total,
        ),
        ("promotions", "Objects on disks that were to get a replica in memory again", stats.promotions_total),
        (
            "evictions_to_disk",
            "Evicted objects that stay readable, because they are on a disk",
            stats.evictions_to_disk_total,
        ),
        ("disk_adopted", "Objects that disks brought with them", stats.disk_adopted_total),
        ("disk_reclaimed", "Objects whose extents were given up by their disks", stats.disk_reclaimed_total),
        ("disk_lost", "Objects that disks could not read, or that were damaged there", stats.disk_lost_total),
    ] {
        counter(registry, name, help, value);
    }
}
