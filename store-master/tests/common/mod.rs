//! A master on loopback, and a client that can send anything.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod followers;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use store_core::message::{
    Commit, Exists, Greeting, Hello, Mount, MountSegment, NewObject, Operation, PutEnd, PutOptions,
    PutRequest, PutStart, Welcome,
};
use store_core::wire::{HEADER_BYTES, VERSION};
use store_core::{Frame, Header, Incarnation, Key, NodeId};
use store_master::{Config, MasterHandle, MasterServer};

/// A value with changes: settings outside of their crate are changed field by field.
pub(crate) fn with<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

pub(crate) fn config() -> Config {
    Config {
        rpc_listen: "127.0.0.1:0".parse().unwrap(),
        http_listen: Some("127.0.0.1:0".parse().unwrap()),
        store: store_core::MasterConfig { epoch: 7, ..Default::default() },
        ..Config::default()
    }
}

pub(crate) fn start() -> MasterHandle {
    start_with(config())
}

pub(crate) fn start_with(config: Config) -> MasterHandle {
    MasterServer::bind(config).unwrap().spawn().unwrap()
}

/// A socket that fails after a time instead of waiting without limit.
pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// A frame as it was received.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) header: Header,
    pub(crate) bytes: Vec<u8>,
}

impl Answer {
    pub(crate) fn frame(&self) -> Frame<'_> {
        Frame::parse(&self.bytes).unwrap().unwrap().0
    }
}

pub(crate) fn read_answer(stream: &mut impl Read) -> std::io::Result<Answer> {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes)?;
    let body_len = u32::from_le_bytes(bytes[20..24].try_into().unwrap()) as usize;
    bytes.resize(HEADER_BYTES + body_len, 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..])?;
    let header = Frame::parse(&bytes).unwrap().unwrap().0.header;
    Ok(Answer { header, bytes })
}

pub(crate) fn hello(request_id: u64) -> Vec<u8> {
    let mut out = Vec::new();
    Hello::encode_request(&mut out, request_id, &Greeting::default(), std::iter::empty()).unwrap();
    out
}

pub(crate) fn exists(request_id: u64, keys: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    Exists::encode_request(&mut out, request_id, &(), keys.iter().map(|key| Key(key))).unwrap();
    out
}

/// Checks that a new client is served.
pub(crate) fn assert_serves(addr: SocketAddr) {
    let mut stream = connect(addr);
    assert_greets(&mut stream);
}

pub(crate) fn assert_greets(stream: &mut (impl Read + Write)) {
    stream.write_all(&hello(42)).unwrap();
    let answer = read_answer(stream).unwrap();
    let welcome: Welcome = Hello::decode_response(&answer.frame()).unwrap().0;
    assert_eq!((answer.header.request_id, welcome.version), (42, VERSION));
}

/// The status of the last frame before the master closes the connection.
pub(crate) fn last_words(stream: &mut TcpStream) -> i32 {
    let answer = read_answer(stream).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "{} bytes after the last answer", rest.len());
    answer.header.status
}

/// Mounts a node whose name is markup, and puts ten objects of 4 KiB.
pub(crate) fn fill(rpc: SocketAddr) {
    let mut stream = connect(rpc);
    assert_greets(&mut stream);
    fill_on(&mut stream, 0xabc, "<img src=x onerror=alert(1)>");
}

/// Mounts a node on a connection with the right to do so, and puts ten objects of 4 KiB.
pub(crate) fn fill_on(stream: &mut TcpStream, node: u64, name: &str) {
    mount_on(stream, node, name);
    (0..10_u8).for_each(|n| put_on(stream, &[b'k', n], 4096));
}

/// Puts an object, without its bytes.
pub(crate) fn put_on(stream: &mut TcpStream, key: &[u8], len: u64) {
    let mut call = |request: Vec<u8>| {
        stream.write_all(&request).unwrap();
        read_answer(stream).unwrap()
    };
    let mut out = Vec::new();
    let put = PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) };
    PutStart::encode_request(&mut out, 3, &put, [NewObject { key: Key(key), len }].into_iter()).unwrap();
    let answer = call(std::mem::take(&mut out));
    let frame: Frame<'_> = answer.frame();
    let allocation = PutStart::decode_response(&frame).unwrap().1.next().unwrap().unwrap();
    let (generation, handle) = (allocation.generation, allocation.handle);
    let commit = Commit { key: Key(key), generation, handle, checksum: 1 };
    PutEnd::encode_request(&mut out, 4, &(), [commit].into_iter()).unwrap();
    assert_eq!(call(out).header.status, 0);
}

/// The segment of a node, as it mounts it on the master of [`config`].
pub(crate) fn segment(node: u64, name: &str, len: u64) -> MountSegment<'_> {
    MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(1),
        name,
        endpoint: "n:1",
        len,
        lineage: 7,
        ..MountSegment::default()
    }
}

/// Mounts a node of 1 MiB on a connection with the right to do so.
pub(crate) fn mount_on(stream: &mut TcpStream, node: u64, name: &str) {
    let segment = segment(node, name, 1 << 20);
    let mut out = Vec::new();
    Mount::encode_request(&mut out, 2, &segment, std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    assert_eq!(read_answer(stream).unwrap().header.status, 0);
}
