use proptest::prelude::*;

use super::*;

/// What a live peer (0.3.13.post1) sent.
const LIVE: &str = concat!(
    r#"{"buffers":[{"addr":139895810027536,"length":1048576,"name":"127.0.0.1:16031"}],"name":"127.0.0.1:16031","#,
    r#""protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":15180,"#,
    r#""tcp_proto_version":2,"timestamp":"2026-11-23 08:45:27.816756"}"#,
    "\n"
);

fn parse(text: &str) -> Result<SegmentDescriptor, DescriptorError> {
    SegmentDescriptor::parse(text.as_bytes())
}

fn descriptor() -> SegmentDescriptor {
    SegmentDescriptor {
        name: "h:1".into(),
        data_host: Some("h".into()),
        data_port: 2,
        version: Version::V2,
        buffers: vec![Buffer { addr: 0x1000, len: 0x1000, name: "h:1".into() }],
        native: None,
    }
}

fn with_buffers(buffers: &[(u64, u64)]) -> SegmentDescriptor {
    let buffers = buffers.iter().map(|&(addr, len)| Buffer { addr, len, name: "b".into() }).collect();
    SegmentDescriptor { buffers, ..descriptor() }
}

#[test]
fn the_descriptor_of_a_live_peer_is_parsed() {
    let live = parse(LIVE).expect("a live peer sent it");
    assert_eq!((live.name.as_str(), live.data_host.as_deref()), ("127.0.0.1:16031", Some("127.0.0.1")));
    assert_eq!((live.data_port, live.version, live.native), (15_180, Version::V2, None));
    let [buffer] = &live.buffers[..] else { panic!("{:?}", live.buffers) };
    assert_eq!(
        (buffer.addr, buffer.len, buffer.name.as_str()),
        (139_895_810_027_536, 1 << 20, "127.0.0.1:16031")
    );
}

#[test]
fn what_is_written_has_the_members_of_a_live_peer_in_its_order() {
    let written = parse(LIVE).expect("a live peer sent it").to_json();
    let written = String::from_utf8(written).expect("JSON is UTF-8");
    // The time of writing is optional.
    assert_eq!(written, LIVE.replace(r#","timestamp":"2026-11-23 08:45:27.816756""#, ""));
    let native = Native { endpoint: "h:9".into(), incarnation: u64::MAX };
    let ours = SegmentDescriptor { native: Some(native), ..descriptor() };
    assert_eq!(SegmentDescriptor::parse(&ours.to_json()), Ok(ours.clone()));
    let text = String::from_utf8(ours.to_json()).expect("JSON is UTF-8");
    assert!(text.contains(r#""snowskin":{"endpoint":"h:9","incarnation":18446744073709551615}"#), "{text}");
}

#[test]
fn versions_are_read_as_mooncake_reads_them() {
    for (version, expected) in [
        ("", Version::V1),
        (r#","tcp_proto_version":null"#, Version::V1),
        (r#","tcp_proto_version":1"#, Version::V1),
        (r#","tcp_proto_version":-7"#, Version::V1),
        (r#","tcp_proto_version":2"#, Version::V2),
        (r#","tcp_proto_version":3"#, Version::V2),
    ] {
        let text = format!(r#"{{"protocol":"tcp","tcp_data_port":1{version}}}"#);
        assert_eq!(parse(&text).expect("valid").version, expected, "{text}");
    }
}

#[test]
fn unknown_members_and_other_transports_beside_tcp_are_ignored() {
    let text = r#"{"a":[{}],"protocol":["tcp","hip"],"tcp_data_port":1,"buffers":[
        {"addr":1,"length":2,"name":"a","protocol":"hip"},{"addr":3,"length":4,"name":"b","protocol":"tcp","rkey":[1]}]}"#;
    assert_eq!(parse(text).expect("valid").buffers, [Buffer { addr: 3, len: 4, name: "b".into() }]);
}

#[test]
fn a_member_of_ours_that_is_not_as_we_write_it_is_ignored() {
    for ours in [
        "1",
        "null",
        "[]",
        "{}",
        r#"{"endpoint":"h:1"}"#,
        r#"{"endpoint":"h","incarnation":1}"#,
        r#"{"endpoint":"h:1","incarnation":-1}"#,
        r#"{"endpoint":7,"incarnation":1}"#,
    ] {
        let text = format!(r#"{{"protocol":"tcp","tcp_data_port":1,"snowskin":{ours}}}"#);
        assert_eq!(parse(&text).expect("valid").native, None, "{ours}");
    }
}

/// Each row: what a peer sends, and what the error names. Several of them abort the process of a Mooncake
/// peer.
#[test]
fn every_shape_of_json_is_accepted_or_refused_with_the_member_that_is_wrong() {
    for (text, named) in [
        ("", "not JSON"),
        ("\0", "not JSON"),
        ("nope", "not JSON"),
        ("{nope", "not JSON"),
        (r#"{"protocol":"tcp","tcp_data_port":1}{"#, "not JSON"),
        ("[1]", "must be an object, but is a list"),
        (r#""str""#, "must be an object, but is the string \"str\""),
        ("1e400", "not JSON"),
        ("7", "must be an object, but is 7"),
        ("null", "must be an object, but is missing"),
        ("{}", "`protocol` of the descriptor must be a string, but is missing"),
        (r#"{"protocol":{}}"#, "`protocol`"),
        (r#"{"protocol":7}"#, "`protocol`"),
        (r#"{"protocol":"rdma"}"#, "over \"rdma\""),
        (r#"{"protocol":["rdma","hip"]}"#, "MC_FORCE_TCP=1"),
        (r#"{"protocol":[]}"#, "MC_FORCE_TCP=1"),
        (r#"{"protocol":"tcp"}"#, "`tcp_data_port`"),
        (r#"{"protocol":"tcp","tcp_data_port":0}"#, "`tcp_data_port`"),
        (r#"{"protocol":"tcp","tcp_data_port":-1}"#, "`tcp_data_port`"),
        (r#"{"protocol":"tcp","tcp_data_port":65536}"#, "`tcp_data_port`"),
        (r#"{"protocol":"tcp","tcp_data_port":"1"}"#, "`tcp_data_port`"),
        (r#"{"protocol":"tcp","tcp_data_port":1.5}"#, "`tcp_data_port`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"tcp_proto_version":"2"}"#, "`tcp_proto_version`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"tcp_proto_version":{}}"#, "`tcp_proto_version`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"name":{}}"#, "`name`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"tcp_data_host":[]}"#, "`tcp_data_host`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"buffers":{}}"#, "`buffers`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"buffers":"x"}"#, "`buffers`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[null]}"#, "`buffers[0]`"),
        (r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{}]}"#, "`buffers[0].addr`"),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":0,"length":1,"name":"a"}]}"#,
            "`buffers[0].addr`",
        ),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":1,"length":0,"name":"a"}]}"#,
            "`buffers[0].length`",
        ),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":-1,"length":1,"name":"a"}]}"#,
            "`buffers[0].addr`",
        ),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":1,"length":1,"name":""}]}"#,
            "`buffers[0].name`",
        ),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":1,"length":1,"name":7}]}"#,
            "`buffers[0].name`",
        ),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":1,"length":1,"name":"a"},
                {"addr":18446744073709551615,"length":2,"name":"a"}]}"#,
            "`buffers[1].length`",
        ),
        (
            r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[{"addr":18446744073709551616,"length":2,"name":"a"}]}"#,
            "`buffers[0].addr`",
        ),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(named), "{text}: {error}");
    }
}

#[test]
fn json_that_is_nested_deeply_is_refused_without_a_deep_stack() {
    let deep = "[".repeat(1 << 20);
    assert!(matches!(parse(&deep), Err(DescriptorError::Json(_))));
    let inside = format!(r#"{{"protocol":"tcp","tcp_data_port":1,"a":{}}}"#, "[".repeat(100_000));
    assert!(matches!(parse(&inside), Err(DescriptorError::Json(_))));
}

#[test]
fn texts_that_a_peer_chose_are_short_in_errors_and_bounded_in_descriptors() {
    let long = "x".repeat(100_000);
    for text in [
        format!(r#"{{"protocol":"{long}"}}"#),
        format!(r#"{{"protocol":"tcp","tcp_data_port":"{long}"}}"#),
        format!(r#"{{"protocol":"tcp","tcp_data_port":1,"name":"{long}"}}"#),
    ] {
        let error = parse(&text).expect_err("it is refused").to_string();
        assert!(error.len() < 300, "{} bytes", error.len());
    }
}

#[test]
fn invalid_utf8_is_replaced() {
    let bytes = b"{\"name\":\"a\xffb\",\"protocol\":\"tcp\",\"tcp_data_port\":1}";
    assert_eq!(SegmentDescriptor::parse(bytes).expect("valid").name, "a\u{fffd}b");
}

#[test]
fn buffers_that_overlap_are_joined_and_those_that_touch_are_not() {
    let ranges = |buffers: &[(u64, u64)]| {
        with_buffers(buffers).ranges().iter().map(|range| (range.addr, range.len)).collect::<Vec<_>>()
    };
    assert_eq!(ranges(&[(200, 50), (100, 100)]), [(100, 100), (200, 50)]);
    assert_eq!(ranges(&[(100, 101), (200, 50)]), [(100, 150)]);
    assert_eq!(ranges(&[(100, 500), (200, 50), (300, 10)]), [(100, 500)]);
    assert_eq!(ranges(&[]), []);
    let two = with_buffers(&[(100, 100), (200, 50)]);
    assert!(two.contains(100, 100) && two.contains(249, 1) && !two.contains(199, 2) && !two.contains(249, 2));
    assert!(!two.contains(u64::MAX, 2) && !two.contains(99, 1));
}

#[test]
fn a_life_changes_with_the_data_port_and_the_incarnation_and_not_with_the_buffers() {
    let one = descriptor();
    assert_eq!(with_buffers(&[(1, 1)]).life(), one.life());
    let native = Some(Native { endpoint: "h:9".into(), incarnation: 1 });
    for other in [
        SegmentDescriptor { data_port: 3, ..descriptor() },
        SegmentDescriptor { data_host: None, ..descriptor() },
        SegmentDescriptor { native, ..descriptor() },
    ] {
        assert_ne!(other.life(), one.life());
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        Just(Value::from("tcp")),
    ];
    let keys = prop_oneof![
        Just("name".to_owned()),
        Just("protocol".to_owned()),
        Just("tcp_data_port".to_owned()),
        Just("tcp_data_host".to_owned()),
        Just("tcp_proto_version".to_owned()),
        Just("buffers".to_owned()),
        Just("addr".to_owned()),
        Just("length".to_owned()),
        Just("snowskin".to_owned()),
        Just("endpoint".to_owned()),
        Just("incarnation".to_owned()),
    ];
    leaf.prop_recursive(4, 64, 8, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::vec((keys.clone(), inner), 0..8)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_json_is_accepted_or_refused_and_what_is_accepted_comes_back(json in any_json()) {
        let bytes = serde_json::to_vec(&json).expect("a value");
        if let Ok(accepted) = SegmentDescriptor::parse(&bytes) {
            prop_assert_eq!(SegmentDescriptor::parse(&accepted.to_json()), Ok(accepted));
        }
    }

    #[test]
    fn any_bytes_are_accepted_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = SegmentDescriptor::parse(&bytes);
    }

    #[test]
    fn joined_ranges_cover_each_buffer_and_do_not_overlap(buffers in proptest::collection::vec((1_u64..500, 1_u64..100), 0..12)) {
        let descriptor = with_buffers(&buffers);
        let ranges = descriptor.ranges();
        prop_assert!(buffers.iter().all(|&(addr, len)| descriptor.contains(addr, len)));
        prop_assert!(ranges.windows(2).all(|pair| pair[0].end() <= pair[1].addr));
    }
}
