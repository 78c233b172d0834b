//! The RDMA ports of this host, and opening a transport on one of them.

use std::path::Path;
use std::sync::Arc;

use te_core::device::Devices;

use crate::config::Config;
use crate::open_error::OpenError;
use crate::sys::{self, Device, NoRdma, SystemVerbs};
use crate::transport::RdmaTransport;

/// One port of a device, before it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceSummary {
    /// The kernel's name of the device: `mlx5_0`, `rxe0`.
    pub name: String,
    /// Its number, from 1.
    pub port: u8,
    /// Whether it can carry traffic.
    pub active: bool,
    /// The kernel's name for its state: `ACTIVE`, `DOWN`, `INIT`, `ARMED`.
    pub state: String,
    /// InfiniBand (true) or Ethernet, that is RoCE (false).
    pub infiniband: bool,
    /// NUMA node of the device; `None`: unknown.
    pub numa_node: Option<u16>,
    /// Link speed times width, bits per second; 0 when unknown.
    pub bits_per_s: u64,
}

/// The ports of this host's devices, in the kernel's order; at least one.
///
/// # Errors
/// The reason why there are none, which is no failure of the host: other fabrics work.
pub fn devices() -> Result<Vec<DeviceSummary>, NoRdma> {
    let mut found = Vec::new();
    for device in Device::list()? {
        for port in device.ports {
            let directory = format!("/sys/class/infiniband/{}/ports/{}", device.name, port.number);
            let rate = std::fs::read_to_string(Path::new(&directory).join("rate"));
            found.push(DeviceSummary {
                name: device.name.clone(),
                port: port.number,
                active: port.state == "ACTIVE",
                state: port.state,
                infiniband: port.infiniband,
                numa_node: device.numa_node,
                bits_per_s: rate.map_or(0, |rate| parse_rate(&rate)),
            });
        }
    }
    if found.is_empty() { Err(NoRdma::NoDevice) } else { Ok(found) }
}

/// The ports that a list of names selects; see [`choose_ports`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChosenPorts<'a> {
    /// The ports, in the order of the names, each once.
    pub ports: Vec<&'a DeviceSummary>,
    /// The names that select no port.
    pub missing: Vec<&'a str>,
}

/// Selects ports by [`Config::devices`]: `mlx5_0` selects the active ports of that device, `mlx5_0:2` one
/// port in any state. Without names, every active port is selected.
#[must_use]
pub fn choose_ports<'a>(names: &'a [String], ports: &'a [DeviceSummary]) -> ChosenPorts<'a> {
    let mut chosen = ChosenPorts::default();
    if names.is_empty() {
        chosen.ports.extend(ports.iter().filter(|port| port.active));
    }
    for name in names {
        let (device, number) = parse_name(name);
        // A port that is named by its number is opened whatever its state: that gives the better error.
        let is_meant = |port: &&DeviceSummary| {
            port.name == device && number.map_or(port.active, |number| port.port == number)
        };
        let before = chosen.ports.len();
        let mut found = ports.iter().filter(is_meant).peekable();
        if found.peek().is_none() {
            chosen.missing.push(name);
        }
        for port in found {
            if !chosen.ports[..before].contains(&port) {
                chosen.ports.push(port);
            }
        }
    }
    chosen
}

/// The device and the port in a name: `mlx5_0:1`, or the device alone.
fn parse_name(name: &str) -> (&str, Option<u8>) {
    let parts = name.rsplit_once(':').and_then(|(device, number)| Some((device, number.parse().ok()?)));
    parts.map_or((name, None), |(device, number)| (device, Some(number)))
}

impl RdmaTransport<SystemVerbs> {
    /// Opens the first port that [`Config::devices`] names, or the first active one, and uses it as
    /// [`new`](Self::new) does.
    ///
    /// # Errors
    /// [`OpenError::NoRdma`] where RDMA is not available, which is no failure of the host; else as
    /// [`new`](Self::new).
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let verbs = open_port(&config)?;
        Self::new(verbs, config)
    }

    /// As [`open`](Self::open), and moves memory of `devices` as [`with_devices`](Self::with_devices) does.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with_devices(config: Config, devices: Arc<dyn Devices>) -> Result<Self, OpenError> {
        let verbs = open_port(&config)?;
        Self::with_devices(verbs, config, devices)
    }
}

fn open_port(config: &Config) -> Result<SystemVerbs, OpenError> {
    config.validate().map_err(OpenError::Config)?;
    let found = devices().map_err(OpenError::NoRdma)?;
    let port = first_port(&config.devices, &found)?;
    Device::open(&port.name, port.port).map_err(|error| match error {
        sys::OpenError::NoRdma(why) => OpenError::NoRdma(why),
        other => OpenError::Provider(other),
    })
}

/// The port of a single transport.
fn first_port<'a>(names: &'a [String], found: &'a [DeviceSummary]) -> Result<&'a DeviceSummary, OpenError> {
    let chosen = choose_ports(names, found);
    if let Some(name) = chosen.missing.first() {
        let (device, port) = parse_name(name);
        let exists = found.iter().any(|port| port.name == device);
        let device = device.to_owned();
        return Err(match port {
            _ if !exists => OpenError::Provider(sys::OpenError::NoSuchDevice(device)),
            Some(port) => OpenError::Provider(sys::OpenError::NoSuchPort { device, port }),
            None => OpenError::PortDown,
        });
    }
    match chosen.ports.first() {
        Some(port) if port.active => Ok(port),
        Some(_) | None => Err(OpenError::PortDown),
    }
}

/// Parses the `rate` file of sysfs: `100 Gb/sec (4X EDR)`, `2.5 Gb/sec (1X SDR)`. 0: not understood.
fn parse_rate(rate: &str) -> u64 {
    let mut words = rate.split_whitespace();
    let (Some(number), Some("Gb/sec")) = (words.next(), words.next()) else { return 0 };
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    match (whole.parse::<u64>(), tenths.get(..1).unwrap_or("0").parse::<u64>()) {
        (Ok(whole), Ok(tenths)) => whole.saturating_mul(1_000_000_000) + tenths * 100_000_000,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_parsed_as_the_kernel_writes_them() {
        assert_eq!(parse_rate("100 Gb/sec (4X EDR)\n"), 100_000_000_000);
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)"), 2_500_000_000);
        assert_eq!((parse_rate(""), parse_rate("fast"), parse_rate("x Gb/sec")), (0, 0, 0));
    }

    fn port(name: &str, port: u8, active: bool) -> DeviceSummary {
        let (name, state) = (name.to_owned(), String::new());
        DeviceSummary { name, port, active, state, infiniband: false, numa_node: None, bits_per_s: 0 }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_single_transport_opens_the_first_active_port_or_the_first_that_is_named() {
        let found = [port("a", 1, false), port("a", 2, true), port("b", 1, true), port("c", 1, false)];
        let pick = |list: &[&str]| {
            let names = names(list);
            first_port(&names, &found).map(|port| (port.name.clone(), port.port))
        };
        assert_eq!(pick(&[]).ok(), Some(("a".to_owned(), 2)));
        assert_eq!(pick(&["b", "a"]).ok(), Some(("b".to_owned(), 1)));
        assert!(matches!(pick(&["a:1"]), Err(OpenError::PortDown)));
        assert!(matches!(pick(&["c"]), Err(OpenError::PortDown)));
        assert!(matches!(
            pick(&["a:3"]),
            Err(OpenError::Provider(sys::OpenError::NoSuchPort { port: 3, .. }))
        ));
        assert!(matches!(pick(&["b", "c"]), Err(OpenError::PortDown)));
        assert!(matches!(
            pick(&["b", "d"]),
            Err(OpenError::Provider(sys::OpenError::NoSuchDevice(name))) if name == "d"
        ));
        assert!(matches!(pick(&["d"]), Err(OpenError::Provider(sys::OpenError::NoSuchDevice(_)))));
        assert!(matches!(first_port(&[], &[port("a", 1, false)]), Err(OpenError::PortDown)));
    }

    fn chosen(list: &[&str]) -> (Vec<String>, Vec<String>) {
        let ports = [
            port("mlx5_0", 1, true),
            port("mlx5_0", 2, false),
            port("mlx5_1", 1, true),
            port("rxe0", 1, true),
        ];
        let names = names(list);
        let chosen = choose_ports(&names, &ports);
        let name = |port: &&DeviceSummary| format!("{}:{}", port.name, port.port);
        (chosen.ports.iter().map(name).collect(), chosen.missing.iter().map(|&name| name.into()).collect())
    }

    #[test]
    fn without_names_every_active_port_is_chosen() {
        let (ports, missing) = chosen(&[]);
        assert_eq!((ports, missing.len()), (vec!["mlx5_0:1".into(), "mlx5_1:1".into(), "rxe0:1".into()], 0));
    }

    #[test]
    fn the_name_of_a_device_chooses_its_active_ports_and_that_of_a_port_the_port() {
        assert_eq!(chosen(&["rxe0", "mlx5_0"]).0, ["rxe0:1", "mlx5_0:1"]);
        assert_eq!(chosen(&["mlx5_0:2"]).0, ["mlx5_0:2"], "opening it reports that it is down");
        assert_eq!(chosen(&["mlx5_0:1", "mlx5_0"]).0, ["mlx5_0:1"], "each port once");
    }

    #[test]
    fn a_name_that_no_port_has_is_reported() {
        assert_eq!(chosen(&["mlx5_9", "rxe0:x", "rxe0:9", "rxe0"]), {
            (vec!["rxe0:1".into()], vec!["mlx5_9".into(), "rxe0:x".into(), "rxe0:9".into()])
        });
    }

    #[test]
    fn a_host_without_devices_gets_one_reason() {
        match devices() {
            Ok(found) => assert!(!found.is_empty()),
            Err(reason) => assert!(!reason.to_string().is_empty()),
        }
    }
}
