//! The owner's side: the regions that peers may map, and the peers that do.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use te_core::grant::{self, Message, Offer, OwnerEffect, OwnerLimits, Revoked};
use te_core::{Error, ErrorKind, Instant, RegionId};
use te_fabric::net::{self, Accepted};
use te_fabric::{Epoll, Interest};
use te_gpu::{Block, Gpu};
use te_host::control::{Ledger, Process, SeqSocket};
use te_host::own_uid;

use crate::channel::{Channel, Received, Socket, Tag, system};
use crate::config::Config;
use crate::memory::Handles;
use crate::stream::Stream;
use crate::warnings::Warnings;
use crate::wire::Frame;

/// Time for which no connection is accepted after accepting one has failed.
const PAUSE: Duration = Duration::from_millis(100);
/// Frames of one peer handled before the others get a turn.
const FRAMES_MAX: usize = 64;
/// How soon the process of a peer whose connection has ended is looked at, and how often at least: the time
/// doubles.
const LOOK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

pub(crate) struct Owner {
    listener: Option<SeqSocket>,
    /// For peers of other hosts, with the largest number of peers.
    hosts_listener: Option<(net::Listener, u32)>,
    half: grant::Owner<Rows>,
    /// The exported regions, by region index.
    shared: Vec<Option<Shared>>,
    /// The peers, by their number in `half`.
    holders: Vec<Option<Holder>>,
    other_users: bool,
    quarantine: Duration,
    /// Peers whose connection has ended and that may still copy.
    gone: usize,
    /// When their processes are looked at next, and how long after that again.
    look_at: Instant,
    look_every: Duration,
    /// Accepting is paused, because no descriptor is left for another peer.
    paused: bool,
    /// The end of the pause; set by the first `poll` after its begin.
    paused_until: Option<Instant>,
    now: Instant,
    warnings: Warnings,
}

/// The memory of a region that peers may map, by its handles.
pub(crate) struct Shared {
    pub(crate) id: RegionId,
    /// For peers of this host.
    pub(crate) parts: Handles,
    /// For peers of other hosts; empty: they cannot map it.
    pub(crate) across_hosts: Handles,
    /// The allocation of device memory.
    pub(crate) block: Option<Block>,
}

/// A peer that maps memory of this process, or may.
struct Holder {
    /// `None`: its connection has ended, at `since` or before the next poll.
    channel: Option<Channel>,
    since: Option<Instant>,
    origin: Origin,
    /// The file of its ledger, until it is sent.
    ledger: Option<OwnedFd>,
}

/// Who a peer is.
enum Origin {
    /// A process of this host.
    Process { uid: u32, process: Process },
    /// A process of another host.
    Host {
        address: SocketAddr,
        /// Whether it has named this owner.
        has_opened: bool,
        /// Whether its connection has ended without a word of its host: its process may live for ever.
        is_silent: bool,
        is_expelled: Arc<AtomicBool>,
    },
}

impl Origin {
    /// Whether the process is known to have ended.
    fn has_ended(&self) -> bool {
        if let Self::Process { process, .. } = self { process.has_ended() } else { false }
    }

    /// Whether messages of the peer are for this owner.
    const fn has_opened(&self) -> bool {
        if let Self::Host { has_opened, .. } = self { *has_opened } else { true }
    }

    /// The peer names an owner. Returns whether it had to.
    fn opens(&mut self) -> bool {
        if let Self::Host { has_opened, .. } = self { !std::mem::replace(has_opened, true) } else { false }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { uid, .. } => write!(f, "of user {uid}"),
            Self::Host { address, .. } => write!(f, "at {address}"),
        }
    }
}

/// The rows of a peer.
enum Rows {
    /// Both see them.
    Shared(Ledger),
    /// The peer is on another host: what it was granted is in use until it has released it.
    Apart { is_expelled: Arc<AtomicBool> },
}

impl grant::Rows for Rows {
    fn reset(&self, row: u32) {
        if let Self::Shared(ledger) = self {
            ledger.reset(row);
        }
    }

    fn revoke(&self, row: u32, why: Revoked) -> bool {
        match self {
            Self::Shared(ledger) => ledger.revoke(row, why),
            Self::Apart { is_expelled } => {
                is_expelled.fetch_or(why == Revoked::Peer, Ordering::Relaxed);
                false
            }
        }
    }
}

impl Owner {
    pub(crate) fn new(config: &Config) -> Self {
        let milliseconds = |ms: u32| Duration::from_millis(ms.into());
        let limits = OwnerLimits { peers_max: config.peers_max, idle_max: milliseconds(config.idle_ms_max) };
        Self {
            listener: None,
            hosts_listener: None,
            half: grant::Owner::new(limits).until_released(),
            shared: Vec::new(),
            holders: Vec::new(),
            other_users: config.other_users,
            quarantine: milliseconds(config.quarantine_ms),
            gone: 0,
            look_at: Instant::ZERO,
            look_every: LOOK.0,
            paused: false,
            paused_until: None,
            now: Instant::ZERO,
            warnings: Warnings::default(),
        }
    }

    /// Starts listening, unless it does already.
    pub(crate) fn listen(&mut self, epoll: &Epoll, name: &[u8]) -> Result<(), Error> {
        if self.listener.is_none() {
            let listener = SeqSocket::listen(name).map_err(system)?;
            epoll.add(&listener, Tag::Listener.to_bits(), Interest::READ).map_err(system)?;
            self.listener = Some(listener);
        }
        Ok(())
    }

    /// Listens for peers of other hosts; returns where.
    pub(crate) fn listen_across_hosts(&mut self, epoll: &Epoll, config: &Config) -> io::Result<SocketAddr> {
        let listener = net::Listener::bind(config.listen())?;
        epoll.add(&listener, Tag::HostsListener.to_bits(), Interest::READ)?;
        let address = listener.local_address()?;
        self.hosts_listener = Some((listener, config.peers_max));
        Ok(address)
    }

    /// Lets peers map a region.
    pub(crate) fn share(&mut self, offer: Offer, shared: Shared) {
        let (id, index) = (shared.id, shared.id.index as usize);
        if self.shared.len() <= index {
            self.shared.resize_with(index + 1, || None);
        }
        self.shared[index] = Some(shared);
        self.half.share(id, offer);
    }

    /// Revokes what was granted of a region. Returns true when no peer has it mapped any more.
    pub(crate) fn unshare(&mut self, epoll: &Epoll, id: RegionId) -> bool {
        if let Some(slot) = self.shared.get_mut(id.index as usize)
            && slot.as_ref().is_some_and(|shared| shared.id == id)
        {
            *slot = None;
        }
        let mut out = self.half.unshare(id);
        if !out && self.remove_dead() {
            out = self.half.unshare(id);
        }
        self.settle(epoll);
        out
    }

    /// Whether a process with this identity is connected.
    pub(crate) fn is_connected(&self, peer: u64) -> bool {
        let is = |holder: &Holder| holder.channel.is_some() && !holder.origin.has_ended();
        self.half.connections(peer).any(|at| self.holders[at as usize].as_ref().is_some_and(is))
    }

    /// Revokes what was granted to a peer, and refuses it from now on. Returns true when it copies nothing
    /// any more.
    pub(crate) fn expel(&mut self, epoll: &Epoll, peer: u64) -> Result<bool, Error> {
        let mut gone = self.half.expel(peer)?;
        if !gone && self.remove_dead() {
            gone = self.half.expel(peer)?;
        }
        self.settle(epoll);
        Ok(gone)
    }

    /// Removes peers that hold memory and whose process has ended: the end of their copies. Returns whether
    /// there was one.
    fn remove_dead(&mut self) -> bool {
        let has_ended = |at: &u32| self.holders[*at as usize].as_ref().is_none_or(|of| of.origin.has_ended());
        let dead: Vec<u32> = self.half.waited_for().filter(has_ended).collect();
        dead.iter().for_each(|&at| self.remove(at));
        !dead.is_empty()
    }

    /// The peer can no longer touch anything.
    fn remove(&mut self, at: u32) {
        self.half.ended(at);
        if self.holders[at as usize].take().is_some_and(|holder| holder.channel.is_none()) {
            self.gone -= 1;
        }
    }

    pub(crate) fn accept(&mut self, epoll: &Epoll) {
        for _ in 0..FRAMES_MAX {
            let Some(listener) = &self.listener else { return };
            let socket = match listener.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(errno) => {
                    log::warn!("nvlink: cannot accept a peer: {errno}; trying again in 100 ms");
                    self.paused = epoll.modify(listener, Tag::Listener.to_bits(), Interest::NONE).is_ok();
                    return;
                }
            };
            if let Err(error) = self.admit(epoll, socket) {
                self.warnings.warn(format_args!("refused a peer: {error}"));
            }
        }
    }

    fn admit(&mut self, epoll: &Epoll, socket: SeqSocket) -> Result<(), Error> {
        let (uid, process) = socket.peer().map_err(system)?;
        if !may_share(uid, own_uid(), self.other_users) {
            self.warnings.warn(format_args!("a peer is of user {uid}; see the setting other_users"));
            return Err(ErrorKind::AccessDenied.into());
        }
        self.add(epoll, Socket::Host(socket), Origin::Process { uid, process })
    }

    fn add(&mut self, epoll: &Epoll, socket: Socket, origin: Origin) -> Result<(), Error> {
        let at = self.half.connected()?;
        let channel = Channel::new(epoll, socket, Tag::Holder(at)).inspect_err(|_| self.half.ended(at))?;
        if self.holders.len() <= at as usize {
            self.holders.resize_with(at as usize + 1, || None);
        }
        let holder = Holder { channel: Some(channel), since: None, origin, ledger: None };
        self.holders[at as usize] = Some(holder);
        Ok(())
    }

    /// Accepts peers of other hosts.
    pub(crate) fn accept_across_hosts(&mut self, epoll: &Epoll, now: Instant) {
        for _ in 0..FRAMES_MAX {
            let Some((listener, peers_max)) = &mut self.hosts_listener else { return };
            match listener.accept() {
                Accepted::Connection(socket) => {
                    if let Err(error) = self.admit_across_hosts(epoll, socket) {
                        self.warnings.warn(format_args!("refused a peer of another host: {error}"));
                    }
                }
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    listener.pause(now, &error, *peers_max);
                    _ = epoll.modify(&*listener, Tag::HostsListener.to_bits(), Interest::NONE);
                    return;
                }
            }
        }
    }

    fn admit_across_hosts(&mut self, epoll: &Epoll, socket: TcpStream) -> Result<(), Error> {
        let address = socket.peer_addr().map_err(system)?;
        let stream = Stream::accepted(socket).map_err(system)?;
        let is_expelled = Arc::default();
        let origin = Origin::Host { address, has_opened: false, is_silent: false, is_expelled };
        self.add(epoll, Socket::Hosts(stream), origin)
    }

    /// Handles the frames of a peer until there are no more, or until its socket has no room for an answer.
    /// `name` is this owner's.
    pub(crate) fn receive(&mut self, epoll: &Epoll, gpu: &Gpu, name: &[u8; 16], at: u32) {
        for nth in 0.. {
            let Some(Some(holder)) = self.holders.get_mut(at as usize) else { return };
            let Some(channel) = holder.channel.as_mut() else { return };
            channel.flush(epoll);
            if channel.is_blocked() || (nth >= FRAMES_MAX && !channel.has_frame()) {
                return;
            }
            match channel.receive(epoll) {
                Received::Nothing => return,
                Received::End => return self.lost(at, false),
                Received::Silence => return self.lost(at, true),
                Received::Invalid(error) => self.half.disconnect(at, error),
                Received::Frame(Frame::Open(wanted), _) if holder.origin.opens() => {
                    // An owner that has ended listened at this address.
                    if wanted != *name {
                        self.half.disconnect(at, ErrorKind::Stale.into());
                    }
                }
                Received::Frame(Frame::Grant(message), _) if holder.origin.has_opened() => {
                    if let Message::Ask { region, .. } = message {
                        self.look_at_memory(gpu, region);
                    }
                    self.half.received(at, message);
                }
                // A peer sends no handles.
                Received::Frame(..) => self.half.disconnect(at, ErrorKind::Protocol.into()),
            }
            self.settle(epoll);
        }
    }

    /// Memory that was freed while it was registered, and perhaps allocated again, is granted to no peer.
    fn look_at_memory(&mut self, gpu: &Gpu, region: RegionId) {
        let shared = self.shared.get_mut(region.index as usize).and_then(Option::as_mut);
        let Some(Shared { id, block: Some(block), .. }) = shared.filter(|shared| shared.id == region) else {
            return;
        };
        if let Err(error) = gpu.recheck(block) {
            let text = format_args!("region {id} is exported, but its memory was freed: {error}");
            self.warnings.warn(text);
            let _in_use = self.half.unshare(region);
        }
    }

    /// A connection has ended. That alone does not say that copies have: the descriptors of a process that
    /// dies are closed one after the other.
    fn lost(&mut self, at: u32, silent: bool) {
        let Some(Some(holder)) = self.holders.get_mut(at as usize) else { return };
        if !self.half.holds(at) || holder.origin.has_ended() {
            self.remove(at);
            return;
        }
        if let Origin::Host { address, is_silent, .. } = &mut holder.origin {
            *is_silent = silent;
            if silent {
                log::error!(
                    "nvlink: the host of a peer at {address} does not answer: its process may live, and what it has \
                     mapped stays in use until this process ends"
                );
            }
        }
        holder.channel = None;
        holder.since = None;
        self.gone += 1;
        (self.look_at, self.look_every) = (self.now, LOOK.0);
    }

    /// Disconnects peers that have shown no key in time, learns that peers have died, and accepts again after
    /// a pause.
    pub(crate) fn poll(&mut self, epoll: &Epoll, now: Instant) {
        self.now = now;
        if let (true, Some(listener)) = (self.paused, &self.listener)
            && now >= *self.paused_until.get_or_insert(now + PAUSE)
        {
            self.paused = epoll.modify(listener, Tag::Listener.to_bits(), Interest::READ).is_err();
            self.paused_until = None;
        }
        if let Some((listener, _)) = &mut self.hosts_listener
            && listener.is_pause_over(now)
            && epoll.modify(&*listener, Tag::HostsListener.to_bits(), Interest::READ).is_ok()
        {
            listener.resume();
        }
        if self.gone > 0 && now >= self.look_at {
            self.look_at_gone(now);
            self.look_at = now + self.look_every;
            self.look_every = (self.look_every * 2).min(LOOK.1);
        }
        self.half.poll(now);
        self.settle(epoll);
    }

    #[cold]
    fn look_at_gone(&mut self, now: Instant) {
        for at in 0..self.holders.len() {
            let Some(holder) = self.holders[at].as_mut().filter(|holder| holder.channel.is_none()) else {
                continue;
            };
            let since = *holder.since.get_or_insert(now);
            let has_ended = match &holder.origin {
                Origin::Process { process, .. } if process.is_known() => process.has_ended(),
                Origin::Host { is_silent: true, .. } => false,
                _ => now >= since + self.quarantine,
            };
            if has_ended {
                self.remove(at as u32);
            }
        }
    }

    /// When `poll` has something to do; `now` when it has something at once.
    pub(crate) fn poll_at(&self, now: Instant) -> Option<Instant> {
        let pause = self.paused.then(|| self.paused_until.unwrap_or(now));
        let look = (self.gone > 0).then_some(self.look_at);
        let hosts = self.hosts_listener.as_ref().and_then(|(listener, _)| listener.paused_until());
        self.half.poll_at(now).into_iter().chain(pause).chain(look).chain(hosts).min()
    }

    /// Carries out the effects that `half` has queued.
    fn settle(&mut self, epoll: &Epoll) {
        while let Some(effect) = self.half.effect() {
            let (OwnerEffect::MakeRows { peer }
            | OwnerEffect::Send { peer, .. }
            | OwnerEffect::Grant { peer, .. }
            | OwnerEffect::Close { peer, .. }) = effect;
            let Some(Some(holder)) = self.holders.get_mut(peer as usize) else { continue };
            match effect {
                OwnerEffect::MakeRows { .. } => match &holder.origin {
                    Origin::Process { .. } => match Ledger::create() {
                        Ok((ledger, fd)) => {
                            holder.ledger = Some(fd);
                            self.half.welcomed(peer, Rows::Shared(ledger));
                        }
                        Err(errno) => self.half.disconnect(peer, system(errno)),
                    },
                    Origin::Host { is_expelled, .. } => {
                        let is_expelled = Arc::clone(is_expelled);
                        self.half.welcomed(peer, Rows::Apart { is_expelled });
                    }
                },
                OwnerEffect::Send { message, .. } => {
                    let message = match (message, &holder.origin) {
                        // The peer does not see its rows, where it would find the reason.
                        (Message::Revoked { .. }, Origin::Host { is_expelled, .. })
                            if is_expelled.load(Ordering::Relaxed) =>
                        {
                            Message::Expelled
                        }
                        _ => message,
                    };
                    let ledger = (message == Message::Welcome).then(|| holder.ledger.take().map(Arc::new));
                    holder.send(epoll, Frame::Grant(message), ledger.flatten());
                }
                OwnerEffect::Grant { region, message, .. } => {
                    let shared = self.shared.get(region.index as usize).and_then(Option::as_ref);
                    let handles =
                        shared.filter(|shared| shared.id == region).map(|shared| match holder.origin {
                            Origin::Process { .. } => &shared.parts,
                            Origin::Host { .. } => &shared.across_hosts,
                        });
                    match handles.filter(|handles| !handles.is_empty()) {
                        Some(handles) => {
                            for (part, fd) in handles {
                                holder.send(epoll, Frame::Part(*part), fd.clone());
                            }
                            holder.send(epoll, Frame::Grant(message), None);
                        }
                        None => self.half.withdraw(peer, message),
                    }
                }
                OwnerEffect::Close { why, .. } => {
                    let (origin, warnings) = (&holder.origin, &mut self.warnings);
                    match why.kind {
                        ErrorKind::TimedOut => warnings.warn(format_args!(
                            "disconnected a peer {origin}: it was granted nothing in time"
                        )),
                        ErrorKind::Expelled => warnings.warn(format_args!("expelled a peer {origin}")),
                        _ => warnings.warn(format_args!("disconnected a peer {origin}: {why}")),
                    }
                    if self.holders[peer as usize].take().is_some_and(|holder| holder.channel.is_none()) {
                        self.gone -= 1;
                    }
                }
            }
        }
    }
}

impl Holder {
    fn send(&mut self, epoll: &Epoll, frame: Frame, fd: Option<Arc<OwnedFd>>) {
        if let Some(channel) = &mut self.channel {
            channel.push(frame, fd);
            channel.flush(epoll);
        }
    }
}

/// Whether a process of user `own` shares memory with one of user `uid`, and maps that one's.
pub(crate) const fn may_share(uid: u32, own: u32, other_users: bool) -> bool {
    uid == own || uid == 0 || other_users
}

#[cfg(test)]
mod tests {
    use te_core::Access;
    use te_core::grant::PROTOCOL;

    use super::*;
    use crate::wire::{Means, Part};

    /// A host that does not answer any more says nothing about its processes.
    #[test]
    fn a_peer_whose_connection_ended_is_waited_for_and_for_ever_if_its_host_is_silent() {
        for silent in [false, true] {
            let config = Config { quarantine_ms: 100, ..Config::default() };
            let (mut owner, epoll) = (Owner::new(&config), Epoll::new(4).expect("an instance"));
            let address = owner.listen_across_hosts(&epoll, &config).expect("a free port");
            let _peer = TcpStream::connect(address).expect("it listens");
            owner.accept_across_hosts(&epoll, Instant::ZERO);
            let (id, key) = (RegionId::new(0, 1), [7; 16]);
            let part = Part { means: Means::Fabric([1; 64]), bytes: 4_096, offset: 0, len: 4_096 };
            let across_hosts = vec![(part, None)];
            let shared = Shared { id, parts: Vec::new(), across_hosts, block: None };
            owner.share(Offer { key, offset: 0, len: 4_096, access: Access::REMOTE_READ }, shared);
            let hello = Message::Hello { protocol: PROTOCOL, identity: 5 };
            for message in [hello, Message::Ask { request: 1, region: id, key }] {
                owner.half.received(0, message);
                owner.settle(&epoll);
            }
            assert!(!owner.unshare(&epoll, id), "it was granted");
            owner.lost(0, silent);
            let at = |ms| Instant::ZERO + Duration::from_millis(ms);
            owner.poll(&epoll, at(1));
            owner.poll(&epoll, at(90));
            assert!(!owner.unshare(&epoll, id), "its process may still end");
            owner.poll(&epoll, at(10_000));
            assert_eq!(owner.unshare(&epoll, id), !silent);
            assert_eq!(owner.poll_at(at(10_000)).is_some(), silent);
        }
    }

    #[test]
    fn only_this_user_and_root_may_share_memory_unless_others_are_allowed() {
        assert!(
            may_share(1_000, 1_000, false) && may_share(0, 1_000, false) && may_share(1_001, 1_000, true)
        );
        assert!(!may_share(1_001, 1_000, false) && !may_share(1_000, 0, false));
    }
}
