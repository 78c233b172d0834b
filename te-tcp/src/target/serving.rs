//! Requests of a peer are checked, served and answered in their order.

use te_core::{Access, Instant, Op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::connection::{PeerConnection, Phase};
use super::staged::{Flow, Staged, Stagings, release};
use crate::connection::{Connection, Destination, Inbox, Source};
use crate::frame::{
    self, CHECKSUM_BYTES_MAX, DataEntry, ENTRIES_MAX, FLAG_CHECKSUM, FrameError, Header, Hello, Kind,
    Operation, Request, Status, Step,
};
use crate::region::{Regions, granted, peer_begins, peer_ends};
use crate::stats::Stats;
use crate::sys::Pinned;

/// The parts of the target that requests use and change.
pub(super) struct Serving<'a> {
    pub(super) regions: &'a mut Regions,
    pub(super) stats: &'a mut Stats,
    pub(super) answer: &'a mut Answer,
    pub(super) staging: &'a mut Stagings,
    /// Unused records of requests on memory of devices, kept so that serving does not allocate.
    pub(super) spare: &'a mut Vec<Staged>,
    /// Bytes whose checksums may still be computed in this poll.
    pub(super) checksums_left: &'a mut u64,
    pub(super) slice_bytes_max: u32,
    pub(super) now: Instant,
}

/// Why serving the requests of a connection has stopped.
pub(super) enum Stop {
    /// More bytes have to arrive, or there is no room for answers.
    Wait,
    /// This HELLO has arrived.
    Hello(Hello),
    /// A FENCE is next, and it affects other connections.
    Fence,
    /// The peer broke the protocol.
    Broken(FrameError),
    /// An answer whose beginning was sent cannot be completed.
    Lost,
}

impl Serving<'_> {
    /// Serves the requests that have arrived while there is room for the answers.
    pub(super) fn run(&mut self, connection: &mut PeerConnection) -> Stop {
        if connection.role.phase == Phase::Ending {
            let rest = connection.inbox.unparsed().len();
            connection.inbox.take(rest);
            release(connection, self.regions, self.staging);
            return Stop::Wait;
        }
        if connection.role.staged.is_some()
            && let Some(stop) = self.go_on(connection)
        {
            return stop;
        }
        loop {
            self.payloads(connection);
            if connection.inbox.expects_payload() {
                return Stop::Wait;
            }
            if !connection.inbox.announced().is_empty() {
                connection.acknowledge();
            }
            if !connection.has_room() || *self.checksums_left == 0 {
                connection.paused = true;
                return Stop::Wait;
            }
            let stop = match connection.role.phase {
                Phase::Greeting => hello(connection),
                _ => self.request(connection),
            };
            match stop {
                Ok(None) => {}
                Ok(Some(stop)) => return stop,
                Err(error) => return Stop::Broken(error),
            }
        }
    }

    /// Continues with the request that touches memory of a device. `None`: it is answered.
    #[inline(never)]
    fn go_on(&mut self, connection: &mut PeerConnection) -> Option<Stop> {
        let mut staged = connection.role.staged.take()?;
        let flow = self.staged(&mut staged, connection);
        if matches!(flow, Flow::Done) {
            self.spare.push(staged);
            return None;
        }
        connection.role.staged = Some(staged);
        connection.paused |= matches!(flow, Flow::Wait | Flow::Full);
        connection.role.waits = matches!(flow, Flow::Wait);
        Some(if matches!(flow, Flow::Lost) { Stop::Lost } else { Stop::Wait })
    }

    /// Releases the regions of payloads that have arrived completely.
    fn payloads(&mut self, connection: &mut PeerConnection) {
        while let Some(destination) = connection.inbox.next_complete() {
            if destination.memory.is_some() {
                peer_ends(self.regions, destination.user);
                self.stats.bytes_served += destination.len;
            }
            if !destination.is_intact() {
                self.stats.corrupt += 1;
                connection.inbox.set_status(Status::Corrupt as u32);
            }
        }
    }

    /// Serves one request, unless it has not arrived completely or affects other connections.
    fn request(&mut self, connection: &mut PeerConnection) -> Result<Option<Stop>, FrameError> {
        let Connection { inbox, outbox, role, .. } = connection;
        let (staged, plan) = inbox.split();
        let Step::Frame(request, head) = frame::parse_request(staged)? else { return Ok(Some(Stop::Wait)) };
        if let Request::Read { seq, checksum, operations } | Request::Write { seq, checksum, operations } =
            request
        {
            if seq != role.next {
                return Err(FrameError::Sequence);
            }
            role.next += operations.len() as u64;
            if !self.staging.is_unused() && self.is_staged(operations) {
                let op = if matches!(request, Request::Read { .. }) { Op::Read } else { Op::Write };
                role.staged = Some(self.begin_staged(op, checksum, seq, operations));
                inbox.take(head);
                return Ok(self.go_on(connection));
            }
        }
        match request {
            Request::Read { seq, checksum, operations } => {
                let mut checksums_left = u64::from(CHECKSUM_BYTES_MAX);
                for (at, asked) in operations.iter().enumerate() {
                    let entry = self.read(asked, checksum, &mut checksums_left);
                    if entry.status == U32::ZERO {
                        role.carries(self.now);
                    }
                    self.answer.entries[at] = entry;
                }
                let flags = if checksum { FLAG_CHECKSUM } else { 0 };
                let header = Header::new(Kind::Data, flags, operations.len() as u16, seq);
                let entries = &self.answer.entries[..operations.len()];
                outbox.push_head(&[header.as_bytes(), entries.as_bytes()]);
                for (part, region) in self.answer.payloads.drain(..) {
                    outbox.push_payload(part, Source::Region(region));
                }
            }
            Request::Write { seq, checksum, operations } => {
                role.writing = seq;
                for asked in operations {
                    let destination = self.write(asked, checksum);
                    if destination.memory.is_some() {
                        role.carries(self.now);
                    }
                    plan.push(destination);
                }
            }
            Request::Fence { .. } => return Ok(Some(Stop::Fence)),
            Request::Ping { id } => {
                outbox.push_head(&[Header::new(Kind::Pong, 0, 0, id).as_bytes()]);
            }
        }
        inbox.take(head);
        Ok(None)
    }

    /// The entry that answers one operation of a READ. Its payload is added to the answer unless it is
    /// refused. `checksums_left` is the number of bytes whose checksums may still be computed for this frame.
    pub(super) fn read(&mut self, asked: &Operation, checksum: bool, checksums_left: &mut u64) -> DataEntry {
        let part = match granted(self.regions, asked, Access::REMOTE_READ, self.slice_bytes_max) {
            Ok(_) if checksum && asked.len.get() > *checksums_left => Err(Status::TooLong),
            other => other,
        };
        // A request that touches memory of a device is served in `staged`; the region has changed since that
        // was checked.
        let part = match part.and_then(|memory| memory.host().ok_or(Status::Stale)) {
            Ok(part) => part,
            Err(status) => {
                self.stats.refused += 1;
                return DataEntry { status: U32::new(status as u32), ..EMPTY };
            }
        };
        let mut entry = DataEntry { len: asked.len, ..EMPTY };
        if checksum {
            entry.crc = U32::new(part.crc32c(0));
            *checksums_left -= asked.len.get();
            *self.checksums_left = self.checksums_left.saturating_sub(asked.len.get());
        }
        peer_begins(self.regions, asked.region.get());
        self.stats.bytes_served += asked.len.get();
        self.answer.payloads.push((part, asked.region.get()));
        entry
    }

    /// Where the payload of a WRITE goes. The payload of a refused WRITE is discarded.
    fn write(&mut self, asked: &Operation, checksum: bool) -> Destination {
        let (memory, status) = match granted(self.regions, asked, Access::REMOTE_WRITE, self.slice_bytes_max)
            .and_then(|memory| memory.host().ok_or(Status::Stale))
        {
            Ok(part) => (Some(part), Status::Ok),
            Err(status) => (None, status),
        };
        if memory.is_some() {
            peer_begins(self.regions, asked.region.get());
        } else {
            self.stats.refused += 1;
        }
        Destination {
            memory,
            len: asked.len.get(),
            done: 0,
            checksum: checksum.then_some((asked.crc.get(), 0)),
            status: status as u32,
            user: asked.region.get(),
        }
    }
}

pub(super) const EMPTY: DataEntry = DataEntry { status: U32::ZERO, crc: U32::ZERO, len: U64::ZERO };

/// Scratch space in which DATA frames are assembled, one after the other.
#[derive(Debug)]
pub(super) struct Answer {
    entries: Box<[DataEntry; ENTRIES_MAX]>,
    /// Payloads, each with the index of its region. Empty between frames.
    pub(super) payloads: Vec<(Pinned, u32)>,
}

impl Answer {
    pub(super) fn new() -> Self {
        Self { entries: Box::new([EMPTY; ENTRIES_MAX]), payloads: Vec::with_capacity(ENTRIES_MAX) }
    }
}

/// Forgets the announced payloads: what still arrives of them is discarded.
pub(super) fn drop_plan(inbox: &mut Inbox, regions: &mut Regions) {
    for destination in inbox.open_payloads() {
        if destination.memory.is_some() {
            peer_ends(regions, destination.user);
        }
    }
    inbox.clear_plan();
}

fn hello(connection: &mut PeerConnection) -> Result<Option<Stop>, FrameError> {
    let Step::Frame(hello, head) = frame::parse_hello(connection.inbox.unparsed())? else {
        return Ok(Some(Stop::Wait));
    };
    connection.inbox.take(head);
    connection.role.introduce(&hello);
    Ok(Some(Stop::Hello(hello)))
}
