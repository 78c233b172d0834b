//! The RDMA fabric: one rail per port that the settings name.

use std::error::Error as StdError;
use std::fmt;
use std::net::SocketAddr;
use std::string::String;
use std::vec::Vec;

use te_fabric::ConfigError;
use te_rdma::RdmaTransport;

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// RDMA: one rail per port.
pub(super) struct Rdma;

impl Fabric for Rdma {
    /// Opens a rail per port that the settings name, or per active port if they name none. A port that does
    /// not open is logged.
    ///
    /// # Errors
    /// Why no port opened; or why a port that the settings name did not.
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let settings = &context.config.rdma;
        let ports = te_rdma::devices().map_err(Cause::absent)?;
        let chosen = te_rdma::choose_ports(&settings.devices, &ports);
        // Every port that the settings name must open.
        let named = !settings.devices.is_empty();
        if let Some(name) = chosen.missing.first() {
            return Err(NoSuchPort(String::from(*name)).into());
        }
        let advertise = context.advertise();
        let mut rails = Vec::with_capacity(chosen.ports.len());
        let mut last: Option<Cause> = None;
        for (nth, port) in (0_u16..).zip(chosen.ports) {
            let device = format!("{}:{}", port.name, port.port);
            // Each rail listens on another port.
            let listen = if settings.port == 0 { 0 } else { settings.port.saturating_add(nth) };
            let config = te_rdma::Config {
                devices: vec![device.clone()],
                port: listen,
                bind: SocketAddr::new(context.control.ip(), 0),
                advertise,
                inflight_max: context.config.inflight_slices_max.min(1 << 20),
                identity: context.identity,
                ..settings.clone()
            };
            let opened = match context.devices() {
                Some(devices) => RdmaTransport::open_with_devices(config, devices),
                None => RdmaTransport::open(config),
            };
            match opened {
                Ok(transport) => rails.push(Rail { device, transport: Box::new(transport) }),
                Err(why) if named => return Err(why.into()),
                Err(why) => {
                    log::warn!("fabric rdma did not start on {device}: {why}");
                    last = Some(why.into());
                }
            }
        }
        if rails.is_empty() { Err(last.unwrap_or_else(|| Cause::absent(NoPort))) } else { Ok(rails) }
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.rdma.validate()
    }

    fn is_asked_for(&self, config: &Config) -> bool {
        config.rdma.port != 0 || !config.rdma.devices.is_empty()
    }
}

/// There are devices, and no port is active and wanted.
#[derive(Debug)]
struct NoPort;

impl fmt::Display for NoPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no active RDMA port is chosen: check `rdma link` and the setting rdma.devices")
    }
}

impl StdError for NoPort {}

/// A device or port that the settings name does not exist or is not active.
#[derive(Debug)]
struct NoSuchPort(String);

impl fmt::Display for NoSuchPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not an active RDMA port: check `snowskin doctor` or `rdma link`", self.0)
    }
}

impl StdError for NoSuchPort {}
