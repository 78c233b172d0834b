//! An export for tests that need one and do not read it.

use core::net::{IpAddr, Ipv4Addr};

use te_core::{Access, Location};

use crate::{EXPORT_ADDRESSES_MAX, Export, ExportFormat};

/// An export of a region of 1 MiB with all remote rights, at port 9 of `127.0.0.1`. Tests change the fields
/// that matter to them.
#[must_use]
pub fn export(format: ExportFormat) -> Export {
    Export {
        format,
        rights: (Access::REMOTE_READ | Access::REMOTE_WRITE).bits(),
        addresses: [IpAddr::V4(Ipv4Addr::LOCALHOST); EXPORT_ADDRESSES_MAX],
        address_count: 1,
        port: 9,
        incarnation: 5,
        region: 0,
        generation: 1,
        key: 7,
        len: 1 << 20,
        location: Location::Host,
    }
}
