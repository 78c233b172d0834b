//! The handshake port, byte by byte: what a Mooncake engine sends and expects, and what a hostile one sends.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream};

use common::{ALL, Exported, config, connect, everything, handshake, service, service_with};
use te_fabric::testkit::eventually;
use te_mooncake::frame::{self, Kind};
use te_mooncake::{Client, Config, MetadataString, Mode, PeerError, SegmentDescriptor, Service, StartError};

fn framed(kind: u8, json: &str) -> Vec<u8> {
    [&(json.len() as u64 + 1).to_le_bytes()[..], &[kind], json.as_bytes()].concat()
}

#[test]
fn requests_get_the_answers_of_a_live_peer() {
    let service = service();
    let port = service.rpc_port();
    // Recorded from 0.3.13.post1, but for the reason in the last two.
    assert_eq!(handshake(port, &framed(3, "{}")), b"\x16\0\0\0\0\0\0\0\x03{\"status\":\"success\"}\n");
    assert_eq!(
        handshake(port, &framed(2, r#"{"name":"n","notify_msg":"m \u00e9"}"#)),
        b"\x24\0\0\0\0\0\0\0\x02{\"name\":\"\",\"notify_msg\":\"success\"}\n"
    );
    let notified = service.take_notifications();
    assert_eq!((notified[0].name.as_str(), notified[0].message.as_str(), notified.len()), ("n", "m é", 1));
    for (request, first) in [
        (framed(0, r#"{"local_nic_path":"a@b","peer_nic_path":"c@d","qp_num":[1]}"#), 0),
        (frame::write(Kind::Untyped, br#"{"local_nic_path":"a@b"}"#), b'{'),
        // Not a type: the whole is the JSON of an old release, which may begin with white space.
        (framed(9, "{}"), b'{'),
    ] {
        let answer = handshake(port, &request);
        assert_eq!(answer[8], first, "{request:?}");
        let json: serde_json::Value = serde_json::from_slice(json_of(&answer[8..])).unwrap();
        for (member, empty) in
            [("local_gid", ""), ("local_nic_path", ""), ("payload", ""), ("peer_nic_path", "")]
        {
            assert_eq!(json[member], empty);
        }
        assert_eq!((&json["local_lid"], &json["qp_num"]), (&serde_json::json!(0), &serde_json::json!([])));
        assert!(json["reply_msg"].as_str().unwrap().contains("TCP alone"), "{json}");
    }
}

/// The JSON behind the type byte, if there is one.
fn json_of(body: &[u8]) -> &[u8] {
    if body[0] == b'{' { body } else { &body[1..] }
}

#[test]
fn the_descriptor_lists_what_is_exported_as_long_as_it_is() {
    let service = service();
    let describe = || {
        let answer = handshake(service.rpc_port(), &framed(1, r#"{"name":"asker"}"#));
        assert_eq!(answer[8], 1);
        SegmentDescriptor::parse(&answer[9..]).unwrap()
    };
    assert_eq!(describe().buffers, []);
    let exported = Exported::new(&service, 4096, ALL);
    let segment = describe();
    assert_eq!((segment.name.as_str(), segment.data_host.as_deref()), (service.name(), Some("127.0.0.1")));
    assert_eq!((segment.data_port, segment.buffers[0].addr), (service.data_port(), exported.addr()));
    assert_eq!(service.name(), format!("127.0.0.1:{}", service.rpc_port()));
    service.set_native("127.0.0.1:7400", 7).unwrap();
    assert_eq!(describe().native.map(|native| native.endpoint).as_deref(), Some("127.0.0.1:7400"));
    drop(exported);
    assert_eq!(describe().buffers, []);
}

#[test]
fn what_is_no_request_is_closed_without_an_answer() {
    let service = service();
    for (bytes, what) in [
        (0_u64.to_le_bytes().to_vec(), "a length of 0"),
        ((u64::MAX).to_le_bytes().to_vec(), "a length of 2^64 - 1"),
        (((1 << 20) + 1_u64).to_le_bytes().to_vec(), "a length above the limit"),
        (framed(0x80, "{}"), "a type above 127"),
        (framed(1, "{nope"), "no JSON"),
        (framed(2, "{nope"), "no JSON"),
        (framed(3, ""), "no bytes"),
        (framed(0, "\u{feff}{}"), "a byte order mark"),
        (framed(1, &"[".repeat(1000)), "deep JSON"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "HTTP"),
    ] {
        assert_eq!(handshake(service.rpc_port(), &bytes), b"", "{what}");
    }
    assert_eq!(handshake(service.rpc_port(), &framed(3, "{}")).len(), 30, "it still answers");
}

/// Several of these abort the process of a Mooncake engine.
#[test]
fn a_notification_of_any_shape_is_answered() {
    let service = service();
    for (json, taken) in [
        ("[1]", false),
        (r#""str""#, false),
        ("null", false),
        (r#"{"name":{}}"#, false),
        (r#"{"notify_msg":["x"]}"#, false),
        ("{}", true),
        (r#"{"name":1,"notify_msg":null}"#, true),
    ] {
        let answer = handshake(service.rpc_port(), &framed(2, json));
        let answer = te_mooncake::message::parse_notify_answer(&answer[9..]).unwrap();
        assert_eq!(answer, taken, "{json}");
    }
    assert_eq!(service.take_notifications().len(), 2);
    assert_eq!(handshake(service.rpc_port(), &framed(0, r#"{"qp_num":["x"],"local_nic_path":[]}"#))[8], 0);
}

#[test]
fn a_request_may_arrive_byte_by_byte_and_be_a_mebibyte_long() {
    let service = service();
    let mut stream = connect(service.rpc_port());
    for byte in framed(3, "{}") {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(everything(&mut stream).len(), 30);
    let message = "m".repeat((1 << 20) - 100);
    let request = frame::write(Kind::Notify, &te_mooncake::message::notify("long", &message));
    let answer = handshake(service.rpc_port(), &request);
    assert!(te_mooncake::message::parse_notify_answer(&answer[9..]).unwrap());
    assert_eq!(service.take_notifications()[0].message, message);
}

#[test]
fn silent_clients_stall_no_other_handshake() {
    let service = service();
    let silent: Vec<TcpStream> = (0..64).map(|_| connect(service.rpc_port())).collect();
    for mut stream in &silent {
        // Some have sent a part of a request.
        stream.write_all(&framed(3, "{}")[..5]).unwrap();
    }
    assert_eq!(handshake(service.rpc_port(), &framed(3, "{}")).len(), 30);
}

#[test]
fn when_there_are_too_many_handshakes_the_oldest_incomplete_one_makes_room() {
    let service = service_with(Config { handshakes_max: 2, ..config() });
    let mut first = connect(service.rpc_port());
    first.write_all(&[1]).unwrap();
    eventually("the first is open", || service.stats().handshakes.open == 1);
    let _second = connect(service.rpc_port());
    eventually("the second is open", || service.stats().handshakes.open == 2);
    assert_eq!(handshake(service.rpc_port(), &framed(3, "{}")).len(), 30);
    assert_eq!(everything(&mut first), b"");
    assert_eq!(service.stats().handshakes.replaced, 1);
}

#[test]
fn the_queue_of_notifications_is_bounded_and_a_full_one_refuses() {
    let service = service_with(Config { notifications_max: 2, ..config() });
    let client = common::client();
    for _ in 0..2 {
        client.notify(service.name(), "n", "m").unwrap();
    }
    let full = client.notify(service.name(), "n", "m").unwrap_err();
    assert_eq!(full, PeerError::Refused { name: service.name().into() });
    assert_eq!((service.take_notifications().len(), service.stats().notifications_refused), (2, 1));
    client.notify(service.name(), "n", "m").unwrap();
}

#[test]
fn peers_that_are_not_listed_are_closed_before_a_byte_is_read() {
    let service = service_with(Config { peers: vec!["10.0.0.0/8".parse().unwrap()], ..config() });
    assert_eq!(refused(service.rpc_port()), b"");
    assert_eq!(refused(service.data_port()), b"");
    let stats = service.stats();
    eventually("both are counted", || {
        let stats = service.stats();
        (stats.handshakes.refused, stats.data.refused) == (1, 1)
    });
    assert_eq!((stats.handshakes.accepted, stats.data.accepted), (0, 0));
}

/// What a port sends to a peer that it refuses.
fn refused(port: u16) -> Vec<u8> {
    let mut stream = connect(port);
    // The connection may be closed by now.
    let _ = stream.write_all(&framed(3, "{}"));
    everything(&mut stream)
}

#[test]
fn it_starts_only_when_it_is_asked_for_and_told_where() {
    let start = |config| Service::start(config, &MetadataString::peer_to_peer());
    assert!(matches!(start(Config::default()), Err(StartError::Off)));
    assert!(matches!(
        start(Config { bind: None, ..config() }),
        Err(StartError::Config { field: "bind", .. })
    ));
    let none = start(Config { peers: Vec::new(), ..config() });
    assert!(matches!(none, Err(StartError::Config { field: "peers", .. })));
    let initiator = start(Config { mode: Mode::Initiator, ..Config::default() }).unwrap();
    assert_eq!((initiator.rpc_port(), initiator.data_port(), initiator.name()), (0, 0, ""));
    let taken = TcpListener::bind((common::HERE, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = start(Config { rpc_port: port, ..config() }).unwrap_err().to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[test]
fn a_port_is_chosen_from_the_range() {
    let (min, max) = (21_000, 21_999);
    let service = service_with(Config { port_min: min, port_max: max, ..config() });
    assert!((min..=max).contains(&service.rpc_port()) && (min..=max).contains(&service.data_port()));
    let one = Config { port_min: service.data_port(), port_max: service.data_port(), ..config() };
    let full = Service::start(one, &MetadataString::peer_to_peer());
    assert!(matches!(full, Err(StartError::Listen { .. })), "{full:?}");
}

#[test]
fn peers_are_told_the_host_that_is_configured() {
    let service = service_with(Config { advertise_host: Some("localhost".into()), ..config() });
    assert_eq!(service.name(), format!("localhost:{}", service.rpc_port()));
    let segment = common::client().descriptor(service.name()).unwrap();
    assert_eq!(segment.data_host.as_deref(), Some("localhost"));
    let addresses = common::client().data_addresses(service.name(), &segment).unwrap();
    assert!(addresses.contains(&common::HERE), "{addresses:?}");
    let nowhere = SegmentDescriptor { data_host: Some("0.0.0.0".into()), ..segment };
    let addresses = common::client().data_addresses(service.name(), &nowhere).unwrap();
    assert!(addresses.iter().all(IpAddr::is_loopback), "that of the handshake port: {addresses:?}");
}

/// What a client makes of peers that answer wrongly, or not.
#[test]
fn a_client_survives_every_answer() {
    type IsExpected = fn(&PeerError) -> bool;
    let answers: [(&[u8], IsExpected); 9] = [
        (b"", |error| matches!(error, PeerError::Unreachable { .. })),
        (&[5, 0, 0], |error| matches!(error, PeerError::Unreachable { .. })),
        (&[0; 8], |error| matches!(error, PeerError::Frame { .. })),
        (&[0xff; 64], |error| matches!(error, PeerError::Frame { .. })),
        (b"\x03\0\0\0\0\0\0\0\x03{}", |error| matches!(error, PeerError::Kind { .. })),
        (b"\x02\0\0\0\0\0\0\0{}", |error| matches!(error, PeerError::Kind { .. })),
        (b"\x03\0\0\0\0\0\0\0\x01{}", |error| matches!(error, PeerError::Descriptor { .. })),
        (b"\x04\0\0\0\0\0\0\0\x01[1]", |error| matches!(error, PeerError::Descriptor { .. })),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", |error| matches!(error, PeerError::Frame { .. })),
    ];
    for (answer, is_expected) in answers {
        let listener = TcpListener::bind((common::HERE, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 12];
                stream.read_exact(&mut request).unwrap();
                stream.write_all(answer).unwrap();
                common::finish(stream);
            });
            let error = common::client().descriptor(&format!("127.0.0.1:{port}")).unwrap_err();
            assert!(is_expected(&error), "{answer:?}: {error}");
        });
    }
    let port = { TcpListener::bind((common::HERE, 0)).unwrap().local_addr().unwrap().port() };
    let error = common::client().probe(&format!("127.0.0.1:{port}")).unwrap_err();
    assert!(
        matches!(error, PeerError::Unreachable { .. }) && error.to_string().contains("check that it runs"),
        "{error}"
    );
    assert!(matches!(common::client().probe("no port:x"), Err(PeerError::Name(_))));
    let short = Client::new(&config(), &MetadataString::peer_to_peer()).unwrap();
    let long = short.notify("127.0.0.1:1", "n", &"m".repeat(1 << 20)).unwrap_err();
    assert!(matches!(long, PeerError::TooLong { .. }), "{long}");
}

#[test]
fn a_service_on_ipv6_is_found_by_its_bracketed_name() {
    if TcpListener::bind("[::1]:0").is_err() {
        eprintln!("not tested: this host has no IPv6");
        return;
    }
    let here = IpAddr::from(std::net::Ipv6Addr::LOCALHOST);
    let service = service_with(Config { bind: Some(here), peers: vec!["::1".parse().unwrap()], ..config() });
    assert_eq!(service.name(), format!("[::1]:{}", service.rpc_port()));
    let client = common::client();
    let segment = client.descriptor(service.name()).unwrap();
    assert_eq!(client.data_addresses(service.name(), &segment).unwrap(), [here]);
    client.notify(service.name(), "n", "m").unwrap();
    let both = service_with(Config { bind: Some("::".parse().unwrap()), ..config() });
    // Connections over IPv4 count as such.
    client.probe(&format!("127.0.0.1:{}", both.rpc_port())).unwrap();
}
