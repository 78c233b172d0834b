//! The fabrics within a host: `local` and `shm`.

use std::vec::Vec;

use te_fabric::ConfigError;
use te_host::{LocalConfig, LocalTransport, ShmConfig, ShmTransport};

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// Copies within the process.
pub(super) struct Local;

/// Shared memory between processes.
pub(super) struct Shm;

impl Fabric for Local {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        Ok(Rail::only(LocalTransport::new(LocalConfig { identity: context.identity })?))
    }
}

impl Fabric for Shm {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        Ok(Rail::only(ShmTransport::new(ShmConfig { identity: context.identity, ..context.config.shm })?))
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.shm.validate()
    }
}
