//! The settings of one transport, their defaults and their ranges.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use te_fabric::config::{ConfigError, check_ranges};

/// How the hosts that map a pool see each other's writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Coherence {
    /// The caches of different hosts do not know of each other: writers store past the cache, and readers
    /// drop what their cache holds before they read. Offsets and lengths are multiples of 64 bytes.
    #[default]
    Flush,
    /// The hardware keeps the caches coherent: one host maps the pool, or the devices do it (CXL 3,
    /// back-invalidation). The operator states that; it cannot be detected.
    Hardware,
}

impl Coherence {
    /// The granule of offsets and lengths, in bytes.
    #[must_use]
    pub const fn granule_bytes(self) -> u32 {
        match self {
            Self::Flush => crate::lines::LINE as u32,
            Self::Hardware => 1,
        }
    }
}

/// How a [`CxlTransport`](crate::CxlTransport) bounds itself. Every field has a default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// How the hosts see each other's writes: `flush`, or `hardware` where the hardware keeps their caches
    /// coherent. All hosts that map a pool use the same. Default flush.
    pub coherence: Coherence,
    /// The pools: paths of devdax devices, such as `/dev/dax0.0`, or of files that can be mapped shared. The
    /// program that makes the transport opens them. Default none.
    pub pools: Vec<PathBuf>,
    /// A peer that has not renewed its sign of life for this long does not count as connected, ms; 200 to
    /// 3,600,000. A peer renews it every 100 ms while it is polled and has attached a region. Default 5,000.
    pub peer_silence_ms_max: u32,
    /// Upper limit of slices that are accepted and not yet completed, 1 to 1,048,576. Default 4,096.
    #[serde(skip)]
    pub inflight_max: u32,
    /// In the mode `flush`: the program promises that each line of which it writes a part has no other writer
    /// meanwhile, such as a store whose allocations begin and end at lines. Offsets and lengths are then any:
    /// the rest of a line that is not written whole is read from memory and stored with it. Default off: a
    /// WRITE of a part of a line is refused.
    #[serde(skip)]
    pub sole_writer: bool,
    /// How peers identify this process, and expel it: the same for all transports of one engine. Default 0: a
    /// random one.
    #[serde(skip)]
    pub identity: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            coherence: Coherence::Flush,
            pools: Vec::new(),
            peer_silence_ms_max: 5_000,
            inflight_max: 4_096,
            sole_writer: false,
            identity: 0,
        }
    }
}

impl Config {
    /// The granule of remote offsets and lengths, in bytes.
    #[must_use]
    pub const fn granule_bytes(&self) -> u32 {
        if self.sole_writer { 1 } else { self.coherence.granule_bytes() }
    }

    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is out of its limits, with the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("peer_silence_ms_max", u64::from(self.peer_silence_ms_max), 200, 3_600_000),
            ("inflight_max", u64::from(self.inflight_max), 1, 1 << 20),
        ])
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::{Error, MapDeserializer};

    use super::*;

    #[test]
    fn settings_are_read_by_their_names() {
        let read = |name: &'static str, value: &'static str| {
            Config::deserialize(MapDeserializer::<_, Error>::new([(name, value)].into_iter()))
        };
        let hardware = Config { coherence: Coherence::Hardware, ..Config::default() };
        assert_eq!(read("coherence", "hardware"), Ok(hardware));
        assert_eq!(read("coherence", "flush"), Ok(Config::default()));
        assert!(read("coherence", "none").is_err() && read("identity", "1").is_err());
    }
}
