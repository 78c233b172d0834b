//! The devices of each profile's guests. Everything here is emulated.

/// A kind of lab.
pub(super) struct Profile {
    /// Name on the command line.
    pub(super) name: &'static str,
    /// Description, for `lab list`.
    pub(super) what: &'static str,
    /// Number of guests: one or two.
    pub(super) guests: usize,
    /// NICs with soft-RoCE, each in its own subnet and connected to the other guest's.
    pub(super) rails: usize,
    /// NUMA nodes.
    pub(super) nodes: Nodes,
    /// Further steps of the second stage: its functions `setup_NAME`.
    pub(super) setup: &'static [&'static str],
    /// Whether there is a CXL memory device, whose memory the guests share.
    pub(super) cxl: bool,
    /// Memory of a guest, MiB; two guests must fit a small machine.
    pub(super) memory_mib: u32,
    /// Further words of the kernel's command line.
    pub(super) kernel_line: &'static str,
}

/// NUMA nodes of a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Nodes {
    /// One node.
    One,
    /// Two nodes with a CPU and half of the memory each; rails are spread over them.
    Two,
    /// As `Two`, and a far one with memory only, as CXL memory or HBM appears.
    TwoAndFarMemory,
}

/// Size of the emulated CXL memory, bytes.
pub(super) const CXL_BYTES: u64 = 256 << 20;

/// All profiles.
pub(super) const PROFILES: [Profile; 6] = [
    Profile {
        name: "rdma",
        what: "two guests, two rails each (soft-RoCE on virtio-net), each rail on its own NUMA node",
        guests: 2,
        rails: 2,
        nodes: Nodes::Two,
        setup: &[],
        cxl: false,
        memory_mib: 2048,
        kernel_line: "",
    },
    Profile {
        name: "nvmeof",
        what: "two guests; b exports RAM disks as NVMe namespaces over TCP (ports 4420, 4422) and RDMA (4421), a connects",
        guests: 2,
        rails: 2,
        nodes: Nodes::One,
        setup: &["nvmeof"],
        cxl: false,
        memory_mib: 1024,
        kernel_line: "",
    },
    Profile {
        name: "cxl",
        what: "two guests that share one CXL memory device, a devdax namespace on it in each",
        guests: 2,
        rails: 0,
        nodes: Nodes::One,
        setup: &["cxl"],
        cxl: true,
        memory_mib: 1024,
        kernel_line: "",
    },
    Profile {
        name: "dax",
        what: "one guest with 256 MiB of its memory as a devdax device, at the speed of RAM",
        guests: 1,
        rails: 0,
        nodes: Nodes::One,
        setup: &["dax"],
        cxl: false,
        memory_mib: 1536,
        kernel_line: "memmap=256M!1G",
    },
    Profile {
        name: "numa",
        what: "one guest: two NUMA nodes with a CPU and a NIC each, a third with memory only, and distances",
        guests: 1,
        rails: 2,
        nodes: Nodes::TwoAndFarMemory,
        setup: &[],
        cxl: false,
        memory_mib: 1536,
        kernel_line: "",
    },
    Profile {
        name: "disk",
        what: "one guest with three RAM disks, which device-mapper makes lose power, fail and stall",
        guests: 1,
        rails: 0,
        nodes: Nodes::One,
        setup: &["disk"],
        cxl: false,
        memory_mib: 1536,
        kernel_line: "",
    },
];

/// The profile of that name.
pub(super) fn find(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}
