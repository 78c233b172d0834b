//! One end of a control connection: frames that wait for room in the socket, and the events of sockets.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use te_core::grant::Message;
use te_core::{Error, ErrorKind};
use te_fabric::{Epoll, Interest};
use te_host::control::SeqSocket;

use crate::stream::{Arrived, Stream};
use crate::wire::{FRAME_BYTES_MAX, Frame};

/// What an event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    Listener,
    /// The worker has done something.
    Worker,
    /// Peers of other hosts wait to be accepted.
    HostsListener,
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
            Self::HostsListener => 2,
            Self::Holder(index) => 1 << 32 | u64::from(index),
            Self::Host(index) => 2 << 32 | u64::from(index),
        }
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        match (bits >> 32, bits as u32) {
            (0, 0) => Self::Listener,
            (0, 2) => Self::HostsListener,
            (0, _) => Self::Worker,
            (1, index) => Self::Holder(index),
            (_, index) => Self::Host(index),
        }
    }
}

/// What carries frames.
#[derive(Debug)]
pub(crate) enum Socket {
    /// Within the host. It carries file descriptors.
    Host(SeqSocket),
    /// To another host.
    Hosts(Stream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Host(socket) => socket.as_fd(),
            Self::Hosts(stream) => stream.as_fd(),
        }
    }
}

/// A connection, and what is to be sent over it.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: Socket,
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
    /// The other end has closed the connection, or its host says that it is closed.
    End,
    /// The other host has not answered for long. Its process may live.
    Silence,
}

impl Channel {
    pub(crate) fn new(epoll: &Epoll, socket: Socket, tag: Tag) -> Result<Self, Error> {
        epoll.add(&socket, tag.to_bits(), Interest::READ).map_err(system)?;
        Ok(Self { socket, tag, outbox: VecDeque::new(), waits_for_room: false, is_broken: false })
    }

    /// Whether the other end is on another host.
    pub(crate) const fn is_across_hosts(&self) -> bool {
        matches!(self.socket, Socket::Hosts(_))
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
        let is_cut = if let Socket::Hosts(stream) = &self.socket { stream.is_blocked() } else { false };
        (!self.outbox.is_empty() || is_cut) && !self.is_broken
    }

    /// Whether a frame waits to be received of which no event tells.
    pub(crate) fn has_frame(&self) -> bool {
        if let Socket::Hosts(stream) = &self.socket { stream.has_frame() } else { false }
    }

    /// Sends what there is room for, and waits for room if some is left.
    pub(crate) fn flush(&mut self, epoll: &Epoll) {
        while let Err(errno) = self.send() {
            match errno {
                // Too many descriptors are on their way, or the socket is full.
                Errno::EAGAIN | Errno::EINTR | Errno::ETOOMANYREFS | Errno::ENOBUFS => break,
                _ if self.redials(epoll) => {}
                _ => {
                    // The end of the connection is noticed when the socket is read.
                    self.outbox.clear();
                    self.is_broken = true;
                    break;
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

    /// Sends all frames that wait.
    fn send(&mut self) -> Result<(), Errno> {
        while let Some((frame, fd)) = self.outbox.front() {
            let mut bytes = [0; FRAME_BYTES_MAX];
            let len = frame.encode(&mut bytes);
            match &mut self.socket {
                Socket::Host(socket) => socket.send(&bytes[..len], fd.as_ref().map(|fd| fd.as_fd()))?,
                Socket::Hosts(stream) => stream.send(&bytes[..len])?,
            }
            self.outbox.pop_front();
        }
        if let Socket::Hosts(stream) = &mut self.socket { stream.flush() } else { Ok(()) }
    }

    pub(crate) fn receive(&mut self, epoll: &Epoll) -> Received {
        let mut bytes = [0; FRAME_BYTES_MAX + 1];
        let socket = match &mut self.socket {
            Socket::Host(socket) => socket,
            Socket::Hosts(stream) => {
                let received = receive_from(stream);
                let is_end = matches!(received, Received::End | Received::Silence);
                return if is_end && self.redials(epoll) { Received::Nothing } else { received };
            }
        };
        match socket.recv(&mut bytes) {
            Ok(None) => Received::Nothing,
            Ok(Some((0, _))) => Received::End,
            Ok(Some((len, fd))) => frame(&bytes[..len], fd),
            // The frame has arrived without its descriptor.
            Err(errno @ Errno::EMFILE) => {
                Received::Invalid(Error::with_code(ErrorKind::Unreachable, errno as i32))
            }
            // The other end has closed its socket without reading everything: its last frames follow.
            Err(Errno::ECONNRESET) => match socket.recv(&mut bytes) {
                Ok(Some((len, fd))) if len > 0 => frame(&bytes[..len], fd),
                _ => Received::End,
            },
            Err(_) => Received::End,
        }
    }

    /// Tries the next address of an owner that was not reached at the last one. Returns whether there was
    /// one.
    fn redials(&mut self, epoll: &Epoll) -> bool {
        let Socket::Hosts(stream) = &mut self.socket else { return false };
        let redials = stream.redial(epoll, self.tag.to_bits());
        self.waits_for_room |= redials;
        redials
    }

    /// Makes closing the connection leave what was sent on its way.
    pub(crate) fn finish(&mut self) {
        if let Socket::Hosts(stream) = &mut self.socket {
            stream.finish();
        }
    }
}

fn receive_from(stream: &mut Stream) -> Received {
    let mut bytes = [0; FRAME_BYTES_MAX];
    match stream.receive(&mut bytes) {
        Arrived::Frame(len) => frame(&bytes[..len], None),
        Arrived::Invalid => Received::Invalid(ErrorKind::Protocol.into()),
        Arrived::Nothing => Received::Nothing,
        Arrived::End if stream.is_silent() => Received::Silence,
        Arrived::End => Received::End,
    }
}

fn frame(bytes: &[u8], fd: Option<OwnedFd>) -> Received {
    match Frame::decode(bytes) {
        Ok(frame) => Received::Frame(frame, fd),
        Err(error) => Received::Invalid(error),
    }
}

pub(crate) fn system(error: impl Into<io::Error>) -> Error {
    Error::with_code(ErrorKind::System, error.into().raw_os_error().unwrap_or(0))
}
