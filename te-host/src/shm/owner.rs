//! The owner's side: whom our memory was handed to, and the sockets over which that is said.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use te_core::grant::{self, MESSAGE_BYTES_MAX, Message, Offer, OwnerEffect, OwnerLimits};
use te_core::{Access, Error, ErrorKind, Instant, RegionId};
use te_fabric::{Epoll, Interest};

use super::{ShmConfig, Tag, system, watch};
use crate::sys::{Ledger, Process, SeqSocket, SharedMemory, own_uid};

/// How long not to listen after a peer could not be accepted.
const REST: Duration = Duration::from_millis(100);
/// Messages of one holder handled before the others have their turn.
const MESSAGES_MAX: usize = 64;

pub(super) struct Owner {
    listener: Option<SeqSocket>,
    half: grant::Owner<Ledger>,
    /// What goes with a grant, by region index.
    shared: Vec<Option<Shared>>,
    /// By the half's number.
    holders: Vec<Option<Holder>>,
    /// Holders of one user that is neither ours nor root, at most.
    per_user_max: usize,
    /// We do not listen for a while: no descriptor is left for one more peer, and who waits would wake us
    /// again and again.
    rests: bool,
    /// Until then; told by the first `poll` after it began.
    rests_until: Option<Instant>,
}

/// The memory of a region that can be had.
struct Shared {
    generation: u32,
    memory: Arc<SharedMemory>,
    writable: bool,
}

/// A process that maps some of our memory.
struct Holder {
    socket: SeqSocket,
    uid: u32,
    process: Process,
    /// Its ledger's file, until it is sent.
    ledger: Option<OwnedFd>,
    /// An answer that its socket had no room for; nothing more is read from it until this is sent.
    blocked: Option<(Message, Option<OwnedFd>)>,
    /// Whether we wait for room in its socket, and not for messages.
    deaf: bool,
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

    /// Lets peers have a region, which lies in this memory.
    pub(super) fn share(&mut self, id: RegionId, offer: Offer, memory: Arc<SharedMemory>) {
        let index = id.index as usize;
        if self.shared.len() <= index {
            self.shared.resize_with(index + 1, || None);
        }
        let writable = offer.access.contains(Access::REMOTE_WRITE);
        self.shared[index] = Some(Shared { generation: id.generation, memory, writable });
        self.half.share(id, offer);
    }

    /// Revokes what was granted of a region. True: nobody copies to or from it any more.
    pub(super) fn unshare(&mut self, id: RegionId) -> bool {
        if let Some(slot) = self.shared.get_mut(id.index as usize)
            && slot.as_ref().is_some_and(|shared| shared.generation == id.generation)
        {
            *slot = None;
        }
        let mut out = self.half.unshare(id);
        if !out && self.bury() {
            out = self.half.unshare(id);
        }
        self.settle();
        out
    }

    /// Whether a process with this identity has a connection to us.
    pub(super) fn is_connected(&self, peer: u64) -> bool {
        self.half
            .connections(peer)
            .any(|at| self.holders[at as usize].as_ref().is_some_and(|holder| !holder.process.has_ended()))
    }

    /// Takes back what was granted to a peer, and lets it have nothing from now on. True: it copies nothing
    /// any more.
    pub(super) fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        let mut gone = self.half.expel(peer)?;
        if !gone && self.bury() {
            gone = self.half.expel(peer)?;
        }
        self.settle();
        Ok(gone)
    }

    /// Notices holders that died in the middle of a copy: a fork may keep the socket of one open. True: there
    /// were some.
    fn bury(&mut self) -> bool {
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
            let Ok(at) = self.half.connected() else {
                log::warn!("shm: {} peers map our memory; one more is refused", self.holders.len());
                continue;
            };
            if let Err(error) = watch(epoll, &socket, Tag::Holder(at)) {
                log::warn!("shm: a peer is refused: {error}");
                self.half.ended(at);
                continue;
            }
            if self.holders.len() <= at as usize {
                self.holders.resize_with(at as usize + 1, || None);
            }
            self.holders[at as usize] =
                Some(Holder { socket, uid, process, ledger: None, blocked: None, deaf: false });
        }
    }

    /// Handles what a holder says, until it says no more, or has no room for an answer. One that says
    /// nonsense, or is gone, loses its grants.
    pub(super) fn receive(&mut self, epoll: &Epoll, at: u32) {
        for _ in 0..MESSAGES_MAX {
            let Some(Some(holder)) = self.holders.get_mut(at as usize) else { return };
            if !holder.unblock() {
                break;
            }
            let mut bytes = [0; MESSAGE_BYTES_MAX + 1];
            match holder.socket.recv(&mut bytes) {
                Ok(None) => break,
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

    /// Parts with those who connected and showed no key in time, and listens again after a rest.
    pub(super) fn poll(&mut self, epoll: &Epoll, now: Instant) {
        if let (true, Some(listener)) = (self.rests, &self.listener)
            && now >= *self.rests_until.get_or_insert(now + REST)
        {
            self.rests = epoll.modify(listener, Tag::Listener.to_bits(), Interest::READ).is_err();
            self.rests_until = None;
        }
        self.half.poll(now);
        self.settle();
    }

    /// When `poll` has something to do; `now` when it has at once.
    pub(super) fn poll_at(&self, now: Instant) -> Option<Instant> {
        let rest = self.rests.then(|| self.rests_until.unwrap_or(now));
        self.half.poll_at(now).into_iter().chain(rest).min()
    }

    /// Does what the half wants done.
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
                OwnerEffect::Send { message, .. } => holder.say(message),
                OwnerEffect::Grant { region, message, .. } => {
                    let shared = self.shared.get(region.index as usize).and_then(Option::as_ref);
                    match shared.map(|shared| shared.memory.share(shared.writable)) {
                        Some(Ok(fd)) => holder.answer(message, Some(fd)),
                        _ => self.half.withdraw(peer, message),
                    }
                }
                OwnerEffect::Close { why, .. } => {
                    let uid = holder.uid;
                    match why.kind {
                        ErrorKind::TimedOut => log::warn!(
                            "shm: a peer of user {uid} is dropped: it asked for nothing it may have"
                        ),
                        ErrorKind::Expelled => log::warn!("shm: a peer of user {uid} is cut off"),
                        _ => log::warn!("shm: a peer is dropped: {why}"),
                    }
                    self.holders[peer as usize] = None;
                }
            }
        }
    }
}

impl Holder {
    /// While an answer waits for room, what it says meanwhile must not wake us.
    fn listen(&mut self, epoll: &Epoll, at: u32) -> Result<(), Error> {
        let deaf = self.blocked.is_some();
        if deaf != self.deaf {
            let interest = Interest { readable: !deaf, writable: deaf };
            epoll.modify(&self.socket, Tag::Holder(at).to_bits(), interest).map_err(system)?;
            self.deaf = deaf;
        }
        Ok(())
    }

    fn say(&mut self, message: Message) {
        match message {
            // The ledger is the truth. This is so that the peer unmaps soon; it will see the ledger
            // otherwise. Nor does it overtake the grant. And one that is cut off learns it when it comes
            // again.
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
        // An error other than fullness shows again when the socket is read.
        if send(&self.socket, message, fd.as_ref()) == Err(Errno::EAGAIN) {
            self.blocked = Some((message, fd));
        }
    }

    /// Sends the answer that waits. False: there is still no room.
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
