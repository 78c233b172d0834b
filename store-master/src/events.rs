//! What the log tells of nodes and segments: who joins, leaves, is replaced, refused or given up, and what is drained.
//!
//! The master's events, as lines. Those that a peer could cause without end are written seldom, and counted always. How far
//! drains are is compared with what was told before.

use std::collections::BTreeMap;
use std::time::Instant;

use store_core::message::{DrainInfo, SegmentState};
use store_core::{Event, Master, NodeId, SegmentNo};
use tracing::{info, warn};

use crate::seldom::Seldom;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Mounts of a name that another live node has.
    pub(crate) names_held_total: u64,
    /// Mounts that took a name from another endpoint.
    pub(crate) taken_over_total: u64,
    /// Segments that are not active.
    states: BTreeMap<SegmentNo, (String, SegmentState)>,
    came: Seldom,
    refused: Seldom,
    reached: Seldom,
    expelled: Seldom,
}

impl Events {
    /// Tells what has happened since the last time.
    pub(crate) fn tell(&mut self, master: &mut Master, now: Instant) {
        // Whoever replaces another is mounted as well.
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

    fn line(&mut self, event: &Event, now: Instant) {
        match event {
            Event::SegmentMounted { node, name, endpoint, bytes, .. } => {
                if let Some(left_out) = self.came.may(now) {
                    info!(%name, %endpoint, node = %hex(*node), bytes, left_out, "node joined");
                }
            }
            Event::SegmentReplaced { name, endpoint, old_endpoint, objects_lost, .. }
                if endpoint == old_endpoint =>
            {
                if let Some(left_out) = self.came.may(now) {
                    info!(%name, %endpoint, objects_lost, left_out, "node mounted anew, with fresh memory");
                }
            }
            Event::SegmentReplaced { name, endpoint, old_endpoint, objects_lost, takeover, .. } => {
                self.taken_over_total += 1;
                if let Some(left_out) = self.came.may(now) {
                    warn!(
                        %name,
                        %endpoint,
                        %old_endpoint,
                        objects_lost,
                        takeover,
                        left_out,
                        "node replaced: another one has its name now"
                    );
                }
            }
            Event::SegmentUnmounted { node, name, endpoint, objects_lost, .. } => {
                let Some(left_out) = self.came.may(now) else { return };
                if *objects_lost == 0 {
                    info!(%name, %endpoint, node = %hex(*node), left_out, "node left");
                } else {
                    warn!(
                        %name,
                        %endpoint,
                        node = %hex(*node),
                        objects_lost,
                        left_out,
                        "node left, and objects with it: drain it first"
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
                "node given up: it was silent for too long"
            ),
            Event::MountRefused { name, endpoint, holder_endpoint, holder_silent_ms } => {
                self.names_held_total += 1;
                if let Some(left_out) = self.refused.may(now) {
                    warn!(
                        %name,
                        %endpoint,
                        %holder_endpoint,
                        holder_silent_ms,
                        left_out,
                        "mount refused: another live node has the name; choose another, or stop that one"
                    );
                }
            }
            Event::IncarnationTooHigh { name, endpoint, incarnation_ms, wall_ms } => {
                if let Some(left_out) = self.refused.may(now) {
                    warn!(
                        %name,
                        %endpoint,
                        node_clock_ms = incarnation_ms,
                        master_clock_ms = wall_ms,
                        left_out,
                        "mount refused: the node's clock is more than an hour ahead of this master's; correct the one that is wrong"
                    );
                }
            }
            Event::SegmentUnreachable { name, endpoint, .. } => {
                if let Some(left_out) = self.reached.may(now) {
                    warn!(%name, %endpoint, left_out, "clients cannot reach a segment");
                }
            }
            Event::SegmentReachable { name, endpoint, .. } => {
                if let Some(left_out) = self.reached.may(now) {
                    info!(%name, %endpoint, left_out, "a segment is well again, as its node says");
                }
            }
            Event::WriterExpelled { writer, node, freed_bytes } => {
                if let Some(left_out) = self.expelled.may(now) {
                    info!(
                        writer = %hex(*writer),
                        node = %hex(*node),
                        freed_bytes,
                        left_out,
                        "a writer that is gone was cut off: its space is free"
                    );
                }
            }
            Event::MetadataFull { bytes, bytes_max } => {
                warn!(
                    bytes,
                    bytes_max, "metadata is full, and puts are refused: raise store.metadata_bytes_max"
                );
            }
            Event::SegmentDrained { name, left_objects, left_bad, .. } if left_objects + left_bad > 0 => {
                warn!(
                    %name,
                    left_objects,
                    left_bad,
                    "a drain cannot move all: no other segment has room, or bytes are damaged; add memory, or remove these objects"
                )
            }
            // How far drains are is told by `drains`. Others are of a later release.
            _ => {}
        }
    }

    /// Whether drains may have gone on.
    pub(crate) fn is_draining(&self) -> bool {
        self.states.values().any(|(_, state)| *state == SegmentState::Draining)
    }

    /// Tells of the states that have changed.
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
    fn each_state_of_a_segment_is_told_once() {
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
        let mut told = |master: &Master| {
            let changed = events.changed(master);
            changed.into_iter().map(|(name, drain)| (name, drain.state)).collect::<Vec<_>>()
        };
        assert_eq!(told(&master), []);
        for state in [SegmentState::Maintenance, SegmentState::Draining, SegmentState::Active] {
            master.order_segment(now, &SegmentOrder { segment: no, state }).unwrap();
            assert_eq!(told(&master), [("n1".to_owned(), state)]);
            assert_eq!(told(&master), []);
        }
    }
}
