//! PCI functions: NICs, GPUs, and the bridges between them.

use crate::commands::doctor::source::Source;

const FUNCTIONS_MAX: usize = 8192;

/// PCI vendor of ConnectX and BlueField.
const MELLANOX: u32 = 0x15b3;
const NVIDIA: u32 = 0x10de;
const AMD: u32 = 0x1002;

/// One PCI function.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    /// `0000:17:00.0`.
    pub(crate) address: String,
    /// PCI vendor, and the vendor's device number.
    pub(crate) vendor: u32,
    pub(crate) device: u32,
    /// 24 bits: base class, sub-class, interface.
    pub(crate) class: u32,
    /// NUMA node, if the firmware reports it.
    pub(crate) node: Option<u32>,
    /// PCI addresses from the host bridge down to the function itself.
    pub(crate) path: Vec<String>,
    /// Link speed (GT/s) and lanes: current, and maximum.
    pub(crate) link: Option<[(f64, u32); 2]>,
    /// Size of the largest window into its memory, bytes.
    pub(crate) window: Option<u64>,
    /// The control word of access control services; `None` without them, or when only root may read it.
    pub(crate) acs: Option<u16>,
}

impl Function {
    /// Whether it is a network or InfiniBand controller.
    pub(crate) const fn is_nic(&self) -> bool {
        matches!(self.class >> 8, 0x0200 | 0x0207)
    }

    /// Whether it is a NIC of a family that always supports RDMA.
    pub(crate) const fn is_rdma_nic(&self) -> bool {
        self.is_nic() && self.vendor == MELLANOX
    }

    /// Whether it is a GPU for computing: of NVIDIA or AMD, display controller or accelerator.
    pub(crate) const fn is_gpu(&self) -> bool {
        matches!(self.class >> 16, 0x03 | 0x12) && matches!(self.vendor, NVIDIA | AMD)
    }

    /// Whether the vendor is NVIDIA.
    pub(crate) const fn is_nvidia(&self) -> bool {
        self.vendor == NVIDIA
    }

    /// Whether it is a bridge between PCI buses.
    pub(crate) const fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }
}

/// Reads all functions.
pub(super) fn gather(source: &Source) -> Vec<Function> {
    const DEVICES: &str = "sys/bus/pci/devices";
    let mut functions = Vec::new();
    for address in source.entries(DEVICES).into_iter().take(FUNCTIONS_MAX) {
        let dir = format!("{DEVICES}/{address}");
        let Some(class) = source.hex(&format!("{dir}/class")) else { continue };
        let mut function = Function {
            vendor: source.hex(&format!("{dir}/vendor")).unwrap_or(0),
            device: source.hex(&format!("{dir}/device")).unwrap_or(0),
            class,
            node: source.number(&format!("{dir}/numa_node")),
            path: path(source, &dir, &address),
            link: None,
            window: None,
            acs: None,
            address,
        };
        if function.is_nic() {
            function.link = link(source, &dir);
        }
        if function.is_gpu() {
            function.window =
                source.text(&format!("{dir}/resource")).as_deref().and_then(largest_memory_window);
        }
        if function.is_bridge() {
            function.acs = source.bytes(&format!("{dir}/config")).and_then(|config| acs_control(&config));
        }
        functions.push(function);
    }
    functions
}

/// The part of `../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0` from the host bridge on.
fn path(source: &Source, dir: &str, address: &str) -> Vec<String> {
    let link = source.link(dir).unwrap_or_default();
    let path: Vec<String> =
        link.split('/').skip_while(|part| !part.starts_with("pci")).map(str::to_owned).collect();
    if path.is_empty() { vec![address.to_owned()] } else { path }
}

fn link(source: &Source, dir: &str) -> Option<[(f64, u32); 2]> {
    let one = |when: &str| {
        // `16.0 GT/s PCIe`
        let speed = source.line(&format!("{dir}/{when}_link_speed"))?;
        let speed = speed.split_whitespace().next()?.parse::<f64>().ok()?;
        let lanes = source.number::<u32>(&format!("{dir}/{when}_link_width"))?;
        // A virtual function has no link and reports zeros or 255.
        (speed > 0.0 && (1..=32).contains(&lanes)).then_some((speed, lanes))
    };
    Some([one("current")?, one("max")?])
}

/// The argument has lines of `start end flags`, one per region.
fn largest_memory_window(resource: &str) -> Option<u64> {
    const MEMORY: u64 = 0x200;
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let bytes = resource.lines().filter_map(|line| {
        let mut words = line.split_whitespace().map(hex);
        let (start, end, flags) = (words.next()??, words.next()??, words.next()??);
        (flags & MEMORY != 0).then(|| end.checked_sub(start)?.checked_add(1)).flatten()
    });
    bytes.max()
}

/// Walks the list of extended capabilities (PCI Express Base Specification, 7.6) to access control services
/// (7.7.11).
fn acs_control(config: &[u8]) -> Option<u16> {
    const ACS: u32 = 0x000d;
    const CONTROL: usize = 6;
    let word = |offset: usize| config.get(offset..offset + 4)?.try_into().ok().map(u32::from_le_bytes);
    let mut offset = 0x100;
    // Each capability takes at least eight bytes, so a longer list contains a loop.
    for _ in 0..(4096 - 0x100) / 8 {
        let header = word(offset)?;
        if header & 0xffff == ACS {
            let control = config.get(offset + CONTROL..offset + CONTROL + 2)?;
            return control.try_into().ok().map(u16::from_le_bytes);
        }
        offset = (header >> 20) as usize & !3;
        if offset < 0x100 {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration space with the given capabilities: offset, identifier, next.
    fn config(capabilities: &[(usize, u32, u32)]) -> Vec<u8> {
        let mut config = vec![0; 4096];
        for &(offset, id, next) in capabilities {
            config[offset..offset + 4].copy_from_slice(&(id | 1 << 16 | next << 20).to_le_bytes());
        }
        config
    }

    #[test]
    fn access_control_is_found_behind_other_capabilities() {
        let mut space = config(&[(0x100, 1, 0x148), (0x148, 0x000d, 0)]);
        space[0x14e..0x150].copy_from_slice(&0x001du16.to_le_bytes());
        assert_eq!(acs_control(&space), Some(0x1d));
        assert_eq!(acs_control(&config(&[(0x100, 1, 0)])), None);
    }

    #[test]
    fn the_largest_region_of_memory_is_the_window() {
        let text = "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n\
                    0x0000380000000000 0x00003807ffffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000000000003000 0xffffffffffffffff 0x0000000000040101\n";
        assert_eq!(largest_memory_window(text), Some(32 << 30));
        assert_eq!(largest_memory_window("0x0 0xffffffffffffffff 0x200\n0x5 0x1 0x200\nx y z\n1 2"), None);
    }

    #[test]
    fn a_list_of_capabilities_that_goes_in_circles_or_ends_early_ends() {
        assert_eq!(acs_control(&config(&[(0x100, 1, 0x100)])), None);
        assert_eq!(acs_control(&config(&[(0x100, 1, 0xfff)])), None);
        for len in [0, 64, 0x102, 0x149, 0x14f] {
            assert_eq!(acs_control(&config(&[(0x100, 1, 0x148), (0x148, 0x000d, 0)])[..len]), None);
        }
    }
}
