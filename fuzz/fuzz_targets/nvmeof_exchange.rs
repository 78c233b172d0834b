//! Whatever a host sends, or a target answers, a transport neither panics nor holds a region afterwards.
#![no_main]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use libfuzzer_sys::fuzz_target;
use te_core::{
    Access, Completion, Instant, Memory, Op, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token,
    Transport,
};
use te_fabric::testkit::{Node, REGION};
use te_fabric::{Export, ExportFormat};
use te_nvmeof::command::{CC_ENABLED, CONTROLLER_ANY, Sqe, connect_data, property};
use te_nvmeof::pdu::{self, Agreed, Kind};
use te_nvmeof::{Config, NvmeofTransport};
use zerocopy::IntoBytes;

const BYTES: usize = 64 << 10;

fn node() -> Node<NvmeofTransport> {
    let config = Config { open_to_hosts: true, ..Config::default() };
    Node::with(NvmeofTransport::new(config).expect("loopback"), BYTES, Access::all())
}

/// A host's bytes, behind a valid beginning or not.
fn host(bytes: &[u8], opened: bool) {
    let mut node = node();
    let target = &mut node.transport;
    let mut stream = TcpStream::connect(target.local_address()).expect("it listens");
    if opened {
        let data = connect_data([9; 16], CONTROLLER_ANY, &target.nqn(), "nqn.2014-08.org.example:host");
        let agreed = Agreed::default();
        let talk = [
            pdu::initialize(Kind::IcReq, 0, (false, false), 0).as_bytes(),
            pdu::command(Sqe::connect(1, 0, 8, 0), 1024, agreed).bytes(),
            data.as_bytes(),
            pdu::command(Sqe::property_set(2, property::CC, CC_ENABLED), 0, agreed).bytes(),
        ]
        .concat();
        stream.write_all(&talk).expect("room");
    }
    let _ = stream.write_all(bytes);
    drop(stream);
    for step in 0..32 {
        target.poll(Instant::from_millis(step), &mut []);
    }
    target.poll(Instant::from_millis(100_000), &mut []);
    target.poll(Instant::from_millis(200_000), &mut []);
    assert_eq!(target.deregister(REGION), Ok(()));
}

/// A target's answers.
fn controller(bytes: &[u8]) {
    let mut node = node();
    let initiator = &mut node.transport;
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("it is bound");
    let export = Export {
        format: ExportFormat { magic: *b"nvmo", version: 3 },
        rights: (Access::REMOTE_READ | Access::REMOTE_WRITE).bits(),
        addresses: [address.ip(); 4],
        address_count: 1,
        port: address.port(),
        incarnation: 5,
        region: 1,
        generation: 1,
        key: 7,
        len: BYTES as u64,
        location: te_core::Location::Host,
    };
    let mut blob = [0; 256];
    let len = export.write(&mut blob).expect("room");
    let remote = RemoteRegionId::new(0, 1);
    initiator.attach(remote, &blob[..len]).expect("a valid export");
    let slice = Slice {
        token: Token(1),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(remote, 0),
        len: 8192,
        op: Op::Write,
    };
    assert_eq!(initiator.submit(&[slice]), Ok(1));
    let mut out = [Completion::applied(Token(0)); 4];
    let mut ended = initiator.poll(Instant::from_millis(1), &mut out);
    let (mut stream, _) = listener.accept().expect("the initiator connects");
    stream.set_nonblocking(true).expect("a socket");
    let _ = stream.write_all(pdu::initialize(Kind::IcResp, 0, (false, false), 8192).as_bytes());
    let _ = stream.write_all(bytes);
    for step in 2..32 {
        ended += initiator.poll(Instant::from_millis(step), &mut out);
        let _ = stream.read(&mut [0; 4096]);
    }
    drop((stream, listener));
    for step in 1..16 {
        ended += initiator.poll(Instant::from_millis(step * 10_000), &mut out);
    }
    assert_eq!(ended, 1, "the slice ends once");
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    match which % 3 {
        0 => host(bytes, false),
        1 => host(bytes, true),
        _ => controller(bytes),
    }
});
