//! The peer's side: owners whose memory is mapped here, and how it is used and given back.
//!
//! Copies run by themselves, and mappings are opened and closed by another thread. So three things happen
//! later than in [`te_core::grant`]: a grant is *mapped* when the thread says so; a mapping that is dropped
//! is closed when the last copy has ended; and its `Release` is sent, once, when it is closed.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use te_core::grant::{self, LinkState, Message, PeerEffect, Revoked, Want};
use te_core::{Error, ErrorKind, Instant, Location, RegionId};
use te_fabric::Epoll;
use te_gpu::{Gpu, Place};
use te_host::control::{Ledger, SeqSocket, socket_name};
use te_host::own_uid;

use crate::channel::{Channel, Received, Socket, Tag};
use crate::config::Config;
use crate::memory::{Memory, Opening, Own};
use crate::owner::may_share;
use crate::stream::Stream;
use crate::warnings::Warnings;
use crate::wire::{Frame, Part};
use crate::worker::{Done, Job, Worker};

/// Frames of one owner handled before the others get a turn.
const FRAMES_MAX: usize = 64;
/// Parts of one region.
const PARTS_MAX: usize = 4_096;
/// The owner of a mapping whose connection has ended.
const NONE: u32 = u32::MAX;

pub(crate) struct Peers {
    half: grant::Peer<Arc<Ledger>, Token>,
    /// The connection of each owner, by its number in `half`.
    owners: Vec<Option<u32>>,
    hosts: Vec<Option<Host>>,
    /// What is behind each link of `half`.
    links: Vec<Link>,
    imports: Vec<Option<Import>>,
    /// Imports whose token was dropped by `half`.
    dropped: Arc<Mutex<Vec<u32>>>,
    /// Imports that are closed when their last copy has ended.
    leaving: Vec<u32>,
    driver: u64,
    other_users: bool,
    warnings: Warnings,
}

/// A connection to an owner.
struct Host {
    name: [u8; 16],
    /// Its number in `half`; `None` when that has forgotten it, and mappings remain.
    owner: Option<u32>,
    channel: Channel,
    rows: Option<Arc<Ledger>>,
    /// The parts of the next grant.
    parts: Vec<(Part, Option<OwnedFd>)>,
    /// Mappings that are being opened, are open, or are being closed.
    imports: u32,
    /// Requests that were not answered. The owner may have granted them already.
    asks: u32,
    /// Whether the owner has ever answered.
    is_met: bool,
}

/// What an export says of a link.
#[derive(Clone, Copy)]
struct Link {
    socket: [u8; 16],
    region: RegionId,
    is_device: bool,
    is_across_hosts: bool,
    via: Location,
}

/// A mapping of an owner's memory.
struct Import {
    /// `NONE`: its connection has ended, and another one may have its place.
    host: u32,
    row: u32,
    link: u32,
    rows: Arc<Ledger>,
    /// `None` while it is being opened or closed.
    memory: Option<Memory>,
    /// Copies that use it.
    running: u32,
}

/// Stands for a mapping in `half`.
pub(crate) struct Token {
    import: u32,
    dropped: Arc<Mutex<Vec<u32>>>,
}

impl Drop for Token {
    fn drop(&mut self) {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push(self.import);
    }
}

/// Where a link's memory is, for one copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) import: u32,
    pub(crate) place: Place,
    /// The device that copies.
    pub(crate) via: Location,
    pub(crate) kernel: bool,
}

impl Peers {
    pub(crate) fn new(identity: u64, config: &Config) -> Self {
        Self {
            half: grant::Peer::new(identity, Duration::from_millis(config.grant_ms_max.into())),
            other_users: config.other_users,
            owners: Vec::new(),
            hosts: Vec::new(),
            links: Vec::new(),
            imports: Vec::new(),
            dropped: Arc::new(Mutex::new(Vec::with_capacity(1_024))),
            leaving: Vec::with_capacity(1_024),
            driver: 0,
            warnings: Warnings::default(),
        }
    }

    /// Requests a region from its owner, of this host or at these `addresses`; `via` will copy.
    pub(crate) fn attach(
        &mut self,
        (epoll, gpu, worker): (&Epoll, &Gpu, &Worker),
        (socket, addresses): ([u8; 16], Option<&[SocketAddr]>),
        want: Want,
        (is_device, via): (bool, Location),
    ) -> Result<u32, Error> {
        self.driver = gpu.driver_id();
        let owner = self.owner(epoll, socket, addresses)?;
        let at = self.owners.get(owner as usize).copied().flatten();
        let host = at.and_then(|at| self.hosts.get(at as usize)).and_then(Option::as_ref);
        // An owner has so many rows for this process, and refuses what is more.
        if host.is_some_and(|host| host.imports + host.asks >= grant::ROWS_MAX) {
            return Err(ErrorKind::Full.into());
        }
        let link = self.half.attach(owner, want);
        let is_across_hosts = addresses.is_some();
        let known = Link { socket, region: want.region, is_device, is_across_hosts, via };
        if self.links.len() <= link as usize {
            self.links.resize(link as usize + 1, known);
        }
        self.links[link as usize] = known;
        self.settle(epoll, worker, None);
        Ok(link)
    }

    pub(crate) fn detach(&mut self, epoll: &Epoll, worker: &Worker, link: u32) {
        self.half.detach(link);
        self.settle(epoll, worker, None);
        self.sweep(worker);
    }

    /// How a link's memory is reached; `None`: not yet.
    #[inline]
    pub(crate) fn target(&self, link: u32) -> Result<Option<Target>, Error> {
        let import = match self.half.link_state(link) {
            LinkState::Ready { mapping, .. } => mapping.import,
            LinkState::Waiting => return Ok(None),
            LinkState::Late => return Err(ErrorKind::Unreachable.into()),
            LinkState::Closed(error) => return Err(error),
        };
        let known = self.imports.get(import as usize).and_then(Option::as_ref);
        let memory = known.and_then(|known| known.memory.as_ref()).ok_or(ErrorKind::Stale)?;
        let via = self.links.get(link as usize).ok_or(ErrorKind::NotFound)?.via;
        Ok(Some(Target { import, place: memory.place()?, via, kernel: memory.allows_kernel() }))
    }

    /// A copy is about to use a mapping: says so to the owner, before the copy is started.
    #[inline]
    pub(crate) fn enter(&mut self, import: u32) -> Result<(), Error> {
        let known = self.imports.get_mut(import as usize).and_then(Option::as_mut).ok_or(ErrorKind::Stale)?;
        let row = known.rows.row(known.row).ok_or(ErrorKind::Protocol)?;
        let revoked = match known.running {
            0 => row.enter().map(grant::Inside::keep).err(),
            _ => row.revoked(),
        };
        match revoked {
            None => known.running += 1,
            Some(Revoked::Peer) => return Err(ErrorKind::Expelled.into()),
            Some(Revoked::Region) => return Err(ErrorKind::Stale.into()),
        }
        Ok(())
    }

    /// A copy has ended.
    #[inline]
    pub(crate) fn leave(&mut self, import: u32) {
        let Some(Some(known)) = self.imports.get_mut(import as usize) else { return };
        known.running -= 1;
        if known.running == 0
            && let Some(row) = known.rows.row(known.row)
        {
            row.leave();
        }
    }

    /// Handles the frames of an owner. An owner that breaks the protocol, or is gone, counts as dead.
    pub(crate) fn receive(&mut self, epoll: &Epoll, worker: &Worker, at: u32) {
        for nth in 0.. {
            let Some(Some(host)) = self.hosts.get_mut(at as usize) else { return };
            if nth >= FRAMES_MAX && !host.channel.has_frame() {
                return;
            }
            host.channel.flush(epoll);
            let received = host.channel.receive(epoll);
            let Some(owner) = host.owner else {
                // Only releases are of interest any more: ours, and those of grants that come too late.
                match received {
                    Received::Frame(Frame::Grant(message), _) => {
                        host.answered(message);
                        if let Message::Grant { row, .. } = message {
                            host.channel.push_message(Message::Release { row });
                        }
                        continue;
                    }
                    Received::Frame(..) | Received::Invalid(_) => continue,
                    Received::Nothing => return self.forget_idle(at),
                    Received::End | Received::Silence => return self.forget(at),
                }
            };
            match received {
                Received::Nothing => return,
                // No owner listens at the addresses, or another one: other fabrics may lead to it.
                Received::End | Received::Silence if host.channel.is_across_hosts() && !host.is_met => {
                    self.half.lost(owner, ErrorKind::Unreachable.into());
                }
                Received::End | Received::Silence => self.half.lost(owner, ErrorKind::PeerDead.into()),
                Received::Invalid(error) => {
                    if error.kind == ErrorKind::Unreachable {
                        let text = "no room for a descriptor of an owner: raise RLIMIT_NOFILE";
                        self.warnings.warn(format_args!("{text}"));
                    } else {
                        host.asks = 0;
                    }
                    self.half.lost(owner, error);
                }
                Received::Frame(Frame::Part(part), fd) => {
                    host.parts.push((part, fd));
                    if host.parts.len() > PARTS_MAX {
                        host.asks = 0;
                        self.half.lost(owner, ErrorKind::Protocol.into());
                    }
                }
                Received::Frame(Frame::Open(_), _) => {
                    host.asks = 0;
                    self.half.lost(owner, ErrorKind::Protocol.into());
                }
                Received::Frame(Frame::Grant(message), fd) => {
                    self.message(epoll, worker, (at, owner), message, fd)
                }
            }
            self.settle(epoll, worker, None);
        }
    }

    fn message(
        &mut self,
        epoll: &Epoll,
        worker: &Worker,
        (at, owner): (u32, u32),
        message: Message,
        fd: Option<OwnedFd>,
    ) {
        let Some(Some(host)) = self.hosts.get_mut(at as usize) else { return };
        host.answered(message);
        if let (Message::Revoked { row }, Some(rows)) = (message, &host.rows)
            && rows.row(row).and_then(grant::Row::revoked) == Some(Revoked::Peer)
        {
            // The row says why.
            self.half.lost(owner, ErrorKind::Expelled.into());
            return;
        }
        self.half.received(owner, message);
        match message {
            Message::Welcome => self.settle(epoll, worker, Some(Came::Rows(fd))),
            Message::Grant { row, .. } => {
                self.settle(epoll, worker, Some(Came::Row(row)));
                if let Some(Some(host)) = self.hosts.get_mut(at as usize) {
                    // Those of a grant that no link wants any more.
                    host.parts.clear();
                }
            }
            _ => self.settle(epoll, worker, None),
        }
        // It was expelled, or the message was not valid: no answer is waited for.
        if let Some(Some(host)) = self.hosts.get_mut(at as usize)
            && host.owner.is_none()
        {
            host.asks = 0;
            self.forget_idle(at);
        }
    }

    /// Sends requests that could not be sent, and gives up on owners that do not answer.
    pub(crate) fn poll(&mut self, epoll: &Epoll, worker: &Worker, now: Instant) {
        self.half.poll(now);
        self.settle(epoll, worker, None);
        self.sweep(worker);
    }

    pub(crate) fn poll_at(&self) -> Option<Instant> {
        self.half.poll_at()
    }

    /// What the worker has done.
    pub(crate) fn done(&mut self, epoll: &Epoll, worker: &Worker, done: Done) {
        match done {
            Done::Opened { import, memory } => {
                let Some(Some(known)) = self.imports.get_mut(import as usize) else { return };
                let link = known.link;
                match memory {
                    Ok(memory) => {
                        known.memory = Some(memory);
                        let token = Token { import, dropped: Arc::clone(&self.dropped) };
                        self.half.mapped(link, Ok(token));
                    }
                    Err(why) => {
                        self.warnings.warn(format_args!("memory of a peer could not be mapped: {why}"));
                        // The import sends the release, as one that was open does: `mapped` sends none
                        // when the owner counts as dead, and settling none while the import is there.
                        self.half.mapped(link, Err(why.error));
                        self.settle(epoll, worker, None);
                        let is_closed = !why.stays_mapped;
                        return self.done(epoll, worker, Done::Closed { import, is_closed });
                    }
                }
            }
            Done::Closed { import, is_closed } => {
                let Some(Import { host, row, .. }) = self.imports[import as usize].take() else { return };
                if is_closed && let Some(Some(host)) = self.hosts.get_mut(host as usize) {
                    host.channel.push_message(Message::Release { row });
                }
                self.one_less(epoll, host);
            }
            Done::Pinned { .. } => {}
        }
        self.settle(epoll, worker, None);
        self.sweep(worker);
    }

    /// Hands mappings that no link uses any more to the worker, which closes them.
    pub(crate) fn sweep(&mut self, worker: &Worker) {
        {
            let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
            self.leaving.append(&mut dropped);
        }
        let imports = &mut self.imports;
        self.leaving.retain(|&import| {
            let Some(Some(known)) = imports.get_mut(import as usize) else { return false };
            if known.running > 0 {
                return true;
            }
            if let Some(memory) = known.memory.take() {
                worker.send(Job::Close { import, memory });
            }
            false
        });
    }

    /// Closes all links, and whatever no copy uses: waits for the worker. What a copy may still use stays
    /// mapped for the life of the process, and its row in use.
    pub(crate) fn close(&mut self, epoll: &Epoll, worker: &mut Worker) {
        for link in 0..self.links.len() as u32 {
            self.half.detach(link);
        }
        self.settle(epoll, worker, None);
        self.sweep(worker);
        worker.finish();
        while let Some(done) = worker.next() {
            // What was opened meanwhile is closed here.
            if let Done::Opened { import, memory: Ok(memory) } = done {
                let is_closed = memory.close();
                self.done(epoll, worker, Done::Closed { import, is_closed });
            } else {
                self.done(epoll, worker, done);
            }
        }
        for import in self.imports.iter_mut().flatten() {
            if let Some(memory) = import.memory.take() {
                log::error!("nvlink: memory of a peer stays mapped, because copies have not ended");
                std::mem::forget(memory);
            }
        }
        for at in 0..self.hosts.len() as u32 {
            self.flush(epoll, at);
        }
    }

    /// Whether owners have to answer, or to take releases, before their connections are closed.
    pub(crate) fn waits(&self) -> bool {
        self.hosts.iter().flatten().any(|host| host.asks > 0 || host.channel.is_blocked())
    }

    fn one_less(&mut self, epoll: &Epoll, at: u32) {
        if let Some(Some(host)) = self.hosts.get_mut(at as usize) {
            host.imports -= 1;
        }
        self.flush(epoll, at);
    }

    fn flush(&mut self, epoll: &Epoll, at: u32) {
        if let Some(Some(host)) = self.hosts.get_mut(at as usize) {
            host.channel.flush(epoll);
        }
        self.forget_idle(at);
    }

    /// A connection has ended. Its mappings that are still in use are released to no owner.
    fn forget(&mut self, at: u32) {
        for import in self.imports.iter_mut().flatten().filter(|import| import.host == at) {
            import.host = NONE;
        }
        self.hosts[at as usize] = None;
    }

    /// Closes a connection whose owner is forgotten, once all its mappings are closed and said to be, and all
    /// requests are answered.
    fn forget_idle(&mut self, at: u32) {
        let is_idle = |host: &Host| {
            host.owner.is_none() && host.imports == 0 && host.asks == 0 && !host.channel.is_blocked()
        };
        if let Some(slot) = self.hosts.get_mut(at as usize)
            && slot.as_ref().is_some_and(is_idle)
            && let Some(mut host) = slot.take()
        {
            host.channel.finish();
        }
    }

    fn owner(
        &mut self,
        epoll: &Epoll,
        name: [u8; 16],
        addresses: Option<&[SocketAddr]>,
    ) -> Result<u32, Error> {
        let known = self.hosts.iter().flatten().find(|host| host.name == name && host.owner.is_some());
        if let Some(owner) = known.and_then(|host| host.owner) {
            return Ok(owner);
        }
        let unreachable = |errno: Errno| Error::with_code(ErrorKind::Unreachable, errno as i32);
        let (socket, rows) = match addresses {
            None => (Socket::Host(self.connect(&name).map_err(unreachable)?), None),
            // The rows of this owner are seen here alone.
            Some(addresses) => {
                let stream = Stream::connect(addresses).map_err(unreachable)?;
                let (ledger, _) = Ledger::create().map_err(unreachable)?;
                (Socket::Hosts(stream), Some(Arc::new(ledger)))
            }
        };
        let at = self.hosts.iter().position(Option::is_none).unwrap_or(self.hosts.len());
        let mut channel = Channel::new(epoll, socket, Tag::Host(at as u32))?;
        if channel.is_across_hosts() {
            channel.push(Frame::Open(name), None);
        }
        let owner = self.half.connected()?;
        if at == self.hosts.len() {
            self.hosts.push(None);
        }
        let (owned, parts) = (Some(owner), Vec::new());
        let host = Host { name, owner: owned, channel, rows, parts, imports: 0, asks: 0, is_met: false };
        self.hosts[at] = Some(host);
        if self.owners.len() <= owner as usize {
            self.owners.resize(owner as usize + 1, None);
        }
        self.owners[owner as usize] = Some(at as u32);
        Ok(owner)
    }

    /// Connects to an owner of this host.
    fn connect(&mut self, name: &[u8; 16]) -> Result<SeqSocket, Errno> {
        let socket = SeqSocket::connect(&socket_name(name))?;
        let (uid, _) = socket.peer()?;
        if !may_share(uid, own_uid(), self.other_users) {
            let text = format_args!("memory of user {uid} is not mapped; see the setting other_users");
            self.warnings.warn(text);
            return Err(Errno::EACCES);
        }
        Ok(socket)
    }

    /// Carries out the effects that `half` has queued; `came` is what came with the message that was just
    /// passed to it.
    fn settle(&mut self, epoll: &Epoll, worker: &Worker, mut came: Option<Came>) {
        while let Some(effect) = self.half.effect() {
            let (PeerEffect::Send { owner, .. }
            | PeerEffect::OpenRows { owner }
            | PeerEffect::Map { owner, .. }
            | PeerEffect::Close { owner }) = effect;
            let Some(at) = self.owners.get(owner as usize).copied().flatten() else { continue };
            let Some(Some(host)) = self.hosts.get_mut(at as usize) else { continue };
            match effect {
                PeerEffect::Send { message, .. } => {
                    let is_open = |import: &Import| {
                        message == Message::Release { row: import.row } && import.host == at
                    };
                    // The release of a mapping is sent when it is closed.
                    if !self.imports.iter().flatten().any(is_open) {
                        host.asks += u32::from(matches!(message, Message::Ask { .. }));
                        host.channel.push_message(message);
                        host.channel.flush(epoll);
                    }
                }
                PeerEffect::OpenRows { .. } => {
                    let fd = if let Some(Came::Rows(fd)) = came.take() { fd } else { None };
                    let opened = fd.and_then(|fd| Ledger::open(fd.as_fd()).ok()).map(Arc::new);
                    match if host.channel.is_across_hosts() { host.rows.clone() } else { opened } {
                        Some(ledger) => {
                            host.rows = Some(Arc::clone(&ledger));
                            host.is_met = true;
                            self.half.welcomed(owner, ledger);
                        }
                        None => self.half.lost(owner, ErrorKind::Protocol.into()),
                    }
                }
                PeerEffect::Map { link, len, writable, .. } => {
                    let (Some(Came::Row(row)), Some(rows)) = (came.take(), host.rows.clone()) else {
                        self.half.lost(owner, ErrorKind::Protocol.into());
                        self.half.mapped(link, Err(ErrorKind::Protocol.into()));
                        continue;
                    };
                    let parts = std::mem::take(&mut host.parts);
                    host.imports += 1;
                    let import = Import { host: at, row, link, rows, memory: None, running: 0 };
                    self.open(worker, import, (parts, len, writable));
                }
                PeerEffect::Close { .. } => {
                    host.owner = None;
                    self.owners[owner as usize] = None;
                    self.forget_idle(at);
                }
            }
        }
    }

    fn open(
        &mut self,
        worker: &Worker,
        import: Import,
        (parts, len, writable): (Vec<(Part, Option<OwnedFd>)>, u64, bool),
    ) {
        let Link { socket, region, is_device, is_across_hosts, via } = self.links[import.link as usize];
        let own = if is_device { Own::find(socket, region, self.driver) } else { None };
        let at = self.imports.iter().position(Option::is_none).unwrap_or(self.imports.len());
        if at == self.imports.len() {
            self.imports.push(None);
        }
        self.imports[at] = Some(import);
        let opening = Opening { parts, is_across_hosts, own, is_device, via, len, writable };
        worker.send(Job::Open { import: at as u32, opening });
    }
}

impl Host {
    /// A message may be the answer to a request.
    fn answered(&mut self, message: Message) {
        if matches!(message, Message::Grant { .. } | Message::Refuse { .. }) {
            self.asks = self.asks.saturating_sub(1);
        }
    }
}

/// What came with a message.
enum Came {
    Rows(Option<OwnedFd>),
    Row(u32),
}
