//! Peers' operations on the regions exported here: checked, served in order, answered in order.

use core::net::IpAddr;
use std::io;

use te_core::{Access, Instant};
use te_fabric::net::reset_on_close;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::connections::Connection;
use crate::frame::{
    self, CHECKSUM_BYTES_MAX, DataEntry, ENTRIES_MAX, FLAG_CHECKSUM, FrameError, Header, Kind, LaneEntry,
    PROTOCOL, Request, Status, Step,
};
use crate::lane::{Destination, Lane, Owner, Progress, Reading};
use crate::region::{granted, peer_begins, peer_ends};
use crate::transport::{RECEIVE_BYTES_MAX, TcpTransport};

/// Requests are not read while more answers than this wait to be sent on their lane, bytes.
const ANSWERS_BYTES_MAX: u64 = 8 << 20;

/// How far a peer's lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its HELLO has not come.
    Greeting,
    Live,
    /// It has been told why it ends; what it still sends is discarded.
    Ending,
}

/// The target's side of a lane.
#[derive(Debug)]
pub(crate) struct InLane {
    pub(crate) phase: Phase,
    /// The name of its events.
    pub(crate) name: u64,
    /// Which lanes are one host's: the address it came from, or its prefix.
    pub(crate) group: IpAddr,
    /// Which lanes are one process's, once it has said so.
    pub(crate) identity: u64,
    session: u64,
    number: u16,
    generation: u32,
    /// Sequence number of the next operation.
    pub(crate) next: u64,
    /// Sequence number of the first operation of the WRITE that is coming in.
    writing: u64,
    finished_sending: bool,
    /// Something has moved that had been granted.
    pub(crate) carried: bool,
    /// When something last did, or the lane was admitted.
    pub(crate) used: Instant,
}

impl InLane {
    pub(crate) const fn new(name: u64, group: IpAddr, now: Instant) -> Self {
        Self {
            phase: Phase::Greeting,
            name,
            group,
            identity: 0,
            session: 0,
            number: 0,
            generation: 0,
            next: 0,
            writing: 0,
            finished_sending: false,
            carried: false,
            used: now,
        }
    }
}

impl TcpTransport {
    /// Works on a peer's lane after an event, or because it is warm.
    pub(crate) fn drive_in(
        &mut self,
        index: u32,
        mut lane: Box<Lane<InLane>>,
        reading: Reading,
        writable: bool,
    ) {
        if writable {
            lane.blocked = false;
        }
        match self.step_in(index, &mut lane, reading) {
            Ok(()) => {
                self.settle_interest(index, &mut lane);
                self.connections.put(index, Connection::In(lane));
            }
            Err(error) => {
                log::debug!("a peer's lane ended: {error}");
                self.end_in(index, lane);
            }
        }
    }

    fn step_in(&mut self, index: u32, lane: &mut Lane<InLane>, reading: Reading) -> io::Result<()> {
        self.serve(index, lane)?;
        if reading.is_wanted() && !lane.paused {
            self.read_in(index, lane, reading)?;
            self.serve(index, lane)?;
        }
        if lane.role.phase == Phase::Ending && lane.outbox.is_empty() && !lane.role.finished_sending {
            lane.socket.finish_sending();
            lane.role.finished_sending = true;
        }
        Ok(())
    }

    /// Sends answers; as long as that makes room, serves requests that wait for it.
    fn serve(&mut self, index: u32, lane: &mut Lane<InLane>) -> io::Result<()> {
        loop {
            self.write_in(lane)?;
            if !lane.paused || !lane.has_room() {
                return Ok(());
            }
            if self.checksums_left == 0 {
                if !self.deferred.contains(&index) {
                    self.deferred.push(index);
                }
                self.timers.wake();
                return Ok(());
            }
            lane.paused = false;
            self.stopped_reading(index, &mut lane.heat, false);
            self.requests(lane);
        }
    }

    fn read_in(&mut self, index: u32, lane: &mut Lane<InLane>, mut reading: Reading) -> io::Result<()> {
        let mut budget = RECEIVE_BYTES_MAX;
        while !lane.paused {
            let received =
                match reading.take().unwrap_or_else(|| lane.inbox.receive(&lane.socket, &mut self.buffers)) {
                    Ok(received) => received,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        lane.heat = lane.heat.saturating_sub(1);
                        return Ok(());
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                };
            self.stats.receives += 1;
            self.stats.bytes_received += received.bytes as u64;
            self.heat_up(index, &mut lane.heat);
            if lane.inbox.open_payloads().first().is_some_and(|payload| payload.memory.is_some()) {
                lane.role.used = self.timers.now();
            }
            self.requests(lane);
            budget = budget.saturating_sub(received.bytes);
            if received.drained || budget == 0 {
                self.stopped_reading(index, &mut lane.heat, received.drained && !lane.finished);
                break;
            }
        }
        Ok(())
    }

    /// Serves every request that has arrived, as long as there is room for the answers.
    fn requests(&mut self, lane: &mut Lane<InLane>) {
        loop {
            if lane.role.phase == Phase::Ending {
                let rest = lane.inbox.staged().len();
                lane.inbox.take(rest);
                self.drop_plan(lane);
                return;
            }
            while let Some(destination) = lane.inbox.next_complete() {
                if destination.memory.is_some() {
                    peer_ends(&mut self.regions, destination.owner);
                    self.stats.bytes_served += destination.len;
                }
                if !destination.is_intact() {
                    self.stats.corrupt += 1;
                    lane.inbox.set_status(Status::Corrupt as u32);
                }
            }
            if lane.inbox.expects_payload() {
                return;
            }
            if !lane.inbox.announced().is_empty() {
                acknowledge(lane);
            }
            if !lane.has_room() || self.checksums_left == 0 {
                lane.paused = true;
                return;
            }
            let end = match lane.role.phase {
                Phase::Greeting => self.hello(lane),
                _ => self.request(lane),
            };
            match end {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => self.end_with(lane, error),
            }
        }
    }

    /// Answers a HELLO. False: it is not all there yet.
    fn hello(&mut self, lane: &mut Lane<InLane>) -> Result<bool, FrameError> {
        let Step::Frame(hello, head) = frame::parse_hello(lane.inbox.staged())? else { return Ok(false) };
        lane.inbox.take(head);
        lane.role.identity = hello.identity.get();
        lane.role.session = hello.session.get();
        lane.role.number = hello.lane.get();
        lane.role.generation = hello.lane_generation.get();
        let status = self.admit(&hello, lane);
        self.welcome(lane, status);
        if status != Status::Ok {
            self.begin_end(lane);
        }
        Ok(true)
    }

    /// Serves one request. False: its head is not all there yet.
    fn request(&mut self, lane: &mut Lane<InLane>) -> Result<bool, FrameError> {
        let Lane { inbox, outbox, role, .. } = lane;
        let (staged, plan) = inbox.split();
        let Step::Frame(request, head) = frame::parse_request(staged)? else { return Ok(false) };
        match request {
            Request::Read { seq, checksum, operations } => {
                if seq != role.next {
                    return Err(FrameError::Sequence);
                }
                role.next += operations.len() as u64;
                let mut entries =
                    [DataEntry { status: U32::ZERO, crc: U32::ZERO, len: U64::ZERO }; ENTRIES_MAX];
                let mut memory = [None; ENTRIES_MAX];
                let bytes_max = self.config.slice_bytes_max;
                let mut checksums_left = u64::from(CHECKSUM_BYTES_MAX);
                for ((asked, entry), to) in operations.iter().zip(&mut entries).zip(&mut memory) {
                    match granted(&mut self.regions, asked, Access::REMOTE_READ, bytes_max) {
                        Ok(_) if checksum && asked.len.get() > checksums_left => {
                            self.stats.refused += 1;
                            entry.status = U32::new(Status::TooLong as u32);
                        }
                        Ok(part) => {
                            entry.len = asked.len;
                            if checksum {
                                entry.crc = U32::new(part.crc32c(0));
                                checksums_left -= asked.len.get();
                                self.checksums_left = self.checksums_left.saturating_sub(asked.len.get());
                            }
                            peer_begins(&mut self.regions, asked.region.get());
                            self.stats.bytes_served += asked.len.get();
                            *to = Some((part, asked.region.get()));
                            (role.used, role.carried) = (self.timers.now(), true);
                        }
                        Err(status) => {
                            self.stats.refused += 1;
                            entry.status = U32::new(status as u32);
                        }
                    }
                }
                let count = operations.len();
                let flags = if checksum { FLAG_CHECKSUM } else { 0 };
                let header = Header::new(Kind::Data, flags, count as u16, seq);
                outbox.push_head(&[header.as_bytes(), entries[..count].as_bytes()]);
                for (part, region) in memory.into_iter().flatten() {
                    outbox.push_payload(part, Owner::Region(region));
                }
            }
            Request::Write { seq, checksum, operations } => {
                if seq != role.next {
                    return Err(FrameError::Sequence);
                }
                role.writing = seq;
                role.next += operations.len() as u64;
                for asked in operations {
                    let (memory, status) = match granted(
                        &mut self.regions,
                        asked,
                        Access::REMOTE_WRITE,
                        self.config.slice_bytes_max,
                    ) {
                        Ok(part) => (Some(part), Status::Ok),
                        Err(status) => (None, status),
                    };
                    if memory.is_some() {
                        peer_begins(&mut self.regions, asked.region.get());
                        (role.used, role.carried) = (self.timers.now(), true);
                    } else {
                        self.stats.refused += 1;
                    }
                    plan.push(Destination {
                        memory,
                        len: asked.len.get(),
                        done: 0,
                        checksum: checksum.then_some((asked.crc.get(), 0)),
                        status: status as u32,
                        owner: asked.region.get(),
                    });
                }
            }
            Request::Fence { id, lanes } => {
                let (session, header) = (role.session, Header::new(Kind::FenceAck, 0, 0, id));
                // This lane itself is out of the table while it is served.
                self.end_others(session, lanes);
                outbox.push_head(&[header.as_bytes()]);
                self.stats.fences_served += 1;
            }
            Request::Ping { id } => {
                outbox.push_head(&[Header::new(Kind::Pong, 0, 0, id).as_bytes()]);
            }
        }
        inbox.take(head);
        Ok(true)
    }

    /// L5: ends every lane of `session` that is not listed, with whatever lies unread in it.
    fn end_others(&mut self, session: u64, listed: &[LaneEntry]) {
        for index in 0..self.connections.bound() {
            let Some(lane) = self.connections.in_mut(index) else { continue };
            let role = &lane.role;
            let is = |entry: &LaneEntry| {
                entry.lane.get() == role.number && entry.generation.get() == role.generation
            };
            if role.phase == Phase::Greeting || role.session != session || listed.iter().any(is) {
                continue;
            }
            if let Some(lane) = self.connections.take_in(index) {
                self.end_in(index, lane);
            }
        }
    }

    fn welcome(&self, lane: &mut Lane<InLane>, status: Status) {
        let longest = u64::from(self.config.slice_bytes_max);
        let welcome = PROTOCOL.welcome(status as u32, self.end.incarnation, longest);
        lane.outbox.push_head(&[welcome.as_bytes()]);
    }

    /// Tells a peer that it broke the protocol, as the lane's last word.
    fn end_with(&mut self, lane: &mut Lane<InLane>, error: FrameError) {
        log::warn!("a peer broke the protocol: {error}");
        self.stats.protocol_errors += 1;
        match lane.role.phase {
            Phase::Greeting => self.welcome(lane, error.into()),
            _ => {
                let header = Header::new(Kind::Error, 0, 0, Status::from(error) as u64);
                lane.outbox.push_head(&[header.as_bytes()]);
            }
        }
        self.begin_end(lane);
    }

    fn write_in(&mut self, lane: &mut Lane<InLane>) -> io::Result<()> {
        while !lane.blocked && !lane.outbox.is_empty() {
            let Lane { outbox, socket, role, .. } = lane;
            let (regions, now) = (&mut self.regions, self.timers.now());
            let flushed = outbox.flush(socket, &mut self.buffers, |owner, progress| {
                if let Owner::Region(_) = owner {
                    role.used = now;
                }
                if let (Owner::Region(index), Progress::Finished) = (owner, progress) {
                    peer_ends(regions, index);
                }
            });
            match flushed {
                Ok((sent, all)) => {
                    self.stats.sends += 1;
                    self.stats.bytes_sent += sent as u64;
                    lane.blocked = !all;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => lane.blocked = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// A peer's lane has ended: nothing more of it is read or written.
    pub(crate) fn end_in(&mut self, index: u32, mut lane: Box<Lane<InLane>>) {
        self.struck_off(&lane.role);
        self.drop_plan(&mut lane);
        for owner in lane.outbox.owners() {
            if let Owner::Region(region) = owner {
                peer_ends(&mut self.regions, region);
            }
        }
        self.forget(index, lane.interest);
    }

    fn drop_plan(&mut self, lane: &mut Lane<InLane>) {
        for destination in lane.inbox.open_payloads() {
            if destination.memory.is_some() {
                peer_ends(&mut self.regions, destination.owner);
            }
        }
        lane.inbox.clear_plan();
    }

    /// Takes `region` away from every peer in the middle of an operation: what still comes in is discarded, what still
    /// has to go out is copied aside. Lanes for which that would be too much are closed.
    pub(crate) fn withdraw(&mut self, region: u32) {
        let owner = Owner::Region(region);
        for index in 0..self.connections.bound() {
            let Some(mut lane) = self.connections.take_in(index) else { continue };
            let incoming = lane.inbox.open_payloads().iter();
            let incoming = incoming.filter(|d| d.owner == region && d.memory.is_some()).count();
            let outgoing = lane.outbox.owners().filter(|&known| known == owner).count();
            if lane.outbox.unsent(owner) > u64::from(self.config.aside_bytes_max) {
                reset_on_close(&lane.socket);
                self.end_in(index, lane);
                continue;
            }
            lane.inbox.redirect(region, Status::Withdrawn as u32);
            lane.outbox.detach(owner);
            for _ in 0..incoming + outgoing {
                peer_ends(&mut self.regions, region);
            }
            self.connections.put(index, Connection::In(lane));
        }
    }
}

impl Lane<InLane> {
    fn has_room(&self) -> bool {
        self.outbox.has_room(ENTRIES_MAX) && self.outbox.queued() < ANSWERS_BYTES_MAX
    }
}

/// All payloads of a WRITE frame are in place or discarded: says so.
fn acknowledge(lane: &mut Lane<InLane>) {
    let Lane { inbox, outbox, role, .. } = lane;
    let mut statuses = [U32::ZERO; ENTRIES_MAX];
    let count = inbox.announced().len().min(ENTRIES_MAX);
    for (to, destination) in statuses.iter_mut().zip(inbox.announced()) {
        *to = U32::new(destination.status);
    }
    let header = Header::new(Kind::Ack, 0, count as u16, role.writing);
    outbox.push_head(&[header.as_bytes(), statuses[..count].as_bytes()]);
    inbox.clear_plan();
}
