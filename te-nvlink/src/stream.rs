//! A control connection to another host: frames over TCP, each behind a byte with its length.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use te_fabric::{Epoll, Interest, net};

use crate::wire::FRAME_BYTES_MAX;

/// The longest frame with its length.
const BYTES_MAX: usize = FRAME_BYTES_MAX + 1;
/// How often the kernel asks the other host for a sign of life, ms.
const PROBE_MS: u32 = 5_000;
/// After this silence a peer gives an owner up, and closes what it has mapped of it, ms.
const PEER_GIVES_UP_MS: u32 = 20_000;
/// After this silence an owner closes the connection of a peer, ms. That proves nothing about the peer, but
/// until then the answer of a host that was started again does.
const OWNER_GIVES_UP_MS: u32 = 3_600_000;

/// A TCP connection.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    /// While the connection is being made: the addresses that were not tried.
    dialing: Option<VecDeque<SocketAddr>>,
    /// What has arrived and was not taken: at most two frames.
    inbox: Vec<u8>,
    /// What is left of frames that were taken over.
    outbox: Vec<u8>,
    /// Why the connection ended, if the other end has not closed it.
    error: Option<Errno>,
}

/// What was received.
#[derive(Debug)]
pub(crate) enum Arrived {
    /// The length of a frame, which is in the buffer.
    Frame(usize),
    /// Bytes that are no frame.
    Invalid,
    Nothing,
    End,
}

impl Stream {
    /// A connection that was accepted from a peer.
    pub(crate) fn accepted(socket: TcpStream) -> io::Result<Self> {
        net::set_probes(&socket, PROBE_MS, OWNER_GIVES_UP_MS)?;
        socket.set_nodelay(true)?;
        Ok(Self { socket, dialing: None, inbox: Vec::new(), outbox: Vec::new(), error: None })
    }

    /// Starts to connect to the first of these addresses that can be tried.
    pub(crate) fn connect(addresses: &[SocketAddr]) -> Result<Self, Errno> {
        let mut left: VecDeque<SocketAddr> = addresses.iter().copied().collect();
        let socket = dial(&mut left)?;
        Ok(Self { socket, dialing: Some(left), inbox: Vec::new(), outbox: Vec::new(), error: None })
    }

    /// Sends a frame, of which a part may wait for room; `EAGAIN`: there is none for its first byte.
    pub(crate) fn send(&mut self, frame: &[u8]) -> Result<(), Errno> {
        self.flush()?;
        if self.is_blocked() {
            return Err(Errno::EAGAIN);
        }
        let mut bytes = [0; BYTES_MAX];
        bytes[0] = frame.len() as u8;
        bytes[1..=frame.len()].copy_from_slice(frame);
        let bytes = &bytes[..=frame.len()];
        let count = self.write(bytes)?;
        self.outbox.extend_from_slice(&bytes[count..]);
        Ok(())
    }

    /// Sends what is left of a frame, as far as there is room.
    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        while self.is_blocked() {
            let bytes = std::mem::take(&mut self.outbox);
            let count = self.write(&bytes);
            self.outbox = bytes;
            match count {
                Ok(count) => _ = self.outbox.drain(..count),
                Err(Errno::EAGAIN) => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        match self.socket.write(bytes) {
            Ok(count) => {
                self.dialing = None;
                Ok(count)
            }
            Err(error) if is_later(&error) => Err(Errno::EAGAIN),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Whether a part of a frame waits for room.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether a whole frame waits to be taken, of which no event tells.
    pub(crate) fn has_frame(&self) -> bool {
        self.inbox.split_first().is_some_and(|(len, rest)| rest.len() >= usize::from(*len))
    }

    /// The next frame.
    pub(crate) fn receive(&mut self, out: &mut [u8; FRAME_BYTES_MAX]) -> Arrived {
        loop {
            if self.has_frame() {
                let len = usize::from(self.inbox[0]);
                if len > FRAME_BYTES_MAX {
                    return Arrived::Invalid;
                }
                out[..len].copy_from_slice(&self.inbox[1..=len]);
                self.inbox.drain(..=len);
                return Arrived::Frame(len);
            }
            // What is told to be longer than a frame never becomes one.
            if self.inbox.len() > BYTES_MAX {
                return Arrived::Invalid;
            }
            let mut bytes = [0; BYTES_MAX];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Arrived::End,
                Ok(count) => {
                    self.dialing = None;
                    self.inbox.extend_from_slice(&bytes[..count]);
                }
                Err(error) if is_later(&error) => return Arrived::Nothing,
                Err(error) => {
                    self.failed(&error);
                    return Arrived::End;
                }
            }
        }
    }

    /// Whether the connection has ended without a word of the other host's kernel: its process may live.
    pub(crate) fn is_silent(&self) -> bool {
        self.error.is_some_and(|errno| !matches!(errno, Errno::ECONNRESET | Errno::EPIPE))
    }

    /// Goes on with the next address, if the connection was never there and another address is left. What is
    /// to be sent stays.
    pub(crate) fn redial(&mut self, epoll: &Epoll, token: u64) -> bool {
        let Some(left) = &mut self.dialing else { return false };
        let Ok(socket) = dial(left) else { return false };
        if epoll.add(&socket, token, Interest::BOTH).is_err() {
            return false;
        }
        self.socket = socket;
        self.error = None;
        true
    }

    /// Takes what has arrived, so that closing the socket does not discard what was sent.
    pub(crate) fn finish(&mut self) {
        _ = self.socket.shutdown(Shutdown::Write);
        while self.socket.read(&mut [0; 256]).is_ok_and(|count| count > 0) {}
    }

    fn failed(&mut self, error: &io::Error) -> Errno {
        let errno = errno_of(error);
        // The kernel tells the reason once.
        *self.error.get_or_insert(errno)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Starts to connect to the first address that can be tried, and removes it and those before it.
fn dial(left: &mut VecDeque<SocketAddr>) -> Result<TcpStream, Errno> {
    let mut why = Errno::EADDRNOTAVAIL;
    while let Some(address) = left.pop_front() {
        let socket = net::socket(address).and_then(|socket| {
            net::set_probes(&socket, PROBE_MS, PEER_GIVES_UP_MS)?;
            socket.set_nodelay(true)?;
            net::start_connect(&socket, address).map(|()| socket)
        });
        match socket {
            Ok(socket) => return Ok(socket),
            Err(error) => why = errno_of(&error),
        }
    }
    Err(why)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let there = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (here, _) = listener.accept().expect("it connects");
        here.set_nonblocking(true).expect("an option");
        (Stream::accepted(here).expect("options"), there)
    }

    /// What arrives, while there is nothing.
    fn next(stream: &mut Stream) -> Result<Vec<u8>, &'static str> {
        let mut out = [0; FRAME_BYTES_MAX];
        loop {
            match stream.receive(&mut out) {
                Arrived::Frame(len) => return Ok(out[..len].to_vec()),
                Arrived::Invalid => return Err("invalid"),
                Arrived::Nothing => std::thread::yield_now(),
                Arrived::End => return Err("end"),
            }
        }
    }

    #[test]
    fn frames_arrive_whole_however_they_are_cut() {
        let (mut here, mut there) = pair();
        let frames: Vec<Vec<u8>> = (1..=FRAME_BYTES_MAX).map(|len| vec![len as u8; len]).collect();
        let bytes: Vec<u8> =
            frames.iter().flat_map(|frame| [&[frame.len() as u8], &frame[..]].concat()).collect();
        for step in [1, 7, 90, 91, 92, bytes.len()] {
            let writer = {
                let (mut there, bytes) = (there.try_clone().expect("a copy"), bytes.clone());
                std::thread::spawn(move || bytes.chunks(step).all(|part| there.write_all(part).is_ok()))
            };
            assert!(frames.iter().all(|frame| next(&mut here).as_ref() == Ok(frame)), "in steps of {step}");
            assert!(writer.join().expect("it writes"));
        }
        // What is cut off is an end, and no frame.
        there.write_all(&[90, 1, 2, 3]).expect("room");
        drop(there);
        assert_eq!((next(&mut here), here.is_silent()), (Err("end"), false));
    }

    #[test]
    fn a_frame_that_is_too_long_is_invalid_before_it_has_arrived() {
        for (nth, len) in [(0, 91), (1, 255)] {
            let (mut here, mut there) = pair();
            there.write_all(&[&[len], &[0; 100][..]].concat()).expect("room");
            assert_eq!(next(&mut here), Err("invalid"), "{nth}");
        }
    }

    #[test]
    fn a_frame_is_refused_while_an_earlier_one_waits_for_room() {
        let (mut here, mut there) = pair();
        let frame = [7; FRAME_BYTES_MAX];
        let mut sent = 0;
        while here.send(&frame) == Ok(()) {
            sent += 1;
        }
        assert!(here.is_blocked());
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; sent * BYTES_MAX];
            there.read_exact(&mut bytes).map(|()| bytes)
        });
        while here.is_blocked() {
            here.flush().expect("it reads");
        }
        let bytes = reader.join().expect("it reads").expect("all of them");
        assert!(bytes.chunks(BYTES_MAX).all(|part| part[0] == 90 && part[1..] == frame));
    }

    #[test]
    fn the_kernel_of_the_other_host_says_that_a_connection_is_over_or_nothing_does() {
        let (mut here, there) = pair();
        net::reset_on_close(&there);
        drop(there);
        assert_eq!((next(&mut here), here.is_silent()), (Err("end"), false), "reset");
        let (mut here, _there) = pair();
        for (errno, is_silent) in [
            (Errno::ECONNRESET, false),
            (Errno::EPIPE, false),
            (Errno::ETIMEDOUT, true),
            (Errno::EHOSTUNREACH, true),
        ] {
            here.error = None;
            here.failed(&io::Error::from_raw_os_error(errno as i32));
            assert_eq!(here.is_silent(), is_silent, "{errno}");
            // What comes afterwards is no reason.
            here.failed(&io::Error::from_raw_os_error(Errno::EPIPE as i32));
            assert_eq!(here.is_silent(), is_silent, "{errno}");
        }
    }

    #[test]
    fn an_address_that_refuses_is_followed_by_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let good = listener.local_addr().expect("bound");
        let refuses = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound");
        let mut epoll = Epoll::new(4).expect("an instance");
        let mut here = Stream::connect(&[refuses, good]).expect("it can be tried");
        epoll.add(&here, 1, Interest::BOTH).expect("added");
        let mut redialed = false;
        while here.dialing.is_some() {
            _ = epoll.ready();
            if here.send(b"hello").is_err_and(|errno| errno != Errno::EAGAIN) {
                assert!(here.redial(&epoll, 1), "there is another address");
                redialed = true;
            }
        }
        assert!(redialed);
        let (mut there, _) = listener.accept().expect("it connects");
        let mut bytes = [0; 6];
        there.read_exact(&mut bytes).expect("a frame");
        assert_eq!(&bytes, b"\x05hello");
        assert!(!here.redial(&epoll, 1), "it is connected");
        assert!(Stream::connect(&[]).is_err());
    }
}
