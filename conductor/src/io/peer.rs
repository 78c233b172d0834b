//! A connection to a peer: a TCP stream, and the ZMTP that is spoken on it.

use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;

use conductor_core::zmtp::{Connection, Event, Kind, Limits};
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use te_core::Instant;

use super::publisher::Turn;

/// A connection, registered with a poller. Dropping it closes it.
#[derive(Debug)]
pub(super) struct Peer {
    stream: TcpStream,
    pub(super) zmtp: Connection,
    /// Whether the system has not said yet that the connection is open.
    connecting: bool,
}

/// What one read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Brought {
    /// Bytes: there may be more.
    Bytes,
    /// Nothing for now.
    Nothing,
    /// The peer closed the connection.
    End,
}

impl Peer {
    /// Begins to connect.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(super) fn connect(
        addr: SocketAddr,
        kind: Kind,
        limits: Limits,
        now: Instant,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Self> {
        let stream = TcpStream::connect(addr)?;
        Self::new(stream, true, kind, limits, now, registry, token)
    }

    /// Takes a connection that a listener accepted.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(super) fn accepted(
        stream: TcpStream,
        kind: Kind,
        limits: Limits,
        now: Instant,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Self> {
        Self::new(stream, false, kind, limits, now, registry, token)
    }

    fn new(
        mut stream: TcpStream,
        connecting: bool,
        kind: Kind,
        limits: Limits,
        now: Instant,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Self> {
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self { stream, zmtp: Connection::new(kind, limits, b"", now), connecting })
    }

    /// Writes what waits, as far as the system takes it. Returns false while the connection is not open yet.
    ///
    /// # Errors
    /// The connection is lost, or could not be opened.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        if self.connecting {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
            match self.stream.peer_addr() {
                Ok(_) => {
                    self.connecting = false;
                    self.stream.set_nodelay(true)?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        while !self.zmtp.output().is_empty() {
            match self.stream.write(self.zmtp.output()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => self.zmtp.wrote(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Handles what has arrived, and reads up to `reads_max` times more. `handle` returns the number of a
    /// replay to ask for.
    pub(super) fn pump(
        &mut self,
        now: Instant,
        reads_max: u32,
        mut handle: impl FnMut(Event<'_>) -> Option<[u8; 8]>,
    ) -> Turn {
        for _ in 0..reads_max {
            match self.flush().and_then(|open| if open { self.read(now) } else { Ok(Brought::Nothing) }) {
                Ok(Brought::Bytes) => {}
                Ok(Brought::Nothing) => return Turn::Done,
                Ok(Brought::End) => return Turn::Lost("the publisher closed it".to_owned()),
                Err(error) => return Turn::Lost(error.to_string()),
            }
            loop {
                let asked = match self.zmtp.next() {
                    Ok(Some(event)) => handle(event),
                    Ok(None) => break,
                    Err(error) => return Turn::Lost(error.to_string()),
                };
                if let Some(from) = asked {
                    self.zmtp.send(&[b"", &from]);
                }
            }
        }
        match self.flush() {
            Ok(_) => Turn::More,
            Err(error) => Turn::Lost(error.to_string()),
        }
    }

    /// Reads once. Call [`Connection::next`] until it has nothing before the next read.
    ///
    /// # Errors
    /// The connection is lost.
    fn read(&mut self, now: Instant) -> io::Result<Brought> {
        if self.connecting {
            return Ok(Brought::Nothing);
        }
        loop {
            match self.stream.read(self.zmtp.space()) {
                Ok(0) => return Ok(Brought::End),
                Ok(len) => {
                    self.zmtp.filled(now, len);
                    return Ok(Brought::Bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Brought::Nothing),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
