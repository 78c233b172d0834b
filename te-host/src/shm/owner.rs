//! The owner's side: whom our memory was handed to, and how it comes back.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use te_core::{Access, Error, ErrorKind, Instant, RegionId};
use te_fabric::peer::Expelled;
use te_fabric::{Epoll, Interest};

use super::message::{MESSAGE_BYTES_MAX, Message, PROTOCOL};
use super::{Config, Tag, system, watch};
use crate::keys::same_bytes;
use crate::sys::{Ledger, Process, Revoked, SeqSocket, SharedMemory, own_uid};

/// How long not to listen after a peer could not be accepted.
const REST: Duration = Duration::from_millis(100);
/// Messages of one holder handled before the others have their turn.
const MESSAGES_MAX: usize = 64;

pub(super) struct Owner {
    listener: Option<SeqSocket>,
    shared: Vec<Option<Shared>>,
    holders: Vec<Option<Holder>>,
    holders_max: usize,
    /// Of these, processes of one user that is neither ours nor root, at most.
    per_user_max: usize,
    /// How long one that has been granted nothing may stay.
    idle_max: Duration,
    expelled: Expelled,
    /// Whether some may have been granted nothing yet.
    strangers: bool,
    /// We do not listen for a while: no descriptor is left for one more peer, and who waits would wake us
    /// again and again.
    rests: bool,
    /// Until then; told by the first `poll` after it began.
    rests_until: Option<Instant>,
}

/// A region that can be had.
pub(super) struct Shared {
    pub(super) generation: u32,
    pub(super) key: [u8; 16],
    pub(super) memory: Arc<SharedMemory>,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) access: Access,
}

/// A process that maps some of our memory.
struct Holder {
    socket: SeqSocket,
    uid: u32,
    process: Process,
    /// From its `Hello` on; 0 before.
    identity: u64,
    /// Accepted before then; told by the first `poll` after it.
    since: Option<Instant>,
    /// Whether it was granted something, ever.
    granted: bool,
    /// From its `Hello` on.
    ledger: Option<Ledger>,
    /// By ledger row. A row is taken until its holder releases it.
    grants: Vec<Option<Grant>>,
    /// An answer that its socket had no room for; nothing more is read from it until this is sent.
    blocked: Option<(Message, Option<OwnedFd>)>,
    /// Whether we wait for room in its socket, and not for messages.
    deaf: bool,
}

#[derive(Clone, Copy)]
struct Grant {
    region: RegionId,
    /// Revoked, and seen not to be in use since.
    ended: bool,
    revoked: bool,
}

impl Owner {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            listener: None,
            shared: Vec::new(),
            holders: Vec::new(),
            holders_max: config.peers_max as usize,
            per_user_max: config.peers_per_user_max as usize,
            idle_max: Duration::from_millis(config.idle_ms_max.into()),
            expelled: Expelled::default(),
            strangers: false,
            rests: false,
            rests_until: None,
        }
    }

    /// Listens, if it does not yet.
    pub(super) fn listen(&mut self, epoll: &Epoll, name: &[u8]) -> Result<(), Error> {
        if self.listener.is_none() {
            let listener = SeqSocket::listen(name).map_err(system)?;
            watch(epoll, &listener, Tag::Listener)?;
            self.listener = Some(listener);
        }
        Ok(())
    }

    pub(super) fn share(&mut self, id: RegionId, shared: Shared) {
        let index = id.index as usize;
        if self.shared.len() <= index {
            self.shared.resize_with(index + 1, || None);
        }
        self.shared[index] = Some(shared);
    }

    /// Revokes what was granted of a region. True: nobody copies to or from it any more.
    pub(super) fn unshare(&mut self, id: RegionId) -> bool {
        if let Some(slot) = self.shared.get_mut(id.index as usize)
            && slot.as_ref().is_some_and(|shared| shared.generation == id.generation)
        {
            *slot = None;
        }
        let mut all_out = true;
        for holder in self.holders.iter_mut().flatten() {
            for (row, grant) in holder.grants.iter_mut().enumerate() {
                let Some(grant) = grant.as_mut().filter(|grant| grant.region == id && !grant.ended) else {
                    continue;
                };
                grant.ended =
                    holder.ledger.as_ref().is_none_or(|ledger| ledger.revoke(row as u32, Revoked::Region))
                        || holder.process.has_ended();
                all_out &= grant.ended;
                if !grant.revoked {
                    grant.revoked = true;
                    // The ledger is the truth. This is so that the peer unmaps soon; it will see the ledger
                    // otherwise.
                    let _ = send(&holder.socket, Message::Revoked { row: row as u32 }, None);
                }
            }
        }
        all_out
    }

    /// Whether a process with this identity has a connection to us.
    pub(super) fn is_connected(&self, peer: u64) -> bool {
        let is_there = |holder: &Holder| holder.identity == peer && !holder.process.has_ended();
        let connected = self.holders.iter().flatten().any(is_there);
        connected && !self.expelled.contains(peer)
    }

    /// Takes back what was granted to a peer, and lets it have nothing from now on. True: it copies nothing
    /// any more.
    pub(super) fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        self.expelled.add(peer, true, false)?;
        let mut gone = true;
        for slot in &mut self.holders {
            let Some(holder) = slot.as_mut().filter(|holder| holder.identity == peer) else { continue };
            let mut out = true;
            for (row, grant) in holder.grants.iter_mut().enumerate() {
                let Some(grant) = grant.as_mut().filter(|grant| !grant.ended) else { continue };
                grant.ended =
                    holder.ledger.as_ref().is_none_or(|ledger| ledger.revoke(row as u32, Revoked::Peer));
                grant.revoked = true;
                out &= grant.ended;
            }
            if out || holder.process.has_ended() {
                // So that it learns why. Without room for that it learns it when it comes again.
                let _ = send(&holder.socket, Message::Expelled, None);
                log::warn!("shm: a peer of user {} is cut off", holder.uid);
                *slot = None;
            } else {
                gone = false;
            }
        }
        Ok(gone)
    }

    pub(super) fn accept(&mut self, epoll: &Epoll) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..MESSAGES_MAX {
            let socket = match listener.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(errno) => {
                    log::warn!("shm: accepting a peer failed: {errno}");
                    self.rests = epoll.modify(listener, Tag::Listener.to_bits(), Interest::NONE).is_ok();
                    return;
                }
            };
            let (uid, process) = match socket.peer() {
                Ok(peer) => peer,
                Err(errno) => {
                    log::warn!("shm: a peer that does not say who it is is refused: {errno}");
                    continue;
                }
            };
            let same_user = self.holders.iter().flatten().filter(|holder| holder.uid == uid).count();
            if uid != 0 && uid != own_uid() && same_user >= self.per_user_max {
                log::warn!("shm: {same_user} peers of user {uid} map our memory; one more is refused");
                continue;
            }
            let free = self.holders.iter().position(Option::is_none);
            let index = free.unwrap_or(self.holders.len());
            if index >= self.holders_max {
                log::warn!("shm: {index} peers map our memory; one more is refused");
                continue;
            }
            if let Err(error) = watch(epoll, &socket, Tag::Holder(index as u32)) {
                log::warn!("shm: a peer is refused: {error}");
                continue;
            }
            if index == self.holders.len() {
                self.holders.push(None);
            }
            self.strangers = true;
            self.holders[index] = Some(Holder {
                socket,
                uid,
                process,
                identity: 0,
                since: None,
                granted: false,
                ledger: None,
                grants: Vec::new(),
                blocked: None,
                deaf: false,
            });
        }
    }

    /// Handles what a holder says. One that says nonsense, or is gone, loses its grants.
    pub(super) fn receive(&mut self, epoll: &Epoll, index: u32) {
        let Self { shared, holders, expelled, .. } = self;
        let Some(slot) = holders.get_mut(index as usize) else { return };
        let Some(holder) = slot else { return };
        let kept = holder.converse(shared, expelled).and_then(|()| holder.listen(epoll, index).map_err(Some));
        if let Err(reason) = kept {
            if let Some(error) = reason {
                log::warn!("shm: a peer is dropped: {error}");
            }
            *slot = None;
        }
    }

    /// Parts with those who connected and showed no key in time, and listens again after a rest.
    pub(super) fn poll(&mut self, epoll: &Epoll, now: Instant) {
        if let (true, Some(listener)) = (self.rests, &self.listener)
            && now >= *self.rests_until.get_or_insert(now + REST)
        {
            self.rests = epoll.modify(listener, Tag::Listener.to_bits(), Interest::READ).is_err();
            self.rests_until = None;
        }
        if !self.strangers {
            return;
        }
        self.strangers = false;
        for slot in &mut self.holders {
            let Some(holder) = slot.as_mut().filter(|holder| !holder.granted) else { continue };
            if now >= *holder.since.get_or_insert(now) + self.idle_max {
                log::warn!("shm: a peer of user {} is dropped: it asked for nothing it may have", holder.uid);
                *slot = None;
            } else {
                self.strangers = true;
            }
        }
    }

    /// When `poll` has something to do; `now` when it has at once.
    pub(super) fn poll_at(&self, now: Instant) -> Option<Instant> {
        let rest = self.rests.then(|| self.rests_until.unwrap_or(now));
        if !self.strangers {
            return rest;
        }
        let strangers = self.holders.iter().flatten().filter(|holder| !holder.granted);
        strangers.map(|holder| holder.since.map_or(now, |since| since + self.idle_max)).chain(rest).min()
    }
}

impl Holder {
    /// Answers what it says until it says no more, or has no room for an answer. `Err(None)`: it is gone.
    fn converse(&mut self, shared: &[Option<Shared>], expelled: &Expelled) -> Result<(), Option<Error>> {
        for _ in 0..MESSAGES_MAX {
            if !self.unblock() {
                break;
            }
            let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
            let message = match self.socket.recv(&mut bytes) {
                Ok(None) => break,
                Ok(Some((0, _))) | Err(_) => return Err(None),
                Ok(Some((len, _))) => Message::decode(&bytes[..len]).map_err(Some)?,
            };
            self.handle(message, shared, expelled).map_err(Some)?;
        }
        Ok(())
    }

    /// While an answer waits for room, what it says meanwhile must not wake us.
    fn listen(&mut self, epoll: &Epoll, index: u32) -> Result<(), Error> {
        let deaf = self.blocked.is_some();
        if deaf != self.deaf {
            let interest = Interest { readable: !deaf, writable: deaf };
            epoll.modify(&self.socket, Tag::Holder(index).to_bits(), interest).map_err(system)?;
            self.deaf = deaf;
        }
        Ok(())
    }

    fn handle(
        &mut self,
        message: Message,
        shared: &[Option<Shared>],
        expelled: &Expelled,
    ) -> Result<(), Error> {
        match message {
            Message::Hello { protocol: PROTOCOL, identity } if self.ledger.is_none() && identity != 0 => {
                if expelled.contains(identity) {
                    // It has just connected: there is room.
                    let _ = send(&self.socket, Message::Expelled, None);
                    return Err(Error::new(ErrorKind::Expelled));
                }
                self.identity = identity;
                let (ledger, fd) = Ledger::create().map_err(system)?;
                self.ledger = Some(ledger);
                self.answer(Message::Welcome, Some(fd))
            }
            // One that was expelled and is not out yet gets nothing new.
            Message::Ask { request, .. } if expelled.contains(self.identity) => {
                self.answer(Message::Refuse { request, stale: true }, None)
            }
            Message::Ask { request, region, key } if self.ledger.is_some() => {
                match self.grant(request, region, &key, shared) {
                    Ok((grant, fd)) => self.answer(grant, Some(fd)),
                    Err(error) => {
                        let stale = error.kind == ErrorKind::Stale;
                        self.answer(Message::Refuse { request, stale }, None)
                    }
                }
            }
            Message::Release { row } => {
                if let Some(grant) = self.grants.get_mut(row as usize) {
                    *grant = None;
                }
                Ok(())
            }
            _ => Err(Error::new(ErrorKind::Protocol)),
        }
    }

    fn grant(
        &mut self,
        request: u32,
        region: RegionId,
        key: &[u8; 16],
        shared: &[Option<Shared>],
    ) -> Result<(Message, OwnedFd), Error> {
        let stale = Error::new(ErrorKind::Stale);
        let shared = shared.get(region.index as usize).and_then(Option::as_ref).ok_or(stale)?;
        if shared.generation != region.generation {
            return Err(stale);
        }
        if !same_bytes(&shared.key, key) {
            return Err(Error::new(ErrorKind::AccessDenied));
        }
        let row = self.grants.iter().position(Option::is_none).unwrap_or(self.grants.len());
        let ledger = self.ledger.as_ref().filter(|_| row < Ledger::ROWS as usize);
        let ledger = ledger.ok_or(Error::new(ErrorKind::Full))?;
        let fd = shared.memory.share(shared.access.contains(Access::REMOTE_WRITE)).map_err(system)?;
        ledger.reset(row as u32);
        if row == self.grants.len() {
            self.grants.push(None);
        }
        self.granted = true;
        self.grants[row] = Some(Grant { region, ended: false, revoked: false });
        let Shared { offset, len, access, .. } = *shared;
        Ok((Message::Grant { request, row: row as u32, offset, len, access }, fd))
    }

    fn answer(&mut self, message: Message, fd: Option<OwnedFd>) -> Result<(), Error> {
        match send(&self.socket, message, fd.as_ref()) {
            Err(Errno::EAGAIN) => {
                self.blocked = Some((message, fd));
                Ok(())
            }
            other => other.map_err(system),
        }
    }

    /// Sends the answer that waits. False: there is still no room.
    fn unblock(&mut self) -> bool {
        match self.blocked.take() {
            None => true,
            Some((message, fd)) => {
                // An error other than fullness shows again when the socket is read.
                let _ = self.answer(message, fd);
                self.blocked.is_none()
            }
        }
    }
}

pub(super) fn send(socket: &SeqSocket, message: Message, fd: Option<&OwnedFd>) -> Result<(), Errno> {
    let mut bytes = [0; 128];
    let len = message.encode(&mut bytes);
    socket.send(&bytes[..len], fd.map(AsFd::as_fd))
}
