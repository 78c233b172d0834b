//! The names of this fabric: exports, NQNs, hosts and namespaces.

use te_fabric::{Export, ExportFormat};

/// The magic and the version of exports of regions that our target serves. `region` is the namespace,
/// `generation` that of the region.
pub(crate) const EXPORT_FORMAT: ExportFormat = ExportFormat { magic: *b"nvmo", version: 3 };

/// The NQN of the subsystem of one incarnation of our target.
pub(crate) fn target_nqn(incarnation: u64) -> String {
    format!("nqn.2026-11.io.snowskin:te:{incarnation:016x}")
}

/// The NQN of a host with this identity.
pub(crate) fn host_nqn(identity: u64) -> String {
    format!("nqn.2026-11.io.snowskin:host:{identity:016x}")
}

/// The identifier of a host with this identity.
pub(crate) fn host_id(identity: u64) -> [u8; 16] {
    let mut id = *b"\0\0\0\0\0\0\0\0snowskin";
    id[..8].copy_from_slice(&identity.to_le_bytes());
    id
}

/// The NGUID of a namespace of our target.
pub(crate) fn nguid(incarnation: u64, nsid: u32, generation: u32) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&incarnation.to_be_bytes());
    id[8..12].copy_from_slice(&nsid.to_be_bytes());
    id[12..].copy_from_slice(&generation.to_be_bytes());
    id
}

/// Where a remote region is: what its export says beyond the fields that all fabrics have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The subsystem.
    pub(crate) nqn: String,
    pub(crate) nsid: u32,
    pub(crate) nguid: [u8; 16],
    /// The first block of the range.
    pub(crate) first_lba: u64,
    /// It is served by our own target: keys, incarnations and resets mean something there.
    pub(crate) ours: bool,
}

impl Place {
    pub(crate) fn of_ours(export: &Export) -> Self {
        Self {
            nqn: target_nqn(export.incarnation),
            nsid: export.region,
            nguid: nguid(export.incarnation, export.region, export.generation),
            first_lba: 0,
            ours: true,
        }
    }
}
