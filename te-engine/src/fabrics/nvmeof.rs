//! The fabric NVMe over TCP: one rail, which serves this engine's regions as namespaces and reaches those of
//! peers.

use std::net::SocketAddr;
use std::vec::Vec;

use te_fabric::ConfigError;
use te_nvmeof::NvmeofTransport;

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// NVMe over TCP: one rail.
pub(super) struct NvmeOf;

impl Fabric for NvmeOf {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let config = context.config;
        Ok(Rail::only(NvmeofTransport::new(te_nvmeof::Config {
            bind: SocketAddr::new(context.control.ip(), config.nvmeof.port),
            advertise: context.advertise(),
            inflight_max: config.inflight_slices_max.min(1 << 20),
            identity: context.identity,
            ..config.nvmeof.clone()
        })?))
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.nvmeof.validate()
    }

    fn is_asked_for(&self, config: &Config) -> bool {
        config.nvmeof.port != 0
    }
}
