//! The peer's side: owners whose memory is mapped here, and the sockets over which it is requested.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use te_core::grant::{self, LinkState, MESSAGE_BYTES_MAX, Message, PeerEffect, Revoked, Want};
use te_core::{Error, ErrorKind, Instant, Slice};
use te_fabric::Epoll;

use super::owner::send;
use super::{Tag, socket_name, system, watch};
use crate::copier::carry_out;
use crate::reach::{Checksum, Copied};
use crate::sys::{Ledger, Mapping, Protection, SeqSocket, Use};

/// Messages of one owner handled before the others get a turn.
const MESSAGES_MAX: usize = 64;

pub(super) struct Peers {
    half: grant::Peer<Ledger, Mapping>,
    /// The owners that are connected, by their number in `half`.
    hosts: Vec<Option<Host>>,
}

/// An owner.
struct Host {
    name: [u8; 16],
    socket: SeqSocket,
}

impl Peers {
    pub(super) fn new(identity: u64, grant_max: Duration) -> Self {
        Self { half: grant::Peer::new(identity, grant_max), hosts: Vec::new() }
    }

    /// Requests a region from its owner.
    pub(super) fn attach(&mut self, epoll: &Epoll, name: [u8; 16], want: Want) -> Result<u32, Error> {
        let host = self.host(epoll, name)?;
        let link = self.half.attach(host, want);
        self.settle(None);
        Ok(link)
    }

    pub(super) fn detach(&mut self, link: u32) {
        self.half.detach(link);
        self.settle(None);
    }

    pub(super) fn copy(&self, link: u32, local: &Use<'_>, slice: &Slice, checksum: Checksum) -> Copied {
        let failed = |kind| Copied::Failed(Error::new(kind));
        match self.half.link_state(link) {
            LinkState::Ready { rows, row, mapping } => match rows.enter(row, mapping) {
                Ok(lease) => carry_out(slice, local.window(), lease.window(), checksum),
                Err(Revoked::Region) => failed(ErrorKind::Stale),
                Err(Revoked::Peer) => failed(ErrorKind::Expelled),
            },
            LinkState::Waiting => Copied::NotYet,
            LinkState::Late => failed(ErrorKind::Unreachable),
            LinkState::Closed(error) => Copied::Failed(error),
        }
    }

    /// Handles the messages of an owner. An owner that breaks the protocol, or is gone, counts as dead.
    pub(super) fn receive(&mut self, at: u32) {
        let mut was_reset = false;
        for _ in 0..MESSAGES_MAX {
            let Some(Some(host)) = self.hosts.get(at as usize) else { return };
            let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
            let mut came = None;
            match host.socket.recv(&mut bytes) {
                Ok(None) => return,
                // The owner has closed its socket without reading everything that was sent to it: its last
                // messages follow the error.
                Err(Errno::ECONNRESET) if !was_reset => {
                    was_reset = true;
                    continue;
                }
                // A descriptor of the owner is lost, because this process may have no more.
                Err(errno @ Errno::EMFILE) => {
                    log::warn!("shm: no room for a descriptor of an owner: raise RLIMIT_NOFILE");
                    self.half.lost(at, Error::with_code(ErrorKind::Unreachable, errno as i32));
                }
                Ok(Some((0, _))) | Err(_) => self.half.lost(at, Error::new(ErrorKind::PeerDead)),
                Ok(Some((len, fd))) => match Message::decode(&bytes[..len]) {
                    Ok(message) => {
                        came = fd;
                        self.half.received(at, message);
                    }
                    Err(error) => self.half.lost(at, error),
                },
            }
            self.settle(came);
        }
    }

    /// Sends requests that could not be sent, and gives up on owners that do not answer.
    pub(super) fn poll(&mut self, now: Instant) {
        self.half.poll(now);
        self.settle(None);
    }

    pub(super) fn poll_at(&self) -> Option<Instant> {
        self.half.poll_at()
    }

    /// When to try a full socket again.
    pub(super) fn soon(&self) -> Instant {
        self.half.soon()
    }

    fn host(&mut self, epoll: &Epoll, name: [u8; 16]) -> Result<u32, Error> {
        let known = |host: &Option<Host>| host.as_ref().is_some_and(|host| host.name == name);
        if let Some(at) = self.hosts.iter().position(known) {
            return Ok(at as u32);
        }
        let unreachable = |errno: Errno| Error::with_code(ErrorKind::Unreachable, errno as i32);
        let socket = SeqSocket::connect(&socket_name(&name)).map_err(unreachable)?;
        let at = self.half.connected()?;
        if let Err(error) = watch(epoll, &socket, Tag::Host(at)) {
            self.half.lost(at, error);
            self.settle(None);
            return Err(error);
        }
        if self.hosts.len() <= at as usize {
            self.hosts.resize_with(at as usize + 1, || None);
        }
        self.hosts[at as usize] = Some(Host { name, socket });
        Ok(at)
    }

    /// Carries out the effects that `half` has queued; `came` is the file descriptor that came with the
    /// message which was just passed to it.
    fn settle(&mut self, mut came: Option<OwnedFd>) {
        let protocol = Error::new(ErrorKind::Protocol);
        while let Some(effect) = self.half.effect() {
            match effect {
                PeerEffect::Send { owner, message } => {
                    let Some(Some(host)) = self.hosts.get(owner as usize) else { continue };
                    // The death of an owner is noticed when its socket is read. When there is no room for a
                    // release, the row stays taken until the socket closes, which costs no more than that
                    // row.
                    if send(&host.socket, message, None) == Err(Errno::EAGAIN) {
                        self.half.unsent(message);
                    }
                }
                PeerEffect::OpenRows { owner } => {
                    match came.take().and_then(|fd| Ledger::open(fd.as_fd()).ok()) {
                        Some(ledger) => self.half.welcomed(owner, ledger),
                        None => self.half.lost(owner, protocol),
                    }
                }
                PeerEffect::Map { owner, link, offset, len, writable } => {
                    let Some(fd) = came.take() else {
                        self.half.lost(owner, protocol);
                        self.half.mapped(link, Err(protocol));
                        continue;
                    };
                    let protection = if writable { Protection::ReadWrite } else { Protection::ReadOnly };
                    let mapping = Mapping::new(fd.as_fd(), offset, len, protection);
                    self.half.mapped(link, mapping.map_err(system));
                }
                PeerEffect::Close { owner } => {
                    if let Some(host) = self.hosts.get_mut(owner as usize) {
                        *host = None;
                    }
                }
            }
        }
    }
}
