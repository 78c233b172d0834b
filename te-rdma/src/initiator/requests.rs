//! Requests to a target and its answers: keys, queue pairs, fences.

use te_core::{Access, Error, ErrorKind};
use te_fabric::net::{error_of, random_u64};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::Initiator;
use super::remote_region::{Keys, RemoteRegion};
use super::work::Work;
use crate::config::{CHUNKS_MAX, Config, QPS_MAX};
use crate::env::Env;
use crate::io::Io;
use crate::io::connects::{Requester, Task};
use crate::io::link::Phase;
use crate::peers::outbound::Outbound;
use crate::sys::verbs::{Connecting, Path, Qp, QpConfig, Verbs};
use crate::wire::{Chunking, Kind, PortBody, QpEntry, Resolve, Resolved, Response, Status};

/// The id of a request about keys has the index of the remote region in this many low bits.
const REMOTE_BITS: u32 = 24;
/// Retries after "receiver not ready". One-sided work on healthy peers never needs one.
const RNR_RETRIES: u8 = 6;

/// The result of connecting a queue pair: its name, and the error if there is one.
type Connected = (u32, Result<(), Error>);

impl Initiator {
    /// Whether there are requests to send a peer.
    #[inline]
    pub(crate) fn has_requests<V: Verbs>(&self, peer: u32, io: &Io<V>, config: &Config) -> bool {
        let Some(work) = self.slices.work(peer) else { return false };
        !work.wanting.is_empty() || work.has_unsent_fence() || work.cleanup_due || may_offer(work, io, config)
    }

    /// Writes the pending requests to a peer; returns how many.
    pub(crate) fn write_requests<V: Verbs>(
        &mut self,
        peer: u32,
        to: &mut Outbound,
        env: &mut Env<'_, V>,
    ) -> u32 {
        let Some(work) = self.slices.work(peer) else { return 0 };
        let before = to.unanswered();
        let offers = may_offer(work, env.io, env.config);
        self.ask_for_keys(peer, to);
        if offers {
            self.offer(peer, to, env);
        }
        self.send_fences(peer, to, env);
        to.unanswered() - before
    }

    /// A new id, with `low` in its low bits.
    fn request_id(&mut self, low: u32) -> u64 {
        self.last_request += 1;
        self.last_request << REMOTE_BITS | u64::from(low)
    }

    /// Whether a request with this id was sent before.
    fn was_requested(&self, id: u64) -> bool {
        id >> REMOTE_BITS <= self.last_request
    }

    fn ask_for_keys(&mut self, peer: u32, to: &mut Outbound) {
        while to.has_room()
            && let Some(remote) = self.slices.work_mut(peer).and_then(|work| work.wanting.pop())
        {
            if self.slices.remote_regions().get(remote).is_none() {
                continue;
            }
            let id = self.request_id(remote);
            let Some(of) = self.slices.remote_regions_mut().get_mut(remote) else { continue };
            let body = Resolve {
                region: U32::new(of.region),
                generation: U32::new(of.region_generation),
                key: U64::new(of.key),
                first: U32::new(of.ext.remote_keys.len() as u32),
                reserved: U32::ZERO,
            };
            of.ext.keys = Keys::Requested(id);
            to.request(Kind::Resolve, 0, id, [body.as_bytes(), &[]]);
        }
    }

    /// Makes the missing queue pairs and offers them to the target.
    fn offer<V: Verbs>(&mut self, peer: u32, to: &mut Outbound, env: &mut Env<'_, V>) {
        let Some(work) = self.slices.work(peer) else { return };
        if !to.has_room() || work.backoff.pending(env.timers.now()).is_some() {
            return;
        }
        let links = work.links;
        let none = QpEntry { generation: U32::ZERO, number: U32::ZERO, psn: U32::ZERO, reserved: U32::ZERO };
        let mut entries = [none; QPS_MAX as usize];
        let mut count = 0;
        let mut failed = None;
        for number in 0..env.config.qps {
            if links[usize::from(number)].is_some() {
                continue;
            }
            match self.make_link(peer, number, env) {
                Ok(entry) => {
                    entries[count] = entry;
                    count += 1;
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = failed {
            log::warn!("{}: a queue pair cannot be made: {error}", env.io.info().name);
            self.links_failed(peer, Error::with_code(ErrorKind::Rail, error.code), env);
        }
        if count > 0 {
            let id = self.request_id(0);
            let port = env.io.port();
            let body = port.body(&port.gid, env.config.reads);
            to.request(Kind::Connect, count as u16, id, [body.as_bytes(), entries[..count].as_bytes()]);
            if let Some(work) = self.slices.work_mut(peer) {
                work.offered = Some(id);
            }
        }
    }

    fn make_link<V: Verbs>(&mut self, peer: u32, number: u8, env: &mut Env<'_, V>) -> Result<QpEntry, Error> {
        let psn = random_u64().map_err(|error| error_of(&error))? as u32 & 0xff_ffff;
        let shape = QpConfig {
            depth: env.config.qp_depth,
            sges: u32::from(env.config.sges),
            inline_bytes: env.config.inline_bytes_max,
        };
        let link = env.io.make_link((peer, number), shape, psn)?;
        let entry = QpEntry {
            generation: U32::new(link.generation),
            number: U32::new(link.qp.number),
            psn: U32::new(psn),
            reserved: U32::ZERO,
        };
        let name = link.name;
        if let Some(work) = self.slices.work_mut(peer) {
            work.links[usize::from(number)] = env.io.links().index(name);
        }
        Ok(entry)
    }

    /// Requests that the target destroy every queue pair that this initiator does not use any more: for
    /// fences, and to free the target's resources.
    fn send_fences<V: Verbs>(&mut self, peer: u32, to: &mut Outbound, env: &Env<'_, V>) {
        let Some(work) = self.slices.work(peer) else { return };
        if !(work.has_unsent_fence() || work.cleanup_due) || !to.has_room() {
            return;
        }
        let mut live = [U32::ZERO; QPS_MAX as usize];
        let mut count = 0;
        for link in work.links.iter().flatten().filter_map(|&at| env.io.links().get(at)) {
            if matches!(link.phase, Phase::Live | Phase::Connecting | Phase::Offered) {
                live[count] = U32::new(link.generation);
                count += 1;
            }
        }
        let id = self.request_id(0);
        to.request(Kind::Fence, count as u16, id, [live[..count].as_bytes(), &[]]);
        if let Some(work) = self.slices.work_mut(peer) {
            work.cleanup_due = false;
            for fence in work.fences.iter_mut().filter(|fence| fence.sent.is_none()) {
                fence.sent = Some(id);
            }
        }
    }

    /// Handles a frame of a target. False: it is malformed, or answers no request.
    pub(crate) fn answer<V: Verbs>(
        &mut self,
        peer: u32,
        response: &Response<'_>,
        env: &mut Env<'_, V>,
    ) -> bool {
        let known = match *response {
            Response::Withdrawn { region } => {
                self.withdrawn(peer, region.region.get(), region.generation.get(), env);
                return true;
            }
            Response::Accept { id, port, qps } => self.accepted(peer, id, &port, qps, env),
            Response::Resolved { id, of, keys } => self.resolved(peer, id, &of, keys, env),
            Response::Fenced { id } => {
                self.fences += self.slices.fenced(peer, id);
                self.was_requested(id)
            }
            Response::Refused { id, status } => self.refused(peer, id, status, env),
            Response::Error { .. } => true,
        };
        self.slices.list(peer, env.timers);
        known
    }

    /// Handles the target's ends of the queue pairs that we offered. False: they were not offered.
    fn accepted<V: Verbs>(
        &mut self,
        peer: u32,
        id: u64,
        port: &PortBody,
        qps: &[QpEntry],
        env: &mut Env<'_, V>,
    ) -> bool {
        let Some(work) = self.slices.work_mut(peer) else { return false };
        if work.offered != Some(id) {
            return false;
        }
        work.offered = None;
        let (mut ends, mut jobs) = (Vec::new(), Vec::new());
        for index in work.links.into_iter().flatten() {
            let Some(link) = env.io.links().get(index).filter(|link| link.phase == Phase::Offered) else {
                continue;
            };
            let Some(entry) = qps.iter().find(|entry| entry.generation.get() == link.generation) else {
                // The answer lacks a queue pair of the request.
                return false;
            };
            let (qp, name) = (link.qp, link.name);
            match connect(index, qp, (port, entry), env) {
                Ok(Connecting::Done) => ends.push((name, Ok(()))),
                Ok(Connecting::Later(job)) => jobs.push((name, job)),
                Err(error) => ends.push((name, Err(error))),
            }
        }
        if !jobs.is_empty()
            && let Err(task) = env.io.push_connects(Task { requester: Requester::Initiator { peer }, jobs })
        {
            let full = Error::with_code(ErrorKind::Full, libc::EAGAIN);
            ends.extend(task.jobs.into_iter().map(|(name, _)| (name, Err(full))));
        }
        self.connected(peer, ends, env);
        true
    }

    /// Handles the results of connecting queue pairs of ours, by their names.
    pub(crate) fn connected<V: Verbs>(&mut self, peer: u32, ends: Vec<Connected>, env: &mut Env<'_, V>) {
        let mut failed = None;
        for (name, end) in ends {
            let Some(index) = env.io.links().index(name) else { continue };
            let Some(link) = env.io.links_mut().get_mut(index) else { continue };
            match end {
                Ok(()) if link.phase == Phase::Connecting => link.phase = Phase::Live,
                // It was put in error meanwhile.
                _ if link.phase != Phase::Connecting => self.destroy(index, env),
                Ok(()) => {}
                Err(error) => {
                    log::warn!("a queue pair cannot be connected: {error}");
                    failed = Some(Error::with_code(ErrorKind::Rail, error.code));
                    self.destroy(index, env);
                }
            }
        }
        if let Some(error) = failed {
            // The target still has its ends.
            if let Some(work) = self.slices.work_mut(peer) {
                work.cleanup_due = true;
            }
            self.links_failed(peer, error, env);
        }
        self.slices.list(peer, env.timers);
    }

    /// Handles remote keys. False: they were not requested, or are inconsistent.
    fn resolved<V: Verbs>(
        &mut self,
        peer: u32,
        id: u64,
        of: &Resolved,
        keys: &[U32],
        env: &mut Env<'_, V>,
    ) -> bool {
        let index = remote_of(id);
        let Some(remote) = self.requested(peer, id) else {
            // The remote region may have been detached meanwhile: any id that was used is accepted.
            return self.was_requested(id);
        };
        let chunking = Chunking::new(of.base.get(), of.len.get(), of.chunk_bytes.get());
        let fresh = remote.ext.remote_keys.is_empty();
        let first = of.first.get() as usize == remote.ext.remote_keys.len();
        if chunking.is_none()
            || of.chunks.get() > CHUNKS_MAX
            || !first
            || !(fresh || remote.ext.chunking == chunking)
        {
            return false;
        }
        remote.ext.chunking = chunking;
        // The target's values replace those of the export.
        remote.len = of.len.get();
        remote.access = Access::from_bits_truncate(of.rights);
        remote.ext.remote_keys.extend(keys.iter().map(|key| key.get()));
        if remote.ext.remote_keys.len() < of.chunks.get() as usize {
            remote.ext.keys = Keys::Unknown;
            self.slices.want_keys(index, env.timers);
            return true;
        }
        remote.ext.keys = Keys::Known;
        self.slices.keys_known(index, env.timers);
        true
    }

    /// The remote region for which request `id` requested keys, if it still waits for the answer.
    fn requested(&mut self, peer: u32, id: u64) -> Option<&mut RemoteRegion> {
        let remote = self.slices.remote_regions_mut().get_mut(remote_of(id))?;
        let same = matches!(remote.ext.keys, Keys::Requested(open) if open == id);
        (remote.peer == peer && same).then_some(remote)
    }

    fn refused<V: Verbs>(&mut self, peer: u32, id: u64, status: Status, env: &mut Env<'_, V>) -> bool {
        let error = status.error().unwrap_or(ErrorKind::Protocol.into());
        let Some(work) = self.slices.work_mut(peer) else { return false };
        if work.offered == Some(id) {
            work.offered = None;
            for index in work.links.into_iter().flatten() {
                if env.io.links().get(index).is_some_and(|link| link.phase == Phase::Offered) {
                    self.destroy(index, env);
                }
            }
            self.links_failed(peer, error, env);
            return true;
        }
        if let Some(remote) = self.requested(peer, id) {
            remote.ext.forget(match status {
                Status::NotFound | Status::Stale => Keys::Withdrawn,
                _ => Keys::Unknown,
            });
            self.slices.fail_waiting_for_keys(remote_of(id), error, env.memory);
        }
        self.was_requested(id)
    }

    /// Handles the report that the target has deregistered a region.
    fn withdrawn<V: Verbs>(&mut self, peer: u32, region: u32, generation: u32, env: &mut Env<'_, V>) {
        for index in 0..self.slices.remote_regions().bound() {
            if let Some(remote) = self.slices.remote_regions_mut().get_mut(index)
                && (remote.peer, remote.region, remote.region_generation) == (peer, region, generation)
            {
                remote.ext.forget(Keys::Withdrawn);
                self.slices.fail_waiting_for_keys(index, ErrorKind::Stale.into(), env.memory);
            }
        }
    }

    /// Handles queue pairs that could not be made or connected: begins the backoff, and ends waiting slices
    /// with `error` unless another queue pair is live.
    fn links_failed<V: Verbs>(&mut self, peer: u32, error: Error, env: &mut Env<'_, V>) {
        let Some(work) = self.slices.work_mut(peer) else { return };
        work.backoff.fail(env.timers.now(), env.config.reconnect_ms_max);
        env.timers.changed();
        let links = env.io.links();
        let live = |index: &u32| links.get(*index).is_some_and(|link| link.phase == Phase::Live);
        if !work.links.iter().flatten().any(live) {
            self.slices.fail_pending(peer, error, env.memory);
        }
    }
}

/// Whether queue pairs to a peer are missing, and no offer is open. They are made before keys are known, so
/// that the first slices wait for one round trip instead of two.
fn may_offer<V: Verbs>(work: &Work, io: &Io<V>, config: &Config) -> bool {
    let wanted = work.operations > 0 && work.links[..usize::from(config.qps)].iter().any(Option::is_none);
    wanted && work.offered.is_none() && io.outage().is_none()
}

/// Connects a queue pair that the target has accepted.
fn connect<V: Verbs>(
    index: u32,
    qp: Qp,
    (port, entry): (&PortBody, &QpEntry),
    env: &mut Env<'_, V>,
) -> Result<Connecting, Error> {
    let (config, ours) = (env.config, env.io.port());
    let (gid_index, mtu_bytes) = (ours.gid.index, ours.mtu.min(port.mtu.get()));
    let Some(link) = env.io.links_mut().get_mut(index) else { return Err(ErrorKind::NotFound.into()) };
    link.mtu = mtu_bytes;
    link.phase = Phase::Connecting;
    let path = Path {
        peer_qp: entry.number.get(),
        peer_lid: port.lid.get(),
        peer_gid: port.gid,
        gid_index,
        mtu_bytes,
        peer_psn: entry.psn.get(),
        psn: link.psn,
        reads_from_peer: 1,
        reads_to_peer: config.reads.min(port.reads).max(1),
        traffic_class: config.traffic_class,
        service_level: config.service_level,
        timeout_exponent: config.timeout_exponent,
        retries: config.retries,
        rnr_retries: RNR_RETRIES,
    };
    env.io.connect(qp, path)
}

/// The index of the remote region in the id of a request about keys.
const fn remote_of(id: u64) -> u32 {
    id as u32 & ((1 << REMOTE_BITS) - 1)
}
