//! Memory of the node's regions, lent to its disks.

use te_engine::SharedRegion;

use crate::disk::Lent;

/// Lends `bytes` bytes of a region, from the address `addr` on. `None`: they are not within it.
#[allow(unsafe_code, reason = "memory of regions is reached by address")]
pub(super) fn lend(region: &SharedRegion, addr: u64, bytes: u64) -> Option<Lent> {
    let offset = addr.checked_sub(region.addr())?;
    let span = region.span().part(offset, bytes).ok()?;
    // SAFETY: the span is within the region, which is host memory and stays mapped as long as the owner that
    // is passed along. Peers may write to it at any time, so nothing has a reference to it. What changes
    // while it is written to a disk has another checksum there, and no reader accepts it.
    Some(unsafe { Lent::new(span, Box::new(region.clone())) })
}
