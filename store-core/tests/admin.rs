//! Requests of admins: evicting on request, the list of nodes, the settings.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::message::*;
use store_core::{
    ChangeHow, ConfigChange, ConfigChanges, ErrorCode, Frame, Incarnation, Key, Kind, Master, MasterConfig,
    NodeId, Peer, Secret, Session, TenantConfig,
};
use te_core::Instant;

const LEN: u64 = 4096;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn segment(node: u64) -> MountSegment<'static> {
    let name = ["none", "n1", "n2"][node as usize];
    let export = Export::default();
    MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(1),
        name,
        endpoint: "n:1",
        len: 64 * LEN,
        export,
        ..MountSegment::default()
    }
}

fn master(config: MasterConfig) -> Master {
    let mut master = Master::new(config).unwrap();
    for node in [1, 2] {
        master.mount(at(1), &segment(node)).unwrap();
    }
    for n in 0..100_u8 {
        let new = master.put_start(at(2), &[n], LEN, &PutOptions::DEFAULT).unwrap();
        master.put_end(at(2), &[n], new.generation, 7).unwrap();
    }
    master
}

fn send<O: Operation>(master: &mut Master, session: &mut Session, head: &O::Request<'_>) -> Vec<u8> {
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    O::encode_request(&mut request, 1, head, std::iter::empty()).unwrap();
    master.handle(at(10), session, &Frame::parse(&request).unwrap().unwrap().0, &mut answer);
    answer
}

fn status<O: Operation>(answer: &[u8]) -> Result<(), ErrorCode> {
    O::decode_response(&Frame::parse(answer).unwrap().unwrap().0).map(|_| ())
}

#[test]
fn eviction_on_demand_leaves_what_it_was_to_leave_and_a_second_one_takes_nothing() {
    let mut master = master(MasterConfig::default());
    let leave = Evict { objects_max: 40, used_bytes_max: u64::MAX };
    let evicted = master.evict_now(at(10), leave);
    assert_eq!(evicted, Evicted { objects: 60, bytes: 60 * LEN, more: false });
    assert_eq!(master.evict_now(at(10), leave), Evicted::default());
    let leave = Evict { objects_max: u64::MAX, used_bytes_max: 10 * LEN };
    assert_eq!(master.evict_now(at(10), leave).objects, 30);
    assert_eq!(master.stats().used_bytes, 10 * LEN);
}

#[test]
fn eviction_on_demand_is_bounded_in_one_call_and_says_that_there_is_more() {
    let mut master = master(MasterConfig { evictions_per_call_max: 8, ..MasterConfig::default() });
    let leave = Evict { objects_max: 0, used_bytes_max: 0 };
    assert_eq!(master.evict_now(at(10), leave), Evicted { objects: 8, bytes: 8 * LEN, more: true });
}

#[test]
fn eviction_on_demand_spares_what_is_leased_and_what_is_pinned_for_good() {
    let mut master = master(MasterConfig::default());
    master.get(at(10), b"\x05").unwrap();
    let hard =
        PutOptions { retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT }, ..PutOptions::DEFAULT };
    let pinned = master.put_start(at(10), b"pinned", LEN, &hard).unwrap();
    master.put_end(at(10), b"pinned", pinned.generation, 7).unwrap();
    let evicted = master.evict_now(at(10), Evict { objects_max: 0, used_bytes_max: 0 });
    assert_eq!((evicted.objects, evicted.more), (99, false));
    assert!(master.exists(b"\x05") && master.exists(b"pinned"));
}

#[test]
fn nodes_are_listed_with_what_they_hold_and_since_when_they_are_silent() {
    let mut master = master(MasterConfig::default());
    master
        .heartbeat(at(400), &Heartbeat { node: NodeId::new(2), incarnation: Incarnation::new(1), key: 0 })
        .unwrap();
    let nodes: Vec<NodeInfo> = master.nodes(at(500)).collect();
    assert_eq!(nodes.len(), 2);
    assert_eq!((nodes[0].node, nodes[0].segments, nodes[0].silent_ms), (NodeId::new(1), 1, 499));
    assert_eq!((nodes[1].node, nodes[1].capacity, nodes[1].silent_ms), (NodeId::new(2), 64 * LEN, 100));
    assert_eq!(nodes.iter().map(|node| node.used).sum::<u64>(), 100 * LEN);
}

#[test]
fn only_admins_get_a_response_and_it_contains_no_secret() {
    let secret = Secret::new(b"open sesame");
    let mut master = master(MasterConfig { admin_secret: secret, ..MasterConfig::default() });
    for peer in [Peer::Local, Peer::Remote] {
        let mut session = Session::new(peer, [0; 32]);
        let leave = Evict { objects_max: 0, used_bytes_max: 0 };
        let refused = [
            status::<EvictNow>(&send::<EvictNow>(&mut master, &mut session, &leave)),
            status::<ReadConfig>(&send::<ReadConfig>(&mut master, &mut session, &())),
            status::<ListNodes>(&send::<ListNodes>(&mut master, &mut session, &())),
        ];
        assert_eq!(refused, [Err(ErrorCode::PermissionDenied); 3]);
    }
    assert_eq!(master.stats().objects, 100);
    let answer = send::<ReadConfig>(&mut master, &mut Session::owner(), &());
    assert!(!answer.windows(11).any(|bytes| bytes == b"open sesame"));
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    assert_eq!(frame.header.kind, Kind::ReadConfig as u8);
    let (shown, _) = ReadConfig::decode_response(&frame).unwrap();
    assert!(!shown.admin_secret.is_set());
    assert_eq!(shown.lease_ttl_ms, MasterConfig::default().lease_ttl_ms);
}

#[test]
fn the_process_of_the_master_acts_for_any_tenant_and_inspects_without_a_lease() {
    let tenant = |name: &str| TenantConfig { name: name.into(), ..TenantConfig::default() };
    let config = MasterConfig {
        multi_tenants: true,
        admin_secret: Secret::new(b"sesame"),
        tenants: vec![tenant("a"), tenant("b")],
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    master.mount(at(1), &segment(1)).unwrap();
    let mut a = master.owner_for("a").unwrap();
    let mut out = Vec::new();
    let put = PutRequest { writer: 9, ..PutRequest::once(PutOptions::DEFAULT) };
    let new = NewObject { key: Key(b"k"), len: LEN };
    PutStart::encode_request(&mut out, 1, &put, [new].into_iter()).unwrap();
    let mut answer = Vec::new();
    master.handle(at(2), &mut a, &Frame::parse(&out).unwrap().unwrap().0, &mut answer);
    let (listed, replicas) = master.inspect(at(2), "a", b"k").unwrap();
    assert_eq!((listed.len, listed.complete, replicas.len()), (LEN, false, 1));
    assert_eq!(replicas[0].state, ReplicaState::Processing);
    assert_eq!(master.inspect(at(2), "b", b"k"), Err(ErrorCode::ObjectNotFound), "another tenant's");
    assert_eq!(master.inspect(at(2), "c", b"k"), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(master.owner_for("c").unwrap_err(), ErrorCode::TenantNotRegistered);
    assert_eq!(master.stats().gets_total, 0);
    // It has the rights of an admin as well, and those of the tenant alone for objects.
    assert_eq!(status::<ListNodes>(&send::<ListNodes>(&mut master, &mut a, &())), Ok(()));
    let list = ListQuery { prefix: Key(b""), cursor: 0, limit: 9 };
    let mut b = master.owner_for("b").unwrap();
    let of = |master: &mut Master, session: &mut Session| {
        let answer = send::<List>(master, session, &list);
        List::decode_response(&Frame::parse(&answer).unwrap().unwrap().0).unwrap().1.len()
    };
    assert_eq!((of(&mut master, &mut a), of(&mut master, &mut b)), (1, 0));
}

fn changed(change: &ConfigChange, master: &mut Master) -> Result<ConfigChanges, ErrorCode> {
    let answer = send::<ChangeConfig>(master, &mut Session::owner(), change);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    ChangeConfig::decode_response(&frame).map(|(set, _)| set)
}

#[test]
fn settings_are_changed_together_or_not_at_all() {
    let mut master = master(MasterConfig::default());
    let values = ConfigChanges {
        eviction_high_watermark: Some(0.5),
        tasks_attempts_max: Some(7),
        ..ConfigChanges::default()
    };
    let set = ConfigChange { how: ChangeHow::Set, changes: values };
    assert_eq!(changed(&set, &mut master), Ok(values));
    let marked = || master.config().eviction_high_watermark;
    assert_eq!((marked(), master.config().tasks.attempts_max), (0.5, 7));
    // Half of 128 blocks: what is above it is evicted without a put.
    master.handle_timeout(at(10));
    assert!(master.stats().used_bytes <= 64 * LEN, "{}", master.stats().used_bytes);
    // The ratio is above the watermark.
    let wrong = ConfigChanges {
        eviction_high_watermark: Some(0.2),
        eviction_ratio: Some(0.3),
        ..ConfigChanges::default()
    };
    let wrong = ConfigChange { how: ChangeHow::Set, changes: wrong };
    assert_eq!(changed(&wrong, &mut master), Err(ErrorCode::InvalidParams));
    assert_eq!(master.config().eviction_high_watermark, 0.5);
    let unset = ConfigChange { how: ChangeHow::Unset, changes: values };
    assert_eq!(changed(&unset, &mut master), Ok(ConfigChanges::default()));
    assert_eq!(*master.config(), MasterConfig { ..MasterConfig::default() });
    let mut session = Session::new(Peer::Remote, [0; 32]);
    let refused = send::<ChangeConfig>(&mut master, &mut session, &set);
    assert_eq!(status::<ChangeConfig>(&refused), Err(ErrorCode::PermissionDenied));
}

#[test]
fn a_lease_that_was_granted_for_longer_holds_when_leases_become_shorter() {
    let mut master = master(MasterConfig::default());
    master.get(at(10), b"\x05").unwrap();
    let values = ConfigChanges { lease_ttl_ms: Some(100), ..ConfigChanges::default() };
    let change = ConfigChange { how: ChangeHow::Set, changes: values };
    master.change_config(at(20), &change).unwrap();
    let all = Evict { objects_max: 0, used_bytes_max: 0 };
    master.evict_now(at(4_000), all);
    assert!(master.exists(b"\x05"), "leased until 5,010 ms");
    let reused = |master: &Master| master.stats().used_bytes == 0;
    master.remove(at(4_000), b"\x05", RemoveMode::Force).unwrap();
    assert!(!reused(&master));
    master.evict_now(at(6_000), all);
    master.handle_timeout(at(6_000));
    assert!(reused(&master), "{:?}", master.stats());
}
