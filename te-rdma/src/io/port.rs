//! Our port: the GID that we use, and the proof by a loopback that packets with it arrive.

use std::time::{Duration, Instant as Clock};

use te_core::{Error, ErrorKind, Op};

use crate::config::Config;
use crate::sys::posting::post;
use crate::sys::registration::Scratch;
use crate::sys::verbs::{
    Gid, GidKind, MrAccess, Path, PortInfo, Qp, QpConfig, QpStep, Sge, Verbs, WcStatus, WorkCompletion,
    WorkRequest,
};
use crate::wire::PortBody;

/// The most entries of the GID table that are read.
const GIDS_MAX: u32 = 256;
/// The loopback sends again after 4.096 µs × 2^this.
const PROOF_TIMEOUT_EXPONENT: u8 = 12;
const PROOF_RETRIES: u8 = 3;
/// The bytes that the loopback sends.
const PROOF: u64 = 0x736e_6f77_736b_696e;

/// The port as we use it.
#[derive(Debug)]
pub(crate) struct LocalPort {
    pub(crate) info: PortInfo,
    /// The source GID of our packets.
    pub(crate) gid: Gid,
    /// All GIDs by which peers may address us.
    gids: Vec<Gid>,
    /// Path MTU, bytes.
    pub(crate) mtu: u32,
}

impl LocalPort {
    /// Queries the port and chooses a GID.
    ///
    /// # Errors
    /// The driver's; `Rail` when the port cannot carry traffic, `Unreachable` when no GID passes the proof.
    pub(crate) fn open<V: Verbs>(verbs: &mut V, config: &Config) -> Result<Self, Error> {
        let info = verbs.port()?;
        if !info.active {
            return Err(ErrorKind::Rail.into());
        }
        let gids = gids(verbs, info.gids);
        let mut candidates = gids.clone();
        match config.gid_index {
            Some(index) => candidates.retain(|gid| gid.index == index),
            None => candidates.sort_by_key(|gid| (rank(gid), gid.index)),
        }
        let mtu = info.mtu_bytes.min(config.mtu_bytes_max).max(256);
        let mut last = Error::new(ErrorKind::Unreachable);
        for gid in candidates {
            let port = Self { info, gid, gids: gids.clone(), mtu };
            if config.proof_ms_max == 0 {
                return Ok(port);
            }
            match port.prove(verbs, config) {
                Ok(()) => return Ok(port),
                Err(error) => {
                    log::info!("GID {} does not pass the loopback: {error}", gid.index);
                    last = error;
                }
            }
        }
        Err(Error::with_code(ErrorKind::Unreachable, last.code))
    }

    /// Queries the port after one of its events. The GID stays while the table has it; otherwise it is
    /// replaced by the best of the others. True: it has changed, or has another index.
    ///
    /// # Errors
    /// The driver's; `Rail` when the table has no other GID, or not the one at index `only`.
    pub(crate) fn refresh<V: Verbs>(&mut self, verbs: &V, only: Option<u32>) -> Result<bool, Error> {
        self.info = verbs.port()?;
        self.gids = gids(verbs, self.info.gids);
        let ours = self.gids.iter().find(|gid| gid.raw == self.gid.raw && gid.kind == self.gid.kind);
        if let Some(&gid) = ours {
            let moved = gid.index != self.gid.index;
            self.gid = gid;
            return Ok(moved);
        }
        let others = self.gids.iter().filter(|gid| only.is_none_or(|only| only == gid.index));
        let best = others.min_by_key(|gid| (rank(gid), gid.index)).ok_or(ErrorKind::Rail)?;
        self.gid = *best;
        Ok(true)
    }

    /// The address of our port in a frame, with this GID.
    pub(crate) fn body(&self, gid: &Gid, reads: u8) -> PortBody {
        PortBody {
            gid: gid.raw,
            lid: self.info.lid.into(),
            gid_kind: gid_kind_to_wire(gid.kind),
            reads,
            mtu: self.mtu.into(),
            reserved: 0.into(),
        }
    }

    /// The GID by which a peer with this port can reach us: of the same kind and address family, and of the
    /// same scope if there is one.
    pub(crate) fn matching(&self, peer: &PortBody) -> Option<Gid> {
        let kind = gid_kind_from_wire(peer.gid_kind)?;
        let fits = |gid: &&Gid| gid.kind == kind && is_v4(&gid.raw) == is_v4(&peer.gid);
        let mut fitting: Vec<&Gid> = self.gids.iter().filter(fits).collect();
        let other_scope = |gid: &Gid| is_link_local(&gid.raw) != is_link_local(&peer.gid);
        fitting.sort_by_key(|gid| (other_scope(gid), gid.raw != self.gid.raw, gid.index));
        fitting.first().copied().copied()
    }

    /// The loopback: sends eight bytes from one queue pair of ours to another.
    fn prove<V: Verbs>(&self, verbs: &mut V, config: &Config) -> Result<(), Error> {
        let scratch = Scratch::new(verbs)?;
        let shape = QpConfig { depth: 1, sges: 1, inline_bytes: 0 };
        let mut made: Vec<Qp> = Vec::new();
        let mut run = || -> Result<(), Error> {
            for _ in 0..2 {
                made.push(verbs.create_qp(shape)?);
            }
            let (from, to) = (made[0], made[1]);
            verbs.modify_qp(from.handle, QpStep::Init(MrAccess::empty()))?;
            verbs.modify_qp(to.handle, QpStep::Init(MrAccess::REMOTE_WRITE))?;
            for (qp, peer) in [(to, from), (from, to)] {
                verbs.modify_qp(qp.handle, QpStep::Connect(self.proof_path(peer, config)))?;
            }
            scratch.set(0, PROOF);
            scratch.set(1, 0);
            let keys = scratch.registration();
            let sge = Sge { addr: scratch.address(0), len: 8, local_key: keys.local_key };
            let request = WorkRequest {
                id: 1,
                op: Op::Write,
                signaled: true,
                inline: false,
                sges: 1,
                remote_addr: scratch.address(1),
                remote_key: keys.remote_key,
            };
            if let (0, error) = post(verbs, from.handle, &[request], &[sge]) {
                return Err(error.unwrap_or(ErrorKind::System.into()));
            }
            wait(verbs, from.number, Duration::from_millis(u64::from(config.proof_ms_max)))?;
            if scratch.get(1) == PROOF { Ok(()) } else { Err(ErrorKind::Corrupt.into()) }
        };
        let result = run();
        let mut quiet = true;
        for qp in made {
            quiet &= verbs.destroy_qp(qp.handle).is_ok();
        }
        if quiet {
            scratch.free(verbs);
        }
        // Completions that they left in the completion queue belong to no slice.
        let mut left = [NOTHING; 16];
        while verbs.poll_cq(&mut left)? > 0 {}
        result
    }

    fn proof_path(&self, peer: Qp, config: &Config) -> Path {
        Path {
            peer_qp: peer.number,
            peer_lid: self.info.lid,
            peer_gid: self.gid.raw,
            gid_index: self.gid.index,
            mtu_bytes: self.mtu,
            peer_psn: 0,
            psn: 0,
            reads_from_peer: 1,
            reads_to_peer: 1,
            traffic_class: config.traffic_class,
            service_level: config.service_level,
            timeout_exponent: PROOF_TIMEOUT_EXPONENT,
            retries: PROOF_RETRIES,
            rnr_retries: 0,
        }
    }
}

/// An empty place for a completion.
pub(crate) const NOTHING: WorkCompletion =
    WorkCompletion { id: 0, qp_number: 0, status: WcStatus::Other, code: 0 };

/// Waits for a completion of queue pair `number`. Only while the transport is being opened.
fn wait<V: Verbs>(verbs: &mut V, number: u32, limit: Duration) -> Result<(), Error> {
    let start = Clock::now();
    let mut out = [NOTHING; 4];
    loop {
        let count = verbs.poll_cq(&mut out)?;
        if let Some(end) = out[..count].iter().find(|end| end.qp_number == number) {
            return match end.status {
                WcStatus::Success => Ok(()),
                _ => Err(Error::with_code(ErrorKind::Unreachable, end.code)),
            };
        }
        if start.elapsed() > limit {
            return Err(Error::with_code(ErrorKind::Unreachable, libc::ETIMEDOUT));
        }
        std::thread::yield_now();
    }
}

/// The number of a GID's kind on the wire.
const fn gid_kind_to_wire(kind: GidKind) -> u8 {
    match kind {
        GidKind::Infiniband => 0,
        GidKind::RoceV1 => 1,
        GidKind::RoceV2 => 2,
    }
}

/// The inverse of [`gid_kind_to_wire`].
const fn gid_kind_from_wire(number: u8) -> Option<GidKind> {
    match number {
        0 => Some(GidKind::Infiniband),
        1 => Some(GidKind::RoceV1),
        2 => Some(GidKind::RoceV2),
        _ => None,
    }
}

fn gids<V: Verbs>(verbs: &V, count: u32) -> Vec<Gid> {
    let entry = |index| verbs.gid(index).ok().flatten().filter(|gid| gid.raw != [0; 16]);
    (0..count.min(GIDS_MAX)).filter_map(entry).collect()
}

/// The preference for a GID, smaller is better: routable addresses first, link-local ones last.
fn rank(gid: &Gid) -> u8 {
    let scope = if is_v4(&gid.raw) {
        0
    } else if !is_link_local(&gid.raw) {
        1
    } else {
        2
    };
    match gid.kind {
        GidKind::Infiniband => 0,
        GidKind::RoceV2 => scope,
        GidKind::RoceV1 => 3 + scope,
    }
}

fn is_v4(raw: &[u8; 16]) -> bool {
    raw[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
}

fn is_link_local(raw: &[u8; 16]) -> bool {
    raw[0] == 0xfe && raw[1] & 0xc0 == 0x80
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::GID_KINDS;

    const V4: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
    const GLOBAL: [u8; 16] = [0x20, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    const LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    fn table() -> Vec<Gid> {
        let kinds = [GidKind::RoceV1, GidKind::RoceV2];
        let pairs = [LOCAL, GLOBAL, V4].into_iter().flat_map(|raw| kinds.map(|kind| (raw, kind)));
        pairs.enumerate().map(|(i, (raw, kind))| Gid { index: i as u32, raw, kind }).collect()
    }

    #[test]
    fn every_kind_of_gid_has_its_number_on_the_wire() {
        for number in 0..GID_KINDS {
            assert_eq!(gid_kind_from_wire(number).map(gid_kind_to_wire), Some(number));
        }
        assert_eq!(gid_kind_from_wire(GID_KINDS), None);
    }

    #[test]
    fn routable_gids_come_first() {
        let mut gids = table();
        gids.sort_by_key(|gid| (rank(gid), gid.index));
        assert_eq!(gids.iter().map(|gid| gid.index).collect::<Vec<_>>(), [5, 3, 1, 4, 2, 0]);
    }

    #[test]
    fn a_peer_is_answered_in_its_own_family() {
        let info =
            PortInfo { active: true, infiniband: false, mtu_bytes: 4_096, lid: 0, gids: 6, bits_per_s: 0 };
        let gids = table();
        let port = LocalPort { info, gid: gids[5], gids, mtu: 1_024 };
        let peer = |raw, kind| {
            let gid = Gid { index: 9, raw, kind };
            port.matching(&port.body(&gid, 1)).map(|gid| gid.index)
        };
        let mut other_v4 = V4;
        other_v4[15] = 77;
        assert_eq!(peer(other_v4, GidKind::RoceV2), Some(5));
        assert_eq!(peer(GLOBAL, GidKind::RoceV2), Some(3));
        assert_eq!(peer(LOCAL, GidKind::RoceV2), Some(1));
        assert_eq!(peer(LOCAL, GidKind::RoceV1), Some(0));
        assert_eq!(peer(LOCAL, GidKind::Infiniband), None);
    }
}
