//! Metrics of segments.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use store_core::Master;

/// One segment's gauges.
#[derive(Debug)]
pub(crate) struct SegmentUse {
    name: String,
    capacity_bytes: u64,
    used_bytes: u64,
}

/// The segments' part of a snapshot.
pub(crate) fn of(master: &Master) -> Vec<SegmentUse> {
    let row = |info: store_core::message::SegmentInfo<'_>| SegmentUse {
        name: info.name.to_owned(),
        capacity_bytes: info.len,
        used_bytes: info.used,
    };
    master.segments().map(row).collect()
}

/// Registers the metrics, by segment.
pub(super) fn register(registry: &mut Registry, segments: &[SegmentUse]) {
    let capacity = Family::<SegmentLabels, Gauge>::default();
    let used = Family::<SegmentLabels, Gauge>::default();
    for segment in segments {
        let labels = SegmentLabels { segment: segment.name.clone() };
        capacity.get_or_create(&labels).set(super::signed(segment.capacity_bytes));
        used.get_or_create(&labels).set(super::signed(segment.used_bytes));
    }
    registry.register("segment_capacity_bytes", "Bytes of a segment", capacity);
    registry.register(
        "segment_allocated_bytes",
        "Bytes of a segment that are allocated or pending release",
        used,
    );
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SegmentLabels {
    segment: String,
}
