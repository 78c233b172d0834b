//! The owner's side: the peers that were granted memory, and the sockets to them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use te_core::grant::{self, MESSAGE_BYTES_MAX, Message, Offer, OwnerEffect, OwnerLimits};
use te_core::{Access, Error, ErrorKind, Instant, RegionId};
use te_fabric::{Epoll, Interest};

use super::{ShmConfig, Tag, system, watch};
use crate::sys::{Ledger, Process, Protection, SeqSocket, SharedMemory, own_uid};

/// Time for which no connection is accepted after accepting one has failed.
const PAUSE: Duration = Duration::from_millis(100);
/// Messages of one peer handled before the others get a turn.
const MESSAGES_MAX: usize = 64;

pub(super) struct Owner {
    listener: Option<SeqSocket>,
    half: grant::Owner<Ledger>,
    /// The memory of exported regions, by region index.
    shared: Vec<Option<Shared>>,
    /// The peers that map memory of this process, by their number in `half`.
    holders: Vec<Option<Holder>>,
    /// Peers that may belong to one user who is neither this process's user nor root.
    per_user_max: usize,
    /// Accepting is paused: no descriptor is left for another peer, and a peer that waits would wake this
    /// process again and again.
    paused: bool,
    /// The end of the pause; set by the first `poll` after its begin.
    paused_until: Option<Instant>,
}

/// The memory of a region that peers may map.
struct Shared {
    generation: u32,
    memory: Arc<SharedMemory>,
    protection: Protection,
}

/// A peer that maps memory of this process.
struct Holder {
    socket: SeqSocket,
    uid: u32,
    process: Process,
    /// The file of its ledger, until it is sent.
    ledger: Option<OwnedFd>,
    /// An answer for which its socket had no room; nothing more is read from it until this is sent.
    blocked: Option<(Message, Option<OwnedFd>)>,
    /// The event loop waits for room in its socket, and not for messages.
    write_blocked: bool,
}

impl Owner {
    pub(super) fn new(config: &ShmConfig) -> Self {
        let limits = OwnerLimits {
            peers_max: config.peers_max,
            idle_max: Duration::from_millis(config.idle_ms_max.into()),
        };
        Self {
            listener: None,
            half: grant::Owner::new(limits),
            shared: Vec::new(),
            holders: Vec::new(),
            per_user_max: config.peers_per_user_max as usize,
            paused: false,
            paused_until: None,
        }
    }

    /// Starts listening, unless it does already.
    pub(super) fn listen(&mut self, epoll: &Epoll, name: &[u8]) -> Result<(), Error> {
        if self.listener.is_none() {
            let listener = SeqSocket::listen(name).map_err(system)?;
            watch(epoll, &listener, Tag::Listener)?;
            self.listener = Some(listener);
        }
        Ok(())
    }

    /// Lets peers map a region, which is in this memory.
    pub(super) fn share(&mut self, id: RegionId, offer: Offer, memory: Arc<SharedMemory>) {
        let index = id.index as usize;
        if self.shared.len() <= index {
            self.shared.resize_with(index + 1, || None);
        }
        let protection = match offer.access.contains(Access::REMOTE_WRITE) {
            true => Protection::ReadWrite,
            false => Protection::ReadOnly,
        };
        self.shared[index] = Some(Shared { generation: id.generation, memory, protection });
        self.half.share(id, offer);
    }

    /// Revokes what was granted of a region. Returns true when no peer copies to or from it any more.
    pub(super) fn unshare(&mut self, id: RegionId) -> bool {
        if let Some(slot) = self.shared.get_mut(id.index as usize)
            && slot.as_ref().is_some_and(|shared| shared.generation == id.generation)
        {
            *slot = None;
        }
        let mut out = self.half.unshare(id);
        if !out && self.remove_dead() {
            out = self.half.unshare(id);
        }
        self.settle();
        out
    }

    /// Whether a process with this identity is connected.
    pub(super) fn is_connected(&self, peer: u64) -> bool {
        self.half
            .connections(peer)
            .any(|at| self.holders[at as usize].as_ref().is_some_and(|holder| !holder.process.has_ended()))
    }

    /// Revokes what was granted to a peer, and refuses it from now on. Returns true when it copies nothing
    /// any more.
    pub(super) fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        let mut gone = self.half.expel(peer)?;
        if !gone && self.remove_dead() {
            gone = self.half.expel(peer)?;
        }
        self.settle();
        Ok(gone)
    }

    /// Removes peers that have died in the middle of a copy: a fork may keep the socket of such a peer open.
    /// Returns whether there was one.
    fn remove_dead(&mut self) -> bool {
        let has_ended =
            |at: &u32| self.holders[*at as usize].as_ref().is_none_or(|holder| holder.process.has_ended());
        let dead: Vec<u32> = self.half.waited_for().filter(has_ended).collect();
        for &at in &dead {
            self.half.ended(at);
            self.holders[at as usize] = None;
        }
        !dead.is_empty()
    }

    pub(super) fn accept(&mut self, epoll: &Epoll) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..MESSAGES_MAX {
            let socket = match listener.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(errno) => {
                    log::warn!("shm: cannot accept a peer: {errno}; trying again in 100 ms");
                    self.paused = epoll.modify(listener, Tag::Listener.to_bits(), Interest::NONE).is_ok();
                    return;
                }
            };
            let (uid, process) = match socket.peer() {
                Ok(peer) => peer,
                Err(errno) => {
                    log::warn!("shm: refused a peer whose credentials cannot be read: {errno}");
                    continue;
                }
            };
            let same_user = self.holders.iter().flatten().filter(|holder| holder.uid == uid).count();
            if uid != 0 && uid != own_uid() && same_user >= self.per_user_max {
                log::warn!(
                    "shm: refused a peer of user {uid}, who has {same_user} already; see peers_per_user_max"
                );
                continue;
            }
            let Ok(at) = self.half.connected() else {
                log::warn!("shm: refused a peer, there are {} already; see peers_max", self.holders.len());
                continue;
            };
            if let Err(error) = watch(epoll, &socket, Tag::Holder(at)) {
                log::warn!("shm: refused a peer: {error}");
                self.half.ended(at);
                continue;
            }
            if self.holders.len() <= at as usize {
                self.holders.resize_with(at as usize + 1, || None);
            }
            self.holders[at as usize] =
                Some(Holder { socket, uid, process, ledger: None, blocked: None, write_blocked: false });
        }
    }

    /// Handles the messages of a peer until there are no more, or until its socket has no room for an answer.
    /// A peer that breaks the protocol, or is gone, loses its grants.
    pub(super) fn receive(&mut self, epoll: &Epoll, at: u32) {
        for _ in 0..MESSAGES_MAX {
            let Some(Some(holder)) = self.holders.get_mut(at as usize) else { return };
            if !holder.unblock() {
                break;
            }
            let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
            match holder.socket.recv(&mut bytes) {
                Ok(None) => break,
                // It has sent descriptors, which no peer does, and lives.
                Err(errno @ Errno::EMFILE) => {
                    self.half.disconnect(at, Error::with_code(ErrorKind::Protocol, errno as i32));
                }
                Ok(Some((0, _))) | Err(_) => {
                    self.half.ended(at);
                    self.holders[at as usize] = None;
                    return;
                }
                Ok(Some((len, _))) => match Message::decode(&bytes[..len]) {
                    Ok(message) => self.half.received(at, message),
                    Err(error) => self.half.disconnect(at, error),
                },
            }
            self.settle();
        }
        let Some(Some(holder)) = self.holders.get_mut(at as usize) else { return };
        if let Err(error) = holder.listen(epoll, at) {
            self.half.disconnect(at, error);
            self.settle();
        }
    }

    /// Disconnects peers that have shown no key in time, and accepts again after a pause.
    pub(super) fn poll(&mut self, epoll: &Epoll, now: Instant) {
        if let (true, Some(listener)) = (self.paused, &self.listener)
            && now >= *self.paused_until.get_or_insert(now + PAUSE)
        {
            self.paused = epoll.modify(listener, Tag::Listener.to_bits(), Interest::READ).is_err();
            self.paused_until = None;
        }
        self.half.poll(now);
        self.settle();
    }

    /// When `poll` has something to do; `now` when it has something at once.
    pub(super) fn poll_at(&self, now: Instant) -> Option<Instant> {
        let pause = self.paused.then(|| self.paused_until.unwrap_or(now));
        self.half.poll_at(now).into_iter().chain(pause).min()
    }

    /// Carries out the effects that `half` has queued.
    fn settle(&mut self) {
        while let Some(effect) = self.half.effect() {
            let (OwnerEffect::MakeRows { peer }
            | OwnerEffect::Send { peer, .. }
            | OwnerEffect::Grant { peer, .. }
            | OwnerEffect::Close { peer, .. }) = effect;
            let Some(Some(holder)) = self.holders.get_mut(peer as usize) else { continue };
            match effect {
                OwnerEffect::MakeRows { .. } => match Ledger::create() {
                    Ok((ledger, fd)) => {
                        holder.ledger = Some(fd);
                        self.half.welcomed(peer, ledger);
                    }
                    Err(errno) => self.half.disconnect(peer, system(errno)),
                },
                OwnerEffect::Send { message, .. } => holder.send(message),
                OwnerEffect::Grant { region, message, .. } => {
                    let shared = self.shared.get(region.index as usize).and_then(Option::as_ref);
                    match shared.map(|shared| shared.memory.share(shared.protection)) {
                        Some(Ok(fd)) => holder.answer(message, Some(fd)),
                        _ => self.half.withdraw(peer, message),
                    }
                }
                OwnerEffect::Close { why, .. } => {
                    let uid = holder.uid;
                    match why.kind {
                        ErrorKind::TimedOut => log::warn!(
                            "shm: disconnected a peer of user {uid}: it was granted nothing in time"
                        ),
                        ErrorKind::Expelled => log::warn!("shm: expelled a peer of user {uid}"),
                        _ => log::warn!("shm: disconnected a peer: {why}"),
                    }
                    self.holders[peer as usize] = None;
                }
            }
        }
    }
}

impl Holder {
    /// While an answer waits for room, messages of the peer must not wake this process.
    fn listen(&mut self, epoll: &Epoll, at: u32) -> Result<(), Error> {
        let write_blocked = self.blocked.is_some();
        if write_blocked != self.write_blocked {
            let interest = Interest { readable: !write_blocked, writable: write_blocked };
            epoll.modify(&self.socket, Tag::Holder(at).to_bits(), interest).map_err(system)?;
            self.write_blocked = write_blocked;
        }
        Ok(())
    }

    fn send(&mut self, message: Message) {
        match message {
            // The ledger decides; this message only makes the peer unmap sooner, so it may be lost. It does
            // not overtake the grant either. An expelled peer learns of it when it comes again.
            Message::Revoked { .. } | Message::Expelled => {
                if self.blocked.is_none() {
                    let _ = send(&self.socket, message, None);
                }
            }
            Message::Welcome => {
                let ledger = self.ledger.take();
                self.answer(message, ledger);
            }
            _ => self.answer(message, None),
        }
    }

    fn answer(&mut self, message: Message, fd: Option<OwnedFd>) {
        // An error other than a full socket is reported again when the socket is read.
        if send(&self.socket, message, fd.as_ref()) == Err(Errno::EAGAIN) {
            self.blocked = Some((message, fd));
        }
    }

    /// Sends the answer that waits. Returns false when there is still no room.
    fn unblock(&mut self) -> bool {
        if let Some((message, fd)) = self.blocked.take() {
            self.answer(message, fd);
        }
        self.blocked.is_none()
    }
}

pub(super) fn send(socket: &SeqSocket, message: Message, fd: Option<&OwnedFd>) -> Result<(), Errno> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let len = message.encode(&mut bytes);
    socket.send(&bytes[..len], fd.map(AsFd::as_fd))
}
