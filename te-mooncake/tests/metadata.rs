//! Mooncake's metadata on real servers: what is stored, which engines find it, and what happens when a server
//! is not there. Tests of a server that is not installed are ignored, with a reason.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]
#![allow(unsafe_code, reason = "exports memory")]

mod common;
#[path = "common/servers.rs"]
mod servers;

use std::process::ExitCode;
use std::time::Instant;

use common::{ALL, Exported, config};
use libtest_mimic::{Arguments, Completion, Trial};
use servers::{Kind, Server};
use te_fabric::testkit::Block;
use te_metadata::MetadataError;
use te_mooncake::message::RpcMeta;
use te_mooncake::{
    Client, Config, ExportError, PeerError, SegmentDescriptor, Service, StartError, WithdrawError,
};

type Test = fn(Kind);
const OF_ALL: [(&str, Test); 6] = [
    ("the_entries_of_an_engine_are_there_as_long_as_it_is", entries),
    ("a_segment_is_found_by_its_name_and_its_owner_by_rpc_meta", found_by_name),
    ("a_name_with_a_slash_and_a_cluster_have_their_own_keys", keys),
    ("entries_of_any_shape_are_survived", any_shape),
    ("a_server_that_is_gone_refuses_exports_and_leaves_nothing_exported", server_gone),
    ("a_descriptor_longer_than_a_frame_is_refused", long_descriptor),
];
const OF_HTTP: [(&str, Test); 1] = [("the_requests_are_those_of_mooncake", requests)];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for kind in Kind::ALL {
        let of_kind: &[(&str, Test)] = if kind == Kind::Http { &OF_HTTP } else { &[] };
        for &(name, test) in OF_ALL.iter().chain(of_kind) {
            trials.push(Trial::ignorable_test(format!("{}::{name}", kind.name()), move || {
                if let Some(missing) = kind.missing() {
                    eprintln!("ignored: {missing}");
                    return Ok(Completion::ignored_with(missing));
                }
                test(kind);
                Ok(Completion::Completed)
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn named(name: &str) -> Config {
    Config { name: Some(name.into()), ..config() }
}

fn start(server: &Server, config: Config) -> Service {
    Service::start(config, &server.metadata()).unwrap()
}

fn asker(server: &Server) -> Client {
    Client::new(&config(), &server.metadata()).unwrap()
}

fn stored(server: &Server, name: &str) -> SegmentDescriptor {
    SegmentDescriptor::parse(server.get(&format!("mooncake/ram/{name}")).unwrap().as_bytes()).unwrap()
}

fn entries(kind: Kind) {
    let server = Server::start(kind);
    let service = start(&server, named("nodeA:12345"));
    assert_eq!(service.name(), "nodeA:12345");
    let meta = RpcMeta::parse(server.get("mooncake/rpc_meta/nodeA:12345").unwrap().as_bytes()).unwrap();
    assert_eq!((meta.host.as_str(), meta.port), ("127.0.0.1", service.rpc_port()));
    assert_eq!(stored(&server, "nodeA:12345").buffers, []);
    let exported = Exported::new(&service, 4096, ALL);
    let buffers = stored(&server, "nodeA:12345").buffers;
    assert_eq!(
        (buffers[0].addr, buffers[0].len, buffers[0].name.as_str()),
        (exported.addr(), 4096, "nodeA:12345")
    );
    service.set_native("127.0.0.1:7400", 7).unwrap();
    assert_eq!(stored(&server, "nodeA:12345").native.unwrap().incarnation, 7);
    drop(exported);
    assert_eq!(stored(&server, "nodeA:12345").buffers, []);
    service.stop();
    assert_eq!(server.get("mooncake/rpc_meta/nodeA:12345"), None);
    assert_eq!(server.get("mooncake/ram/nodeA:12345"), None);
}

fn found_by_name(kind: Kind) {
    let server = Server::start(kind);
    let service = start(&server, named("prefill"));
    let exported = Exported::new(&service, 4096, ALL);
    let client = asker(&server);
    let segment = client.descriptor("prefill").unwrap();
    assert_eq!((segment.data_port, segment.buffers[0].addr), (service.data_port(), exported.addr()));
    assert_eq!(client.data_addresses("prefill", &segment).unwrap(), [common::HERE]);
    // Releases before 0.3.13 do not say the host of the data port: it is that of the handshakes.
    let old = SegmentDescriptor { data_host: None, ..segment };
    assert_eq!(client.data_addresses("prefill", &old).unwrap(), [common::HERE]);
    client.probe("prefill").unwrap();
    client.notify("prefill", "step", "done").unwrap();
    assert_eq!(service.take_notifications()[0].message, "done");
    match client.descriptor("decode") {
        Err(PeerError::Unknown { name, server }) => {
            assert!(name == "decode" && server.contains("127.0.0.1"), "{server}")
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(client.probe("decode"), Err(PeerError::Unknown { .. })));
}

fn keys(kind: Kind) {
    let server = Server::start(kind);
    let one = start(&server, named("pool/node é"));
    assert!(
        server.get("mooncake/pool/node é").is_some() && server.get("mooncake/rpc_meta/pool/node é").is_some()
    );
    assert!(asker(&server).descriptor("pool/node é").is_ok());
    let blue = Config { cluster_id: Some("blue".into()), ..named("prefill") };
    let other = start(&server, blue.clone());
    assert!(
        server.get("mooncake/blue/ram/prefill").is_some() && server.get("mooncake/ram/prefill").is_none()
    );
    assert!(Client::new(&blue, &server.metadata()).unwrap().descriptor("prefill").is_ok());
    assert!(matches!(asker(&server).descriptor("prefill"), Err(PeerError::Unknown { .. })));
    drop((one, other));
    assert_eq!(server.get("mooncake/pool/node é"), None);
}

fn any_shape(kind: Kind) {
    let server = Server::start(kind);
    let client = asker(&server);
    for value in ["{}", "[1]", "\"str\"", "{nope", "{\"protocol\":\"rdma\"}", "null"] {
        server.put("mooncake/ram/bad", value);
        assert!(matches!(client.descriptor("bad"), Err(PeerError::Descriptor { .. })), "{value}");
        server.put("mooncake/rpc_meta/bad", value);
        assert!(matches!(client.probe("bad"), Err(PeerError::Message { .. })), "{value}");
    }
    // Of an engine that is gone: its port is closed.
    server.put("mooncake/rpc_meta/gone", r#"{"ip_or_host_name":"127.0.0.1","rpc_port":1}"#);
    assert!(matches!(client.probe("gone"), Err(PeerError::Unreachable { .. })));
    // A later engine takes the name over.
    let service = start(&server, named("bad"));
    client.probe("bad").unwrap();
    assert_eq!(client.descriptor("bad").unwrap().data_port, service.data_port());
}

fn server_gone(kind: Kind) {
    let mut server = Server::start(kind);
    let service = start(&server, named("prefill"));
    let block = Block::new(4096);
    // SAFETY: the block outlives the exports, and is not accessed.
    let export = || unsafe { service.export(block.span(), ALL) };
    let addr = block.span().as_ptr().addr() as u64;
    export().unwrap();
    server.break_down();
    assert!(matches!(
        service.withdraw(addr),
        Err(WithdrawError::Metadata(MetadataError::Unreachable { .. }))
    ));
    assert_eq!(service.withdraw(addr), Err(WithdrawError::NotFound(addr)), "it is withdrawn");
    assert!(matches!(export(), Err(ExportError::Metadata(_))));
    assert_eq!(service.withdraw(addr), Err(WithdrawError::NotFound(addr)), "it is not exported");
    let began = Instant::now();
    service.stop();
    // timing: the end of a process does not wait for a server that is gone
    assert!(began.elapsed().as_secs() < 3);
    let refused = Service::start(named("other"), &server.metadata());
    assert!(matches!(refused, Err(StartError::Publish(MetadataError::Unreachable { .. }))));
}

fn long_descriptor(kind: Kind) {
    let server = Server::start(kind);
    let long = format!("{{\"name\":\"{}\"}}", "x".repeat(1 << 20));
    server.put("mooncake/ram/long", &long);
    assert!(matches!(
        asker(&server).descriptor("long"),
        Err(PeerError::Metadata(MetadataError::Garbage { .. }))
    ));
}

/// In the order of a live engine (0.3.13.post1), but that it reads its own entry before it replaces it.
fn requests(kind: Kind) {
    let server = Server::start(kind);
    let service = start(&server, named("nodeA:12345"));
    drop(Exported::new(&service, 64, ALL));
    service.stop();
    let ram = "/metadata?key=mooncake%2Fram%2FnodeA%3A12345";
    let meta = "/metadata?key=mooncake%2Frpc_meta%2FnodeA%3A12345";
    let expected = [
        format!("PUT {meta} 200"),
        format!("PUT {ram} 200"),
        format!("PUT {ram} 200"),
        format!("PUT {ram} 200"),
        format!("DELETE {meta} 200"),
        format!("DELETE {ram} 200"),
    ];
    assert_eq!(server.requests(), expected);
}
