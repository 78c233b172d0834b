//! A target that a test plays: it brings associations up by itself, carries reads and writes out or holds
//! them back, and sends what the test wants.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use te_core::Access;
use te_fabric::{Export, ExportFormat};
use te_nvmeof::Namespace;
use te_nvmeof::command::{Cqe, Place, Sqe, Status, admin, fabrics, io, property};
use te_nvmeof::identify::{self, Controller, IDENTIFY_BYTES, cns};
use te_nvmeof::pdu::{self, Agreed, Data, End, FLAG_LAST, Kind, Pdu, Step};
use zerocopy::IntoBytes;

use super::{Node, eventually};

const INCARNATION: u64 = 5;
const NSID: u32 = 1;
pub(crate) const BLOCK: u32 = 4_096;

/// A command that the played target holds.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// The connection that it came on.
    pub(crate) connection: usize,
    pub(crate) sqe: Sqe,
    pub(crate) data: Vec<u8>,
}

impl Held {
    pub(crate) fn cid(&self) -> u16 {
        self.sqe.cid.get()
    }
}

pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    bytes: Vec<u8>,
    opened: bool,
    pub(crate) agreed: Agreed,
    pub(crate) ended: bool,
}

pub(crate) struct Played {
    listener: TcpListener,
    pub(crate) connections: Vec<Connection>,
    /// What Identify Controller says.
    pub(crate) identity: Controller,
    /// Reads and writes are held, not carried out.
    pub(crate) holds: bool,
    pub(crate) held: Vec<Held>,
    /// H2CData that has arrived.
    pub(crate) data: Vec<(pdu::Transfer, Vec<u8>)>,
    pub(crate) memory: Vec<u8>,
    /// How resets are answered.
    pub(crate) reset_answer: (Status, u64),
    pub(crate) resets: Vec<(u16, u64)>,
    pub(crate) keep_alives: usize,
    /// The last TermReq.
    pub(crate) term: Option<pdu::Fatal>,
    /// How Connect is answered, by the queue's number; `None` accepts.
    pub(crate) refuses: fn(u32) -> Option<(Status, u64)>,
    /// WRITEs are answered with this status before their data has arrived.
    pub(crate) refuses_early: Option<Status>,
    /// The command that was refused in this manner.
    pub(crate) refused: Vec<(usize, u16)>,
    /// Bytes that one poll receives on one connection.
    pub(crate) receive_bytes_max: usize,
    /// Connect of I/O queues gets no answer.
    pub(crate) stalls: bool,
    /// Aborts get no answer.
    pub(crate) keeps_aborts: bool,
    /// Namespaces have reservations: answers a command, by its opcode, its dword 10 and its keys.
    pub(crate) reserve: Option<Reserve>,
    /// What Reservation Report says.
    pub(crate) report: Vec<u8>,
    /// Identify of a namespace is answered with this status.
    pub(crate) without_namespace: Option<Status>,
    controllers: u16,
}

pub(crate) type Reserve = Box<dyn FnMut(u8, u32, &[u8]) -> Option<Status>>;

impl Played {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self::on(listener)
    }

    pub(crate) fn on(listener: TcpListener) -> Self {
        listener.set_nonblocking(true).unwrap();
        Self {
            listener,
            connections: Vec::new(),
            identity: Controller {
                in_capsule_bytes: 8_192,
                keep_alive_granularity_ms: 100,
                commands_max: 64,
                ..Controller::default()
            },
            holds: false,
            held: Vec::new(),
            data: Vec::new(),
            memory: vec![0; 64 * BLOCK as usize],
            reset_answer: (Status::SUCCESS, 1),
            resets: Vec::new(),
            keep_alives: 0,
            term: None,
            refuses: |_| None,
            refuses_early: None,
            refused: Vec::new(),
            receive_bytes_max: usize::MAX,
            stalls: false,
            keeps_aborts: false,
            reserve: None,
            report: vec![0; 4_096],
            without_namespace: None,
            controllers: 0,
        }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    fn nguid() -> [u8; 16] {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&INCARNATION.to_be_bytes());
        id[8..12].copy_from_slice(&NSID.to_be_bytes());
        id[12..].copy_from_slice(&1_u32.to_be_bytes());
        id
    }

    /// The export of its namespace, as a target of ours writes it.
    pub(crate) fn export(&self) -> Vec<u8> {
        let mut export = te_fabric::testkit::export(ExportFormat { magic: *b"nvmo", version: 3 });
        let address = self.address();
        (export.addresses[0], export.port) = (address.ip(), address.port());
        export.rights = (Access::REMOTE_READ | Access::REMOTE_WRITE).bits();
        (export.incarnation, export.region, export.generation) = (INCARNATION, NSID, 1);
        export.len = self.memory.len() as u64;
        let mut blob = [0; 256];
        let len = Export::write(&export, &mut blob).unwrap();
        blob[..len].to_vec()
    }

    /// The same namespace as one of another vendor.
    pub(crate) fn namespace(&self) -> Namespace {
        Namespace {
            addresses: vec![self.address().ip()],
            port: self.address().port(),
            nqn: "nqn.2014-08.org.example:played".into(),
            nsid: NSID,
            nguid: Self::nguid(),
        }
    }

    /// Polls both sides until `done` returns true.
    pub(crate) fn drive(
        &mut self,
        node: &mut Node,
        what: &str,
        mut done: impl FnMut(&mut Self, &mut Node) -> bool,
    ) {
        eventually(what, || {
            for _ in 0..16 {
                node.poll();
                self.poll();
            }
            done(self, node)
        });
    }

    /// Accepts, receives and answers.
    pub(crate) fn poll(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(true).unwrap();
            stream.set_nodelay(true).unwrap();
            let agreed = Agreed::default();
            self.connections.push(Connection {
                stream,
                bytes: Vec::new(),
                opened: false,
                agreed,
                ended: false,
            });
        }
        for at in 0..self.connections.len() {
            self.receive(at);
            while self.take(at) {}
        }
    }

    /// Sends bytes on a connection.
    pub(crate) fn send(&mut self, at: usize, parts: &[&[u8]]) {
        let bytes = parts.concat();
        let mut left = &bytes[..];
        while !left.is_empty() {
            match self.connections[at].stream.write(left) {
                Ok(count) => left = &left[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                // The initiator has closed the connection; the test sees that elsewhere.
                Err(_) => return,
            }
        }
    }

    pub(crate) fn respond(&mut self, at: usize, cid: u16, status: Status, result: u64) {
        let head = pdu::response(Cqe::new(cid, status, 0xffff, result), self.connections[at].agreed);
        self.send(at, &[head.bytes()]);
    }

    /// Sends data of a command in one PDU.
    pub(crate) fn send_data(&mut self, at: usize, cid: u16, offset: u32, data: &[u8], flags: u8) {
        let agreed = self.connections[at].agreed;
        let head = pdu::transfer(Kind::C2hData, flags, cid, 0, (offset, data.len() as u32), agreed);
        let digest = crc32c::crc32c(data).to_le_bytes();
        let digest: &[u8] = if agreed.data_digest { &digest } else { &[] };
        self.send(at, &[head.bytes(), data, digest]);
    }

    pub(crate) fn ask(&mut self, at: usize, cid: u16, ttag: u16, range: (u32, u32)) {
        let head = pdu::transfer(Kind::R2t, 0, cid, ttag, range, self.connections[at].agreed);
        self.send(at, &[head.bytes()]);
    }

    fn receive(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        let mut more = [0; 65_536];
        let mut left = self.receive_bytes_max;
        while left > 0 {
            let len = more.len().min(left);
            match connection.stream.read(&mut more[..len]) {
                Ok(0) => {
                    connection.ended = true;
                    return;
                }
                Ok(count) => {
                    connection.bytes.extend_from_slice(&more[..count]);
                    left -= count;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    connection.ended = true;
                    return;
                }
            }
        }
    }

    /// Takes in one PDU.
    fn take(&mut self, at: usize) -> bool {
        let connection = &mut self.connections[at];
        let parsed = pdu::parse(&connection.bytes, End::Host, connection.agreed, 1 << 25);
        let Step::Frame(pdu, used) = parsed.unwrap() else { return false };
        let data = match pdu {
            Pdu::Command(_, data) | Pdu::H2cData(_, data) => data,
            _ => Data::default(),
        };
        let whole = used + data.len as usize + if data.digest { 4 } else { 0 };
        if connection.bytes.len() < whole {
            if let (Pdu::Command(sqe, _), Some(status)) = (pdu, self.refuses_early)
                && sqe.opcode == io::WRITE
                && !self.refused.contains(&(at, sqe.cid.get()))
            {
                self.refused.push((at, sqe.cid.get()));
                self.respond(at, sqe.cid.get(), status, 0);
            }
            return false;
        }
        let bytes: Vec<u8> = connection.bytes.drain(..whole).collect();
        let data = bytes[used..used + data.len as usize].to_vec();
        match pdu {
            Pdu::IcReq(request) => {
                let digests = (request.digests & 1 != 0, request.digests & 2 != 0);
                connection.opened = true;
                connection.agreed = Agreed { header_digest: digests.0, data_digest: digests.1, alignment: 0 };
                let answer = pdu::initialize(Kind::IcResp, 0, digests, 8_192);
                self.send(at, &[answer.as_bytes()]);
            }
            Pdu::Command(sqe, _) => self.command(at, sqe, data),
            Pdu::H2cData(header, _) => self.data.push((header, data)),
            Pdu::TermReq(fatal) => self.term = Some(fatal),
            other => panic!("{other:?}"),
        }
        true
    }

    fn command(&mut self, at: usize, sqe: Sqe, data: Vec<u8>) {
        let cid = sqe.cid.get();
        match (sqe.opcode, sqe.fabrics_type()) {
            (admin::FABRICS, fabrics::CONNECT) => {
                let qid = sqe.dword(10) >> 16;
                if let Some((status, result)) = (self.refuses)(qid) {
                    return self.respond(at, cid, status, result);
                }
                if qid > 0 && self.stalls {
                    return;
                }
                if qid == 0 {
                    self.controllers += 1;
                }
                self.respond(at, cid, Status::SUCCESS, self.controllers.into());
            }
            (admin::FABRICS, fabrics::PROPERTY_GET) => {
                let value = if sqe.dword(11) == property::CAP { 127 } else { 1 };
                self.respond(at, cid, Status::SUCCESS, value);
            }
            (admin::FABRICS, _) | (admin::PRESENT_KEY, _) => self.respond(at, cid, Status::SUCCESS, 0),
            (admin::SET_FEATURES, _) => self.respond(at, cid, Status::SUCCESS, 3 | 3 << 16),
            (admin::KEEP_ALIVE, _) => {
                self.keep_alives += 1;
                self.respond(at, cid, Status::SUCCESS, 0);
            }
            (admin::ABORT, _) if self.keeps_aborts => {}
            (admin::ABORT, _) => self.respond(at, cid, Status::SUCCESS, 1),
            (admin::IDENTIFY, _) => self.identify(at, &sqe),
            (admin::CROSS_CONTROLLER_RESET, _) => {
                self.resets.push((sqe.dword(10) as u16, sqe.qword(12)));
                let (status, result) = self.reset_answer;
                self.respond(at, cid, status, result);
            }
            (io::RESERVATION_REPORT, _) => {
                let report = self.report.clone();
                self.send_data(at, cid, 0, &report, FLAG_LAST);
                self.respond(at, cid, Status::SUCCESS, 0);
            }
            (io::RESERVATION_REGISTER | io::RESERVATION_ACQUIRE, _) if self.reserve.is_some() => {
                let answer = self.reserve.as_mut().and_then(|of| of(sqe.opcode, sqe.dword(10), &data));
                if let Some(status) = answer {
                    self.respond(at, cid, status, 0);
                }
            }
            (io::READ, _) if !self.holds => {
                let (from, len) = range(&sqe);
                let data = self.memory[from..from + len].to_vec();
                self.send_data(at, cid, 0, &data, FLAG_LAST);
                self.respond(at, cid, Status::SUCCESS, 0);
            }
            (io::WRITE, _) if self.refused.contains(&(at, cid)) => {}
            (io::WRITE, _) if !self.holds && matches!(sqe.place(), Some(Place::InCapsule(_))) => {
                let (from, len) = range(&sqe);
                self.memory[from..from + len].copy_from_slice(&data);
                self.respond(at, cid, Status::SUCCESS, 0);
            }
            _ => self.held.push(Held { connection: at, sqe, data }),
        }
    }

    fn identify(&mut self, at: usize, sqe: &Sqe) {
        let mut bytes = [0; IDENTIFY_BYTES];
        if let Some(status) = self.without_namespace.filter(|_| sqe.dword(10) as u8 != cns::CONTROLLER) {
            return self.respond(at, sqe.cid.get(), status, 0);
        }
        match sqe.dword(10) as u8 {
            cns::CONTROLLER => {
                let random = 1_000 + u64::from(self.controllers);
                let reservations = self.reserve.is_some();
                let identity = Controller { instance_random: random, reservations, ..self.identity };
                identity.write("nqn.2014-08.org.example:played", &mut bytes);
            }
            cns::DESCRIPTORS => identify::write_identity(Self::nguid(), &mut bytes),
            _ => identify::Namespace {
                blocks: self.memory.len() as u64 / u64::from(BLOCK),
                block_bytes: BLOCK,
                reservations: if self.reserve.is_some() { 0x7e } else { 0 },
                ..identify::Namespace::default()
            }
            .write(&mut bytes),
        }
        self.send_data(at, sqe.cid.get(), 0, &bytes, FLAG_LAST);
        self.respond(at, sqe.cid.get(), Status::SUCCESS, 0);
    }

    /// Closes all connections.
    pub(crate) fn cut(&mut self) {
        self.connections.clear();
        self.held.clear();
    }
}

fn range(sqe: &Sqe) -> (usize, usize) {
    let from = sqe.qword(10) as usize * BLOCK as usize;
    (from, (sqe.dword(12) as usize + 1) * BLOCK as usize)
}
