//! [`ReplicateConfig`]: how Mooncake's callers describe a put.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use store_client::{Pin, PutOptions, Retention};
use store_core::message::{Existing, Inherit, InheritPin, SOFT_PIN_TTL_MS_MAX};

use crate::codes::{StoreCode, store as code};

/// Most replicas of an object.
const REPLICAS_MAX: u64 = store_core::message::REPLICAS_MAX as u64;

/// What a put does about the soft pin of the object that it replaces (`MS/include/replica.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftPin {
    /// A new object has none; an object that is replaced keeps its own.
    #[default]
    Preserve,
    /// The object has one.
    Enable,
    /// The object has none.
    Disable,
}

/// Mooncake's `ReplicateConfig`: number of replicas, where they should be, and how long they are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicateConfig {
    /// Number of replicas in memory, at least 1. At least one is made, and at most 8.
    pub replica_num: u64,
    /// Number of replicas over NVMe over Fabrics: 0.
    pub nof_replica_num: u64,
    /// Number of replicas in a distributed file system: 0.
    pub dfs_replica_num: u64,
    /// What happens to the soft pin.
    pub soft_pin_action: SoftPin,
    /// How long the soft pin is valid, milliseconds; only with [`SoftPin::Enable`].
    pub soft_pin_ttl_ms: Option<u64>,
    /// Whether the object is never evicted.
    pub with_hard_pin: bool,
    /// Names of segments to try first, in their order. The first eight that exist count.
    pub preferred_segments: Vec<String>,
    /// Whether the segments of this process are tried next.
    pub prefer_alloc_in_same_node: bool,
    /// The group of each key of a batch; members of a group are evicted together.
    pub group_ids: Option<Vec<String>>,
}

impl Default for ReplicateConfig {
    fn default() -> Self {
        Self {
            replica_num: 1,
            nof_replica_num: 0,
            dfs_replica_num: 0,
            soft_pin_action: SoftPin::default(),
            soft_pin_ttl_ms: None,
            with_hard_pin: false,
            preferred_segments: Vec::new(),
            prefer_alloc_in_same_node: false,
            group_ids: None,
        }
    }
}

impl ReplicateConfig {
    /// Whether the placement has to be resolved: names of segments, or the own node.
    pub(super) fn names_places(&self) -> bool {
        self.prefer_alloc_in_same_node || !self.preferred_segments.is_empty()
    }

    /// The options of a put of `keys` keys, without placement and groups.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for no replica, for replicas that this store does not have, for a time to live
    /// without a soft pin, and for another number of groups than keys.
    pub(super) fn options(&self, keys: usize, upsert: bool) -> Result<PutOptions, StoreCode> {
        let refuse = |why: &str| {
            log::error!("put: {why}");
            Err(code::INVALID_PARAMS)
        };
        if self.replica_num == 0 {
            return refuse("replica_num is 0: ask for at least one replica");
        }
        if self.nof_replica_num > 0 || self.dfs_replica_num > 0 {
            return refuse(
                "this store keeps replicas in memory alone: leave nof_replica_num and dfs_replica_num at 0",
            );
        }
        if self.group_ids.as_ref().is_some_and(|groups| groups.len() != keys) {
            return refuse("group_ids has another length than the keys");
        }
        let soft_pin_ttl_ms = match self.soft_pin_ttl_ms.map(u32::try_from) {
            None => None,
            Some(Ok(ttl_ms @ 1..=SOFT_PIN_TTL_MS_MAX)) if self.soft_pin_action == SoftPin::Enable => {
                Some(ttl_ms)
            }
            Some(_) => return refuse("soft_pin_ttl_ms needs ENABLE, and a value from 1 ms to 30 days"),
        };
        let pin = match (self.with_hard_pin, self.soft_pin_action) {
            (true, _) => Pin::Hard,
            (false, SoftPin::Enable) => Pin::Soft,
            (false, SoftPin::Preserve | SoftPin::Disable) => Pin::None,
        };
        // A hard pin outlasts every soft one.
        let soft_pin_ttl_ms = soft_pin_ttl_ms.filter(|_| pin == Pin::Soft);
        let inherited = match self.soft_pin_action {
            SoftPin::Preserve => InheritPin::Stronger,
            SoftPin::Enable | SoftPin::Disable => InheritPin::Hard,
        };
        let existing = match upsert {
            true => Existing::Replace(Inherit { pin: inherited, group: true }),
            false => Existing::Keep,
        };
        Ok(PutOptions {
            replicas: self.replica_num.min(REPLICAS_MAX) as u8,
            retention: Retention { pin, soft_pin_ttl_ms, ..Retention::DEFAULT },
            existing,
            ..PutOptions::DEFAULT
        })
    }
}

/// The number that the members of a group have in common. The same name has the same number in every process
/// of a release.
pub(super) fn group_number(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(change: impl FnOnce(&mut ReplicateConfig)) -> Result<PutOptions, StoreCode> {
        let mut config = ReplicateConfig::default();
        change(&mut config);
        config.options(2, false)
    }

    #[test]
    fn pins_and_their_validity() {
        let pin = |change: fn(&mut ReplicateConfig)| options(change).unwrap().retention;
        assert_eq!(pin(|_| ()).pin, Pin::None);
        assert_eq!(pin(|config| config.with_hard_pin = true).pin, Pin::Hard);
        let soft = |config: &mut ReplicateConfig| {
            (config.soft_pin_action, config.soft_pin_ttl_ms) = (SoftPin::Enable, Some(5_000));
        };
        assert_eq!((pin(soft).pin, pin(soft).soft_pin_ttl_ms), (Pin::Soft, Some(5_000)));
        let both = pin(|config| {
            (config.soft_pin_action, config.soft_pin_ttl_ms) = (SoftPin::Enable, Some(5_000));
            config.with_hard_pin = true;
        });
        assert_eq!((both.pin, both.soft_pin_ttl_ms), (Pin::Hard, None));
    }

    #[test]
    fn what_the_store_cannot_do_is_refused() {
        for change in [
            (|config: &mut ReplicateConfig| config.replica_num = 0) as fn(&mut ReplicateConfig),
            |config| config.nof_replica_num = 1,
            |config| config.dfs_replica_num = 1,
            |config| config.soft_pin_ttl_ms = Some(1),
            |config| (config.soft_pin_action, config.soft_pin_ttl_ms) = (SoftPin::Enable, Some(0)),
            |config| (config.soft_pin_action, config.soft_pin_ttl_ms) = (SoftPin::Enable, Some(u64::MAX)),
            |config| config.group_ids = Some(vec!["one".into()]),
        ] {
            assert_eq!(options(change), Err(code::INVALID_PARAMS));
        }
    }

    #[test]
    fn more_replicas_than_there_can_be_are_as_many_as_there_can_be() {
        assert_eq!(options(|config| config.replica_num = u64::MAX).unwrap().replicas, 8);
    }

    #[test]
    fn an_upsert_inherits_what_its_action_says() {
        let inherit = |action| {
            let config = ReplicateConfig { soft_pin_action: action, ..ReplicateConfig::default() };
            config.options(1, true).unwrap().existing
        };
        let of = |pin| Existing::Replace(Inherit { pin, group: true });
        assert_eq!(inherit(SoftPin::Preserve), of(InheritPin::Stronger));
        assert_eq!(inherit(SoftPin::Enable), of(InheritPin::Hard));
        assert_eq!(inherit(SoftPin::Disable), of(InheritPin::Hard));
    }
}
