//! What each profile's guests are made of. Everything here is emulated.

/// A kind of lab.
pub(super) struct Profile {
    /// As people call it.
    pub(super) name: &'static str,
    /// What it gives, for `lab list`.
    pub(super) what: &'static str,
    /// One or two.
    pub(super) guests: usize,
    /// NICs with soft-RoCE on them, each a subnet of its own, joined to the other guest's.
    pub(super) rails: usize,
    /// NUMA nodes with a CPU each and half of the memory each; a last one may have memory alone.
    pub(super) nodes: Nodes,
    /// The second stage's further steps: its functions `setup_NAME`.
    pub(super) setup: &'static [&'static str],
    /// Whether there is a CXL memory device; guests share its memory.
    pub(super) cxl: bool,
    /// Memory of a guest, MiB; two guests must fit a small machine.
    pub(super) memory_mib: u32,
}

/// NUMA nodes of a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Nodes {
    /// One.
    One,
    /// Two with a CPU each; rails spread over them.
    Two,
    /// As `Two`, and a far one with memory alone, as CXL memory or HBM appears.
    TwoAndFarMemory,
}

/// Bytes of the emulated CXL memory.
pub(super) const CXL_BYTES: u64 = 256 << 20;

/// All there are.
pub(super) const PROFILES: [Profile; 4] = [
    Profile {
        name: "rdma",
        what: "two guests, two rails each (soft-RoCE on virtio-net), each rail on its own NUMA node",
        guests: 2,
        rails: 2,
        nodes: Nodes::Two,
        setup: &[],
        cxl: false,
        memory_mib: 2048,
    },
    Profile {
        name: "nvmeof",
        what: "two guests; b exports a RAM disk as NVMe namespace over TCP (port 4420) and RDMA (4421), a connects",
        guests: 2,
        rails: 2,
        nodes: Nodes::One,
        setup: &["nvmeof"],
        cxl: false,
        memory_mib: 1024,
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
    },
    Profile {
        name: "numa",
        what: "one guest: two NUMA nodes with a CPU and a NIC each, a third with memory alone, and distances",
        guests: 1,
        rails: 2,
        nodes: Nodes::TwoAndFarMemory,
        setup: &[],
        cxl: false,
        memory_mib: 1536,
    },
];

/// The profile of that name.
pub(super) fn find(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}
