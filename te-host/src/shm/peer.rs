//! The peer's side: owners whose memory we map, and the way to each region.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use te_core::{Access, Error, ErrorKind, Instant, RegionId, Slice};
use te_fabric::Epoll;

use super::message::{MESSAGE_BYTES_MAX, Message, PROTOCOL};
use super::owner::send;
use super::{Tag, socket_name, watch};
use crate::copier::{carry_out, rights};
use crate::reach::Copied;
use crate::sys::{Ledger, Mapping, Revoked, SeqSocket, Use};

/// Owners whose memory we map at a time.
const HOSTS_MAX: usize = 1024;
/// When to try the full socket of one that is late again.
const RETRY_LATE: Duration = Duration::from_millis(100);
/// When to try a full socket again.
const RETRY: Duration = Duration::from_millis(1);
const MESSAGES_MAX: usize = 64;

pub(super) struct Peers {
    /// What owners know us by.
    identity: u64,
    hosts: Vec<Option<Host>>,
    links: Vec<Option<Link>>,
    requests: u32,
    /// Links that time does something to: not asked yet, or not late yet.
    waiting: usize,
    /// How long copies wait for an owner to grant a region. It has to poll for that. After that they fail, so
    /// that other fabrics take over, until the answer is there: however late, it counts.
    grant_max: Duration,
    now: Instant,
}

/// What an export says about a region.
#[derive(Clone, Copy)]
pub(super) struct Ask {
    pub(super) region: RegionId,
    pub(super) key: [u8; 16],
    pub(super) len: u64,
    pub(super) access: Access,
}

/// An owner.
struct Host {
    name: [u8; 16],
    /// `None` when it is dead to us.
    socket: Option<SeqSocket>,
    /// From its `Welcome` on.
    ledger: Option<Ledger>,
    links: u32,
}

/// The way to one region.
struct Link {
    host: u32,
    request: u32,
    ask: Ask,
    state: State,
}

enum State {
    /// Not granted yet.
    Waiting {
        /// False: the socket had no room for the question.
        asked: bool,
        /// Waiting before then; told by the first `flush` after.
        since: Option<Instant>,
        /// The owner did not answer in time. It still may.
        late: bool,
    },
    Ready {
        mapping: Mapping,
        row: u32,
    },
    Closed(Error),
}

impl Peers {
    pub(super) fn new(identity: u64, grant_max: Duration) -> Self {
        let (hosts, links) = (Vec::new(), Vec::new());
        Self { identity, hosts, links, requests: 0, waiting: 0, grant_max, now: Instant::ZERO }
    }

    /// Asks the owner for a region.
    pub(super) fn attach(&mut self, epoll: &Epoll, name: [u8; 16], ask: Ask) -> Result<u32, Error> {
        let host = self.host(epoll, name)?;
        self.requests = self.requests.wrapping_add(1);
        let link = Link { host, request: self.requests, ask, state: State::WAITING };
        let index = self.links.iter().position(Option::is_none).unwrap_or(self.links.len());
        if index == self.links.len() {
            self.links.push(None);
        }
        if let Some(host) = &mut self.hosts[host as usize] {
            host.links += 1;
        }
        self.links[index] = Some(link);
        self.waiting += 1;
        self.ask(index);
        Ok(index as u32)
    }

    pub(super) fn detach(&mut self, link: u32) {
        let Some(link) = self.links.get_mut(link as usize).and_then(Option::take) else { return };
        self.waiting -= usize::from(link.state.is_due());
        let slot = &mut self.hosts[link.host as usize];
        let Some(host) = slot else { return };
        if let State::Ready { mapping, row } = link.state {
            drop(mapping);
            host.release(row);
        }
        host.links -= 1;
        if host.links == 0 {
            // Closing the socket releases what is left.
            *slot = None;
        }
    }

    pub(super) fn copy(&self, link: u32, local: &Use<'_>, slice: &Slice) -> Copied {
        let failed = |kind| Copied::Failed(Error::new(kind));
        let Some(Some(link)) = self.links.get(link as usize) else { return failed(ErrorKind::NotFound) };
        let (mapping, row) = match &link.state {
            State::Ready { mapping, row } => (mapping, *row),
            State::Closed(error) => return Copied::Failed(*error),
            State::Waiting { late: false, .. } => return Copied::NotYet,
            State::Waiting { late: true, .. } => return failed(ErrorKind::Unreachable),
        };
        if !link.ask.access.contains(rights(slice.op).1) {
            return failed(ErrorKind::AccessDenied);
        }
        let host = self.hosts.get(link.host as usize).and_then(Option::as_ref);
        let Some(ledger) = host.and_then(|host| host.ledger.as_ref()) else {
            return failed(ErrorKind::Stale);
        };
        match ledger.enter(row, mapping) {
            Ok(lease) => carry_out(slice, local.window(), lease.window()),
            Err(Revoked::Region) => failed(ErrorKind::Stale),
            Err(Revoked::Peer) => failed(ErrorKind::Expelled),
        }
    }

    /// Handles what an owner says. One that says nonsense, or is gone, is dead to us.
    pub(super) fn receive(&mut self, index: u32) {
        let mut was_reset = false;
        for _ in 0..MESSAGES_MAX {
            let Some(Some(host)) = self.hosts.get_mut(index as usize) else { return };
            let Some(socket) = &host.socket else { return };
            let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
            let heard = match socket.recv(&mut bytes) {
                Ok(None) => return,
                // An owner that goes without having read all that we said: its own last words come after the
                // error.
                Err(Errno::ECONNRESET) if !was_reset => {
                    was_reset = true;
                    continue;
                }
                Ok(Some((0, _))) | Err(_) => Err(Error::new(ErrorKind::PeerDead)),
                Ok(Some((len, fd))) => {
                    Message::decode(&bytes[..len]).and_then(|message| self.handle(index, message, fd))
                }
            };
            if let Err(error) = heard {
                self.bury(index, error);
                return;
            }
        }
    }

    /// Asks what could not be asked, and gives up on owners that do not answer.
    pub(super) fn flush(&mut self, now: Instant) {
        self.now = now;
        if self.waiting == 0 {
            return;
        }
        for index in 0..self.links.len() {
            let Some(link) = &mut self.links[index] else { continue };
            let State::Waiting { asked, since, late } = &mut link.state else { continue };
            let unasked = !*asked;
            if !*late && now >= *since.get_or_insert(now) + self.grant_max {
                *late = true;
                self.waiting -= usize::from(*asked);
            }
            if unasked {
                self.ask(index);
            }
        }
    }

    pub(super) fn poll_at(&self) -> Option<Instant> {
        if self.waiting == 0 {
            return None;
        }
        let at = |link: &Link| match link.state {
            State::Waiting { asked: false, late: true, .. } => Some(self.now + RETRY_LATE),
            State::Waiting { asked: true, late: true, .. } => None,
            State::Waiting { asked: true, since: Some(since), .. } => Some(since + self.grant_max),
            State::Waiting { .. } => Some(self.soon()),
            State::Ready { .. } | State::Closed(_) => None,
        };
        self.links.iter().flatten().filter_map(at).min()
    }

    /// When to try a full socket again.
    pub(super) fn soon(&self) -> Instant {
        self.now + RETRY
    }

    fn host(&mut self, epoll: &Epoll, name: [u8; 16]) -> Result<u32, Error> {
        let known = |host: &Option<Host>| {
            host.as_ref().is_some_and(|host| host.name == name && host.socket.is_some())
        };
        if let Some(index) = self.hosts.iter().position(known) {
            return Ok(index as u32);
        }
        let index = self.hosts.iter().position(Option::is_none).unwrap_or(self.hosts.len());
        if index == HOSTS_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        let unreachable = |errno: Errno| Error::with_code(ErrorKind::Unreachable, errno as i32);
        let socket = SeqSocket::connect(&socket_name(&name)).map_err(unreachable)?;
        watch(epoll, &socket, Tag::Host(index as u32))?;
        send(&socket, Message::Hello { protocol: PROTOCOL, identity: self.identity }, None)
            .map_err(unreachable)?;
        if index == self.hosts.len() {
            self.hosts.push(None);
        }
        self.hosts[index] = Some(Host { name, socket: Some(socket), ledger: None, links: 0 });
        Ok(index as u32)
    }

    fn ask(&mut self, index: usize) {
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        let Some(Some(host)) = self.hosts.get(link.host as usize) else { return };
        let State::Waiting { asked: asked @ false, late, .. } = &mut link.state else { return };
        let message = Message::Ask { request: link.request, region: link.ask.region, key: link.ask.key };
        let Some(socket) = &host.socket else { return };
        // A dead peer shows when its socket is read.
        if send(socket, message, None) != Err(Errno::EAGAIN) {
            *asked = true;
            self.waiting -= usize::from(*late);
        }
    }

    fn handle(&mut self, host_index: u32, message: Message, fd: Option<OwnedFd>) -> Result<(), Error> {
        let protocol = Error::new(ErrorKind::Protocol);
        let Some(Some(host)) = self.hosts.get_mut(host_index as usize) else { return Ok(()) };
        let mine = |link: &&mut Link| link.host == host_index;
        match message {
            Message::Welcome if host.ledger.is_none() => {
                let fd = fd.ok_or(protocol)?;
                host.ledger = Some(Ledger::open(fd.as_fd()).map_err(|_| protocol)?);
            }
            Message::Grant { request, row, offset, len, access } if host.ledger.is_some() => {
                let mut links = self.links.iter_mut().flatten().filter(mine);
                let Some(link) = links.find(|link| link.request == request && link.state.is_waiting()) else {
                    // Detached meanwhile.
                    host.release(row);
                    return Ok(());
                };
                let fd = fd.ok_or(protocol)?;
                self.waiting -= usize::from(link.state.is_due());
                if len != link.ask.len || !access.contains(link.ask.access) {
                    // The export claims more than is there.
                    link.state = State::Closed(Error::new(ErrorKind::AccessDenied));
                    host.release(row);
                    return Ok(());
                }
                let writable = link.ask.access.contains(Access::REMOTE_WRITE);
                link.state = match Mapping::new(fd.as_fd(), offset, len, writable) {
                    Ok(mapping) => State::Ready { mapping, row },
                    Err(errno) => {
                        host.release(row);
                        State::Closed(Error::with_code(ErrorKind::System, errno as i32))
                    }
                };
            }
            Message::Refuse { request, stale } => {
                let mut links = self.links.iter_mut().flatten().filter(mine);
                if let Some(link) = links.find(|link| link.request == request && link.state.is_waiting()) {
                    self.waiting -= usize::from(link.state.is_due());
                    let kind = if stale { ErrorKind::Stale } else { ErrorKind::AccessDenied };
                    link.state = State::Closed(Error::new(kind));
                }
            }
            Message::Revoked { row } => {
                let holds =
                    |link: &&mut Link| matches!(link.state, State::Ready { row: own, .. } if own == row);
                if let Some(link) = self.links.iter_mut().flatten().filter(mine).find(holds) {
                    link.state = State::Closed(Error::new(ErrorKind::Stale));
                    host.release(row);
                }
            }
            Message::Expelled => return Err(Error::new(ErrorKind::Expelled)),
            _ => return Err(protocol),
        }
        Ok(())
    }

    /// Ends all ways over a host.
    fn bury(&mut self, index: u32, error: Error) {
        let Some(Some(host)) = self.hosts.get_mut(index as usize) else { return };
        host.ledger = None;
        host.socket = None;
        for link in self.links.iter_mut().flatten().filter(|link| link.host == index) {
            self.waiting -= usize::from(link.state.is_due());
            // Revoked links too: an owner that goes takes its memory back first, and its end is the better
            // reason.
            link.state = State::Closed(error);
        }
    }
}

impl Host {
    fn release(&self, row: u32) {
        // Without room the row stays taken until the socket closes: a row less, nothing more.
        let _ = self.socket.as_ref().map(|socket| send(socket, Message::Release { row }, None));
    }
}

impl State {
    const WAITING: Self = Self::Waiting { asked: false, since: None, late: false };

    fn is_waiting(&self) -> bool {
        matches!(self, Self::Waiting { .. })
    }

    /// Whether `flush` has something to do about it, now or later.
    fn is_due(&self) -> bool {
        matches!(self, Self::Waiting { asked, late, .. } if !asked || !late)
    }
}
