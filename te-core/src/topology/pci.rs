//! PCI addresses, and the path from the root complex to a device.

use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use super::Distance;

/// The largest number of bridges between the root complex and a device.
pub const BRIDGES_MAX: usize = 32;

/// `domain:bus:device.function`. Domains of volume management devices have 20 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// The PCI domain, which is also called PCI segment.
    pub domain: u32,
    /// The bus, 0 to 255.
    pub bus: u8,
    /// The device, 0 to 31.
    pub device: u8,
    /// The function, 0 to 7.
    pub function: u8,
}

/// The position of a device: the host bridge, the bridges below it from the root port on, and the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciPath {
    /// The address of the device.
    pub address: PciAddress,
    /// The domain and the first bus of the host bridge: `pci0000:16` in sysfs.
    pub root: (u32, u8),
    /// The bridges, from the root port on. At most [`BRIDGES_MAX`].
    pub bridges: Vec<PciAddress>,
}

/// The current and the possible speed of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciLink {
    /// The current transfers per second and lane, in millions: 32,000 is PCIe 5.
    pub mega_transfers_per_s: u32,
    /// The current number of lanes.
    pub lanes: u8,
    /// The transfers per second and lane that the device supports, in millions.
    pub mega_transfers_per_s_max: u32,
    /// The number of lanes that the device supports.
    pub lanes_max: u8,
}

impl PciPath {
    /// A device of which only the address is known. Devices on its bus count as under the same host bridge,
    /// no others do.
    #[must_use]
    pub const fn alone(address: PciAddress) -> Self {
        Self { address, root: (address.domain, address.bus), bridges: Vec::new() }
    }

    /// Parses a path of sysfs, such as `../../devices/pci0000:16/0000:16:01.0/0000:18:00.0/net/eth0`; the
    /// last PCI address is the device. `None` when it is not a PCI device, or has too many bridges.
    #[must_use]
    pub fn parse_sysfs(path: &str) -> Option<Self> {
        let mut parts = path.split('/');
        let root = parts.find_map(|part| {
            let (domain, bus) = part.strip_prefix("pci")?.split_once(':')?;
            Some((u32::from_str_radix(domain, 16).ok()?, u8::from_str_radix(bus, 16).ok()?))
        })?;
        // Below a volume management device there is a second host bridge, which has no address and is
        // skipped.
        let mut bridges: Vec<PciAddress> = Vec::new();
        for address in parts.filter_map(|part| part.parse().ok()) {
            if bridges.len() > BRIDGES_MAX {
                return None;
            }
            bridges.push(address);
        }
        let address = bridges.pop()?;
        Some(Self { address, root, bridges })
    }

    /// The distance of two devices by PCI alone; `None` when they are under different host bridges.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Option<Distance> {
        if self.root != other.root {
            return None;
        }
        let common = self.bridges.iter().zip(&other.bridges).take_while(|(a, b)| a == b).count();
        if common == 0 {
            return Some(Distance::HostBridge);
        }
        let hops = self.bridges.len() + other.bridges.len() - 2 * common;
        Some(Distance::Switch(u8::try_from(hops).unwrap_or(u8::MAX)))
    }
}

impl PciLink {
    /// Whether it runs narrower or slower than the device could, because of a wrong slot, a riser or a
    /// failing lane. GPUs slow their link down when idle.
    #[must_use]
    pub const fn is_degraded(self) -> bool {
        self.lanes < self.lanes_max || self.mega_transfers_per_s < self.mega_transfers_per_s_max
    }

    /// The bandwidth in each direction, in megabits per second, before encoding and headers.
    #[must_use]
    pub const fn mbit_per_s(self) -> u64 {
        self.mega_transfers_per_s as u64 * self.lanes as u64
    }
}

/// Writes the address as the kernel does: `0000:18:00.0`.
impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// A text is not a PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAnAddress;

impl FromStr for PciAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let hex = |digits: &str, lengths: core::ops::RangeInclusive<usize>| {
            let sound =
                lengths.contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            sound.then(|| u32::from_str_radix(digits, 16).ok()).flatten().ok_or(NotAnAddress)
        };
        let (domain, rest) = text.split_once(':').ok_or(NotAnAddress)?;
        let (bus, rest) = rest.split_once(':').ok_or(NotAnAddress)?;
        let (device, function) = rest.split_once('.').ok_or(NotAnAddress)?;
        let (device, function) = (hex(device, 2..=2)?, hex(function, 1..=1)?);
        if device > 31 || function > 7 {
            return Err(NotAnAddress);
        }
        let (domain, bus) = (hex(domain, 4..=8)?, hex(bus, 2..=2)?);
        Ok(Self { domain, bus: bus as u8, device: device as u8, function: function as u8 })
    }
}

impl fmt::Display for NotAnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a PCI address: write domain:bus:device.function, such as 0000:18:00.0")
    }
}

impl core::error::Error for NotAnAddress {}
