//! One end of a control connection: frames that wait for room in the socket, and the events of sockets.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use te_core::grant::Message;
use te_core::{Error, ErrorKind};
use te_fabric::{Epoll, Interest};
use te_host::control::SeqSocket;

use crate::wire::{FRAME_BYTES_MAX, Frame};

/// What an event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    Listener,
    /// The worker has done something.
    Worker,
    /// A peer that maps memory of this process.
    Holder(u32),
    /// An owner whose memory is mapped here.
    Host(u32),
}

impl Tag {
    pub(crate) fn to_bits(self) -> u64 {
        match self {
            Self::Listener => 0,
            Self::Worker => 1,
            Self::Holder(index) => 1 << 32 | u64::from(index),
            Self::Host(index) => 2 << 32 | u64::from(index),
        }
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        match (bits >> 32, bits as u32) {
            (0, 0) => Self::Listener,
            (0, _) => Self::Worker,
            (1, index) => Self::Holder(index),
            (_, index) => Self::Host(index),
        }
    }
}

/// A connection, and what is to be sent over it.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: SeqSocket,
    tag: Tag,
    outbox: VecDeque<(Frame, Option<Arc<OwnedFd>>)>,
    /// Whether the event loop waits for room instead of frames.
    waits_for_room: bool,
    /// The other end is gone.
    is_broken: bool,
}

/// What was received.
#[derive(Debug)]
pub(crate) enum Received {
    Frame(Frame, Option<OwnedFd>),
    /// Bytes that are no frame.
    Invalid(Error),
    /// Nothing more waits.
    Nothing,
    /// The other end has closed the connection.
    End,
}

impl Channel {
    pub(crate) fn new(epoll: &Epoll, socket: SeqSocket, tag: Tag) -> Result<Self, Error> {
        epoll.add(&socket, tag.to_bits(), Interest::READ).map_err(system)?;
        Ok(Self { socket, tag, outbox: VecDeque::new(), waits_for_room: false, is_broken: false })
    }

    /// Puts a frame behind those that wait.
    pub(crate) fn push(&mut self, frame: Frame, fd: Option<Arc<OwnedFd>>) {
        if !self.is_broken {
            self.outbox.push_back((frame, fd));
        }
    }

    pub(crate) fn push_message(&mut self, message: Message) {
        self.push(Frame::Grant(message), None);
    }

    /// Whether frames wait for room. An owner takes no frame from a peer that does not take its own.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.outbox.is_empty() && !self.is_broken
    }

    /// Sends what there is room for, and waits for room if some is left.
    pub(crate) fn flush(&mut self, epoll: &Epoll) {
        while let Some((frame, fd)) = self.outbox.front() {
            let mut bytes = [0; FRAME_BYTES_MAX];
            let len = frame.encode(&mut bytes);
            match self.socket.send(&bytes[..len], fd.as_ref().map(|fd| fd.as_fd())) {
                Ok(()) => _ = self.outbox.pop_front(),
                // Too many descriptors are on their way, or the socket is full.
                Err(Errno::EAGAIN | Errno::EINTR | Errno::ETOOMANYREFS | Errno::ENOBUFS) => break,
                Err(_) => {
                    // The end of the connection is noticed when the socket is read.
                    self.outbox.clear();
                    self.is_broken = true;
                }
            }
        }
        let waits = self.is_blocked();
        if waits != self.waits_for_room {
            // The owner reads requests only when it can answer. A peer always reads, or both would wait for
            // each other; what it sends is bounded by the rows of its owner.
            let is_peer = matches!(self.tag, Tag::Host(_));
            let interest = Interest { readable: !waits || is_peer, writable: waits };
            if epoll.modify(&self.socket, self.tag.to_bits(), interest).is_ok() {
                self.waits_for_room = waits;
            }
        }
    }

    pub(crate) fn receive(&mut self) -> Received {
        let mut bytes = [0; FRAME_BYTES_MAX + 1];
        match self.socket.recv(&mut bytes) {
            Ok(None) => Received::Nothing,
            Ok(Some((0, _))) => Received::End,
            Ok(Some((len, fd))) => match Frame::decode(&bytes[..len]) {
                Ok(frame) => Received::Frame(frame, fd),
                Err(error) => Received::Invalid(error),
            },
            // The frame has arrived without its descriptor.
            Err(errno @ Errno::EMFILE) => {
                Received::Invalid(Error::with_code(ErrorKind::Unreachable, errno as i32))
            }
            // The other end has closed its socket without reading everything: its last frames follow.
            Err(Errno::ECONNRESET) => match self.socket.recv(&mut bytes) {
                Ok(Some((len, fd))) if len > 0 => match Frame::decode(&bytes[..len]) {
                    Ok(frame) => Received::Frame(frame, fd),
                    Err(error) => Received::Invalid(error),
                },
                _ => Received::End,
            },
            Err(_) => Received::End,
        }
    }
}

pub(crate) fn system(error: impl Into<io::Error>) -> Error {
    Error::with_code(ErrorKind::System, error.into().raw_os_error().unwrap_or(0))
}
