//! The identifiers that events of connections carry. Connections that we opened and connections of peers lie
//! in two tables; the lowest bit says in which.

use te_fabric::table;

/// The name of a connection in the table of one side. Like every name of a slab, it contains an index and a
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name<const SIDE: u32>(u64);

/// The name of a connection that this transport opened.
pub(crate) type OwnName = Name<0>;
/// The name of a connection that a peer opened.
pub(crate) type PeerName = Name<1>;

impl<const SIDE: u32> Name<SIDE> {
    /// The name in an event, if the event is about a connection of this side.
    #[cfg(feature = "uring")]
    pub(crate) fn of(raw: u64) -> Option<Self> {
        (raw & 1 == u64::from(SIDE)).then_some(Self(raw))
    }

    /// The value that an event carries.
    pub(crate) const fn raw(self) -> u64 {
        self.0
    }
}

impl<const SIDE: u32> table::Name for Name<SIDE> {
    const SLOTS_MAX: u64 = 1 << 31;

    fn pack(index: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(index << 1 | SIDE))
    }

    fn unpack(self) -> (u32, u32) {
        ((self.0 as u32) >> 1, (self.0 >> 32) as u32)
    }
}

/// A name that came with an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionName {
    Own(OwnName),
    Peer(PeerName),
}

impl ConnectionName {
    /// The connection that an event belongs to.
    pub(crate) const fn of(raw: u64) -> Self {
        if raw & 1 == 0 { Self::Own(Name(raw)) } else { Self::Peer(Name(raw)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use te_fabric::Slab;

    #[test]
    fn connections_of_the_two_sides_share_no_name() {
        let (mut own, mut peers) = (Slab::<char, OwnName>::new(), Slab::<char, PeerName>::new());
        for index in 0..3 {
            let ((ours, a), (theirs, b)) = (own.reserve(), peers.reserve());
            assert_eq!((ours, theirs), (index, index));
            assert_ne!(a.raw(), b.raw());
            assert_eq!(
                (ConnectionName::of(a.raw()), ConnectionName::of(b.raw())),
                (ConnectionName::Own(a), ConnectionName::Peer(b))
            );
            assert_eq!((own.index(a), peers.index(b)), (Some(index), Some(index)));
        }
    }

    #[test]
    fn a_connection_in_the_place_of_another_has_another_name() {
        let mut peers = Slab::<char, PeerName>::new();
        let (index, gone) = peers.reserve();
        peers.release(index);
        let (again, name) = peers.reserve();
        assert_eq!((again, peers.index(gone), peers.index(name)), (index, None, Some(index)));
        assert_eq!(ConnectionName::of(gone.raw()), ConnectionName::Peer(gone));
    }
}
