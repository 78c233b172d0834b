//! What the log tells of nodes and segments: who joins, leaves, is replaced or given up, and what is drained.
//!
//! The roll is called after whatever may have changed it, and compared with the one before.

use std::collections::BTreeMap;

use store_core::message::SegmentState;
use store_core::{Master, SegmentNo};
use tracing::{info, warn};

/// What may have changed the roll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A node mounted, or unmounted.
    Request,
    /// Time passed.
    Timeout,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Roll {
    segments: BTreeMap<SegmentNo, Known>,
    objects_lost: u64,
    /// Mounts that took a name from another endpoint.
    taken_over_total: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    node: u64,
    name: String,
    endpoint: String,
    bytes: u64,
    state: SegmentState,
}

/// A change, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Joined { name: String, endpoint: String, node: u64, bytes: u64 },
    Left { name: String, endpoint: String, node: u64, objects_lost: u64 },
    GivenUp { name: String, endpoint: String, node: u64, objects_lost: u64 },
    Replaced { name: String, endpoint: String, old_endpoint: String, objects_lost: u64 },
    State { name: String, state: SegmentState, moved: u64, left: u64 },
}

impl Roll {
    pub(crate) fn taken_over_total(&self) -> u64 {
        self.taken_over_total
    }

    /// Whether time alone may have changed it: a node was given up, or a drain goes on.
    pub(crate) fn may_have_changed(&self, master: &Master) -> bool {
        master.segments().count() != self.segments.len()
            || self.segments.values().any(|known| known.state == SegmentState::Draining)
    }

    /// Compares, and tells the log.
    pub(crate) fn call(&mut self, master: &Master, cause: Cause) {
        self.compare(master, cause).iter().for_each(tell);
    }

    fn compare(&mut self, master: &Master, cause: Cause) -> Vec<Change> {
        let drains: BTreeMap<SegmentNo, _> = master.drains().map(|info| (info.segment, info)).collect();
        let now: BTreeMap<SegmentNo, Known> = master
            .segments()
            .map(|info| {
                let known = Known {
                    node: info.node,
                    name: info.name.to_owned(),
                    endpoint: info.endpoint.to_owned(),
                    bytes: info.len,
                    state: drains.get(&info.segment).map_or(SegmentState::Active, |drain| drain.state),
                };
                (info.segment, known)
            })
            .collect();
        let before = std::mem::replace(&mut self.segments, now);
        let mut gone: Vec<&Known> =
            before.iter().filter(|(no, _)| !self.segments.contains_key(no)).map(|(_, known)| known).collect();
        let lost_total = master.stats().objects_lost_total;
        let mut objects_lost = lost_total - std::mem::replace(&mut self.objects_lost, lost_total);
        let mut changes = Vec::new();
        for (no, known) in &self.segments {
            let Known { node, name, endpoint, bytes, state } = known.clone();
            match before.get(no) {
                Some(old) if old.state == state => {}
                Some(_) => {
                    let drain = drains.get(no).copied().unwrap_or_default();
                    let left = drain.left_no_room + drain.left_unfinished + drain.left_bad;
                    changes.push(Change::State { name, state, moved: drain.moved_total, left });
                }
                None => match gone.iter().position(|old| old.name == name) {
                    Some(at) => {
                        let old = gone.swap_remove(at);
                        self.taken_over_total += u64::from(old.endpoint != endpoint);
                        let (old_endpoint, objects_lost) =
                            (old.endpoint.clone(), std::mem::take(&mut objects_lost));
                        changes.push(Change::Replaced { name, endpoint, old_endpoint, objects_lost });
                    }
                    None => changes.push(Change::Joined { name, endpoint, node, bytes }),
                },
            }
        }
        for old in gone {
            // What was lost with several at once is told with the first.
            let objects_lost = std::mem::take(&mut objects_lost);
            let Known { node, name, endpoint, .. } = old.clone();
            changes.push(match cause {
                Cause::Request => Change::Left { name, endpoint, node, objects_lost },
                Cause::Timeout => Change::GivenUp { name, endpoint, node, objects_lost },
            });
        }
        changes
    }
}

fn tell(change: &Change) {
    match change {
        Change::Joined { name, endpoint, node, bytes } => {
            info!(name, endpoint, node = %format_args!("{node:016x}"), bytes, "node joined");
        }
        Change::Left { name, endpoint, node, objects_lost: 0 } => {
            info!(name, endpoint, node = %format_args!("{node:016x}"), "node left");
        }
        Change::Left { name, endpoint, node, objects_lost } => {
            warn!(name, endpoint, node = %format_args!("{node:016x}"), objects_lost, "node left, and objects with it: drain it first");
        }
        Change::GivenUp { name, endpoint, node, objects_lost } => {
            warn!(name, endpoint, node = %format_args!("{node:016x}"), objects_lost, "node given up: it was silent for node_ttl_ms");
        }
        Change::Replaced { name, endpoint, old_endpoint, objects_lost } if endpoint == old_endpoint => {
            info!(name, endpoint, objects_lost, "node mounted anew, with fresh memory");
        }
        Change::Replaced { name, endpoint, old_endpoint, objects_lost } => {
            warn!(name, endpoint, old_endpoint, objects_lost, "node replaced: another one has its name now");
        }
        Change::State { name, state: SegmentState::Drained, moved, left } => {
            info!(name, moved, left, "segment drained: it can be unmounted");
        }
        Change::State { name, state, .. } => info!(name, state = state.name(), "segment's state changed"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::message::{MountSegment, PutOptions, SegmentOrder};
    use store_core::{Instant, MasterConfig};

    use super::*;

    fn mount(master: &mut Master, now: Instant, name: &str, endpoint: &str, incarnation: u64) -> SegmentNo {
        let segment = MountSegment {
            node: 5,
            incarnation,
            name,
            endpoint,
            base: 0,
            len: 1 << 20,
            export: Default::default(),
            epoch: 0,
            key: 9,
            takeover: true,
        };
        master.mount(now, &segment).unwrap().mounted().unwrap().segment
    }

    #[test]
    fn who_joins_is_replaced_drains_and_is_given_up_is_told_with_what_was_lost() {
        let mut master = Master::new(MasterConfig::default()).unwrap();
        let mut roll = Roll::default();
        let start = Instant::ZERO + std::time::Duration::from_secs(1);
        let (name, endpoint) = ("n1".to_owned(), "h:1".to_owned());
        mount(&mut master, start, "n1", "h:1", 1);
        let joined =
            Change::Joined { name: name.clone(), endpoint: endpoint.clone(), node: 5, bytes: 1 << 20 };
        assert_eq!(roll.compare(&master, Cause::Request), [joined]);
        assert_eq!(roll.compare(&master, Cause::Timeout), []);

        let put = master.put_start(start, b"k", 100, &PutOptions::DEFAULT).unwrap();
        master.put_end(start, b"k", put.generation, 0).unwrap();
        let no = mount(&mut master, start, "n1", "h:2", 2);
        let replaced = Change::Replaced {
            name: name.clone(),
            endpoint: "h:2".into(),
            old_endpoint: endpoint,
            objects_lost: 1,
        };
        assert_eq!(roll.compare(&master, Cause::Request), [replaced]);
        assert_eq!(roll.taken_over_total(), 1);

        let order = SegmentOrder { segment: no, state: SegmentState::Maintenance };
        master.order_segment(start, &order).unwrap();
        let state = Change::State { name: name.clone(), state: SegmentState::Maintenance, moved: 0, left: 0 };
        assert_eq!(roll.compare(&master, Cause::Request), [state]);

        assert!(!roll.may_have_changed(&master));
        master.handle_timeout(start + std::time::Duration::from_secs(60));
        assert!(roll.may_have_changed(&master));
        let given_up = Change::GivenUp { name, endpoint: "h:2".into(), node: 5, objects_lost: 0 };
        assert_eq!(roll.compare(&master, Cause::Timeout), [given_up]);
    }
}
