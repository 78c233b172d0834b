//! What the initiator keeps about a peer: one life of an engine, at the addresses of its data port.

use std::collections::HashSet;

use te_core::{Error, Op};
use te_fabric::peer::Contact;
use te_fabric::{EXPORT_ADDRESSES_MAX, ExportFormat, Queue};

use crate::config::CONNECTIONS_PER_PEER_MAX;
use crate::export::Export;
use crate::header::Version;
use crate::sys::Memory;

/// The largest number of lives that are remembered after their peers were dropped.
const REMEMBERED_MAX: usize = 4_096;

pub(super) type Operation = te_fabric::Operation<Ext>;
pub(super) type Operations = te_fabric::Operations<Ext>;

/// What this fabric keeps of an operation beside the fields that every fabric keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ext {
    /// The local memory, which the pin of its region keeps mapped.
    pub(super) local: Memory,
    pub(super) place: Place,
    /// It failed once on a connection that had been idle, and is sent on another.
    pub(super) resent: bool,
    /// The target has refused it; the descriptor is fetched again, once.
    pub(super) refused: bool,
    /// Bytes of an earlier try may still land.
    pub(super) in_doubt: bool,
}

/// Where an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It waits for a connection.
    Queue,
    /// It waits for the descriptor.
    Asking,
    /// It is exchanged on the connection with this index.
    Connection(u32),
}

impl Ext {
    pub(super) const fn new(local: Memory) -> Self {
        Self { local, place: Place::Queue, resent: false, refused: false, in_doubt: false }
    }
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) contact: Contact,
    /// The first export that led to it. Another export leads to the same peer if it has the same life,
    /// addresses, version and name: a descriptor states its life itself, and could state another's.
    export: Export,
    /// Remote regions that are attached.
    pub(super) regions: u32,
    /// Operations that wait for a connection.
    pub(super) queue: Queue,
    /// Operations that wait for the descriptor.
    pub(super) asking: Queue,
    /// The descriptor is being fetched.
    pub(super) asked: bool,
    /// Why operations that wait for the descriptor could not be sent.
    pub(super) unreachable: Option<Error>,
    pub(super) connections: [Option<u32>; CONNECTIONS_PER_PEER_MAX as usize],
    /// It is in the list of peers with operations that wait for a connection.
    pub(super) listed: bool,
    /// Another process answers under the segment's name.
    pub(super) restarted: bool,
    /// A WRITE has ended while bytes of it might still land.
    pub(super) in_doubt: bool,
}

impl Peer {
    pub(super) fn new(export: &Export, in_doubt: bool) -> Self {
        Self {
            contact: Contact::new(&contact_of(export)),
            export: export.clone(),
            regions: 0,
            queue: Queue::new(),
            asking: Queue::new(),
            asked: false,
            unreachable: None,
            connections: [None; CONNECTIONS_PER_PEER_MAX as usize],
            listed: false,
            restarted: false,
            in_doubt,
        }
    }

    /// Whether an export leads to this peer.
    pub(super) fn is_of(&self, export: &Export) -> bool {
        let own = &self.export;
        own.life == export.life
            && own.addresses == export.addresses
            && own.port == export.port
            && own.version == export.version
            && own.segment == export.segment
    }

    /// The version that the peer speaks.
    pub(super) const fn version(&self) -> Version {
        self.export.version
    }

    /// The name under which its descriptor is found.
    pub(super) fn segment(&self) -> &str {
        &self.export.segment
    }

    /// A place for another connection, if `connections_max` allows one.
    pub(super) fn vacant(&self, connections_max: u32) -> Option<usize> {
        self.connections.iter().take(connections_max as usize).position(Option::is_none)
    }

    /// The connection with this index is gone.
    pub(super) fn forget(&mut self, index: u32) {
        for connection in &mut self.connections {
            if *connection == Some(index) {
                *connection = None;
            }
        }
    }
}

/// The addresses of an export in the form that `te-fabric` keeps.
fn contact_of(export: &Export) -> te_fabric::Export {
    let first = export.addresses.first().copied();
    let mut addresses = [first.unwrap_or(core::net::Ipv4Addr::LOCALHOST.into()); EXPORT_ADDRESSES_MAX];
    for (to, from) in addresses.iter_mut().zip(&export.addresses) {
        *to = *from;
    }
    te_fabric::Export {
        format: ExportFormat { magic: *b"moon", version: 1 },
        rights: export.access.bits(),
        addresses,
        address_count: export.addresses.len().clamp(1, EXPORT_ADDRESSES_MAX) as u8,
        port: export.port,
        incarnation: export.life,
        region: 0,
        generation: 0,
        key: 0,
        len: export.len,
        location: te_core::Location::Host,
    }
}

/// Lives that were in doubt when their peers were dropped: bytes of WRITEs may still land there.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    lives: HashSet<u64>,
    /// There were more than are remembered: any life may be one of them.
    overflow: bool,
}

impl Doubts {
    pub(super) fn remember(&mut self, peer: &Peer) {
        if peer.in_doubt {
            let known = self.lives.len() < REMEMBERED_MAX || self.lives.contains(&peer.contact.incarnation());
            if known {
                self.lives.insert(peer.contact.incarnation());
            } else {
                self.overflow = true;
            }
        }
    }

    pub(super) fn contains(&self, life: u64) -> bool {
        self.overflow || self.lives.contains(&life)
    }
}

/// What is known about the target's memory when an operation ends.
pub(super) fn remote_bytes(op: Op, error: bool, in_doubt: bool) -> te_fabric::RemoteBytes {
    match (op, error, in_doubt) {
        (Op::Write, _, true) => te_fabric::RemoteBytes::InDoubt,
        (Op::Write, false, false) => te_fabric::RemoteBytes::Written,
        _ => te_fabric::RemoteBytes::Untouched,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use te_core::Access;

    fn export(life: u64) -> Export {
        Export {
            access: Access::REMOTE_READ,
            addresses: vec![core::net::IpAddr::from([127, 0, 0, 1])],
            port: 9,
            version: Version::V2,
            addr: 1,
            len: 1,
            life,
            segment: "h:1".into(),
        }
    }

    #[test]
    fn doubts_about_a_life_outlive_its_peer() {
        let mut doubts = Doubts::default();
        doubts.remember(&Peer::new(&export(1), false));
        assert!(!doubts.contains(1));
        doubts.remember(&Peer::new(&export(1), true));
        assert!(doubts.contains(1) && !doubts.contains(2));
        for life in 2..=REMEMBERED_MAX as u64 {
            doubts.remember(&Peer::new(&export(life), true));
        }
        assert!(!doubts.contains(u64::MAX));
        doubts.remember(&Peer::new(&export(1), true));
        assert!(!doubts.contains(u64::MAX), "it was known");
        doubts.remember(&Peer::new(&export(0), true));
        assert!(doubts.contains(u64::MAX), "too many: it may have been one of them");
    }

    #[test]
    fn a_write_is_written_in_doubt_or_without_effect_and_a_read_has_none() {
        use te_fabric::RemoteBytes::{InDoubt, Untouched, Written};
        assert_eq!(remote_bytes(Op::Write, false, false), Written);
        assert_eq!(remote_bytes(Op::Write, false, true), InDoubt);
        assert_eq!(remote_bytes(Op::Write, true, true), InDoubt);
        assert_eq!(remote_bytes(Op::Write, true, false), Untouched);
        assert_eq!(remote_bytes(Op::Read, false, true), Untouched);
    }

    #[test]
    fn exports_lead_to_one_peer_if_they_agree_in_all_that_identifies_it() {
        let peer = Peer::new(&export(1), false);
        assert!(peer.is_of(&Export { addr: 9, len: 9, access: Access::REMOTE_WRITE, ..export(1) }));
        let elsewhere = vec![core::net::IpAddr::from([10, 0, 0, 1])];
        for other in [
            export(2),
            Export { addresses: elsewhere, ..export(1) },
            Export { port: 8, ..export(1) },
            Export { version: Version::V1, ..export(1) },
            Export { segment: "h:2".into(), ..export(1) },
        ] {
            assert!(!peer.is_of(&other), "{other:?}");
        }
    }

    #[test]
    fn a_peer_has_as_many_connections_as_are_allowed() {
        let mut peer = Peer::new(&export(1), false);
        assert_eq!(peer.vacant(2), Some(0));
        (peer.connections[0], peer.connections[1]) = (Some(7), Some(8));
        assert_eq!((peer.vacant(2), peer.vacant(3)), (None, Some(2)));
        peer.forget(7);
        assert_eq!((peer.vacant(2), peer.connections[1]), (Some(0), Some(8)));
    }
}
