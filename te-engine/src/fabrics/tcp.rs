//! The TCP fabric.

use std::net::SocketAddr;
use std::vec::Vec;

use te_fabric::ConfigError;
use te_tcp::TcpTransport;

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// TCP: one rail.
pub(super) struct Tcp;

impl Fabric for Tcp {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let config = context.config;
        let settings = te_tcp::Config {
            bind: SocketAddr::new(context.control.ip(), config.tcp.port),
            advertise: context.advertise(),
            inflight_max: config.inflight_slices_max.min(1 << 20),
            identity: context.identity,
            ..config.tcp.clone()
        };
        Ok(Rail::only(match context.devices() {
            Some(devices) => TcpTransport::with_devices(settings, devices)?,
            None => TcpTransport::new(settings)?,
        }))
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.tcp.validate()
    }

    fn is_asked_for(&self, config: &Config) -> bool {
        config.tcp.port != 0
    }
}
