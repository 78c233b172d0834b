//! Registered regions and attached segments: what an id refers to, what may be done with it, and who still uses it.

use te_core::{Access, Error, ErrorKind, Op, RegionId, RemoteRegionId, Slice};

use crate::Export;
use crate::table::Table;

/// A region of local memory. `X` is what a fabric keeps beside.
#[derive(Debug)]
pub struct Region<X> {
    /// Which use of the index this is.
    pub generation: u32,
    /// Bytes.
    pub len: u64,
    /// Rights of local operations and of peers.
    pub access: Access,
    /// What a peer has to show.
    pub key: u64,
    /// Operations of this transport that refer to it.
    pub users: u32,
    /// `deregister` has begun: nothing new may use it.
    pub closing: bool,
    /// Fields of this fabric alone.
    pub ext: X,
}

impl<X> Region<X> {
    /// A region that nothing uses yet.
    #[must_use]
    pub const fn new(id: RegionId, len: u64, access: Access, key: u64, ext: X) -> Self {
        Self { generation: id.generation, len, access, key, users: 0, closing: false, ext }
    }

    /// The bits of the rights that peers have.
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

    /// The region that a slice uses locally, once its rights and its range are checked.
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

    /// The region that a peer may use, which shows `key` for it (L6). Whether its rights allow what the peer wants is for the
    /// caller to check.
    ///
    /// # Errors
    /// `NotFound`. `Stale`: another generation, or a region that is being deregistered. `AccessDenied`: a wrong key, or a
    /// region that no peer may use.
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

    /// One more operation of this transport uses the region.
    #[inline]
    pub fn pin(&mut self, index: u32) {
        if let Some(region) = self.get_mut(index) {
            region.users += 1;
        }
    }

    /// An operation of this transport no longer uses the region.
    #[inline]
    pub fn unpin(&mut self, index: u32) {
        if let Some(region) = self.get_mut(index) {
            debug_assert!(region.users > 0, "an operation ends once");
            region.users -= 1;
        }
    }
}

/// A peer's exported region that is attached here. `X` is what a fabric keeps beside.
#[derive(Debug)]
pub struct Segment<X> {
    /// Which use of the index this is.
    pub generation: u32,
    /// Index of the peer that exported it.
    pub peer: u32,
    /// Index of the region at the peer.
    pub region: u32,
    /// Generation of the region at the peer.
    pub region_generation: u32,
    /// What to show for it.
    pub key: u64,
    /// Bytes.
    pub len: u64,
    /// The rights that the export grants.
    pub access: Access,
    /// Slices and fences that refer to it.
    pub users: u32,
    /// Fields of this fabric alone.
    pub ext: X,
}

impl<X> Segment<X> {
    /// A segment that nothing uses yet.
    #[must_use]
    pub const fn new(id: RemoteRegionId, peer: u32, export: &Export, ext: X) -> Self {
        Self {
            generation: id.generation,
            peer,
            region: export.region,
            region_generation: export.generation,
            key: export.key,
            len: export.len,
            access: Access::from_bits_truncate(export.rights),
            users: 0,
            ext,
        }
    }

    /// Checks an operation on a range against what is known here of the segment.
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

/// The attached segments of a transport.
pub type Segments<X> = Table<Segment<X>>;

impl<X> Table<Segment<X>> {
    /// The segment with this id.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    #[inline]
    pub fn find(&self, id: RemoteRegionId) -> Result<&Segment<X>, Error> {
        match self.get(id.index) {
            None => Err(ErrorKind::NotFound.into()),
            Some(segment) if segment.generation != id.generation => Err(ErrorKind::Stale.into()),
            Some(segment) => Ok(segment),
        }
    }

    /// The segment that a slice uses, once its rights and its range are checked.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `AccessDenied`, `OutOfRange`.
    #[inline]
    pub fn check_remote(&self, slice: &Slice) -> Result<&Segment<X>, Error> {
        let segment = self.find(slice.remote.region)?;
        segment.check(slice.op, slice.remote.offset, slice.len)?;
        Ok(segment)
    }

    /// Takes a segment out of the table that nothing uses.
    ///
    /// # Errors
    /// `NotFound`, `Stale`. `Busy`: slices or fences refer to it.
    pub fn detach(&mut self, id: RemoteRegionId) -> Result<Segment<X>, Error> {
        if self.find(id)?.users > 0 {
            return Err(ErrorKind::Busy.into());
        }
        self.remove(id.index).ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// One more slice or fence refers to the segment.
    #[inline]
    pub fn pin(&mut self, index: u32) {
        if let Some(segment) = self.get_mut(index) {
            segment.users += 1;
        }
    }

    /// A slice or fence no longer refers to the segment.
    #[inline]
    pub fn unpin(&mut self, index: u32) {
        if let Some(segment) = self.get_mut(index) {
            debug_assert!(segment.users > 0, "a slice ends once");
            segment.users -= 1;
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
    const SEGMENT: RemoteRegionId = RemoteRegionId::new(0, 5);

    fn regions(access: Access) -> Regions<()> {
        let mut regions = Regions::new(4);
        regions.insert(ID.index, Region::new(ID, 100, access, 77, ())).expect("an empty table");
        regions
    }

    fn segments(rights: Access) -> Segments<()> {
        let export = Export { rights: rights.bits(), len: 100, ..testing::export() };
        let mut segments = Segments::new(4);
        segments.insert(SEGMENT.index, Segment::new(SEGMENT, 9, &export, ())).expect("an empty table");
        segments
    }

    fn slice(op: Op, local: u64, remote: u64, len: u32) -> Slice {
        Slice {
            token: Token(1),
            local: RegionOffset::new(ID, local),
            remote: RemoteOffset::new(SEGMENT, remote),
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
        let all = segments(Access::REMOTE_WRITE);
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
    fn a_segment_is_not_detached_while_something_uses_it() {
        let mut all = segments(Access::REMOTE_READ);
        all.pin(SEGMENT.index);
        assert_eq!(kind(all.detach(SEGMENT)), Some(ErrorKind::Busy));
        all.unpin(SEGMENT.index);
        assert_eq!(kind(all.detach(RemoteRegionId::new(0, 6))), Some(ErrorKind::Stale));
        assert_eq!(all.detach(SEGMENT).map(|of| of.peer), Ok(9));
        assert_eq!(kind(all.detach(SEGMENT)), Some(ErrorKind::NotFound));
    }
}
