//! Peers' operations on the regions exported here. Their connections are accepted, admitted by their HELLO,
//! served in order, and let go in favour of others.
//!
//! ```text
//!   io ──▶ accept ──▶ lane ──▶ serving ──▶ regions        staged ──▶ regions on devices
//!                      │          │ HELLO, FENCE
//!                      ▼          ▼
//!                  admission: which lanes there are
//! ```

mod admission;
mod lane;
mod serving;
mod staged;
#[cfg(test)]
mod tests;

use core::net::IpAddr;
use core::time::Duration;
use std::io;

use te_core::device::Devices;
use te_core::{Error, ExpelMode, Instant, Location, Op};
use te_fabric::net::{Accepted, reset_on_close, set_liveness};
use te_fabric::timers::Earliest;
use te_fabric::{Interest, Slab, Timers};
use zerocopy::IntoBytes;

use self::admission::{Admission, Guest, silent, victim};
use self::lane::{PeerLane, Phase, Theirs};
use self::serving::{Answer, Serving, Stop};
use self::staged::{Staged, Stagings, Tag, release};
use crate::config::LANES_MAX;
use crate::context::Context;
use crate::frame::{
    self, ENTRIES_MAX, FrameError, Header, Hello, Kind, LaneEntry, PROTOCOL, Request, Status, Step,
};
use crate::io::{Io, RECEIVE_BYTES_MAX, tune, tune_to_peer};
#[cfg(feature = "uring")]
use crate::lane::Destination;
use crate::lane::{LaneName, Owner, PeerName, Progress, Reading};
use crate::region::peer_ends;
use crate::stats::Stats;
#[cfg(feature = "uring")]
use crate::sys::Job;
use crate::sys::Socket;

/// Bytes of which one poll computes checksums for peers before it leaves the rest to the next.
const CHECKSUMS_BYTES_MAX: u64 = 8 << 20;
/// Connections accepted in one poll, at most.
const ACCEPTS_MAX: usize = 64;
/// Lanes of one peer, at most: twice what an initiator opens, because those it lost may not have ended here
/// yet.
const PEER_LANES_MAX: usize = 2 * LANES_MAX as usize;
/// How long a lane that has had its last word may take to hang up.
const LAST_WORD_MS: u64 = 1_000;
/// How long a lane that moves nothing may keep slots for which others wait.
const SLOTS_MS: u64 = 1_000;

/// The serving half of a transport.
pub(crate) struct Target {
    /// Which incarnation peers must want to reach.
    incarnation: u64,
    lanes: Slab<PeerLane, PeerName>,
    /// Who is there of those, and what became of the others.
    admission: Admission,
    answer: Answer,
    /// What is left of [`CHECKSUMS_BYTES_MAX`] in this poll.
    checksums_left: u64,
    /// Lanes that wait for the next poll's, for slots, or for hops.
    deferred: Vec<u32>,
    /// Slots and hops of peers' operations on memory of devices.
    staging: Stagings,
    spare: Vec<Staged>,
    stats: Stats,
}

impl Target {
    /// Serves peers that want to reach this incarnation.
    pub(crate) fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            lanes: Slab::new(),
            admission: Admission::default(),
            answer: Answer::new(),
            checksums_left: 0,
            deferred: Vec::new(),
            staging: Stagings::new(),
            spare: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// What became of peers' lanes and operations.
    pub(crate) const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Whether the peer has a lane here, or may be alive without one because it was we who closed its last.
    pub(crate) fn has_peer(&self, identity: u64) -> bool {
        let is = |index| self.lanes.get(index).is_some_and(|lane| lane.role.is_of(identity));
        (0..self.lanes.bound()).any(is) || self.admission.was_sent_away(identity)
    }

    /// Closes every lane of the peer, with whatever is unread in it, and refuses it from now on. When this
    /// returns `Ok`, no byte of it lands any more: nothing is under way in a transport that nobody polls, no
    /// request to the kernel outlives a poll, and a connection without a WELCOME holds no WRITE. `Ok(false)`:
    /// but for hops to memory of devices, which end by themselves.
    ///
    /// # Errors
    /// `InvalidArgument`, `Busy`, `Full`; nothing has changed.
    pub(crate) fn expel(
        &mut self,
        identity: u64,
        mode: ExpelMode,
        cx: &mut Context<'_>,
    ) -> Result<bool, Error> {
        let connected = self.has_peer(identity);
        self.admission.expel(identity, mode, connected)?;
        for index in 0..self.lanes.bound() {
            if let Some(lane) = self.lanes.get(index)
                && lane.role.is_of(identity)
            {
                reset_on_close(&lane.socket);
                self.end(index, cx);
            }
        }
        cx.timers.wake_if(self.staging.is_hopping());
        Ok(!self.is_landing(identity))
    }

    /// Takes `region` away from every peer in the middle of an operation: what still comes in is discarded,
    /// what still has to go out is copied aside. Lanes for which that would be too much are closed.
    pub(crate) fn withdraw(&mut self, region: u32, cx: &mut Context<'_>) {
        for index in 0..self.lanes.bound() {
            let Some(lane) = self.lanes.get_mut(index) else { continue };
            let (unsent, incoming, outgoing) = lane.uses(region);
            if unsent > u64::from(cx.config.aside_bytes_max) {
                reset_on_close(&lane.socket);
                self.end(index, cx);
                continue;
            }
            lane.inbox.redirect(region, Status::Withdrawn as u32);
            lane.outbox.detach(Owner::Region(region));
            for _ in 0..incoming + outgoing {
                peer_ends(cx.regions, region);
            }
        }
    }

    /// Closes every lane, in mid-frame if need be.
    #[cfg(feature = "testkit")]
    pub(crate) fn close_lanes(&mut self, cx: &mut Context<'_>) {
        for index in 0..self.lanes.bound() {
            if let Some(lane) = self.lanes.get(index) {
                reset_on_close(&lane.socket);
                self.end(index, cx);
            }
        }
    }
}

/// Turns of single lanes.
impl Target {
    /// A poll begins: works on the lanes whose requests the last one had no time for.
    #[inline]
    pub(crate) fn begin_poll(&mut self, cx: &mut Context<'_>) {
        self.checksums_left = CHECKSUMS_BYTES_MAX;
        if !self.deferred.is_empty() {
            self.drive_deferred(cx);
        }
    }

    #[inline(never)]
    fn drive_deferred(&mut self, cx: &mut Context<'_>) {
        let count = self.deferred.len();
        for at in 0..count {
            // It may have to wait once more, and is listed anew then.
            let index = std::mem::replace(&mut self.deferred[at], u32::MAX);
            if let Some(lane) = self.lanes.get_mut(index) {
                lane.role.waits = false;
            }
            self.drive_lane(index, Reading::No, false, cx);
        }
        self.deferred.drain(..count);
    }

    /// Works on a lane after an event.
    pub(crate) fn drive(&mut self, name: PeerName, reading: Reading, writable: bool, cx: &mut Context<'_>) {
        if let Some(index) = self.lanes.index(name) {
            self.drive_lane(index, reading, writable, cx);
        }
    }

    /// Works on a lane without having asked whether there is anything. False: it has gone cold, or has ended.
    pub(crate) fn drive_hot(&mut self, name: PeerName, cx: &mut Context<'_>) -> bool {
        let Some(index) = self.lanes.index(name) else { return false };
        match self.lanes.get_mut(index) {
            Some(lane) if lane.heat > 0 && lane.paused => {
                lane.cool();
                lane.heat > 0
            }
            Some(lane) if lane.heat > 0 => self.drive_lane(index, Reading::Yes, false, cx),
            _ => false,
        }
    }

    /// Works on a lane. True: it is worth reading without asking first.
    fn drive_lane(&mut self, index: u32, mut reading: Reading, writable: bool, cx: &mut Context<'_>) -> bool {
        let Some(lane) = self.lanes.get_mut(index) else { return false };
        lane.blocked &= !writable;
        let mut stopped = false;
        while let Some(lane) = self.lanes.get_mut(index) {
            let Context { config, io, regions, timers } = &mut *cx;
            let serving = Serving {
                now: timers.now(),
                regions,
                stats: &mut self.stats,
                answer: &mut self.answer,
                staging: &mut self.staging,
                spare: &mut self.spare,
                checksums_left: &mut self.checksums_left,
                slice_bytes_max: config.slice_bytes_max,
            };
            match (Turn { serving, io, timers }.run(lane, &mut reading, stopped)) {
                Ok(Stop::Wait) => return self.end_turn(index, cx),
                Ok(Stop::Hello(hello)) => self.hello(index, &hello, cx),
                Ok(Stop::Fence) => self.fence(index, cx),
                Ok(Stop::Broken(error)) => self.end_with(index, error, cx),
                Ok(Stop::Lost) => {
                    log::warn!("a peer's lane ends: memory of a device was withdrawn or could not be copied");
                    reset_on_close(&lane.socket);
                    self.end(index, cx);
                }
                Err(error) => {
                    log::debug!("a peer's lane ended: {error}");
                    self.end(index, cx);
                }
            }
            stopped = true;
        }
        false
    }

    /// Nothing more can be done on a lane for the moment. True: it is worth reading without asking first.
    fn end_turn(&mut self, index: u32, cx: &mut Context<'_>) -> bool {
        let Some(lane) = self.lanes.get_mut(index) else { return false };
        if lane.role.waits || (self.checksums_left == 0 && lane.paused && lane.has_room()) {
            if !self.deferred.contains(&index) {
                self.deferred.push(index);
            }
            cx.timers.wake();
        }
        lane.finish_last_word();
        cx.io.settle_interest(lane);
        lane.heat > 0
    }
}

/// One lane's turn.
struct Turn<'a> {
    serving: Serving<'a>,
    io: &'a mut Io,
    timers: &'a mut Timers,
}

impl Turn<'_> {
    /// Sends answers, takes in what has arrived, serves it, and sends again. `stopped`: there may be requests
    /// that an earlier turn has taken in and not served.
    fn run(&mut self, lane: &mut PeerLane, reading: &mut Reading, stopped: bool) -> io::Result<Stop> {
        if stopped
            && !lane.role.waits
            && let Some(stop) = self.requests(lane)
        {
            return Ok(stop);
        }
        if let Some(stop) = self.serve(lane)? {
            return Ok(stop);
        }
        if reading.is_wanted() && !lane.paused {
            if let Some(stop) = self.read(lane, reading)? {
                return Ok(stop);
            }
            if let Some(stop) = self.serve(lane)? {
                return Ok(stop);
            }
        }
        Ok(Stop::Wait)
    }

    /// Sends answers; as long as that makes room, serves requests that wait for it.
    fn serve(&mut self, lane: &mut PeerLane) -> io::Result<Option<Stop>> {
        loop {
            self.send(lane)?;
            if !lane.paused || lane.role.waits || !lane.has_room() || *self.serving.checksums_left == 0 {
                return Ok(None);
            }
            lane.paused = false;
            self.io.stopped_reading(lane, false, self.timers);
            if let Some(stop) = self.requests(lane) {
                return Ok(Some(stop));
            }
        }
    }

    /// Sends answers; regions whose last byte is out are no longer used by them.
    fn send(&mut self, lane: &mut PeerLane) -> io::Result<()> {
        let Serving { regions, staging, now, .. } = &mut self.serving;
        self.io.send(lane, |role, owner, progress| match owner {
            Owner::Region(region) => {
                role.used = *now;
                if progress == Progress::Finished {
                    peer_ends(regions, region);
                }
            }
            Owner::Slot(slot) => {
                role.used = *now;
                if progress == Progress::Finished {
                    staging.give_back(slot);
                }
            }
            Owner::Lane | Owner::Piece(_) => {}
        })?;
        Ok(())
    }

    fn read(&mut self, lane: &mut PeerLane, reading: &mut Reading) -> io::Result<Option<Stop>> {
        let mut budget = RECEIVE_BYTES_MAX;
        while !lane.paused {
            let Some(received) = self.io.receive(lane, reading)? else { break };
            self.io.heat_up(lane);
            if lane.inbox.open_payloads().first().is_some_and(|payload| payload.memory.is_some()) {
                lane.role.used = self.serving.now;
            }
            if let Some(stop) = self.requests(lane) {
                return Ok(Some(stop));
            }
            budget = budget.saturating_sub(received.bytes);
            if received.drained || budget == 0 {
                let drained = received.drained && !lane.finished;
                self.io.stopped_reading(lane, drained, self.timers);
                break;
            }
        }
        Ok(None)
    }

    /// Serves what has arrived. `None`: nothing of it concerns other lanes.
    fn requests(&mut self, lane: &mut PeerLane) -> Option<Stop> {
        Some(self.serving.run(lane)).filter(|stop| !matches!(stop, Stop::Wait))
    }
}

/// What is said on one lane and concerns others.
impl Target {
    /// Answers a HELLO.
    fn hello(&mut self, index: u32, hello: &Hello, cx: &mut Context<'_>) {
        let status = self.admit(index, hello, cx);
        let Some(lane) = self.lanes.get_mut(index) else { return };
        welcome(lane, status, self.incarnation, cx.config.slice_bytes_max);
        if status != Status::Ok {
            self.begin_end(index, cx);
        }
    }

    /// What a HELLO is answered. `Ok`: its lane is admitted, and counted.
    fn admit(&mut self, index: u32, hello: &Hello, cx: &mut Context<'_>) -> Status {
        let identity = hello.identity.get();
        if hello.target.get() != self.incarnation {
            return Status::Restarted;
        }
        if self.admission.is_expelled(identity) {
            self.stats.turned_away += 1;
            return Status::Expelled;
        }
        if self.live_lanes(identity) >= PEER_LANES_MAX || !self.make_room(index, identity, cx) {
            self.stats.turned_away += 1;
            return Status::Full;
        }
        let Some(lane) = self.lanes.get_mut(index) else { return Status::Full };
        self.admission.admit(lane.name, identity);
        lane.role.phase = Phase::Live;
        lane.deadline = None;
        lane.role.used = cx.now();
        // It may stay silent.
        cx.timers.changed();
        Status::Ok
    }

    /// Lanes of the peer that are served.
    fn live_lanes(&self, identity: u64) -> usize {
        self.guests().filter(|guest| guest.identity == identity).count()
    }

    /// Sees to it that lane `index`, whose peer has said who it is, can be admitted. False: everybody is
    /// busy, and nobody has more than the newcomer.
    fn make_room(&mut self, index: u32, identity: u64, cx: &mut Context<'_>) -> bool {
        let own = cx.io.lanes() - self.lanes.len();
        let admitted = self.admission.admitted();
        if admitted < cx.config.connections_for_peers() && own + admitted < cx.config.connections_max as usize
        {
            return true;
        }
        let Some(newcomer) = self.lanes.get(index) else { return false };
        let guests: Vec<Guest> = self.guests().collect();
        let Some(leaving) = victim(&guests, newcomer.role.group, identity, cx.now()) else { return false };
        // The lane that leaves needs a place outside, and the newcomer no longer does.
        self.admission.leave(newcomer.name);
        self.retire(leaving, cx);
        true
    }

    /// The lanes that are served.
    fn guests(&self) -> impl Iterator<Item = Guest> {
        let lanes = (0..self.lanes.bound()).filter_map(|index| Some((index, self.lanes.get(index)?)));
        lanes.filter(|(_, lane)| lane.role.phase == Phase::Live).map(|(index, lane)| {
            let Theirs { group, identity, carried, used, .. } = lane.role;
            Guest { index, group, identity, carried, used, idle: lane.is_idle() }
        })
    }

    /// L5: ends every lane of the session that the FENCE does not list, with whatever lies unread in it, and
    /// says so.
    fn fence(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(lane) = self.lanes.get(index) else { return };
        let (session, identity) = (lane.role.session(), lane.role.identity);
        let Ok(Step::Frame(Request::Fence { id, lanes }, head)) = frame::parse_request(lane.inbox.staged())
        else {
            return;
        };
        let mut listed = [LaneEntry::new(0, 0); ENTRIES_MAX];
        let listed = &mut listed[..lanes.len()];
        listed.copy_from_slice(lanes);
        for other in (0..self.lanes.bound()).filter(|&other| other != index) {
            if self.lanes.get(other).is_some_and(|lane| lane.role.is_fenced(session, listed)) {
                self.end(other, cx);
            }
        }
        let waits = self.is_landing(identity);
        let Some(lane) = self.lanes.get_mut(index) else { return };
        if waits {
            // Asked again in the next poll.
            (lane.paused, lane.role.waits) = (true, true);
            return;
        }
        lane.outbox.push_head(&[Header::new(Kind::FenceAck, 0, 0, id).as_bytes()]);
        lane.inbox.take(head);
        self.stats.fences_served += 1;
    }

    /// Tells a peer that it broke the protocol, as the lane's last word.
    fn end_with(&mut self, index: u32, error: FrameError, cx: &mut Context<'_>) {
        log::warn!("a peer broke the protocol: {error}");
        self.stats.protocol_errors += 1;
        let Some(lane) = self.lanes.get_mut(index) else { return };
        if lane.role.phase == Phase::Greeting {
            welcome(lane, error.into(), self.incarnation, cx.config.slice_bytes_max);
        } else {
            let header = Header::new(Kind::Error, 0, 0, Status::from(error) as u64);
            lane.outbox.push_head(&[header.as_bytes()]);
        }
        self.begin_end(index, cx);
    }
}

fn welcome(lane: &mut PeerLane, status: Status, incarnation: u64, slice_bytes_max: u32) {
    let welcome = PROTOCOL.welcome(status as u32, incarnation, u64::from(slice_bytes_max));
    lane.outbox.push_head(&[welcome.as_bytes()]);
}

/// Lanes begin.
impl Target {
    /// Accepts the connections that wait.
    pub(crate) fn accept_all(&mut self, cx: &mut Context<'_>) {
        for _ in 0..ACCEPTS_MAX {
            match cx.io.accept() {
                Accepted::Connection(stream) => {
                    if let Err(error) = self.adopt(stream.into(), cx) {
                        log::debug!("a connection was given up: {error}");
                    }
                }
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    self.cannot_accept(&error, cx);
                    return;
                }
            }
        }
        // There may be more, and not every driver says so twice.
        cx.io.accepts_more();
        cx.timers.wake();
    }

    /// Trying again at once would fail again: rests, and lets go of a descriptor that somebody holds for
    /// nothing.
    fn cannot_accept(&mut self, error: &io::Error, cx: &mut Context<'_>) {
        let guests: Vec<Guest> = self.guests().collect();
        if let Some(index) = silent(&guests, cx.now()) {
            self.retire(index, cx);
        }
        cx.io.rest(error, cx.config.connections_max, cx.timers);
    }

    fn adopt(&mut self, socket: Socket, cx: &mut Context<'_>) -> io::Result<()> {
        self.stats.accepted += 1;
        let role = Theirs::new(socket.peer_address()?.ip(), cx.now());
        tune(&socket, cx.config)?;
        tune_to_peer(&socket, cx.config);
        set_liveness(&socket, cx.config.peer_silence_ms_max)?;
        let (group, (index, name)) = (role.group, self.lanes.reserve());
        let mut lane = PeerLane::new(socket, name.raw(), Interest::READ, role);
        if let Err(error) = cx.io.watch(&lane) {
            self.lanes.release(index);
            return Err(error);
        }
        lane.deadline = Some(cx.after_ms(u64::from(cx.config.connect_ms_max)));
        self.lanes.put(index, lane);
        self.wait_outside(name.raw(), group, cx);
        cx.timers.changed();
        Ok(())
    }

    /// One more connection that is not admitted; another one may have to go for it.
    fn wait_outside(&mut self, name: u64, group: IpAddr, cx: &mut Context<'_>) {
        if let Some(gone) = self.admission.wait_outside(name, group)
            && let LaneName::Peer(gone) = LaneName::of(gone)
            && let Some(index) = self.lanes.index(gone)
        {
            self.stats.turned_away += 1;
            self.end(index, cx);
        }
    }
}

/// Lanes end.
impl Target {
    /// Ends an idle lane in such a way that its peer loses nothing.
    fn retire(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(lane) = self.lanes.get_mut(index) else { return };
        self.stats.retired += 1;
        self.admission.remember_sent_away(lane.role.identity);
        lane.say_retired();
        self.begin_end(index, cx);
        self.drive_lane(index, Reading::No, false, cx);
    }

    /// From here on the lane only has its last words.
    fn begin_end(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(lane) = self.lanes.get_mut(index) else { return };
        let was = std::mem::replace(&mut lane.role.phase, Phase::Ending);
        lane.deadline = Some(cx.after_ms(LAST_WORD_MS));
        let (name, group) = (lane.name, lane.role.group);
        if was == Phase::Live {
            self.admission.dismiss();
            self.wait_outside(name, group, cx);
        }
        cx.timers.changed();
    }

    /// A lane has ended: nothing more of it is read or written.
    fn end(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(mut lane) = self.lanes.remove(index) else { return };
        match lane.role.phase {
            Phase::Live => self.admission.dismiss(),
            Phase::Greeting | Phase::Ending => self.admission.leave(lane.name),
        }
        release(&mut lane, cx.regions, &mut self.staging);
        for owner in lane.outbox.owners() {
            match owner {
                Owner::Region(region) => peer_ends(cx.regions, region),
                Owner::Slot(slot) => self.staging.give_back(slot),
                Owner::Lane | Owner::Piece(_) => {}
            }
        }
        cx.io.forget(&lane);
    }

    /// Ends lanes that did not do in time what they had to. Returns the next time to look.
    pub(crate) fn look(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        let mut next = Earliest::default();
        for index in 0..self.lanes.bound() {
            next.note(self.check_deadline(index, cx));
            next.note(self.check_slots(index, cx));
        }
        next.get()
    }

    /// Ends a lane that did not do in time what it had to. Gives the deadline of one that still may.
    fn check_deadline(&mut self, index: u32, cx: &mut Context<'_>) -> Option<Instant> {
        let crowded = self.admission.admitted() > cx.config.connections_for_peers() / 2;
        let lane = self.lanes.get(index)?;
        let deadline = lane.deadline.or_else(|| lane.quiet_until(crowded, cx.config.idle_ms_max))?;
        if cx.now() < deadline {
            return Some(deadline);
        }
        if lane.role.phase == Phase::Live && lane.is_idle() {
            self.retire(index, cx);
            return self.lanes.get(index)?.deadline;
        }
        self.end(index, cx);
        None
    }
}

/// Memory of devices.
impl Target {
    /// Peers may use memory there from now on.
    ///
    /// # Errors
    /// Those of [`Devices::stager`].
    pub(crate) fn prepare(&mut self, location: Location, devices: &dyn Devices) -> Result<(), Error> {
        self.staging.prepare(location, devices)
    }

    /// Slots that lanes have.
    #[cfg(feature = "testkit")]
    pub(crate) fn slots_out(&self) -> usize {
        self.staging.slots_out()
    }

    /// Takes in the ends of hops, and sets those going that were started.
    pub(crate) fn stage(&mut self, cx: &mut Context<'_>) {
        self.take_hops(cx);
        self.staging.flush();
        cx.timers.wake_if(self.staging.is_hopping());
    }

    /// Takes in the ends of hops.
    fn take_hops(&mut self, cx: &mut Context<'_>) {
        self.staging.collect();
        while let Some(end) = self.staging.next_end() {
            peer_ends(cx.regions, end.tag.region);
            let is_used = self
                .index_of(&end.tag)
                .and_then(|index| self.lanes.get_mut(index)?.role.staged.as_mut())
                .is_some_and(|staged| staged.hop_ended(end.slot, &end.tag, end.result));
            if !is_used {
                self.staging.give_back(end.slot);
            }
        }
    }

    /// The lane that a hop is for, if it has not ended.
    fn index_of(&self, tag: &Tag) -> Option<u32> {
        match LaneName::of(tag.lane) {
            LaneName::Peer(name) => self.lanes.index(name),
            LaneName::Own(_) => None,
        }
    }

    /// Whether hops run that bring bytes of this peer's WRITEs in place, of lanes that have ended.
    fn is_landing(&self, identity: u64) -> bool {
        let is = |tag: &Tag| tag.op == Op::Write && tag.identity == identity && self.index_of(tag).is_none();
        self.staging.hops().any(is)
    }

    /// Ends a lane whose peer keeps others waiting for the slots that it has. Gives when that will be.
    fn check_slots(&mut self, index: u32, cx: &mut Context<'_>) -> Option<Instant> {
        if self.staging.is_unused() || !self.deferred.iter().any(|&other| other != index) {
            return None;
        }
        let lane = self.lanes.get(index).filter(|lane| lane.holds_slots())?;
        let deadline = lane.role.used + Duration::from_millis(SLOTS_MS);
        if cx.now() < deadline {
            return Some(deadline);
        }
        reset_on_close(&lane.socket);
        self.end(index, cx);
        None
    }
}

/// Receives for many lanes at once.
#[cfg(feature = "uring")]
impl Target {
    /// Whether the lane is to be read once more.
    pub(crate) fn is_hot(&self, name: PeerName) -> bool {
        let lane = self.lanes.index(name).and_then(|index| self.lanes.get(index));
        lane.is_some_and(|lane| lane.heat > 0 && !lane.paused)
    }

    /// The peer has finished sending on this lane.
    pub(crate) fn set_finished(&mut self, name: PeerName) {
        if let Some(lane) = self.lanes.index(name).and_then(|index| self.lanes.get_mut(index)) {
            lane.finished = true;
        }
    }

    /// The next receive of each lane among `names` that is a peer's and can be read, with the name of the
    /// lane. `indexes` is room to work in, for as many lanes.
    pub(crate) fn receives(
        &mut self,
        names: &[u64],
        indexes: &mut [u32],
    ) -> impl Iterator<Item = (u64, Job<'_, Destination>)> {
        let theirs = names.iter().filter_map(|&name| match LaneName::of(name) {
            LaneName::Peer(name) => self.lanes.index(name),
            LaneName::Own(_) => None,
        });
        let count = indexes.iter_mut().zip(theirs).map(|(to, index)| *to = index).count();
        let lanes = self.lanes.each_mut(&mut indexes[..count]).map(|(_, lane)| lane);
        lanes.filter(|lane| !lane.paused).map(|lane| (lane.name, lane.inbox.job(&lane.socket)))
    }

    /// A receive of this lane has ended.
    pub(crate) fn arrived(
        &mut self,
        name: PeerName,
        offered: usize,
        result: io::Result<usize>,
    ) -> Option<Reading> {
        let index = self.lanes.index(name)?;
        Some(Reading::Arrived(self.lanes.get_mut(index)?.inbox.arrived(offered, result)))
    }
}
