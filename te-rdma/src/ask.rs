//! Questions to a target and its answers: keys, queue pairs, fences.

use core::time::Duration;

use te_core::{Access, Completion, Error, ErrorKind};
use te_fabric::net::{error_of, random_u64};
use te_fabric::table::Name;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::channel::Channel;
use crate::config::{CHUNKS_MAX, QPS_MAX};
use crate::connection::Role;
use crate::connects::{Task, Whose};
use crate::endpoint::ChannelEnd;
use crate::exchange::{Chunking, Header, Kind, PortBody, QpEntry, Resolve, Resolved, Status};
use crate::link::{Link, Phase};
use crate::region::{Keys, Segment};
use crate::transport::RdmaTransport;
use crate::verbs::{Connecting, MrAccess, Path, QpConfig, QpStep, Verbs};

/// A question about keys carries the segment's index in its low bits.
const SEGMENT_BITS: u32 = 24;
/// Retries after "receiver not ready"; one-sided work on healthy peers never needs one.
const RNR_RETRIES: u8 = 6;

impl<V: Verbs> RdmaTransport<V> {
    /// Sends the questions that an endpoint has.
    pub(crate) fn ask(&mut self, endpoint: u32, channel: u32) {
        let Some(of) = self.endpoints.get(endpoint) else { return };
        // Before their keys are known, so that the first slices wait for one round trip and not for two.
        let wanted =
            of.operations > 0 && of.links[..usize::from(self.config.qps)].iter().any(Option::is_none);
        let offers = wanted && of.offered.is_none() && self.outage.is_none();
        if of.wanting.is_empty() && !of.has_unsent_fence() && !of.sweep && !offers {
            return;
        }
        let Some(mut connection) = self.connections.take(channel) else { return };
        self.ask_for_keys(endpoint, &mut connection.channel);
        if offers {
            self.offer(endpoint, &mut connection.channel);
        }
        self.send_fences(endpoint, &mut connection.channel);
        let asked = self.asked_now.len() as u32;
        if let Role::Out(out) = &mut connection.role
            && asked > 0
        {
            out.open.extend(self.asked_now.drain(..));
            if out.asked == 0 {
                let silence = Duration::from_millis(u64::from(self.config.peer_silence_ms_max));
                connection.deadline = Some(self.timers.now() + silence);
                self.timers.changed();
            }
            out.asked += asked;
            self.questions += asked;
        }
        let flushed = connection.channel.flush();
        match flushed {
            Ok(()) => self.settle_interest(channel, connection),
            Err(error) => self.end_out(channel, *connection, ChannelEnd::Lost(error_of(&error))),
        }
    }

    fn question(&mut self, kind: Kind, low: u32) -> u64 {
        self.next_question += 1;
        let id = self.next_question << SEGMENT_BITS | u64::from(low);
        self.asked_now.push((id, kind));
        id
    }

    fn ask_for_keys(&mut self, endpoint: u32, channel: &mut Channel) {
        while channel.has_room()
            && let Some(segment) = self.endpoints.get_mut(endpoint).and_then(|of| of.wanting.pop())
        {
            if self.segments.get(segment).is_none() {
                continue;
            }
            let id = self.question(Kind::Resolve, segment);
            let Some(of) = self.segments.get_mut(segment) else { continue };
            let question = Resolve {
                region: U32::new(of.region),
                generation: U32::new(of.region_generation),
                key: U64::new(of.key),
                first: U32::new(of.ext.remote_keys.len() as u32),
                reserved: U32::ZERO,
            };
            of.ext.keys = Keys::Asked(id);
            channel.push(&[Header::new(Kind::Resolve, 0, id).as_bytes(), question.as_bytes()]);
        }
    }

    /// Makes the queue pairs that are missing and offers them to the target.
    fn offer(&mut self, endpoint: u32, channel: &mut Channel) {
        let Some(of) = self.endpoints.get(endpoint) else { return };
        if !channel.has_room() || of.links_rest.pending(self.timers.now()).is_some() {
            return;
        }
        let links = of.links;
        let none = QpEntry { generation: U32::ZERO, number: U32::ZERO, psn: U32::ZERO, reserved: U32::ZERO };
        let mut entries = [none; QPS_MAX as usize];
        let mut count = 0;
        let mut failed = None;
        for number in 0..self.config.qps {
            if links[usize::from(number)].is_some() {
                continue;
            }
            match self.make_link(endpoint, number) {
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
            log::warn!("{}: no queue pair could be made: {error}", self.verbs.info().name);
            self.links_failed(endpoint, Error::with_code(ErrorKind::Rail, error.code));
        }
        if count > 0 {
            let id = self.question(Kind::Connect, 0);
            let gid = self.port.gid;
            let port = self.port.body(&gid, self.config.reads);
            let header = Header::new(Kind::Connect, count as u16, id);
            channel.push(&[header.as_bytes(), port.as_bytes(), entries[..count].as_bytes()]);
            if let Some(of) = self.endpoints.get_mut(endpoint) {
                of.offered = Some(id);
            }
        }
    }

    fn make_link(&mut self, endpoint: u32, number: u8) -> Result<QpEntry, Error> {
        if self.links.len() as u64 >= <u32 as Name>::SLOTS_MAX {
            return Err(ErrorKind::Full.into());
        }
        let psn = random_u64().map_err(|error| error_of(&error))? as u32 & 0xff_ffff;
        let shape = QpConfig {
            depth: self.config.qp_depth,
            sges: u32::from(self.config.sges),
            inline_bytes: self.config.inline_bytes_max,
        };
        let qp = self.verbs.create_qp(shape)?;
        // Nobody reaches our memory through a queue pair of ours.
        if let Err(error) = self.verbs.modify_qp(qp.handle, QpStep::Init(MrAccess::empty())) {
            let _ = self.verbs.destroy_qp(qp.handle);
            return Err(error);
        }
        self.stats.qps_made += 1;
        self.next_generation = self.next_generation.wrapping_add(1);
        let (index, name) = self.links.reserve();
        let pieces = self.config.qp_depth as usize * usize::from(self.config.sges);
        let link = Link {
            qp,
            endpoint,
            number,
            generation: self.next_generation,
            psn,
            mtu: self.port.mtu,
            name,
            phase: Phase::Offered,
            posted: std::collections::VecDeque::with_capacity(pieces),
            next: 0,
            outstanding: 0,
            bytes: 0,
            silent: 0,
            failed: None,
            proven: false,
            stuck: None,
        };
        let entry = QpEntry {
            generation: U32::new(link.generation),
            number: U32::new(qp.number),
            psn: U32::new(psn),
            reserved: U32::ZERO,
        };
        self.links.put(index, Box::new(link));
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.links[usize::from(number)] = Some(index);
        }
        Ok(entry)
    }

    /// Asks for the end of every queue pair that we do not use any more: for our fences, and to tidy up.
    fn send_fences(&mut self, endpoint: u32, channel: &mut Channel) {
        let Some(of) = self.endpoints.get(endpoint) else { return };
        if !(of.has_unsent_fence() || of.sweep) || !channel.has_room() {
            return;
        }
        let mut live = [U32::ZERO; QPS_MAX as usize];
        let mut count = 0;
        for link in of.links.iter().flatten().filter_map(|&at| self.links.get(at)) {
            if matches!(link.phase, Phase::Live | Phase::Connecting | Phase::Offered) {
                live[count] = U32::new(link.generation);
                count += 1;
            }
        }
        let id = self.question(Kind::Fence, 0);
        let header = Header::new(Kind::Fence, count as u16, id);
        channel.push(&[header.as_bytes(), live[..count].as_bytes()]);
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.sweep = false;
            for fence in of.fences.iter_mut().filter(|fence| fence.sent.is_none()) {
                fence.sent = Some(id);
            }
        }
    }

    /// The target's ends of the queue pairs that we offered. False: nobody asked for them.
    pub(crate) fn accepted(&mut self, endpoint: u32, id: u64, port: &PortBody, qps: &[QpEntry]) -> bool {
        let Some(of) = self.endpoints.get_mut(endpoint) else { return false };
        if of.offered != Some(id) {
            return false;
        }
        of.offered = None;
        let links = of.links;
        let (mut ends, mut jobs) = (Vec::new(), Vec::new());
        for index in links.into_iter().flatten() {
            let Some(link) = self.links.get(index).filter(|link| link.phase == Phase::Offered) else {
                continue;
            };
            let Some(entry) = qps.iter().find(|entry| entry.generation.get() == link.generation) else {
                // An answer that leaves out what was asked.
                return false;
            };
            let path = Path {
                peer_qp: entry.number.get(),
                peer_lid: port.lid.get(),
                peer_gid: port.gid,
                gid_index: self.port.gid.index,
                mtu_bytes: self.port.mtu.min(port.mtu.get()),
                peer_psn: entry.psn.get(),
                psn: link.psn,
                reads_from_peer: 1,
                reads_to_peer: self.config.reads.min(port.reads).max(1),
                traffic_class: self.config.traffic_class,
                service_level: self.config.service_level,
                timeout_exponent: self.config.timeout_exponent,
                retries: self.config.retries,
                rnr_retries: RNR_RETRIES,
            };
            let (handle, name) = (link.qp.handle, link.name);
            let end = self.verbs.connect_qp(handle, path);
            if let Some(link) = self.links.get_mut(index) {
                link.mtu = path.mtu_bytes;
                link.phase = Phase::Connecting;
            }
            match end {
                Ok(Connecting::Done) => ends.push((name, Ok(()))),
                Ok(Connecting::Later(job)) => jobs.push((name, job)),
                Err(error) => ends.push((name, Err(error))),
            }
        }
        if !jobs.is_empty()
            && let Err(task) = self.connects.push(Task { whose: Whose::Ours { endpoint }, jobs })
        {
            let full = Error::with_code(ErrorKind::Full, libc::EAGAIN);
            ends.extend(task.jobs.into_iter().map(|(name, _)| (name, Err(full))));
        }
        self.connected_ours(endpoint, ends);
        true
    }

    /// Queue pairs of ours, by name, are connected or cannot be.
    pub(crate) fn connected_ours(&mut self, endpoint: u32, ends: Vec<(u32, Result<(), Error>)>) {
        let mut failed = None;
        for (name, end) in ends {
            let Some(index) = self.links.index(name) else { continue };
            let Some(link) = self.links.get_mut(index) else { continue };
            match end {
                Ok(()) if link.phase == Phase::Connecting => link.phase = Phase::Live,
                // It was given up meanwhile.
                _ if link.phase != Phase::Connecting => self.bury(index),
                Ok(()) => {}
                Err(error) => {
                    log::warn!("a queue pair could not be connected: {error}");
                    failed = Some(Error::with_code(ErrorKind::Rail, error.code));
                    self.bury(index);
                }
            }
        }
        if let Some(error) = failed {
            // The target has its ends still.
            if let Some(of) = self.endpoints.get_mut(endpoint) {
                of.sweep = true;
            }
            self.links_failed(endpoint, error);
        }
        self.list(endpoint);
    }

    /// Remote keys. False: nobody asked for them, or they make no sense.
    pub(crate) fn resolved(&mut self, endpoint: u32, id: u64, of: &Resolved, keys: &[U32]) -> bool {
        let index = id as u32 & ((1 << SEGMENT_BITS) - 1);
        let Some(segment) = self.asked(endpoint, id) else {
            // Detached meanwhile, perhaps: ids that we have given are no surprise.
            return id >> SEGMENT_BITS <= self.next_question;
        };
        let chunking = Chunking::new(of.base.get(), of.len.get(), of.chunk_bytes.get());
        let fresh = segment.ext.remote_keys.is_empty();
        let first = of.first.get() as usize == segment.ext.remote_keys.len();
        if chunking.is_none()
            || of.chunks.get() > CHUNKS_MAX
            || !first
            || !(fresh || segment.ext.chunking == chunking)
        {
            return false;
        }
        segment.ext.chunking = chunking;
        // The target's word counts, not the export's.
        segment.len = of.len.get();
        segment.access = Access::from_bits_truncate(of.rights);
        segment.ext.remote_keys.extend(keys.iter().map(|key| key.get()));
        if segment.ext.remote_keys.len() < of.chunks.get() as usize {
            segment.ext.keys = Keys::Unknown;
            self.want_keys(index);
            return true;
        }
        segment.ext.keys = Keys::Known;
        while let Some(slot) = self.segments.get(index).and_then(|segment| segment.ext.waiting.first()) {
            self.unqueue(slot);
            self.enqueue(slot, true);
        }
        true
    }

    fn asked(&mut self, endpoint: u32, id: u64) -> Option<&mut Segment> {
        let index = id as u32 & ((1 << SEGMENT_BITS) - 1);
        let segment = self.segments.get_mut(index)?;
        (segment.peer == endpoint && matches!(segment.ext.keys, Keys::Asked(asked) if asked == id))
            .then_some(segment)
    }

    pub(crate) fn fenced(&mut self, endpoint: u32, id: u64) -> bool {
        let mut at = 0;
        while let Some(of) = self.endpoints.get_mut(endpoint)
            && let Some(fence) = of.fences.get(at).copied()
        {
            if fence.sent == Some(id) {
                of.fences.swap_remove(at);
                self.stats.fences += 1;
                self.fence_done(fence.segment, Completion::applied(fence.token));
            } else {
                at += 1;
            }
        }
        id >> SEGMENT_BITS <= self.next_question
    }

    pub(crate) fn refused(&mut self, endpoint: u32, id: u64, status: Status) -> bool {
        let error = status.error().unwrap_or(ErrorKind::Protocol.into());
        let Some(of) = self.endpoints.get_mut(endpoint) else { return false };
        if of.offered == Some(id) {
            of.offered = None;
            let links = of.links;
            for index in links.into_iter().flatten() {
                if self.links.get(index).is_some_and(|link| link.phase == Phase::Offered) {
                    self.bury(index);
                }
            }
            self.links_failed(endpoint, error);
            return true;
        }
        let index = id as u32 & ((1 << SEGMENT_BITS) - 1);
        if let Some(segment) = self.asked(endpoint, id) {
            segment.ext.forget(match status {
                Status::NotFound | Status::Stale => Keys::Withdrawn,
                _ => Keys::Unknown,
            });
            self.fail_segment(index, error);
        }
        id >> SEGMENT_BITS <= self.next_question
    }

    /// The target has deregistered a region.
    pub(crate) fn withdrawn(&mut self, endpoint: u32, region: u32, generation: u32) {
        for index in 0..self.segments.bound() {
            if let Some(segment) = self.segments.get_mut(index)
                && (segment.peer, segment.region, segment.region_generation) == (endpoint, region, generation)
            {
                segment.ext.forget(Keys::Withdrawn);
                self.fail_segment(index, ErrorKind::Stale.into());
            }
        }
    }

    /// Ends what waits for the keys of a segment.
    pub(crate) fn fail_segment(&mut self, segment: u32, error: Error) {
        while let Some(slot) = self.segments.get(segment).and_then(|segment| segment.ext.waiting.first()) {
            self.fail(slot, error);
        }
    }

    /// Queue pairs could not be made or connected: a pause, and an error for what waits, unless others are there.
    fn links_failed(&mut self, endpoint: u32, error: Error) {
        let Some(of) = self.endpoints.get_mut(endpoint) else { return };
        of.links_rest.fail(self.timers.now(), self.config.reconnect_ms_max);
        self.timers.changed();
        let links = of.links;
        let live = |index: &u32| self.links.get(*index).is_some_and(|link| link.phase == Phase::Live);
        if !links.iter().flatten().any(live) {
            self.fail_pending(endpoint, error);
        }
    }

    pub(crate) fn fail_pending(&mut self, endpoint: u32, error: Error) {
        while let Some(slot) = self.endpoints.get(endpoint).and_then(|of| of.pending.first()) {
            self.fail(slot, error);
        }
    }
}
