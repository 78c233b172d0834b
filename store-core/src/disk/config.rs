//! The settings of a disk.

use core::fmt;

use serde::{Deserialize, Serialize};

/// The settings of a disk with their defaults. They may differ from one opening of a disk to the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiskConfig {
    /// A batch is written when the objects that wait for it have this many bytes. Default 4 MiB.
    pub batch_bytes: u32,
    /// A batch with fewer bytes is written when its first object or tombstone has waited this long, ms.
    /// Default 100.
    pub batch_wait_ms: u32,
    /// Most batches of one stream that are being written at a time. Default 4.
    pub batches_max: u32,
    /// Most objects that wait for a batch. Default 4,096.
    pub queue_objects_max: u32,
    /// Most bytes of objects that wait for a batch. Default 256 MiB.
    pub queue_bytes_max: u64,
    /// Most objects that are being read at a time. Default 1,024.
    pub reads_max: u32,
    /// Most bytes that are being read at a time. Default 256 MiB.
    pub read_bytes_max: u64,
    /// The disk is synced when this many bytes were written since the last time. Default 64 MiB.
    pub sync_bytes: u64,
    /// The disk is synced when something was written this long ago, ms. Default 1,000.
    pub sync_wait_ms: u32,
    /// Extents that are kept free, so that no write waits for the master. Default 3.
    pub free_extents: u32,
    /// How many times faster extents of objects on trial age. Default 3.
    pub trial_weight: u32,
    /// Most bytes of tombstones, which begin every extent; at most a sixteenth of an extent counts. A
    /// tombstone takes 26 bytes and its key. Default 1 MiB.
    pub tombstone_bytes_max: u32,
    /// With this many failed reads and writes within an hour the disk is used for reads only. Default 8.
    pub errors_max: u32,
    /// While an order is not completed for this long, nothing more is ordered, ms. Default 5,000.
    pub stall_ms: u32,
    /// Most bytes written per second, averaged over the last second or batch; 0: as many as possible.
    /// Default 0.
    pub wear_bytes_per_s: u64,
}

impl Default for DiskConfig {
    fn default() -> Self {
        Self {
            batch_bytes: 4 << 20,
            batch_wait_ms: 100,
            batches_max: 4,
            queue_objects_max: 4_096,
            queue_bytes_max: 256 << 20,
            reads_max: 1_024,
            read_bytes_max: 256 << 20,
            sync_bytes: 64 << 20,
            sync_wait_ms: 1_000,
            free_extents: 3,
            trial_weight: 3,
            tombstone_bytes_max: 1 << 20,
            errors_max: 8,
            stall_ms: 5_000,
            wear_bytes_per_s: 0,
        }
    }
}

impl DiskConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// The first setting with which nothing could be stored or read.
    pub fn validate(&self) -> Result<(), DiskConfigError> {
        let positive = [
            ("batch_bytes", u64::from(self.batch_bytes)),
            ("batches_max", self.batches_max.into()),
            ("queue_objects_max", self.queue_objects_max.into()),
            ("queue_bytes_max", self.queue_bytes_max),
            ("reads_max", self.reads_max.into()),
            ("read_bytes_max", self.read_bytes_max),
            ("free_extents", self.free_extents.into()),
            ("trial_weight", self.trial_weight.into()),
            ("tombstone_bytes_max", self.tombstone_bytes_max.into()),
            ("errors_max", self.errors_max.into()),
            ("stall_ms", self.stall_ms.into()),
        ];
        match positive.iter().find(|(_, value)| *value == 0) {
            Some((setting, _)) => Err(DiskConfigError { setting }),
            None => Ok(()),
        }
    }
}

/// A setting that is 0 and must not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfigError {
    /// Its name.
    pub setting: &'static str,
}

impl fmt::Display for DiskConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is 0, so that no object could be stored: set it to at least 1", self.setting)
    }
}

impl core::error::Error for DiskConfigError {}
