//! The queue pairs that are held for peers: made for their offers, destroyed with their connections.

use te_core::Error;
use te_fabric::net::random_u64;
use zerocopy::little_endian::U32;

use super::inbound::{Accepting, Inbound, PeerQp};
use crate::config::Config;
use crate::io::Io;
use crate::io::connects::{Requester, Task};
use crate::sys::verbs::{Connecting, MrAccess, Path, QpConfig, QpHandle, QpStep, Verbs};
use crate::wire::{LIVE_MAX, PortBody, QpEntry, Status};

/// A peer's queue pair that could not be destroyed yet.
#[derive(Clone, Copy, Debug)]
struct Leftover {
    session: u64,
    identity: u64,
    handle: QpHandle,
}

/// Selects the queue pairs of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerKey {
    /// Those of one session.
    Session(u64),
    /// Those of all sessions with this identity.
    Identity(u64),
}

/// An offer of a peer: the id of its request, its port, its queue pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer<'a> {
    pub(super) id: u64,
    pub(super) port: PortBody,
    pub(super) qps: &'a [QpEntry],
}

/// Makes and destroys the queue pairs that are held for peers. Each connection lists its own.
#[derive(Debug, Default)]
pub(super) struct PeerQueuePairs {
    /// Queue pairs that could not be destroyed, and are tried again.
    leftovers: Vec<Leftover>,
    made: u64,
    destroyed: u64,
}

impl PeerQueuePairs {
    pub(super) const fn made(&self) -> u64 {
        self.made
    }

    pub(super) const fn destroyed(&self) -> u64 {
        self.destroyed
    }

    /// Makes our ends of the queue pairs of an offer. `None`: they are being connected, and the peer gets its
    /// answer later.
    ///
    /// # Errors
    /// The reason for refusing the offer. No queue pair is held for it then.
    pub(super) fn accept<V: Verbs>(
        &mut self,
        inbound: &mut Inbound,
        offer: Offer<'_>,
        io: &mut Io<V>,
        config: &Config,
    ) -> Result<Option<Accepting>, Status> {
        // Half of the device's queue pairs are reserved for our own work.
        let held = self.made - self.destroyed + offer.qps.len() as u64;
        if inbound.qps.len() + offer.qps.len() > LIVE_MAX || held > u64::from(io.info().qp_count_max / 2) {
            return Err(Status::Full);
        }
        let gid = io.port().matching(&offer.port).ok_or(Status::Family)?;
        let (mut entries, mut jobs) = (Vec::with_capacity(offer.qps.len()), Vec::new());
        let before = inbound.qps.len();
        let mut failed = None;
        for theirs in offer.qps {
            if inbound.qps.iter().any(|qp| qp.generation == theirs.generation.get()) {
                failed = Some(Status::Protocol);
                break;
            }
            match self.make(inbound, (&offer.port, gid.index, theirs), io, config) {
                Some((ours, Connecting::Done)) => entries.push(ours),
                Some((ours, Connecting::Later(job))) => {
                    entries.push(ours);
                    jobs.push((theirs.generation.get(), job));
                }
                None => {
                    failed = Some(Status::Device);
                    break;
                }
            }
        }
        let session = inbound.session.unwrap_or(0);
        let accepting = Accepting { id: offer.id, port: io.port().body(&gid, config.reads), entries };
        if failed.is_none() {
            if jobs.is_empty() {
                return Ok(Some(accepting));
            }
            let requester = Requester::Target { session, connection: inbound.name };
            match io.push_connects(Task { requester, jobs }) {
                Ok(()) => {
                    inbound.accepting = Some(accepting);
                    return Ok(None);
                }
                Err(_) => failed = Some(Status::Full),
            }
        } else {
            // Until the jobs are dropped, their queue pairs cannot be destroyed.
            drop(jobs);
        }
        let mut new = inbound.qps.split_off(before);
        self.destroy(session, inbound.identity, &mut new, |_| true, io.verbs_mut());
        Err(failed.unwrap_or(Status::Device))
    }

    /// Makes our end of one queue pair and connects it, or starts to.
    fn make<V: Verbs>(
        &mut self,
        inbound: &mut Inbound,
        (port, gid_index, theirs): (&PortBody, u32, &QpEntry),
        io: &mut Io<V>,
        config: &Config,
    ) -> Option<(QpEntry, Connecting)> {
        let psn = random_u64().ok()? as u32 & 0xff_ffff;
        let mtu = io.port().mtu;
        let verbs = io.verbs_mut();
        let qp = match verbs.create_qp(QpConfig { depth: 1, sges: 1, inline_bytes: 0 }) {
            Ok(qp) => qp,
            Err(error) => {
                log::warn!("a queue pair for a peer cannot be made: {error}");
                return None;
            }
        };
        self.made += 1;
        inbound.qps.push(PeerQp { generation: theirs.generation.get(), handle: qp.handle });
        let path = Path {
            peer_qp: theirs.number.get(),
            peer_lid: port.lid.get(),
            peer_gid: port.gid,
            gid_index,
            mtu_bytes: mtu.min(port.mtu.get()),
            peer_psn: theirs.psn.get(),
            psn,
            reads_from_peer: config.reads.min(port.reads).max(1),
            reads_to_peer: 1,
            traffic_class: config.traffic_class,
            service_level: config.service_level,
            timeout_exponent: config.timeout_exponent,
            retries: config.retries,
            rnr_retries: 0,
        };
        let access = MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE;
        let init = verbs.modify_qp(qp.handle, QpStep::Init(access));
        let connecting = match init.and_then(|()| verbs.connect_qp(qp.handle, path)) {
            Ok(connecting) => connecting,
            Err(error) => {
                log::warn!("a queue pair for a peer cannot be connected: {error}");
                return None;
            }
        };
        let entry = QpEntry {
            generation: theirs.generation,
            number: U32::new(qp.number),
            psn: U32::new(psn),
            reserved: U32::ZERO,
        };
        Some((entry, connecting))
    }

    /// Handles the results of connecting the queue pairs of an offer; returns whether all are connected. If
    /// not, they are destroyed.
    pub(super) fn connected<V: Verbs>(
        &mut self,
        inbound: &mut Inbound,
        accepting: &Accepting,
        ends: &[(u32, Result<(), Error>)],
        verbs: &mut V,
    ) -> bool {
        let Some(error) = ends.iter().find_map(|(_, end)| end.err()) else { return true };
        log::warn!("queue pairs for a peer cannot be connected: {error}");
        let of_offer =
            |qp: &PeerQp| accepting.entries.iter().any(|entry| entry.generation.get() == qp.generation);
        let session = inbound.session.unwrap_or(0);
        self.destroy(session, inbound.identity, &mut inbound.qps, of_offer, verbs);
        false
    }

    /// Destroys the queue pairs of a peer that `selected` selects. Those that cannot be destroyed are tried
    /// again later.
    pub(super) fn destroy<V: Verbs>(
        &mut self,
        session: u64,
        identity: u64,
        qps: &mut Vec<PeerQp>,
        mut selected: impl FnMut(&PeerQp) -> bool,
        verbs: &mut V,
    ) {
        qps.retain(|qp| {
            if !selected(qp) {
                return true;
            }
            if verbs.destroy_qp(qp.handle).is_ok() {
                self.destroyed += 1;
            } else {
                // In error it accepts no new packets, but may still execute one that it has begun: it is not
                // fenced (L5). While it is being connected, it can be neither destroyed nor put in error; it
                // is destroyed when that has ended.
                if let Err(error) = verbs.modify_qp(qp.handle, QpStep::Error)
                    && error.code != libc::EBUSY
                {
                    log::warn!("a peer's queue pair can be neither destroyed nor put in error: {error}");
                }
                self.leftovers.push(Leftover { session, identity, handle: qp.handle });
            }
            false
        });
    }

    /// Tries again to destroy queue pairs that could not be destroyed; returns how many are left.
    pub(super) fn retry_destroy<V: Verbs>(&mut self, of: PeerKey, verbs: &mut V) -> usize {
        let mut left = 0;
        self.leftovers.retain(|leftover| {
            let selected = match of {
                PeerKey::Session(session) => leftover.session == session,
                PeerKey::Identity(identity) => leftover.identity == identity,
            };
            if !selected {
                return true;
            }
            let gone = verbs.destroy_qp(leftover.handle).is_ok();
            self.destroyed += u64::from(gone);
            left += usize::from(!gone);
            !gone
        });
        left
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::io::connection::Connection;
    use crate::sim::{DeviceConfig, SimConfig, SimDevice, SimFabric};
    use std::net::{TcpListener, TcpStream};
    use te_core::Instant;
    use te_fabric::Interest;

    fn inbound() -> Inbound {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let connection = Connection::new(stream, Interest::READ);
        let mut inbound = Inbound::new(connection, 5, Instant::from_millis(10));
        (inbound.session, inbound.identity) = (Some(1), 2);
        inbound
    }

    fn io(qp_count_max: u32) -> (SimFabric, Io<SimDevice>, Config) {
        let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
        let config = Config { proof_ms_max: 0, ..Config::default() };
        let device = fabric.device(DeviceConfig { qp_count_max, ..DeviceConfig::default() });
        let (io, _) = Io::open(device, &config).expect("a working port");
        (fabric, io, config)
    }

    fn entries(generations: impl IntoIterator<Item = u32>) -> Vec<QpEntry> {
        let number = U32::new(0x11);
        let entry = |generation| QpEntry {
            generation: U32::new(generation),
            number,
            psn: U32::ZERO,
            reserved: U32::ZERO,
        };
        generations.into_iter().map(entry).collect()
    }

    #[test]
    fn an_offer_is_answered_with_as_many_queue_pairs_or_leaves_none() {
        let (fabric, mut io, config) = io(8);
        let (mut all, mut peer) = (PeerQueuePairs::default(), inbound());
        let port = io.port().body(&io.port().gid, 1);
        let first = entries([1, 2]);
        let accepted = all.accept(&mut peer, Offer { id: 7, port, qps: &first }, &mut io, &config);
        let accepted = accepted.expect("there is room").expect("connecting does not block");
        assert_eq!((accepted.id, accepted.entries.len(), peer.qps.len()), (7, 2, 2));

        let id = io.verbs().id();
        fabric.fail_qp_steps(id, libc::EINVAL, 1);
        let refused = all.accept(&mut peer, Offer { id: 8, port, qps: &entries([3, 4]) }, &mut io, &config);
        assert_eq!(refused.err(), Some(Status::Device));
        let again = all.accept(&mut peer, Offer { id: 9, port, qps: &entries([5, 1]) }, &mut io, &config);
        assert_eq!(again.err(), Some(Status::Protocol), "a generation is used once");
        let many = all.accept(&mut peer, Offer { id: 9, port, qps: &entries(5..8) }, &mut io, &config);
        assert_eq!(many.err(), Some(Status::Full), "half of the device is for our own work");
        let infiniband = PortBody { gid_kind: 0, ..port };
        let offer = Offer { id: 9, port: infiniband, qps: &first };
        assert_eq!(all.accept(&mut peer, offer, &mut io, &config).err(), Some(Status::Family));
        assert_eq!((peer.qps.len(), fabric.qp_count(id), all.made() - all.destroyed()), (2, 2, 2));
    }

    #[test]
    fn queue_pairs_that_cannot_be_destroyed_are_tried_again() {
        let (fabric, mut io, config) = io(8);
        let (mut all, mut peer) = (PeerQueuePairs::default(), inbound());
        let port = io.port().body(&io.port().gid, 1);
        let offer = entries([1, 2]);
        all.accept(&mut peer, Offer { id: 7, port, qps: &offer }, &mut io, &config).expect("there is room");
        // They are not queue pairs of the other device.
        let mut other = fabric.device(DeviceConfig::default());
        all.destroy(1, 2, &mut peer.qps, |qp| qp.generation == 1, &mut other);
        assert_eq!((peer.qps.len(), all.destroyed()), (1, 0));
        assert_eq!(all.retry_destroy(PeerKey::Session(1), &mut other), 1);
        assert_eq!(all.retry_destroy(PeerKey::Session(9), io.verbs_mut()), 0, "of another session");
        assert_eq!(all.destroyed(), 0);
        assert_eq!(all.retry_destroy(PeerKey::Identity(2), io.verbs_mut()), 0);
        assert_eq!(all.destroyed(), 1);
    }

    #[test]
    fn queue_pairs_that_cannot_be_connected_are_destroyed() {
        let (_fabric, mut io, config) = io(8);
        let (mut all, mut peer) = (PeerQueuePairs::default(), inbound());
        let port = io.port().body(&io.port().gid, 1);
        let offer = entries([1, 2]);
        let accepted = all.accept(&mut peer, Offer { id: 7, port, qps: &offer }, &mut io, &config);
        let accepting = accepted.expect("there is room").expect("connecting does not block");
        assert!(all.connected(&mut peer, &accepting, &[(1, Ok(())), (2, Ok(()))], io.verbs_mut()));
        let failed = Err(Error::with_code(te_core::ErrorKind::System, libc::ETIMEDOUT));
        assert!(!all.connected(&mut peer, &accepting, &[(1, Ok(())), (2, failed)], io.verbs_mut()));
        assert!(peer.qps.is_empty() && all.made() == all.destroyed());
    }
}
