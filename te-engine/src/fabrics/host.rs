//! The fabrics within a host: `local` and `shm`.

use std::vec::Vec;

use te_fabric::ConfigError;
use te_host::{LocalConfig, LocalTransport, ShmTransport};

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// Copies within the process.
pub(super) struct Local;

/// Shared memory between processes.
pub(super) struct Shm;

impl Fabric for Local {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        Ok(Rail::only(LocalTransport::new(LocalConfig::of(context.identity))?))
    }
}

impl Fabric for Shm {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let mut config = context.config.shm;
        config.identity = context.identity;
        Ok(Rail::only(ShmTransport::new(config)?))
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.shm.validate()
    }
}
