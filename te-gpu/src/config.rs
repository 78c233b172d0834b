//! The settings.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use te_fabric::ConfigError;

use crate::plan::PathTable;

/// The settings of GPUs' memory. `Config::default()` suits most hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The CUDA driver's library. Default: `libcuda.so.1`, where the dynamic linker and hosts of containers
    /// have it.
    pub cuda_library: Option<PathBuf>,
    /// The HIP library. Default: `libamdhip64.so`, where the dynamic linker and ROCm have it.
    pub hip_library: Option<PathBuf>,
    /// Length of a staging slot, bytes; 4,096 to 64 MiB. Default 256 KiB.
    pub slot_bytes: u32,
    /// Page-locked host memory for the slots of one stager, bytes; one slot to 1 GiB. A fabric has up to two
    /// stagers for each device. Default 16 MiB.
    pub ring_bytes: u32,
    /// Hops that one stager carries out at a time in one direction, a power of two from 16 to 65,536. Default
    /// 4,096.
    pub hops_max: u32,
    /// Whether the copy kernel may be used. It has not run on a device so far, and a fault of a kernel ends
    /// all work of the process on that device. Default off.
    pub kernel: bool,
    /// Thread blocks of the copy kernel, 1 to 64. More take more of the device from computing. Default 8.
    pub blocks_max: u32,
    /// Time in which the first stager of a device measures its copy paths, ms; 0 to 10,000, and with 0 it
    /// does not measure. Default 20.
    pub calibrate_ms_max: u32,
    /// Which copy path is used, instead of the one that was measured: a table as `Plan::table` prints it. A
    /// path that the table does not have is not tried either. Default: measured.
    pub paths: Option<String>,
    /// A stager that is dropped waits this long for its hops, ms; 1 to 60,000. Memory of hops that have not
    /// ended by then is never used again. Default 1,000.
    pub drain_ms_max: u32,
    /// Where sysfs is mounted. Default `/sys`.
    #[serde(skip)]
    pub sysfs: PathBuf,
    /// Where device files are. Default `/dev`.
    #[serde(skip)]
    pub dev: PathBuf,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cuda_library: None,
            hip_library: None,
            slot_bytes: 256 << 10,
            ring_bytes: 16 << 20,
            hops_max: 4_096,
            kernel: false,
            blocks_max: 8,
            calibrate_ms_max: 20,
            paths: None,
            drain_ms_max: 1_000,
            sysfs: PathBuf::from("/sys"),
            dev: PathBuf::from("/dev"),
        }
    }
}

impl Config {
    /// Checks every setting.
    ///
    /// # Errors
    /// The first setting that is outside its limits.
    pub fn validate(&self) -> Result<(), SettingError> {
        let rows = [
            ("slot_bytes", self.slot_bytes.into(), 4_096, 64 << 20),
            ("ring_bytes", self.ring_bytes.into(), self.slot_bytes.into(), 1 << 30),
            ("hops_max", self.hops_max.into(), 16, 65_536),
            ("blocks_max", self.blocks_max.into(), 1, 64),
            ("calibrate_ms_max", self.calibrate_ms_max.into(), 0, 10_000),
            ("drain_ms_max", self.drain_ms_max.into(), 1, 60_000),
        ];
        te_fabric::config::check_ranges(rows).map_err(SettingError::Range)?;
        if !self.hops_max.is_power_of_two() {
            return Err(SettingError::Hops(self.hops_max));
        }
        self.table().map(|_| ())
    }

    /// The copy paths that were set.
    pub(crate) fn table(&self) -> Result<Option<PathTable>, SettingError> {
        self.paths.as_deref().map(str::parse).transpose().map_err(SettingError::Paths)
    }
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingError {
    /// A number is outside its limits.
    Range(ConfigError),
    /// `hops_max` is not a power of two.
    Hops(u32),
    /// `paths` is not a table of copy paths.
    Paths(crate::plan::TableError),
}

impl core::fmt::Display for SettingError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Range(error) => write!(f, "setting {error}"),
            Self::Hops(value) => {
                write!(f, "setting hops_max is {value}: set it to a power of two, such as 4096")
            }
            Self::Paths(error) => write!(f, "setting paths: {error}"),
        }
    }
}

impl std::error::Error for SettingError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed_and_what_is_not_is_named() {
        assert_eq!(Config::default().validate(), Ok(()));
        for (config, expected) in [
            (
                Config { slot_bytes: 100, ..Config::default() },
                "slot_bytes is 100: set it to a value from 4096",
            ),
            (
                Config { ring_bytes: 4_096, ..Config::default() },
                "ring_bytes is 4096: set it to a value from 262144",
            ),
            (Config { hops_max: 100, ..Config::default() }, "hops_max is 100: set it to a power of two"),
            (Config { blocks_max: 0, ..Config::default() }, "blocks_max is 0: set it"),
            (Config { paths: Some("up".to_owned()), ..Config::default() }, "setting paths: "),
        ] {
            let error = config.validate().expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
