//! Settings of the copies of hot prefixes in the store.

use serde::{Deserialize, Serialize};

use super::{ConfigError, wrong};

/// Most replicas of an object; that of the store.
const REPLICAS_MAX: u32 = store_core::message::REPLICAS_MAX as u32;

/// Copies of hot prefixes in the store, whose events are those of an engine of the kind `snowskin`. A prefix
/// is hot when what requests fetch of it takes much of the time of a network card; its objects then get one
/// more replica each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Where the masters of the store are, as in `cluster.master`; they are asked for the copies, with the
    /// secrets of the section `cluster`. Empty: no prefix is copied. Default empty.
    pub master: String,
    /// Whether copies are only counted (metric `snowskin_conductor_store_copies_refused_total`, reason
    /// `dry_run`). Default false.
    pub dry_run: bool,
    /// A prefix is hot when requests fetch so much of it from the store that a network card is busy with it
    /// for this long, milliseconds, at least 1; what was 30 s ago counts half. Default 2,000.
    pub hot_ms: u32,
    /// Most replicas of an object, 2 to 8; one that has as many is not copied. Default 3.
    pub replicas_max: u32,
    /// Most copies that are in progress at a time, in objects, at least 1. Default 256.
    pub copies_max: u32,
    /// Most copies that are begun in a minute, in objects, at least 1. Default 4,096.
    pub copies_per_min_max: u32,
    /// Most memory for the names of objects, MiB, 1 to 65,536. Objects whose names do not fit are not copied.
    /// Default 256.
    pub names_mib_max: u32,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            master: String::new(),
            dry_run: false,
            hot_ms: 2_000,
            replicas_max: 3,
            copies_max: 256,
            copies_per_min_max: 4_096,
            names_mib_max: 256,
        }
    }
}

impl StoreConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let ranges = [
            ("hot_ms", self.hot_ms, 1, u32::MAX),
            ("replicas_max", self.replicas_max, 2, REPLICAS_MAX),
            ("copies_max", self.copies_max, 1, u32::MAX),
            ("copies_per_min_max", self.copies_per_min_max, 1, u32::MAX),
            ("names_mib_max", self.names_mib_max, 1, 65_536),
        ];
        for (field, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                return Err(wrong(&format!("store.{field}"), format!("must be {least} to {most}")));
            }
        }
        if !self.master.is_empty() && self.master.parse::<store_client::Masters>().is_err() {
            let need = "must be HOST:PORT of a master, several separated by commas, or etcd://HOST:PORT/NAME";
            return Err(wrong("store.master", need));
        }
        Ok(())
    }
}
