//! What te-tcp keeps of a region beside the fields that every fabric keeps: the memory itself, and how many
//! payloads of peers use it.

use te_core::{Access, ErrorKind, RegionId};

use crate::frame::{Operation, Status};
use crate::sys::Memory;

/// The part of a region that only te-tcp needs.
#[derive(Debug)]
pub(crate) struct Ext {
    pub(crate) memory: Memory,
    /// Payloads of peers that are being moved into or out of the region. For memory of a device: the parts of
    /// payloads whose hops have not ended.
    pub(crate) peers: u32,
}

pub(crate) type Region = te_fabric::Region<Ext>;
pub(crate) type Regions = te_fabric::Regions<Ext>;
pub(crate) type RemoteRegion = te_fabric::RemoteRegion<()>;
pub(crate) type RemoteRegions = te_fabric::RemoteRegions<()>;

/// Checks a peer's operation against the region that it names, and returns the memory that it may touch (L6).
pub(crate) fn granted(
    regions: &mut Regions,
    asked: &Operation,
    needed: Access,
    bytes_max: u32,
) -> Result<Memory, Status> {
    let id = RegionId::new(asked.region.get(), asked.generation.get());
    let region = regions.granted(id, asked.key.get()).map_err(|kind| match kind {
        ErrorKind::NotFound => Status::NotFound,
        ErrorKind::Stale => Status::Stale,
        _ => Status::AccessDenied,
    })?;
    if !region.access.contains(needed) {
        return Err(Status::AccessDenied);
    }
    let (offset, len) = (asked.offset.get(), asked.len.get());
    if len == 0 {
        return Err(Status::Empty);
    }
    if len > u64::from(bytes_max) {
        return Err(Status::TooLong);
    }
    region.ext.memory.part(offset, len).map_err(|_| Status::OutOfRange)
}

pub(crate) fn peer_begins(regions: &mut Regions, index: u32) {
    if let Some(region) = regions.get_mut(index) {
        region.ext.peers += 1;
    }
}

pub(crate) fn peer_ends(regions: &mut Regions, index: u32) {
    if let Some(region) = regions.get_mut(index) {
        debug_assert!(region.ext.peers > 0, "a payload ends once");
        region.ext.peers = region.ext.peers.saturating_sub(1);
    }
}
