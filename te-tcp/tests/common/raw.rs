//! A client without a transport: it sends any bytes on a connection, to a target that it polls meanwhile.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant as Clock;

use te_tcp::frame::{self, Export, Header, Hello, Kind, MAGIC, Operation, Response, Status, Step, VERSION};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::{Node, PATIENCE};

/// A raw connection to a target, which is polled while the client sends and receives.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    pub(crate) export: Export,
    pub(crate) received: Vec<u8>,
}

impl Raw {
    pub(crate) fn new(target: &Node) -> Self {
        Self::over(TcpStream::connect(target.transport.local_address()).unwrap(), target)
    }

    pub(crate) fn over(stream: TcpStream, target: &Node) -> Self {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, export: frame::parse_export(&target.export()).unwrap(), received: Vec::new() }
    }

    pub(crate) fn greeted(target: &mut Node, session: u64, connection: u16) -> Self {
        Self::new(target).welcomed(target, session, connection)
    }

    pub(crate) fn welcomed(self, target: &mut Node, session: u64, connection: u16) -> Self {
        let mut raw = self;
        let hello = raw.hello(session, connection);
        raw.send(target, hello.as_bytes());
        let welcome = raw.receive(target, 32);
        let Ok(Step::Frame(welcome, 32)) = frame::parse_welcome(&welcome) else { panic!("no welcome") };
        assert_eq!(welcome.status.get(), Status::Ok as u32);
        assert_eq!(welcome.incarnation.get(), target.transport.incarnation());
        raw
    }

    pub(crate) fn hello(&self, session: u64, connection: u16) -> Hello {
        Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            connection: U16::new(connection),
            connection_generation: U32::new(1),
            session: U64::new(session),
            initiator: U64::new(1),
            target: U64::new(self.export.incarnation),
            identity: U64::new(session + 1),
        }
    }

    pub(crate) fn operation(&self, offset: u64, len: u64) -> Operation {
        Operation {
            region: U32::new(self.export.region),
            generation: U32::new(self.export.generation),
            key: U64::new(self.export.key),
            offset: U64::new(offset),
            len: U64::new(len),
            crc: U32::ZERO,
            reserved: U32::ZERO,
        }
    }

    pub(crate) fn send(&mut self, target: &mut Node, mut bytes: &[u8]) {
        let start = Clock::now();
        while !bytes.is_empty() {
            assert!(start.elapsed() < PATIENCE, "the target does not receive");
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
            target.poll();
        }
    }

    /// Receives what is there; false when the target has closed the connection.
    pub(crate) fn receive_some(&mut self) -> bool {
        let mut bytes = [0; 4_096];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(n) => {
                self.received.extend_from_slice(&bytes[..n]);
                true
            }
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        }
    }

    pub(crate) fn receive(&mut self, target: &mut Node, len: usize) -> Vec<u8> {
        let start = Clock::now();
        while self.received.len() < len {
            assert!(start.elapsed() < PATIENCE, "no answer");
            target.poll();
            assert!(self.receive_some() || self.received.len() >= len, "closed after {:?}", self.received);
        }
        self.received.drain(..len).collect()
    }

    /// Everything until the target closes the connection.
    pub(crate) fn receive_rest(&mut self, target: &mut Node) -> Vec<u8> {
        let start = Clock::now();
        while self.receive_some() {
            assert!(start.elapsed() < PATIENCE, "the target does not close");
            target.poll();
        }
        std::mem::take(&mut self.received)
    }

    pub(crate) fn is_alive(&mut self, target: &mut Node) -> bool {
        self.send(target, Header::new(Kind::Ping, 0, 0, 77).as_bytes());
        let answer = self.receive(target, 16);
        frame::parse_response(&answer) == Ok(Step::Frame(Response::Pong { id: 77 }, 16))
    }
}

pub(crate) fn frame_of(kind: Kind, flags: u8, seq: u64, operations: &[Operation]) -> Vec<u8> {
    let header = Header::new(kind, flags, operations.len() as u16, seq);
    [header.as_bytes(), operations.as_bytes()].concat()
}

impl Raw {
    /// `len` bytes, or fewer when the target closes the connection.
    pub(crate) fn receive_up_to(&mut self, target: &mut Node, len: usize) -> Vec<u8> {
        let start = Clock::now();
        while self.received.len() < len {
            assert!(start.elapsed() < PATIENCE, "no answer");
            target.poll();
            if !self.receive_some() {
                break;
            }
        }
        std::mem::take(&mut self.received)
    }
}

/// An export of 4 KiB that leads to this listener.
pub(crate) fn export_of(listener: &TcpListener) -> Vec<u8> {
    let address = listener.local_addr().unwrap();
    let mut export = te_fabric::testkit::export(frame::EXPORT_FORMAT);
    (export.addresses[0], export.port, export.len) = (address.ip(), address.port(), 4_096);
    let mut blob = [0; frame::EXPORT_BYTES_MAX];
    let len = export.write(&mut blob).unwrap();
    blob[..len].to_vec()
}
