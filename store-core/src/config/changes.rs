//! The settings that can be changed while the master serves.
//!
//! A change is a command like any other: standbys repeat it, the journal has it, and a master that takes over
//! or is started again keeps it, until it is taken back. The others are changed by a start, or by a
//! switchover to a master that was started with other ones.

use serde::{Deserialize, Serialize};

use super::MasterConfig;
use crate::{AllocationStrategy, EvictionPolicy, ReplicationMode};

/// Generates [`ConfigChanges`] and what is done with all of its fields. A row: the name of the setting, the
/// field and its type, and where [`MasterConfig`] has it.
macro_rules! changeable {
    ($($name:literal, $field:ident: $type:ty = $($path:ident).+;)*) => {
        /// Values of settings that can be changed while the master serves; `None`: not this one. In JSON a
        /// setting has the name that it has in [`MasterConfig`], with a dot before nested ones, such as
        /// `tasks.attempts_max`.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct ConfigChanges {
            $(
                #[doc = concat!("See [`MasterConfig`], `", $name, "`.")]
                #[serde(rename = $name)]
                pub $field: Option<$type>,
            )*
        }

        impl ConfigChanges {
            /// The names of all settings that can be changed.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// What makes `to` of `from`, of the settings that can be changed.
            #[must_use]
            pub fn between(from: &MasterConfig, to: &MasterConfig) -> Self {
                Self { $($field: (from.$($path).+ != to.$($path).+).then_some(to.$($path).+),)* }
            }

            /// The names of the settings that have a value here.
            pub fn names(&self) -> impl Iterator<Item = &'static str> {
                [$(self.$field.is_some().then_some($name)),*].into_iter().flatten()
            }

            /// Writes the values into settings.
            pub fn apply(&self, config: &mut MasterConfig) {
                $(if let Some(value) = self.$field { config.$($path).+ = value; })*
            }
        }

        impl Overrides {
            /// Sets, until it is taken back.
            fn set(&mut self, changes: &ConfigChanges, config: &mut MasterConfig) {
                $(if let Some(value) = changes.$field {
                    let value = core::mem::replace(&mut config.$($path).+, value);
                    self.start.$field.get_or_insert(value);
                    self.set.$field = changes.$field;
                })*
            }

            /// Takes back what was set.
            fn unset(&mut self, which: &ConfigChanges, config: &mut MasterConfig) {
                $(if which.$field.is_some() {
                    self.set.$field = None;
                    if let Some(value) = self.start.$field.take() {
                        config.$($path).+ = value;
                    }
                })*
            }

            /// The settings of the start are others: what is set stays.
            fn restart(&mut self, changes: &ConfigChanges, config: &mut MasterConfig) {
                $(if let Some(value) = changes.$field {
                    match &mut self.start.$field {
                        Some(start) => *start = value,
                        None => config.$($path).+ = value,
                    }
                })*
            }

            /// Sets in the settings of another start what is set.
            pub(crate) fn set_again(&mut self, config: &mut MasterConfig) {
                let set = core::mem::take(self).set;
                self.set(&set, config);
            }
        }
    };
}

changeable! {
    "lease_ttl_ms", lease_ttl_ms: u32 = lease_ttl_ms;
    "put_start_discard_timeout_ms", put_start_discard_timeout_ms: u32 = put_start_discard_timeout_ms;
    "put_start_release_timeout_ms", put_start_release_timeout_ms: u32 = put_start_release_timeout_ms;
    "allocation_strategy", allocation_strategy: AllocationStrategy = allocation_strategy;
    "slow_start_ms", slow_start_ms: u32 = slow_start_ms;
    "eviction", eviction: EvictionPolicy = eviction;
    "soft_pin_ttl_ms", soft_pin_ttl_ms: u32 = soft_pin_ttl_ms;
    "hard_pin_share_max", hard_pin_share_max: f64 = hard_pin_share_max;
    "eviction_high_watermark", eviction_high_watermark: f64 = eviction_high_watermark;
    "eviction_ratio", eviction_ratio: f64 = eviction_ratio;
    "demote_ahead", demote_ahead: f64 = demote_ahead;
    "disk_away_ms", disk_away_ms: u32 = disk_away_ms;
    "evictions_per_call_max", evictions_per_call_max: u32 = evictions_per_call_max;
    "objects_max", objects_max: u32 = objects_max;
    "segments_max", segments_max: u32 = segments_max;
    "segment_bytes_max", segment_bytes_max: u64 = segment_bytes_max;
    "nodes_max", nodes_max: u32 = nodes_max;
    "metadata_bytes_max", metadata_bytes_max: u64 = metadata_bytes_max;
    "session_puts_max", session_puts_max: u32 = session_puts_max;
    "tenant_puts_max", tenant_puts_max: u32 = tenant_puts_max;
    "session_pool_pages_max", session_pool_pages_max: u32 = session_pool_pages_max;
    "tenant_pool_pages_max", tenant_pool_pages_max: u32 = tenant_pool_pages_max;
    "tasks.unfinished_max", tasks_unfinished_max: u32 = tasks.unfinished_max;
    "tasks.finished_max", tasks_finished_max: u32 = tasks.finished_max;
    "tasks.per_node_max", tasks_per_node_max: u32 = tasks.per_node_max;
    "tasks.pending_timeout_ms", tasks_pending_timeout_ms: u32 = tasks.pending_timeout_ms;
    "tasks.processing_timeout_ms", tasks_processing_timeout_ms: u32 = tasks.processing_timeout_ms;
    "tasks.attempts_max", tasks_attempts_max: u32 = tasks.attempts_max;
    "tasks.drain_moves_max", tasks_drain_moves_max: u32 = tasks.drain_moves_max;
    "tasks.bad_reports_min", tasks_bad_reports_min: u32 = tasks.bad_reports_min;
    "replication.mode", replication_mode: ReplicationMode = replication.mode;
    "replication.gets_per_s_min", replication_gets_per_s_min: f64 = replication.gets_per_s_min;
    "replication.window_ms", replication_window_ms: u32 = replication.window_ms;
    "replication.replicas_max", replication_replicas_max: u8 = replication.replicas_max;
    "replication.tasks_per_s_max", replication_tasks_per_s_max: u32 = replication.tasks_per_s_max;
}

/// A change of settings while the master serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConfigChange {
    /// What the values are.
    pub how: ChangeHow,
    /// The values.
    pub changes: ConfigChanges,
}

/// What the values of a [`ConfigChange`] are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChangeHow {
    /// They are in force from now on, whatever the settings of a start say, until they are taken back.
    #[default]
    Set,
    /// These settings are again those of the start; the values have no meaning.
    Unset,
    /// They are the settings of the start from now on, as if the master had been started with them: what was
    /// set stays in force.
    Start,
}

/// What was set while the master served, and what the start had there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overrides {
    pub(crate) set: ConfigChanges,
    start: ConfigChanges,
}

impl Overrides {
    pub(crate) fn change(&mut self, change: &ConfigChange, config: &mut MasterConfig) {
        match change.how {
            ChangeHow::Set => self.set(&change.changes, config),
            ChangeHow::Unset => self.unset(&change.changes, config),
            ChangeHow::Start => self.restart(&change.changes, config),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(lease_ttl_ms: u32) -> MasterConfig {
        MasterConfig { lease_ttl_ms, ..MasterConfig::default() }
    }

    fn lease(value: u32) -> ConfigChanges {
        ConfigChanges { lease_ttl_ms: Some(value), ..ConfigChanges::default() }
    }

    #[test]
    fn what_is_set_survives_other_settings_of_the_start_until_it_is_taken_back() {
        let (mut overrides, mut config) = (Overrides::default(), ms(1));
        let mut change = |how, value, config: &mut MasterConfig| {
            overrides.change(&ConfigChange { how, changes: lease(value) }, config);
            (config.lease_ttl_ms, overrides.set.lease_ttl_ms)
        };
        assert_eq!(change(ChangeHow::Start, 2, &mut config), (2, None));
        assert_eq!(change(ChangeHow::Set, 3, &mut config), (3, Some(3)));
        assert_eq!(change(ChangeHow::Set, 4, &mut config), (4, Some(4)));
        assert_eq!(change(ChangeHow::Start, 5, &mut config), (4, Some(4)));
        assert_eq!(change(ChangeHow::Unset, 0, &mut config), (5, None));
        assert_eq!(change(ChangeHow::Unset, 0, &mut config), (5, None));
        change(ChangeHow::Set, 6, &mut config);
        let mut other = ms(7);
        overrides.set_again(&mut other);
        assert_eq!(other.lease_ttl_ms, 6);
        overrides.change(&ConfigChange { how: ChangeHow::Unset, changes: lease(0) }, &mut other);
        assert_eq!(other.lease_ttl_ms, 7);
    }

    #[test]
    fn differences_have_the_names_of_the_settings() {
        let mut config = ms(9);
        config.tasks.attempts_max = 2;
        config.key_bytes_max = 9;
        let changes = ConfigChanges::between(&MasterConfig::default(), &config);
        assert!(changes.names().eq(["lease_ttl_ms", "tasks.attempts_max"]), "{changes:?}");
        let mut applied = MasterConfig::default();
        changes.apply(&mut applied);
        assert_eq!(applied, MasterConfig { key_bytes_max: applied.key_bytes_max, ..config });
    }
}
