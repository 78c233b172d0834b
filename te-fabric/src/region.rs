//! Regions that are registered and remote regions that are attached: what an id refers to, what may be done
//! with it, and how many operations still use it.

use te_core::{Access, Error, ErrorKind, Location, Op, RegionId, RemoteRegionId, Slice};

use crate::Export;
use crate::table::Table;

/// A region of local memory. `X` holds what one fabric alone needs.
#[derive(Debug)]
pub struct Region<X> {
    /// The generation of the id.
    pub generation: u32,
    /// The length, in bytes.
    pub len: u64,
    /// Where the memory is.
    pub location: Location,
    /// The rights of local operations and of peers.
    pub access: Access,
    /// The number that a peer has to state to use the region.
    pub key: u64,
    /// The number of operations of this transport that use the region.
    pub pins: u32,
    /// Whether `deregister` has begun: no new operation may use the region.
    pub closing: bool,
    /// What one fabric alone needs.
    pub ext: X,
}

impl<X> Region<X> {
    /// A region of `len` bytes that nothing uses yet.
    #[must_use]
    pub const fn new(id: RegionId, len: u64, location: Location, access: Access, key: u64, ext: X) -> Self {
        Self { generation: id.generation, len, location, access, key, pins: 0, closing: false, ext }
    }

    /// The bits of [`Access`] that peers have.
    #[must_use]
    pub const fn remote_rights(&self) -> u8 {
        self.access.intersection(REMOTE).bits()
    }
}

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The registered regions of a transport.
pub type Regions<X> = Table<Region<X>>;

impl<X> Table<Region<X>> {
    /// The region with this id.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    #[inline]
    pub fn find(&self, id: RegionId) -> Result<&Region<X>, Error> {
        match self.get(id.index) {
            None => Err(ErrorKind::NotFound.into()),
            Some(region) if region.generation != id.generation => Err(ErrorKind::Stale.into()),
            Some(region) => Ok(region),
        }
    }

    /// The region that a slice uses locally, after a check of its rights and its range.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `AccessDenied`, `OutOfRange`.
    #[inline]
    pub fn check_local(&self, slice: &Slice) -> Result<&Region<X>, Error> {
        let region = self.find(slice.local.region)?;
        let needed = match slice.op {
            Op::Read => Access::LOCAL_WRITE,
            Op::Write => Access::LOCAL_READ,
        };
        if region.closing || !region.access.contains(needed) {
            return Err(ErrorKind::AccessDenied.into());
        }
        check_range(slice.local.offset, slice.len, region.len)?;
        Ok(region)
    }

    /// The region that a peer which states `key` may use (L6). The caller checks whether the region's rights
    /// allow what the peer wants.
    ///
    /// # Errors
    /// `NotFound`. `Stale` for another generation and for a region that is being deregistered. `AccessDenied`
    /// for a wrong key and for a region that no peer may use.
    #[inline]
    pub fn granted(&mut self, id: RegionId, key: u64) -> Result<&mut Region<X>, ErrorKind> {
        match self.get_mut(id.index) {
            None => Err(ErrorKind::NotFound),
            Some(region) if region.generation != id.generation || region.closing => Err(ErrorKind::Stale),
            Some(region) if region.key != key || !region.access.intersects(REMOTE) => {
                Err(ErrorKind::AccessDenied)
            }
            Some(region) => Ok(region),
        }
    }

    /// Counts one more operation of this transport that uses the region.
    #[inline]
    pub fn pin(&mut self, index: u32) {
        if let Some(region) = self.get_mut(index) {
            region.pins += 1;
        }
    }

    /// Counts one operation fewer of this transport that uses the region.
    #[inline]
    pub fn unpin(&mut self, index: u32) {
        if let Some(region) = self.get_mut(index) {
            debug_assert!(region.pins > 0, "an operation ends once");
            region.pins -= 1;
        }
    }
}

/// A peer's region that is attached here. `X` holds what one fabric alone needs.
#[derive(Debug)]
pub struct RemoteRegion<X> {
    /// The generation of the id.
    pub generation: u32,
    /// The index of the peer that exported it.
    pub peer: u32,
    /// The index of the region at the peer.
    pub region: u32,
    /// The generation of the region at the peer.
    pub region_generation: u32,
    /// The number that the peer wants to see before it allows a use of the region.
    pub key: u64,
    /// The length, in bytes.
    pub len: u64,
    /// Where the memory is at the peer. No fabric treats kinds of remote memory differently.
    pub location: Location,
    /// The rights that the export grants.
    pub access: Access,
    /// The number of slices and fences that use it.
    pub pins: u32,
    /// What one fabric alone needs.
    pub ext: X,
}

impl<X> RemoteRegion<X> {
    /// The remote region of an export, which nothing uses yet.
    #[must_use]
    pub const fn new(id: RemoteRegionId, peer: u32, export: &Export, ext: X) -> Self {
        Self {
            generation: id.generation,
            peer,
            region: export.region,
            region_generation: export.generation,
            key: export.key,
            len: export.len,
            location: export.location,
            access: Access::from_bits_truncate(export.rights),
            pins: 0,
            ext,
        }
    }

    /// Checks an operation on a range against the rights and the length in the export.
    ///
    /// # Errors
    /// `AccessDenied`, `OutOfRange`.
    #[inline]
    pub fn check(&self, op: Op, offset: u64, len: u32) -> Result<(), Error> {
        let needed = match op {
            Op::Read => Access::REMOTE_READ,
            Op::Write => Access::REMOTE_WRITE,
        };
        if !self.access.contains(needed) {
            return Err(ErrorKind::AccessDenied.into());
        }
        check_range(offset, len, self.len)
    }
}

/// The remote regions that a transport has attached.
pub type RemoteRegions<X> = Table<RemoteRegion<X>>;

impl<X> Table<RemoteRegion<X>> {
    /// The remote region with this id.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    #[inline]
    pub fn find(&self, id: RemoteRegionId) -> Result<&RemoteRegion<X>, Error> {
        match self.get(id.index) {
            None => Err(ErrorKind::NotFound.into()),
            Some(remote) if remote.generation != id.generation => Err(ErrorKind::Stale.into()),
            Some(remote) => Ok(remote),
        }
    }

    /// The remote region that a slice uses, after a check of its rights and its range.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `AccessDenied`, `OutOfRange`.
    #[inline]
    pub fn check_remote(&self, slice: &Slice) -> Result<&RemoteRegion<X>, Error> {
        let remote = self.find(slice.remote.region)?;
        remote.check(slice.op, slice.remote.offset, slice.len)?;
        Ok(remote)
    }

    /// Takes a remote region that nothing uses out of the table.
    ///
    /// # Errors
    /// `NotFound`, `Stale`. `Busy` while slices or fences use it.
    pub fn detach(&mut self, id: RemoteRegionId) -> Result<RemoteRegion<X>, Error> {
        if self.find(id)?.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        self.remove(id.index).ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// Counts one more slice or fence that uses the remote region.
    #[inline]
    pub fn pin(&mut self, index: u32) {
        if let Some(remote) = self.get_mut(index) {
            remote.pins += 1;
        }
    }

    /// Counts one slice or fence fewer that uses the remote region.
    #[inline]
    pub fn unpin(&mut self, index: u32) {
        if let Some(remote) = self.get_mut(index) {
            debug_assert!(remote.pins > 0, "a slice ends once");
            remote.pins -= 1;
        }
    }
}

#[inline]
fn check_range(offset: u64, len: u32, bound: u64) -> Result<(), Error> {
    match offset.checked_add(u64::from(len)) {
        Some(end) if end <= bound => Ok(()),
        _ => Err(ErrorKind::OutOfRange.into()),
    }
}

#[cfg(test)]
mod tests {
    use te_core::{RegionOffset, RemoteOffset};

    use super::*;
    use crate::testing;
    use te_core::Token;

    const ID: RegionId = RegionId::new(0, 3);
    const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 5);

    fn regions(access: Access) -> Regions<()> {
        let mut regions = Regions::new(4);
        regions
            .insert(ID.index, Region::new(ID, 100, Location::Host, access, 77, ()))
            .expect("an empty table");
        regions
    }

    fn remote_regions(rights: Access) -> RemoteRegions<()> {
        let export = Export { rights: rights.bits(), len: 100, ..testing::export() };
        let mut all = RemoteRegions::new(4);
        all.insert(REMOTE.index, RemoteRegion::new(REMOTE, 9, &export, ())).expect("an empty table");
        all
    }

    fn slice(op: Op, local: u64, remote: u64, len: u32) -> Slice {
        Slice {
            token: Token(1),
            local: RegionOffset::new(ID, local),
            remote: RemoteOffset::new(REMOTE, remote),
            len,
            op,
        }
    }

    fn kind<T>(result: Result<T, Error>) -> Option<ErrorKind> {
        result.err().map(|error| error.kind)
    }

    #[test]
    fn a_slice_needs_the_right_id_rights_and_range_locally() {
        let all = regions(Access::LOCAL_READ);
        assert!(all.check_local(&slice(Op::Write, 90, 0, 10)).is_ok());
        assert_eq!(kind(all.check_local(&slice(Op::Write, 90, 0, 11))), Some(ErrorKind::OutOfRange));
        assert_eq!(kind(all.check_local(&slice(Op::Write, u64::MAX, 0, 11))), Some(ErrorKind::OutOfRange));
        assert_eq!(kind(all.check_local(&slice(Op::Read, 0, 0, 1))), Some(ErrorKind::AccessDenied));
        assert_eq!(kind(all.find(RegionId::new(0, 4))), Some(ErrorKind::Stale));
        assert_eq!(kind(all.find(RegionId::new(1, 3))), Some(ErrorKind::NotFound));
    }

    #[test]
    fn a_slice_needs_the_right_id_rights_and_range_remotely() {
        let all = remote_regions(Access::REMOTE_WRITE);
        assert_eq!(all.check_remote(&slice(Op::Write, 0, 90, 10)).map(|of| of.peer), Ok(9));
        assert_eq!(kind(all.check_remote(&slice(Op::Write, 0, 91, 10))), Some(ErrorKind::OutOfRange));
        assert_eq!(kind(all.check_remote(&slice(Op::Read, 0, 0, 10))), Some(ErrorKind::AccessDenied));
        // Where both are wrong, rights are named: they do not change with the range.
        assert_eq!(kind(all.check_remote(&slice(Op::Read, 0, 91, 10))), Some(ErrorKind::AccessDenied));
        assert_eq!(kind(all.find(RemoteRegionId::new(0, 4))), Some(ErrorKind::Stale));
    }

    #[test]
    fn a_peer_needs_the_key_the_generation_and_some_right() {
        let mut all = regions(Access::REMOTE_READ);
        assert!(all.granted(ID, 77).is_ok());
        assert_eq!(all.granted(ID, 78).err(), Some(ErrorKind::AccessDenied));
        assert_eq!(all.granted(RegionId::new(0, 2), 77).err(), Some(ErrorKind::Stale));
        assert_eq!(all.granted(RegionId::new(3, 3), 77).err(), Some(ErrorKind::NotFound));
        assert_eq!(regions(Access::LOCAL).granted(ID, 77).err(), Some(ErrorKind::AccessDenied));
    }

    #[test]
    fn a_region_that_is_being_deregistered_takes_nothing_new_from_either_side() {
        let mut all = regions(Access::all());
        all.get_mut(ID.index).expect("it is there").closing = true;
        assert_eq!(kind(all.check_local(&slice(Op::Write, 0, 0, 1))), Some(ErrorKind::AccessDenied));
        assert_eq!(all.granted(ID, 77).err(), Some(ErrorKind::Stale));
    }

    #[test]
    fn a_remote_region_is_not_detached_while_something_uses_it() {
        let mut all = remote_regions(Access::REMOTE_READ);
        all.pin(REMOTE.index);
        assert_eq!(kind(all.detach(REMOTE)), Some(ErrorKind::Busy));
        all.unpin(REMOTE.index);
        assert_eq!(kind(all.detach(RemoteRegionId::new(0, 6))), Some(ErrorKind::Stale));
        assert_eq!(all.detach(REMOTE).map(|of| of.peer), Ok(9));
        assert_eq!(kind(all.detach(REMOTE)), Some(ErrorKind::NotFound));
    }
}
