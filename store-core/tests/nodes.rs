//! Mounts, node keys, and the orders to nodes to cut off writers.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::message::{
    Beat, Commit, EndTasks, Expulsion, ExpulsionEnd, FetchExpulsions, FetchRequest, FetchTasks, Greeting,
    Heartbeat, Hello, Mount, MountResponse, MountSegment, NewObject, NodeProof, NodeStatus, Operation,
    OrderSegments, PutEnd, PutOptions, PutRequest, PutRevoke, PutStart, RemoveMode, Revocation, SegmentOrder,
    SegmentState, Unmount, UnmountSegment,
};
use store_core::{
    ErrorCode, Event, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId, Peer, Placement, Role,
    Secret, SegmentNo, Session, prove,
};

const KIB: u64 = 1 << 10;
const HOUR_MS: u64 = 3_600_000;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config() -> MasterConfig {
    MasterConfig {
        node_ttl_ms: 10_000,
        put_start_discard_timeout_ms: 3_000,
        put_start_release_timeout_ms: 60_000,
        handle_key: [1, 2],
        ..MasterConfig::default()
    }
}

fn segment<'a>(node: u64, incarnation: u64, name: &'a str, key: u64) -> MountSegment<'a> {
    MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(incarnation),
        name,
        endpoint: "host:1",
        len: 64 * KIB,
        key,
        ..MountSegment::default()
    }
}

/// One request of a connection; returns its response, or the status it failed with.
macro_rules! call {
    ($master:expr, $ms:expr, $session:expr, $operation:ty, $head:expr, $items:expr) => {{
        let (mut request, mut out) = (Vec::new(), Vec::new());
        <$operation>::encode_request(&mut request, 1, &$head, $items.into_iter()).unwrap();
        $master.handle(at($ms), $session, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
        out
    }};
}

macro_rules! head {
    ($operation:ty, $out:expr) => {
        <$operation>::decode_response(&Frame::parse(&$out).unwrap().unwrap().0).map(|(head, _)| head)
    };
}

fn mount(
    master: &mut Master,
    ms: u64,
    session: &mut Session,
    segment: &MountSegment<'_>,
) -> Result<u32, String> {
    let out = call!(master, ms, session, Mount, *segment, []);
    match head!(Mount, out) {
        Ok(MountResponse::Mounted(mounted)) => Ok(mounted.segment.get()),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn as_soon_as_there_is_a_secret_who_knows_none_does_nothing_a_node_does() {
    let secrets = [("root", ""), ("", "cluster"), ("root", "cluster")];
    for (admin, cluster) in secrets {
        let config = MasterConfig {
            admin_secret: Secret::new(admin.as_bytes()),
            cluster_secret: Secret::new(cluster.as_bytes()),
            ..config()
        };
        let mut master = Master::new(config).unwrap();
        master.mount(at(0), &segment(1, 1, "s", 7)).unwrap();
        for peer in [Peer::Local, Peer::Remote] {
            let mut session = Session::new(peer, [9; 32]);
            let master = &mut master;
            let fetch =
                FetchRequest { node: NodeId::new(1), incarnation: Incarnation::new(1), count_max: 9, key: 7 };
            let proof = NodeProof { node: NodeId::new(1), key: 7 };
            let beat = Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(1), key: 7 };
            let unmount = UnmountSegment {
                node: NodeId::new(1),
                incarnation: Incarnation::new(1),
                segment: SegmentNo::new(1),
                key: 7,
            };
            let order = SegmentOrder { segment: SegmentNo::new(1), state: SegmentState::Draining };
            let denied = Err(ErrorCode::PermissionDenied);
            assert_eq!(
                head!(Mount, call!(master, 1, &mut session, Mount, segment(2, 1, "t", 1), [])).map(drop),
                denied
            );
            assert_eq!(head!(Beat, call!(master, 1, &mut session, Beat, beat, [])).map(drop), denied);
            assert_eq!(head!(Unmount, call!(master, 1, &mut session, Unmount, unmount, [])), denied);
            assert_eq!(
                head!(OrderSegments, call!(master, 1, &mut session, OrderSegments, (), [order])),
                denied
            );
            assert_eq!(
                head!(FetchTasks, call!(master, 1, &mut session, FetchTasks, fetch, [])).map(drop),
                denied
            );
            assert_eq!(head!(EndTasks, call!(master, 1, &mut session, EndTasks, proof, [])), denied);
            assert_eq!(
                head!(FetchExpulsions, call!(master, 1, &mut session, FetchExpulsions, fetch, [])),
                denied
            );
            assert_eq!(master.segments_len(), 1);
        }
        let mut session = Session::new(Peer::Remote, [9; 32]);
        let (role, secret) = if cluster.is_empty() { (Role::Admin, admin) } else { (Role::Cluster, cluster) };
        let proof = prove(secret.as_bytes(), role, &[9; 32], "");
        let mut greeting = Greeting { tenant: "", ..Greeting::default() };
        match role {
            Role::Cluster => greeting.cluster_proof = Key(&proof),
            _ => greeting.admin_proof = Key(&proof),
        }
        head!(Hello, call!(&mut master, 1, &mut session, Hello, greeting, [])).unwrap();
        assert_eq!(mount(&mut master, 1, &mut session, &segment(2, 1, "t", 1)), Ok(2));
        assert!(session.is_node() && session.is_admin() == (role == Role::Admin));
    }
}

#[test]
fn who_does_not_know_a_nodes_key_cannot_speak_for_it() {
    let mut master = Master::new(config()).unwrap();
    master.mount(at(0), &segment(1, 5, "s", 7)).unwrap();
    let illegal = Err(ErrorCode::IllegalClient);
    for incarnation in [4, 5, 6, u64::MAX] {
        assert_eq!(
            master
                .heartbeat(
                    at(1),
                    &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(incarnation), key: 8 }
                )
                .map(drop),
            illegal
        );
    }
    assert_eq!(
        master.unmount(
            at(1),
            &UnmountSegment {
                node: NodeId::new(1),
                incarnation: Incarnation::new(5),
                segment: SegmentNo::new(1),
                key: 8
            }
        ),
        illegal
    );
    let fetch = FetchRequest { node: NodeId::new(1), incarnation: Incarnation::new(5), count_max: 9, key: 8 };
    assert_eq!(master.fetch_tasks(at(1), &fetch).map(drop), illegal);
    assert_eq!(master.fetch_expulsions(at(1), &fetch).map(drop), illegal);
    let mut intruder = Session::default();
    let proof = NodeProof { node: NodeId::new(1), key: 8 };
    assert_eq!(head!(EndTasks, call!(&mut master, 1, &mut intruder, EndTasks, proof, [])), illegal);
    assert!(!intruder.is_node());
    // The same number with another key is another node.
    let held = MountResponse::Held { endpoint: "host:1", silent_ms: 1 };
    assert_eq!(master.mount(at(1), &segment(1, 9, "t", 8)), Ok(held));
    assert_eq!((master.segments_len(), master.stats().unmounts_total), (1, 0));
    // The real node is still heard of.
    assert_eq!(
        master
            .heartbeat(at(2), &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(5), key: 7 }),
        Ok(NodeStatus::Ok)
    );
}

#[test]
fn a_beat_drops_nothing_whatever_incarnation_it_names() {
    let mut master = Master::new(config()).unwrap();
    master.mount(at(0), &segment(1, 5, "s", 7)).unwrap();
    let put = master.put_start(at(0), b"k", KIB, &PutOptions::DEFAULT).unwrap();
    master.put_end(at(0), b"k", put.generation, 1).unwrap();
    for incarnation in [0, 4, 6, u64::MAX] {
        let beat = Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(incarnation), key: 7 };
        assert_eq!(master.heartbeat(at(1), &beat), Ok(NodeStatus::NeedRemount));
    }
    assert_eq!((master.segments_len(), master.stats().objects_lost_total), (1, 0));
    assert!(master.get(at(2), b"k").is_ok());
}

#[test]
fn a_name_belongs_to_who_mounted_it_while_that_one_lives() {
    let mut master = Master::new(config()).unwrap();
    let (mut first, mut second) = (Session::default(), Session::default());
    assert_eq!(mount(&mut master, 0, &mut first, &segment(1, 5, "s", 7)), Ok(1));
    // The second node changes nothing, however often it tries and whatever its incarnation is.
    for (ms, incarnation) in [(1, 1), (2, 5), (3, 6), (4, u64::MAX)] {
        let refused = mount(&mut master, ms, &mut second, &segment(2, incarnation, "s", 8)).unwrap_err();
        assert!(refused.contains("Held"), "{refused}");
        let beat = Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(5), key: 7 };
        assert_eq!(head!(Beat, call!(&mut master, ms, &mut first, Beat, beat, [])), Ok(NodeStatus::Ok));
    }
    assert_eq!((master.stats().mounts_total, master.stats().unmounts_total), (1, 0));
    let refusals = std::iter::from_fn(|| master.poll_event());
    assert_eq!(refusals.filter(|event| matches!(event, Event::MountRefused { .. })).count(), 4);
    // The first node's connection ends: it counts as gone.
    master.session_ended(at(10), first);
    assert!(mount(&mut master, 11, &mut second, &segment(2, 5, "s", 8)).unwrap_err().contains("Stale"));
    assert_eq!(mount(&mut master, 11, &mut second, &segment(2, 6, "s", 8)), Ok(2));
    // The name belongs to the second node now, also against the first.
    let refused = mount(&mut master, 12, &mut Session::default(), &segment(1, 9, "s", 7)).unwrap_err();
    assert!(refused.contains("Held"), "{refused}");
    // A takeover succeeds; and a node that is silent for too long has lost the name.
    let takeover = MountSegment { takeover: true, ..segment(3, 10, "s", 9) };
    assert_eq!(mount(&mut master, 13, &mut Session::default(), &takeover), Ok(3));
    assert!(mount(&mut master, 10_012, &mut second, &segment(2, 11, "s", 8)).unwrap_err().contains("Held"));
    assert_eq!(mount(&mut master, 10_013, &mut second, &segment(2, 11, "s", 8)), Ok(4));
}

#[test]
fn a_clock_that_went_back_costs_one_more_mount() {
    let mut master = Master::new(config()).unwrap();
    let mut session = Session::default();
    assert_eq!(mount(&mut master, 0, &mut session, &segment(1, 1_000, "s", 7)), Ok(1));
    master.session_ended(at(1), session);
    // Another process, with a clock that is an hour behind.
    for ms in [2, 100_000] {
        let late = segment(2, 500, "s", 8);
        let answer = master.mount(at(ms), &late).unwrap();
        if let MountResponse::Stale { incarnation_min } = answer {
            let again = MountSegment { incarnation: incarnation_min, ..late };
            assert!(master.mount(at(ms), &again).unwrap().mounted().is_ok());
            return;
        }
    }
    panic!("the response must contain the lowest acceptable incarnation");
}

#[test]
fn an_incarnation_far_above_the_masters_clock_is_refused() {
    let wall_ms = 1_700_000_000_000;
    let ns = |ms: u64| ms * 1_000_000;
    let mut master = Master::new(MasterConfig { started_wall_ms: wall_ms, ..config() }).unwrap();
    for incarnation in [u64::MAX, ns(wall_ms + HOUR_MS + 2)] {
        assert_eq!(
            master.mount(at(1), &segment(1, incarnation, "s", 7)),
            Err(ErrorCode::IncarnationTooHigh),
            "a name must not be taken forever"
        );
        let given = master.poll_event();
        let incarnation_ms = incarnation / 1_000_000;
        assert_eq!(
            given,
            Some(Event::IncarnationTooHigh {
                name: "s".into(),
                endpoint: "host:1".into(),
                incarnation_ms,
                wall_ms: wall_ms + 1
            })
        );
    }
    let advice = ErrorCode::IncarnationTooHigh.to_string();
    assert!(advice.contains("clock") && advice.contains("restart the node"), "{advice}");
    assert!(master.mount(at(1), &segment(1, ns(wall_ms + HOUR_MS), "s", 7)).unwrap().mounted().is_ok());
    // After the master's clock is corrected, the node need not be restarted.
    master.set_wall_ms(at(2), wall_ms + 2 * HOUR_MS);
    assert!(master.mount(at(3), &segment(1, ns(wall_ms + 3 * HOUR_MS), "s", 7)).unwrap().mounted().is_ok());
}

// ---- handles and writers ----

/// Two nodes with one segment each.
fn pair() -> Master {
    let mut master = Master::new(config()).unwrap();
    for node in [1, 2] {
        master.mount(at(0), &segment(node, 1, ["a", "b"][node as usize - 1], 7)).unwrap();
    }
    master
}

fn beat(master: &mut Master, ms: u64, node: u64) -> NodeStatus {
    master
        .heartbeat(at(ms), &Heartbeat { node: NodeId::new(node), incarnation: Incarnation::new(1), key: 7 })
        .unwrap()
}

fn orders(master: &mut Master, ms: u64, node: u64) -> Vec<Expulsion> {
    let fetch =
        FetchRequest { node: NodeId::new(node), incarnation: Incarnation::new(1), count_max: 9, key: 7 };
    master.fetch_expulsions(at(ms), &fetch).unwrap()
}

fn start(
    master: &mut Master,
    ms: u64,
    session: &mut Session,
    key: &[u8],
    on: u32,
    writer: u64,
) -> (u64, u64) {
    let options = PutOptions { placement: Placement::on(SegmentNo::new(on)), ..PutOptions::DEFAULT };
    let put = PutRequest { writer, ..PutRequest::once(options) };
    let out = call!(master, ms, session, PutStart, put, [NewObject { key: Key(key), len: 16 * KIB }]);
    let frame = Frame::parse(&out).unwrap().unwrap().0;
    let allocation = PutStart::decode_response(&frame).unwrap().1.next().unwrap().unwrap();
    assert_eq!(allocation.replicas[0].segment, SegmentNo::new(on));
    (allocation.generation, allocation.handle)
}

#[test]
fn who_guesses_a_generation_neither_ends_nor_revokes_the_put_of_another() {
    let mut master = pair();
    let (mut writer, mut intruder) = (Session::default(), Session::default());
    let (generation, handle) = start(&mut master, 1, &mut writer, b"k", 1, 3);
    let (_, own) = start(&mut master, 1, &mut intruder, b"other", 1, 4);
    let over = Some(Err(ErrorCode::PutIsOver));
    for guess in [0, own, generation, handle ^ 1, u64::MAX] {
        let commit = Commit { key: Key(b"k"), generation, handle: guess, checksum: 1 };
        let out = call!(&mut master, 2, &mut intruder, PutEnd, (), [commit]);
        let frame = Frame::parse(&out).unwrap().unwrap().0;
        assert_eq!(PutEnd::decode_response(&frame).unwrap().1.next(), over);
        for quiet in [true, false] {
            let revocation = Revocation { key: Key(b"k"), generation, handle: guess, quiet };
            let out = call!(&mut master, 2, &mut intruder, PutRevoke, (), [revocation]);
            let frame = Frame::parse(&out).unwrap().unwrap().0;
            assert_eq!(PutRevoke::decode_response(&frame).unwrap().1.next(), over);
        }
    }
    assert_eq!((master.stats().objects_processing, master.stats().quarantined_bytes), (2, 0));
    let commit = Commit { key: Key(b"k"), generation, handle, checksum: 1 };
    let out = call!(&mut master, 3, &mut writer, PutEnd, (), [commit]);
    let frame = Frame::parse(&out).unwrap().unwrap().0;
    assert_eq!(PutEnd::decode_response(&frame).unwrap().1.next(), Some(Ok(())));
}

/// A request may be repeated over any connection, so that the nonce identifies it; but a nonce has only 32
/// bits, and a batch tries thousands of them.
#[test]
fn a_guessed_nonce_does_not_yield_the_handle_of_anothers_put() {
    let mut master = pair();
    let (mut writer, mut intruder) = (Session::default(), Session::default());
    let new = NewObject { key: Key(b"k"), len: 16 * KIB };
    let put = PutRequest { nonce: 5_000, writer: 3, ..PutRequest::default() };
    let started = |master: &mut Master, session: &mut Session, put: PutRequest| {
        let out = call!(master, 2, session, PutStart, put, [new; 4_096]);
        let frame = Frame::parse(&out).unwrap().unwrap().0;
        PutStart::decode_response(&frame).unwrap().1.filter_map(Result::ok).collect::<Vec<_>>()
    };
    let own = started(&mut master, &mut writer, put);
    assert_eq!(own.len(), 1);
    // The other clients know the key and the length from a listing, but not the writer.
    for writer in [4, u64::MAX] {
        for nonce in [1, 4_097] {
            let guess = PutRequest { nonce, writer, ..PutRequest::default() };
            assert_eq!(started(&mut master, &mut intruder, guess), []);
        }
    }
    // The writer itself gets the same space again, over another connection, too.
    assert_eq!(started(&mut master, &mut Session::default(), put), own);
}

#[test]
fn a_writer_whose_connection_ends_is_cut_off_unless_it_is_connected_and_its_space_comes_back() {
    let mut master = pair();
    let mut session = Session::default();
    start(&mut master, 1, &mut session, b"a", 1, 3);
    let (generation, handle) = start(&mut master, 1, &mut session, b"b", 2, 3);
    let revocation = Revocation { key: Key(b"b"), generation, handle, quiet: false };
    drop(call!(&mut master, 2, &mut session, PutRevoke, (), [revocation]));
    assert_eq!((beat(&mut master, 3, 1), orders(&mut master, 3, 1).len()), (NodeStatus::Ok, 0));
    master.session_ended(at(4), session);
    assert_eq!(master.stats().held_dead_writer_bytes, 32 * KIB);
    for node in [1, 2] {
        assert_eq!(beat(&mut master, 5, node), NodeStatus::Work);
        let given = orders(&mut master, 5, node);
        assert_eq!(given, orders(&mut master, 6, node), "the same orders, until their results are reported");
        assert_eq!((given.len(), given[0].writer, given[0].force), (1, 3, false));
    }
    // The first node reports that the writer is gone; it is connected to the second node and left alone.
    let ticket = orders(&mut master, 7, 1)[0].ticket;
    assert_eq!(
        master.end_expulsion(at(7), NodeId::new(2), &ExpulsionEnd { ticket, gone: true }),
        Err(ErrorCode::TaskNotFound)
    );
    assert_eq!(master.end_expulsion(at(7), NodeId::new(1), &ExpulsionEnd { ticket, gone: true }), Ok(()));
    let ticket = orders(&mut master, 7, 2)[0].ticket;
    assert_eq!(master.end_expulsion(at(7), NodeId::new(2), &ExpulsionEnd { ticket, gone: false }), Ok(()));
    let stats = master.stats();
    assert_eq!(
        (stats.used_bytes, stats.quarantined_bytes, stats.objects_processing),
        (16 * KIB, 16 * KIB, 0)
    );
    assert_eq!((stats.held_dead_writer_bytes, stats.expulsions_total), (0, 1));
    // After the release timeout it gets no further orders.
    for ms in [9_000, 18_000, 27_000, 36_000, 45_000, 54_000, 60_001, 60_003] {
        beat(&mut master, ms, 1);
        beat(&mut master, ms, 2);
        master.handle_timeout(at(ms));
    }
    assert_eq!(master.stats().used_bytes, 16 * KIB, "time alone releases nothing");
    let given = orders(&mut master, 60_003, 2);
    assert_eq!((given.len(), given[0].force), (1, true));
    master
        .end_expulsion(at(60_004), NodeId::new(2), &ExpulsionEnd { ticket: given[0].ticket, gone: true })
        .unwrap();
    assert_eq!((master.stats().used_bytes, beat(&mut master, 60_005, 2)), (0, NodeStatus::Ok));
}

#[test]
fn what_a_writer_begins_after_it_was_to_be_cut_off_is_not_freed_by_the_answer() {
    let mut master = pair();
    let mut session = Session::default();
    start(&mut master, 1, &mut session, b"a", 1, 3);
    master.session_ended(at(2), session);
    let given = orders(&mut master, 3, 1);
    start(&mut master, 4, &mut Session::default(), b"b", 1, 3);
    master
        .end_expulsion(at(5), NodeId::new(1), &ExpulsionEnd { ticket: given[0].ticket, gone: true })
        .unwrap();
    assert_eq!((master.stats().used_bytes, master.stats().objects_processing), (16 * KIB, 1));
}

#[test]
fn what_no_node_vouches_for_waits_for_a_remount_however_long_that_takes() {
    let mut master = pair();
    let mut session = Session::default();
    for (key, on) in [(b"a", 1), (b"b", 2)] {
        start(&mut master, 1, &mut session, key, on, 3);
    }
    // An unknown writer, which only the process of the master can have: no node can report about it.
    let unnamed = PutOptions { placement: Placement::on(SegmentNo::new(1)), ..PutOptions::DEFAULT };
    assert_eq!(
        master.put_start(at(1), b"c", 16 * KIB, &unnamed).unwrap().replicas[0].segment,
        SegmentNo::new(1)
    );
    for ms in [9_000, 18_000, 27_000, 36_000, 45_000, 54_000, 60_001] {
        beat(&mut master, ms, 1);
        beat(&mut master, ms, 2);
        master.handle_timeout(at(ms));
    }
    let held = |master: &Master| (master.stats().used_bytes, master.stats().held_unknown_writer_bytes);
    assert_eq!(held(&master), (48 * KIB, 16 * KIB));
    // The first node cannot cut it off, now or later: its list is full, or one of its fabrics cannot.
    let given = orders(&mut master, 60_002, 1);
    assert_eq!((given.len(), given[0].writer, given[0].force), (1, 3, true));
    master
        .end_expulsion(at(60_002), NodeId::new(1), &ExpulsionEnd { ticket: given[0].ticket, gone: false })
        .unwrap();
    assert_eq!(held(&master), (48 * KIB, 32 * KIB), "the writer may continue at any time");
    // The second node can.
    let given = orders(&mut master, 60_003, 2);
    master
        .end_expulsion(at(60_003), NodeId::new(2), &ExpulsionEnd { ticket: given[0].ticket, gone: true })
        .unwrap();
    assert_eq!(held(&master), (32 * KIB, 32 * KIB));
    for hours in 1..10 {
        for ms in (0..HOUR_MS).step_by(9_000) {
            beat(&mut master, hours * HOUR_MS + ms, 1);
            beat(&mut master, hours * HOUR_MS + ms, 2);
        }
        master.handle_timeout(at(hours * HOUR_MS + HOUR_MS - 9_000));
    }
    assert_eq!(held(&master), (32 * KIB, 32 * KIB), "time alone releases nothing");
    // Mounted anew, the memory is another export, which the writer does not know.
    master.mount(at(10 * HOUR_MS), &segment(1, 2, "a", 7)).unwrap().mounted().unwrap();
    assert_eq!(held(&master), (0, 0));
}

#[test]
fn a_put_whose_writer_has_no_name_is_refused() {
    let mut master = pair();
    let new = NewObject { key: Key(b"k"), len: 16 * KIB };
    let out = call!(&mut master, 1, &mut Session::default(), PutStart, PutRequest::default(), [new]);
    assert_eq!(head!(PutStart, out).map(drop), Err(ErrorCode::InvalidParams));
    assert_eq!((master.stats().used_bytes, master.stats().objects_processing), (0, 0));
}

#[test]
fn a_connection_begins_no_more_puts_than_it_may_without_ending_them() {
    let config = MasterConfig { session_puts_max: 3, ..config() };
    let mut master = Master::new(config).unwrap();
    master.mount(at(0), &segment(1, 1, "s", 7)).unwrap();
    let mut session = Session::default();
    let names: Vec<String> = (0..5).map(|n| n.to_string()).collect();
    let new: Vec<_> = names.iter().map(|name| NewObject { key: Key(name.as_bytes()), len: 64 }).collect();
    let out =
        call!(&mut master, 1, &mut session, PutStart, PutRequest { writer: 3, ..PutRequest::default() }, new);
    let frame = Frame::parse(&out).unwrap().unwrap().0;
    let answers: Vec<_> = PutStart::decode_response(&frame).unwrap().1.map(|answer| answer.err()).collect();
    assert_eq!(answers, [None, None, None, Some(ErrorCode::TooManyPuts), Some(ErrorCode::TooManyPuts)]);
    // Other clients are not affected.
    assert!(master.put_start(at(2), b"other", 64, &PutOptions::DEFAULT).is_ok());
}

#[test]
fn a_tenant_begins_no_more_puts_than_it_may_over_however_many_connections() {
    let config = MasterConfig { tenant_puts_max: 3, ..config() };
    let mut master = Master::new(config).unwrap();
    master.mount(at(0), &segment(1, 1, "s", 7)).unwrap();
    let begin = |master: &mut Master, key: &str| {
        let new = NewObject { key: Key(key.as_bytes()), len: 64 };
        let put = PutRequest { writer: 3, ..PutRequest::default() };
        let out = call!(master, 1, &mut Session::default(), PutStart, put, [new]);
        let frame = Frame::parse(&out).unwrap().unwrap().0;
        PutStart::decode_response(&frame).unwrap().1.next().unwrap()
    };
    let first = begin(&mut master, "0").unwrap();
    for key in ["1", "2"] {
        begin(&mut master, key).unwrap();
    }
    assert_eq!(begin(&mut master, "3"), Err(ErrorCode::TooManyPuts));
    // A put that has ended makes room for the next one, however it ended.
    master.put_end(at(2), b"0", first.generation, 1).unwrap();
    begin(&mut master, "3").unwrap();
    assert_eq!(begin(&mut master, "4"), Err(ErrorCode::TooManyPuts));
    master.remove(at(3), b"1", RemoveMode::Force).unwrap();
    begin(&mut master, "4").unwrap();
    assert_eq!(begin(&mut master, "5"), Err(ErrorCode::TooManyPuts));
}

// ---- segments out of reach ----

#[test]
fn a_segment_that_clients_cannot_reach_is_used_last_and_not_vouched_for_until_its_node_is_heard_of() {
    let mut master = pair();
    let on = |no| PutOptions { placement: Placement::on(no), ..PutOptions::DEFAULT };
    for (key, no) in [(b"a", 1), (b"b", 2)] {
        let put = master.put_start(at(0), key, KIB, &on(SegmentNo::new(no))).unwrap();
        master.put_end(at(0), key, put.generation, 1).unwrap();
    }
    assert_eq!(master.report_unreachable(at(1), SegmentNo::new(9)), Err(ErrorCode::SegmentNotFound));
    master.report_unreachable(at(1), SegmentNo::new(1)).unwrap();
    master.report_unreachable(at(1), SegmentNo::new(1)).unwrap();
    assert_eq!(
        (master.exists(b"a"), master.exists(b"b"), master.stats().segments_unreachable),
        (false, true, 1)
    );
    assert!(master.get(at(1), b"a").is_ok(), "nothing is dropped");
    for n in 0..32 {
        let put = master.put_start(at(2), format!("{n}").as_bytes(), KIB, &on(SegmentNo::new(1))).unwrap();
        assert_eq!(put.replicas[0].segment, SegmentNo::new(2), "while another segment has room");
    }
    // The other segment is full: a segment out of reach is better than none.
    let full = (0..64)
        .map(|n| master.put_start(at(3), format!("x{n}").as_bytes(), KIB, &on(SegmentNo::new(2))).unwrap());
    assert!(full.collect::<Vec<_>>().iter().any(|put| put.replicas[0].segment == SegmentNo::new(1)));
    assert_eq!(beat(&mut master, 4, 1), NodeStatus::Ok);
    assert_eq!((master.exists(b"a"), master.stats().segments_unreachable), (true, 0));
    let given: Vec<_> = std::iter::from_fn(|| master.poll_event())
        .filter(|event| matches!(event, Event::SegmentUnreachable { .. } | Event::SegmentReachable { .. }))
        .collect();
    assert_eq!(given.len(), 2, "once each: {given:?}");
}
