//! What the tests of this crate share: services on loopback, targets that follow a script, raw handshakes and
//! requests.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "exports memory")]

pub(crate) mod engines;
pub(crate) mod proxy;

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use te_core::{Access, Op};
use te_fabric::testkit::{Block, Node, REMOTE};
use te_mooncake::export::Export;
use te_mooncake::header::{Request, Status, Version};
use te_mooncake::{Client, Config, Lookup, MetadataString, Mode, MooncakeTransport, Service};

pub(crate) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub(crate) const ALL: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
/// How long a raw socket of a test waits.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Both modes, on loopback, at ports that the system chooses.
pub(crate) fn config() -> Config {
    Config {
        mode: Mode::Both,
        bind: Some(HERE),
        peers: vec!["127.0.0.0/8".parse().unwrap()],
        port_min: 0,
        port_max: 0,
        ..Config::default()
    }
}

pub(crate) fn service() -> Service {
    service_with(config())
}

pub(crate) fn service_with(config: Config) -> Service {
    Service::start(config, &MetadataString::peer_to_peer()).unwrap()
}

pub(crate) fn client() -> Client {
    Client::new(&config(), &MetadataString::peer_to_peer()).unwrap()
}

/// Memory that a service exports as long as the value lives.
pub(crate) struct Exported<'a> {
    service: &'a Service,
    pub(crate) block: Block,
}

impl<'a> Exported<'a> {
    pub(crate) fn new(service: &'a Service, len: usize, access: Access) -> Self {
        let block = Block::new(len);
        // SAFETY: the block is read and written through volatile copies alone, and is freed after the
        // withdrawal.
        unsafe { service.export(block.span(), access) }.unwrap();
        Self { service, block }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.block.span().as_ptr().addr() as u64
    }
}

impl Drop for Exported<'_> {
    fn drop(&mut self) {
        // A test may have withdrawn it.
        let _ = self.service.withdraw(self.addr());
    }
}

/// A connection whose reads and writes give up after [`PATIENCE`].
pub(crate) fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((HERE, port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends raw bytes to the handshake port and returns everything that comes back until it is closed.
pub(crate) fn handshake(port: u16, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(port);
    stream.write_all(bytes).unwrap();
    everything(&mut stream)
}

/// What arrives until the peer closes or resets the connection.
pub(crate) fn everything(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("{error} after {bytes:02x?}"),
    }
}

pub(crate) fn exactly(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

pub(crate) fn request(op: Op, version: Version, addr: u64, len: u64) -> [u8; 24] {
    Request { op, version, addr, len }.to_bytes()
}

/// One exchange of version 2: the status, and what was read.
pub(crate) fn exchange(stream: &mut TcpStream, op: Op, addr: u64, bytes: &mut [u8]) -> Option<Status> {
    stream.write_all(&request(op, Version::V2, addr, bytes.len() as u64)).unwrap();
    if op == Op::Write {
        stream.write_all(bytes).unwrap();
    }
    let mut status = [0; 8];
    stream.read_exact(&mut status).unwrap();
    let status = Status::parse(&status);
    if op == Op::Read && status == Some(Status::Done) {
        stream.read_exact(bytes).unwrap();
    }
    status
}

/// A data port that does to each connection what a script says. The script gets the connection and its
/// number.
pub(crate) struct Scripted {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Scripted {
    /// The thread ends with the process.
    pub(crate) fn start(script: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, script) = (connections.clone(), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (number, script) = (count.fetch_add(1, Ordering::SeqCst), script.clone());
                std::thread::spawn(move || script(stream.unwrap(), number));
            }
        });
        Self { address, connections }
    }

    /// Connections that were accepted.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// An export of `len` bytes at `addr` behind this port.
    pub(crate) fn export(&self, addr: u64, len: u64, version: Version) -> Vec<u8> {
        export(self.address.port(), addr, len, version, ALL)
    }
}

pub(crate) fn export(port: u16, addr: u64, len: u64, version: Version, access: Access) -> Vec<u8> {
    let export = Export {
        access,
        addresses: vec![HERE],
        port,
        version,
        addr,
        len,
        life: u64::from(port),
        segment: format!("127.0.0.1:{port}"),
    };
    export.to_bytes().unwrap()
}

/// The next request on a connection; `None` when it has ended.
pub(crate) fn next_request(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = [0; 24];
    stream.read_exact(&mut bytes).ok().map(|()| Request::parse(&bytes))
}

/// Ends a connection with RST.
pub(crate) fn reset(stream: TcpStream) {
    te_fabric::net::reset_on_close(&stream);
    drop(stream);
}

/// Ends the sending direction and waits for the peer's end.
pub(crate) fn finish(mut stream: TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.read_to_end(&mut Vec::new());
}

/// A rail with one region of `bytes` bytes, attached to `blob` as [`REMOTE`].
pub(crate) fn rail(
    config: &Config,
    lookup: Option<Arc<dyn Lookup>>,
    bytes: usize,
    blob: &[u8],
) -> Node<MooncakeTransport> {
    let mut node = Node::with(MooncakeTransport::new(config, lookup).unwrap(), bytes, Access::LOCAL);
    te_core::Memory::attach(&mut node.transport, REMOTE, blob).unwrap();
    node
}
