//! What RDMA ports this host has, and a transport on one of them.

use std::path::Path;

use crate::config::Config;
use crate::open_error::OpenError;
use crate::sys::{self, Device, NoRdma, SystemVerbs};
use crate::transport::RdmaTransport;

/// One port of a device, as it stands before it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSummary {
    /// The kernel's name of the device: `mlx5_0`, `rxe0`.
    pub name: String,
    /// From 1.
    pub port: u8,
    /// Whether it can carry traffic.
    pub active: bool,
    /// The kernel's word for how it stands: `ACTIVE`, `DOWN`, `INIT`, `ARMED`.
    pub state: String,
    /// InfiniBand (true) or Ethernet, that is RoCE (false).
    pub infiniband: bool,
    /// NUMA node of the device, when it has one.
    pub numa_node: Option<u16>,
    /// Link speed times width, bits per second; 0 when unknown.
    pub bits_per_s: u64,
}

/// The ports of this host's devices, in the kernel's order; never none.
///
/// # Errors
/// Why there are none. That is an answer, not a failure: other fabrics serve.
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

impl RdmaTransport<SystemVerbs> {
    /// Opens the port that `config` names, or the first that is active, and goes by it as [`new`](Self::new)
    /// does.
    ///
    /// # Errors
    /// [`OpenError::NoRdma`] where there is none, which is no failure of the host; else as
    /// [`new`](Self::new).
    pub fn open(config: Config) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let (name, port) = choose(&devices().map_err(OpenError::NoRdma)?, &config)?;
        let verbs = Device::open(&name, port).map_err(|error| match error {
            sys::OpenError::NoRdma(why) => OpenError::NoRdma(why),
            other => OpenError::Provider(other),
        })?;
        Self::new(verbs, config)
    }
}

/// The port that the settings mean.
fn choose(found: &[DeviceSummary], config: &Config) -> Result<(String, u8), OpenError> {
    let named = |port: &&DeviceSummary| {
        config.device.as_ref().is_none_or(|name| *name == port.name)
            && config.port.is_none_or(|number| number == port.port)
    };
    let candidates = || found.iter().filter(named);
    match candidates().find(|port| port.active).or_else(|| candidates().next()) {
        Some(port) if port.active => Ok((port.name.clone(), port.port)),
        Some(_) => Err(OpenError::PortDown),
        None => {
            let device = config.device.clone().unwrap_or_default();
            Err(OpenError::Provider(match config.port {
                Some(port) if found.iter().any(|found| config.device.is_none() || found.name == device) => {
                    sys::OpenError::NoSuchPort { device, port }
                }
                _ => sys::OpenError::NoSuchDevice(device),
            }))
        }
    }
}

/// What sysfs says: `100 Gb/sec (4X EDR)`, `2.5 Gb/sec (1X SDR)`.
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
    fn rates_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_rate("100 Gb/sec (4X EDR)\n"), 100_000_000_000);
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)"), 2_500_000_000);
        assert_eq!((parse_rate(""), parse_rate("fast"), parse_rate("x Gb/sec")), (0, 0, 0));
    }

    fn port(name: &str, port: u8, active: bool) -> DeviceSummary {
        let (name, state) = (name.to_owned(), String::new());
        DeviceSummary { name, port, active, state, infiniband: false, numa_node: None, bits_per_s: 0 }
    }

    #[test]
    fn the_first_active_port_is_meant_unless_one_is_named() {
        let found = [port("a", 1, false), port("a", 2, true), port("b", 1, true)];
        let pick = |device: Option<&str>, port: Option<u8>| {
            choose(&found, &Config { device: device.map(str::to_owned), port, ..Config::default() })
        };
        assert_eq!(pick(None, None).ok(), Some(("a".to_owned(), 2)));
        assert_eq!(pick(Some("b"), None).ok(), Some(("b".to_owned(), 1)));
        assert!(matches!(pick(Some("a"), Some(1)), Err(OpenError::PortDown)));
        assert!(matches!(
            pick(Some("a"), Some(3)),
            Err(OpenError::Provider(sys::OpenError::NoSuchPort { port: 3, .. }))
        ));
        assert!(matches!(pick(Some("c"), None), Err(OpenError::Provider(sys::OpenError::NoSuchDevice(_)))));
    }

    #[test]
    fn a_host_without_devices_gets_one_clear_reason() {
        match devices() {
            Ok(found) => assert!(!found.is_empty()),
            Err(reason) => assert!(!reason.to_string().is_empty()),
        }
    }
}
