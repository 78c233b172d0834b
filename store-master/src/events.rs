//! Logs events of nodes and segments: a node joins, leaves, is replaced, refused or given up; a segment is
//! drained.
//!
//! Events that a peer could cause without limit are logged at a limited rate, and always counted. The
//! progress of drains is compared with what was logged before.

use std::collections::BTreeMap;
use std::time::Instant;

use store_core::message::{DrainInfo, SegmentState};
use store_core::{Event, Master, NodeId, SegmentNo};
use tracing::{info, warn};

use crate::log_limit::LogLimit;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Mounts of a name that another live node has.
    pub(crate) names_held_total: u64,
    /// Mounts that took a name from another endpoint.
    pub(crate) taken_over_total: u64,
    /// Segments that are not active, as last logged.
    states: BTreeMap<SegmentNo, (String, SegmentState)>,
    came: LogLimit,
    refused: LogLimit,
    reached: LogLimit,
    expelled: LogLimit,
}

impl Events {
    /// Logs the events since the last call.
    pub(crate) fn log(&mut self, master: &mut Master, now: Instant) {
        // A node that replaces another is reported as mounted as well.
        let mut replaced = None;
        while let Some(event) = master.poll_event() {
            match event {
                Event::SegmentMounted { name, .. } if replaced.as_ref() == Some(&name) => replaced = None,
                Event::SegmentReplaced { ref name, .. } => {
                    replaced = Some(name.clone());
                    self.line(&event, now);
                }
                _ => self.line(&event, now),
            }
        }
    }

    /// A line about a node that joins, leaves, is replaced or given up.
    fn line(&mut self, event: &Event, now: Instant) {
        match event {
            Event::SegmentMounted { node, name, endpoint, bytes, .. } => {
                if let Some(suppressed) = self.came.may(now) {
                    info!(%name, %endpoint, node = %hex(*node), bytes, suppressed, "node joined");
                }
            }
            Event::SegmentReplaced { name, endpoint, old_endpoint, objects_lost, .. }
                if endpoint == old_endpoint =>
            {
                if let Some(suppressed) = self.came.may(now) {
                    info!(%name, %endpoint, objects_lost, suppressed, "node mounted anew: its memory is empty");
                }
            }
            Event::SegmentReplaced { name, endpoint, old_endpoint, objects_lost, takeover, .. } => {
                self.taken_over_total += 1;
                if let Some(suppressed) = self.came.may(now) {
                    warn!(
                        %name,
                        %endpoint,
                        %old_endpoint,
                        objects_lost,
                        takeover,
                        suppressed,
                        "node replaced: another node has taken its name"
                    );
                }
            }
            Event::SegmentUnmounted { node, name, endpoint, objects_lost, .. } => {
                let Some(suppressed) = self.came.may(now) else { return };
                if *objects_lost == 0 {
                    info!(%name, %endpoint, node = %hex(*node), suppressed, "node left");
                } else {
                    warn!(
                        %name,
                        %endpoint,
                        node = %hex(*node),
                        objects_lost,
                        suppressed,
                        "node left without being drained: objects were lost; drain a node before it is stopped"
                    );
                }
            }
            Event::NodeGivenUp { node, name, endpoint, silent_ms, segments, objects_lost } => warn!(
                %name,
                %endpoint,
                node = %hex(*node),
                silent_ms,
                segments,
                objects_lost,
                "node given up: it sent no heartbeat for too long"
            ),
            Event::ExtentsGiven { node, first, count, epoch, .. } => {
                if let Some(suppressed) = self.came.may(now) {
                    info!(node = %hex(*node), first, count, epoch, suppressed, "node has extents of a CXL pool");
                }
            }
            _ => self.condition(event, now),
        }
    }

    /// A line about a refusal, or about the state of a segment or of the store.
    fn condition(&mut self, event: &Event, now: Instant) {
        match event {
            Event::MountRefused { name, endpoint, holder_endpoint, holder_silent_ms } => {
                self.names_held_total += 1;
                if let Some(suppressed) = self.refused.may(now) {
                    warn!(
                        %name,
                        %endpoint,
                        %holder_endpoint,
                        holder_silent_ms,
                        suppressed,
                        "mount refused: another live node has the name; choose another name, or stop that node"
                    );
                }
            }
            Event::IncarnationTooHigh { name, endpoint, incarnation_ms, wall_ms } => {
                if let Some(suppressed) = self.refused.may(now) {
                    warn!(
                        %name,
                        %endpoint,
                        node_clock_ms = incarnation_ms,
                        master_clock_ms = wall_ms,
                        suppressed,
                        "mount refused: the node's clock is more than an hour ahead of this master's; correct the wrong clock"
                    );
                }
            }
            Event::SegmentUnreachable { name, endpoint, .. } => {
                if let Some(suppressed) = self.reached.may(now) {
                    warn!(%name, %endpoint, suppressed, "clients cannot reach a segment: check its node and the network");
                }
            }
            Event::SegmentReachable { name, endpoint, .. } => {
                if let Some(suppressed) = self.reached.may(now) {
                    info!(%name, %endpoint, suppressed, "segment reachable again: its node sends heartbeats");
                }
            }
            Event::WriterExpelled { writer, node, freed_bytes } => {
                if let Some(suppressed) = self.expelled.may(now) {
                    info!(
                        writer = %hex(NodeId::new(*writer)),
                        node = %hex(*node),
                        freed_bytes,
                        suppressed,
                        "a writer was expelled: the space of its puts is released"
                    );
                }
            }
            Event::MetadataFull { bytes, bytes_max } => {
                warn!(
                    bytes,
                    bytes_max,
                    "puts are refused: the metadata has reached its limit; raise store.metadata_bytes_max"
                );
            }
            Event::SegmentDrained { name, left_objects, left_bad, .. } if left_objects + left_bad > 0 => {
                warn!(
                    %name,
                    left_objects,
                    left_bad,
                    "a drain cannot move all objects: no other segment has room, or bytes are damaged; add memory, or remove these objects"
                )
            }
            // The progress of drains is logged by `drains`. Other events are of a later release.
            _ => {}
        }
    }

    /// Whether there may be progress of drains to log.
    pub(crate) fn is_draining(&self) -> bool {
        self.states.values().any(|(_, state)| *state == SegmentState::Draining)
    }

    /// Logs the states that have changed.
    pub(crate) fn drains(&mut self, master: &Master) {
        for (name, drain) in self.changed(master) {
            match drain.state {
                SegmentState::Drained => {
                    info!(
                        name,
                        moved = drain.moved_total,
                        dropped = drain.dropped_total,
                        "segment drained: it can be unmounted"
                    );
                }
                state => info!(name, state = state.name(), "segment's state changed"),
            }
        }
    }

    fn changed(&mut self, master: &Master) -> Vec<(String, DrainInfo)> {
        let mut changed = Vec::new();
        let mut now = BTreeMap::new();
        for drain in master.drains() {
            let Some(segment) = master.segment(drain.segment) else { continue };
            let state = (segment.name.to_owned(), drain.state);
            if self.states.get(&drain.segment) != Some(&state) {
                changed.push((state.0.clone(), drain));
            }
            now.insert(drain.segment, state);
        }
        for (no, (name, _)) in std::mem::replace(&mut self.states, now) {
            if !self.states.contains_key(&no) && master.segment(no).is_some() {
                changed.push((name, DrainInfo { segment: no, ..DrainInfo::default() }));
            }
        }
        changed
    }
}

fn hex(node: NodeId) -> String {
    format!("{node:016x}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::message::{MountSegment, SegmentOrder};
    use store_core::{Incarnation, Instant as CoreInstant, MasterConfig};

    use super::*;

    #[test]
    fn each_state_of_a_segment_is_logged_once() {
        let mut master = Master::new(MasterConfig::default()).unwrap();
        let now = CoreInstant::ZERO;
        let segment = MountSegment {
            node: NodeId::new(5),
            incarnation: Incarnation::new(1),
            name: "n1",
            endpoint: "h:1",
            len: 1 << 20,
            key: 9,
            ..MountSegment::default()
        };
        let no = master.mount(now, &segment).unwrap().mounted().unwrap().segment;
        let mut events = Events::default();
        let mut logged = |master: &Master| {
            let changed = events.changed(master);
            changed.into_iter().map(|(name, drain)| (name, drain.state)).collect::<Vec<_>>()
        };
        assert_eq!(logged(&master), []);
        for state in [SegmentState::Maintenance, SegmentState::Draining, SegmentState::Active] {
            master.order_segment(now, &SegmentOrder { segment: no, state }).unwrap();
            assert_eq!(logged(&master), [("n1".to_owned(), state)]);
            assert_eq!(logged(&master), []);
        }
    }
}
