//! The RDMA fabric: one rail per port that the settings name.

use std::error::Error as StdError;
use std::fmt;
use std::net::SocketAddr;
use std::string::String;
use std::vec::Vec;

use te_fabric::ConfigError;
use te_rdma::{DeviceSummary, RdmaTransport};

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
        let wanted = choose(&settings.devices, &ports);
        // Every port that the settings name must open.
        let named = !settings.devices.is_empty();
        if let Some(name) = wanted.missing.first() {
            return Err(NoSuchPort(String::from(*name)).into());
        }
        let advertise = context.advertise();
        let mut rails = Vec::with_capacity(wanted.ports.len());
        let mut last: Option<Cause> = None;
        for (nth, port) in (0_u16..).zip(wanted.ports) {
            let device = format!("{}:{}", port.name, port.port);
            // Each rail listens on another port.
            let listen = if settings.port == 0 { 0 } else { settings.port.saturating_add(nth) };
            match RdmaTransport::open(te_rdma::Config {
                device: Some(port.name.clone()),
                port: Some(port.port),
                bind: SocketAddr::new(context.control.ip(), listen),
                advertise,
                inflight_max: context.config.inflight_slices_max.min(1 << 20),
                identity: context.identity,
                ..settings.config()
            }) {
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

struct Wanted<'a> {
    ports: Vec<&'a DeviceSummary>,
    /// Names that no port has.
    missing: Vec<&'a str>,
}

/// The ports that `names` mean, in their order and without repetitions; without names, every active port.
fn choose<'a>(names: &'a [String], ports: &'a [DeviceSummary]) -> Wanted<'a> {
    let mut wanted = Wanted { ports: Vec::new(), missing: Vec::new() };
    if names.is_empty() {
        wanted.ports.extend(ports.iter().filter(|port| port.active));
    }
    for name in names {
        let (device, number) = match name.rsplit_once(':') {
            Some((device, number)) => (device, number.parse::<u8>().ok()),
            None => (name.as_str(), None),
        };
        // A name with a port number is tried whatever the state of the port: the error of the open says more.
        let meant = |port: &&DeviceSummary| {
            port.name == device && number.map_or(port.active && device == name, |number| port.port == number)
        };
        let before = wanted.ports.len();
        let mut found = ports.iter().filter(meant).peekable();
        if found.peek().is_none() {
            wanted.missing.push(name);
        }
        for port in found {
            if !wanted.ports[..before].contains(&port) {
                wanted.ports.push(port);
            }
        }
    }
    wanted
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

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, port: u8, active: bool) -> DeviceSummary {
        DeviceSummary {
            name: name.into(),
            port,
            active,
            state: if active { "ACTIVE" } else { "DOWN" }.into(),
            infiniband: false,
            numa_node: None,
            bits_per_s: 0,
        }
    }

    fn chosen(names: &[&str]) -> (Vec<String>, Vec<String>) {
        let ports = [
            port("mlx5_0", 1, true),
            port("mlx5_0", 2, false),
            port("mlx5_1", 1, true),
            port("rxe0", 1, true),
        ];
        let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
        let wanted = choose(&names, &ports);
        let name = |port: &&DeviceSummary| format!("{}:{}", port.name, port.port);
        (wanted.ports.iter().map(name).collect(), wanted.missing.iter().map(|&name| name.into()).collect())
    }

    #[test]
    fn without_names_every_active_port_is_a_rail() {
        let (ports, missing) = chosen(&[]);
        assert_eq!((ports, missing.len()), (vec!["mlx5_0:1".into(), "mlx5_1:1".into(), "rxe0:1".into()], 0));
    }

    #[test]
    fn a_name_means_its_active_ports_and_a_port_itself() {
        assert_eq!(chosen(&["rxe0", "mlx5_0"]).0, ["rxe0:1", "mlx5_0:1"]);
        assert_eq!(chosen(&["mlx5_0:2"]).0, ["mlx5_0:2"], "the open reports that it is down");
        assert_eq!(chosen(&["mlx5_0:1", "mlx5_0"]).0, ["mlx5_0:1"], "each port once");
    }

    #[test]
    fn a_name_that_no_port_has_is_reported() {
        assert_eq!(chosen(&["mlx5_9", "rxe0:x", "rxe0:9", "rxe0"]), {
            (vec!["rxe0:1".into()], vec!["mlx5_9".into(), "rxe0:x".into(), "rxe0:9".into()])
        });
    }
}
