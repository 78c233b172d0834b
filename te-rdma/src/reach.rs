//! Getting to a peer and losing it: side channels are opened and end, and what waited for them with them.

use core::time::Duration;
use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::io;
use std::net::SocketAddr;

use te_core::{Completion, Error, ErrorKind};
use te_fabric::Interest;
use te_fabric::net::{error_of, peer_dead, reset_on_close};
use te_fabric::peer::{Attempt, Refusal};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::channel::Channel;
use crate::connection::{Connection, Out, Phase, Role};
use crate::endpoint::ChannelEnd;
use crate::exchange::{self, Hello, Kind, MAGIC, Response, Status, Step, VERSION, Welcome};
use crate::net;
use crate::region::Keys;
use crate::sieve::Sign;
use crate::target::ROUNDS_MAX;
use crate::transport::{Outage, RdmaTransport};
use crate::verbs::Verbs;

impl<V: Verbs> RdmaTransport<V> {
    /// Does what can be done now for the endpoints that have something to do.
    pub(crate) fn tend_listed(&mut self) {
        let count = self.listed.len();
        for at in 0..count {
            self.tend(self.listed[at]);
        }
        // Those that have nothing left leave the list; what was listed meanwhile stays.
        let mut at = 0;
        while at < self.listed.len() {
            let endpoint = self.listed[at];
            match self.endpoints.get_mut(endpoint) {
                Some(of) if of.needs_channel() || (of.sweep && of.up) => at += 1,
                Some(of) => {
                    of.listed = false;
                    self.listed.swap_remove(at);
                }
                None => _ = self.listed.swap_remove(at),
            }
        }
    }

    fn tend(&mut self, endpoint: u32) {
        if let Some(outage) = self.outage {
            self.fail_slices(endpoint, outage.error());
        }
        let Some(of) = self.endpoints.get(endpoint) else { return };
        match of.channel {
            None if of.needs_channel() => self.open_channel(endpoint),
            None => {}
            Some(channel) if of.up => {
                self.ask(endpoint, channel);
                self.post(endpoint);
            }
            Some(_) => {}
        }
    }

    /// Opens the side channel, if nothing keeps us away.
    fn open_channel(&mut self, endpoint: u32) {
        let Some(of) = self.endpoints.get(endpoint) else { return };
        let (at, address) = match of.contact.attempt(self.timers.now()) {
            Attempt::To(at, address) => (at, address),
            Attempt::Later => return,
            Attempt::Never(error) => {
                self.fail_waiting(endpoint, error);
                return;
            }
        };
        if self.connected.len() >= self.config.endpoints_max as usize && !self.evict() {
            // All are busy: somebody will have done.
            return;
        }
        if let Err(error) = self.start_channel(endpoint, at, address) {
            self.channel_refused(endpoint, at, error_of(&error));
        }
    }

    /// Gives up the connection of an endpoint that nobody has used for a while.
    fn evict(&mut self) -> bool {
        let endpoints = &mut self.endpoints;
        let victim = self.connected.victim(|key| match endpoints.get_mut(key) {
            Some(of) if of.is_busy() => Sign::Busy,
            Some(of) if of.used => {
                of.used = false;
                Sign::Used
            }
            _ => Sign::Idle,
        });
        let Some(victim) = victim else { return false };
        self.stats.evictions += 1;
        self.drop_channel(victim);
        true
    }

    fn start_channel(&mut self, endpoint: u32, at: u8, address: SocketAddr) -> io::Result<()> {
        let stream = net::dial(address, self.config.peer_silence_ms_max)?;
        let interest = Interest::BOTH;
        let (index, name) = self.connections.reserve();
        if let Err(error) = self.poller.add(&stream, u64::from(name), interest) {
            self.connections.release(index);
            return Err(error);
        }
        let deadline = self.timers.now() + Duration::from_millis(u64::from(self.config.connect_ms_max));
        let role = Out {
            endpoint,
            address: at,
            phase: Phase::Connecting,
            asked: 1,
            open: VecDeque::new(),
            answered: false,
        };
        let mut channel = Channel::new(stream, interest);
        channel.dialing = true;
        let connection = Connection { channel, deadline: Some(deadline), role: Role::Out(role) };
        self.connections.put(index, Box::new(connection));
        self.questions += 1;
        self.stats.channels_opened += 1;
        self.connected.insert(endpoint);
        self.timers.changed();
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.channel = Some(index);
            of.used = true;
        }
        Ok(())
    }

    /// Works on a side channel of ours that is ready.
    pub(crate) fn drive_out(&mut self, index: u32, mut connection: Box<Connection>, readable: bool) {
        match self.try_drive_out(&mut connection, readable) {
            Ok(()) => self.settle_interest(index, connection),
            Err(end) => self.end_out(index, *connection, end),
        }
    }

    fn try_drive_out(&mut self, connection: &mut Connection, readable: bool) -> Result<(), ChannelEnd> {
        let Role::Out(out) = &mut connection.role else { return Ok(()) };
        let channel = &mut connection.channel;
        let refused = |error: &io::Error| ChannelEnd::Refused(error_of(error));
        if out.phase == Phase::Connecting {
            match channel.stream.take_error() {
                Ok(None) => {}
                Ok(Some(error)) | Err(error) => return Err(refused(&error)),
            }
            if channel.stream.peer_addr().is_err() {
                return Ok(());
            }
            channel.dialing = false;
            self.greet(out, channel);
        }
        for round in 0.. {
            let came = match readable && round < ROUNDS_MAX {
                true => channel.receive().map_err(|error| lost(out.phase, error_of(&error)))?,
                false => false,
            };
            let mut used = 0;
            while let Some(bytes) = self.hear(out, &mut connection.deadline, channel.bytes())? {
                channel.consume(bytes);
                used += bytes;
            }
            if !came && used == 0 {
                break;
            }
        }
        if channel.finished {
            return Err(lost(out.phase, Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET)));
        }
        channel.flush().map_err(|error| lost(out.phase, error_of(&error)))
    }

    fn greet(&mut self, out: &mut Out, channel: &mut Channel) {
        self.next_connection = self.next_connection.wrapping_add(1);
        let incarnation = self.endpoints.get(out.endpoint).map_or(0, |of| of.contact.incarnation());
        let hello = Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            connection: U32::new(self.next_connection),
            session: U64::new(self.sessions.hash_one(incarnation)),
            target: U64::new(incarnation),
            identity: U64::new(self.end.identity),
            reserved_end: U64::ZERO,
        };
        channel.push(&[hello.as_bytes()]);
        out.phase = Phase::Greeting;
    }

    /// Takes in one frame; gives its length, or `None` when there is none yet.
    fn hear(
        &mut self,
        out: &mut Out,
        deadline: &mut Option<te_core::Instant>,
        bytes: &[u8],
    ) -> Result<Option<usize>, ChannelEnd> {
        let protocol = |_| lost(out.phase, ErrorKind::Protocol.into());
        if out.phase == Phase::Greeting {
            return match exchange::parse_welcome(bytes).map_err(protocol)? {
                Step::Need(_) => Ok(None),
                Step::Frame(welcome, used) => {
                    self.welcomed(out, &welcome)?;
                    *deadline = None;
                    Ok(Some(used))
                }
            };
        }
        let (response, used) = match exchange::parse_response(bytes).map_err(protocol)? {
            Step::Need(_) => return Ok(None),
            Step::Frame(response, used) => (response, used),
        };
        self.stats.frames += 1;
        if let Response::Error { status } = response {
            return Err(ChannelEnd::Lost(status.error().unwrap_or(ErrorKind::Protocol.into())));
        }
        if let Response::Withdrawn { region } = response {
            self.withdrawn(out.endpoint, region.region.get(), region.generation.get());
            return Ok(Some(used));
        }
        let answers = match (&response, out.open.pop_front()) {
            (Response::Accept { id, .. }, Some((asked, Kind::Connect)))
            | (Response::Resolved { id, .. }, Some((asked, Kind::Resolve)))
            | (Response::Fenced { id }, Some((asked, Kind::Fence)))
            | (Response::Refused { id, .. }, Some((asked, Kind::Connect | Kind::Resolve))) => *id == asked,
            _ => false,
        };
        // An answer to what nobody has asked, or to something else.
        if !answers {
            return Err(ChannelEnd::Lost(ErrorKind::Protocol.into()));
        }
        out.answered = true;
        let known = match response {
            Response::Accept { id, port, qps } => self.accepted(out.endpoint, id, &port, qps),
            Response::Resolved { id, of, keys } => self.resolved(out.endpoint, id, &of, keys),
            Response::Fenced { id } => self.fenced(out.endpoint, id),
            Response::Refused { id, status } => self.refused(out.endpoint, id, status),
            Response::Withdrawn { .. } | Response::Error { .. } => true,
        };
        if !known || out.asked == 0 {
            return Err(ChannelEnd::Lost(ErrorKind::Protocol.into()));
        }
        out.asked -= 1;
        self.questions -= 1;
        let silence = Duration::from_millis(u64::from(self.config.peer_silence_ms_max));
        *deadline = (out.asked > 0).then_some(self.timers.now() + silence);
        self.list(out.endpoint);
        Ok(Some(used))
    }

    fn welcomed(&mut self, out: &mut Out, welcome: &Welcome) -> Result<(), ChannelEnd> {
        if let Some(error) = Status::from_wire(welcome.status.get()).error() {
            return Err(ChannelEnd::Refused(error));
        }
        let Some(of) = self.endpoints.get_mut(out.endpoint) else { return Err(ChannelEnd::Dropped) };
        if welcome.incarnation.get() != of.contact.incarnation() {
            return Err(ChannelEnd::Refused(ErrorKind::PeerRestarted.into()));
        }
        out.phase = Phase::Up;
        out.asked = 0;
        self.questions -= 1;
        of.contact.welcomed(out.address);
        of.up = true;
        self.stats.frames += 1;
        self.list(out.endpoint);
        Ok(())
    }

    /// Ends every slice of an endpoint that is not posted.
    fn fail_slices(&mut self, endpoint: u32, error: Error) {
        self.fail_pending(endpoint, error);
        for index in 0..self.segments.bound() {
            if self.segments.get(index).is_some_and(|segment| segment.peer == endpoint) {
                self.fail_segment(index, error);
            }
        }
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.wanting.clear();
        }
    }

    /// A side channel of ours has ended: what was posted to that peer ends with it, for the peer ends its part as well.
    pub(crate) fn end_out(&mut self, index: u32, connection: Connection, end: ChannelEnd) {
        let Connection { channel, role, .. } = connection;
        let Role::Out(out) = role else { return };
        reset_on_close(&channel.stream);
        drop(channel);
        self.connections.release(index);
        self.questions -= out.asked;
        self.stats.channels_lost += 1;
        let endpoint = out.endpoint;
        self.connected.remove(endpoint);
        log::debug!("the side channel to endpoint {endpoint} ended: {end:?}");
        let Some(of) = self.endpoints.get_mut(endpoint) else { return };
        (of.channel, of.up, of.offered, of.sweep) = (None, false, None, false);
        of.fences.iter_mut().for_each(|fence| fence.sent = None);
        let links = of.links;
        let error = match end {
            ChannelEnd::Lost(error) | ChannelEnd::Refused(error) => peer_dead(error),
            ChannelEnd::Dropped => ErrorKind::Canceled.into(),
        };
        for link in links.into_iter().flatten() {
            self.retire(link, Some(error));
        }
        for index in 0..self.segments.bound() {
            if let Some(segment) = self.segments.get_mut(index)
                && segment.peer == endpoint
                && !matches!(segment.ext.keys, Keys::Withdrawn)
            {
                // The next connection has to show the key again.
                segment.ext.forget(Keys::Unknown);
                if !segment.ext.waiting.is_empty() {
                    self.want_keys(index);
                }
            }
        }
        // What had its keys waits for them again.
        while let Some(slot) = self.endpoints.get(endpoint).and_then(|of| of.pending.first()) {
            self.unqueue(slot);
            self.again(slot);
        }
        match end {
            ChannelEnd::Refused(error) => self.channel_refused(endpoint, out.address, error),
            // It would go the same way at once.
            ChannelEnd::Lost(_) if !out.answered || error.kind == ErrorKind::Protocol => {
                if let Some(of) = self.endpoints.get_mut(endpoint) {
                    of.contact.back_off(self.timers.now(), self.config.reconnect_ms_max);
                }
                self.timers.changed();
                self.fail_waiting(endpoint, error);
            }
            _ => {}
        }
        self.list(endpoint);
    }

    /// An attempt to open a side channel to address `at` has failed.
    fn channel_refused(&mut self, endpoint: u32, at: u8, error: Error) {
        let Some(of) = self.endpoints.get_mut(endpoint) else { return };
        self.timers.changed();
        match of.contact.refused(at, error, self.timers.now(), self.config.reconnect_ms_max) {
            Refusal::NextAddress => self.timers.wake(),
            Refusal::Final(error) | Refusal::Paused(error) => self.fail_waiting(endpoint, error),
        }
    }

    /// Ends what waits for a side channel that will not come.
    fn fail_waiting(&mut self, endpoint: u32, error: Error) {
        self.fail_slices(endpoint, error);
        let harmless = self.endpoints.get(endpoint).is_none_or(|of| of.contact.is_harmless(&self.known));
        while let Some(fence) = self.endpoints.get_mut(endpoint).and_then(|of| of.fences.pop()) {
            let completion = if harmless {
                Completion::applied(fence.token)
            } else {
                Completion::unknown(fence.token, error)
            };
            self.fence_done(fence.segment, completion);
        }
    }

    pub(crate) fn fence_done(&mut self, segment: u32, completion: Completion) {
        self.operations.complete(completion);
        self.fences.end();
        self.segments.unpin(segment);
    }

    /// Closes the side channel to an endpoint that has nothing to do.
    fn drop_channel(&mut self, endpoint: u32) {
        if let Some(index) = self.endpoints.get(endpoint).and_then(|of| of.channel)
            && let Some(connection) = self.connections.take(index)
        {
            self.end_out(index, *connection, ChannelEnd::Dropped);
        }
    }

    /// Lets go of an endpoint that nothing needs any more.
    pub(crate) fn drop_idle_endpoint(&mut self, endpoint: u32) {
        if self.endpoints.get(endpoint).is_none_or(|of| !of.is_idle()) {
            return;
        }
        self.drop_channel(endpoint);
        // Queue pairs that would not go have no endpoint any more.
        for index in 0..self.links.bound() {
            if let Some(link) = self.links.get_mut(index)
                && link.endpoint == endpoint
            {
                link.endpoint = u32::MAX;
            }
        }
        self.listed.retain(|&listed| listed != endpoint);
        if let Some(of) = self.endpoints.remove(endpoint) {
            self.known.remember(&of.contact);
        }
    }

    /// Ends a side channel whose time is up.
    pub(crate) fn out_is_late(&mut self, index: u32, connection: Connection) {
        let error = Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT);
        let end = match &connection.role {
            Role::Out(out) => lost(out.phase, error),
            Role::In(_) => ChannelEnd::Lost(error),
        };
        if let (ChannelEnd::Lost(_), Role::Out(out)) = (end, &connection.role) {
            log::warn!("endpoint {} owes an answer for too long: given up", out.endpoint);
            let endpoint = out.endpoint;
            self.end_out(index, connection, end);
            if let Some(of) = self.endpoints.get_mut(endpoint) {
                of.contact.back_off(self.timers.now(), self.config.reconnect_ms_max);
            }
            self.fail_waiting(endpoint, error);
            return;
        }
        self.end_out(index, connection, end);
    }

    /// Looks at the port again after one of its events.
    pub(crate) fn look_at_port(&mut self) {
        match self.port.refresh(&self.verbs, self.config.gid_index) {
            Ok(changed) if self.port.info.active => {
                if changed {
                    log::info!("{}: the GID is {} from now on", self.verbs.info().name, self.port.gid.index);
                    // Nobody finds the old queue pairs any more, ours and peers'.
                    self.lose_port(Outage::Port);
                    self.end_all_in();
                }
                if self.outage == Some(Outage::Port) {
                    log::info!("{}: the port is back", self.verbs.info().name);
                    self.outage = None;
                    (0..self.endpoints.bound()).for_each(|endpoint| self.list(endpoint));
                }
            }
            _ => self.lose_port(Outage::Port),
        }
    }
}

/// What the end of a side channel says, by how far it was.
fn lost(phase: Phase, error: Error) -> ChannelEnd {
    if phase == Phase::Up { ChannelEnd::Lost(error) } else { ChannelEnd::Refused(error) }
}
