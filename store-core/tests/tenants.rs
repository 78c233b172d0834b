//! Tenants: what one of them does is nothing to another.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::message::*;
use store_core::{
    ErrorCode, Frame, FullKey, Instant, Key, Master, MasterConfig, Peer, Secret, Session, TenantConfig,
};

const GRAIN: u64 = 64;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn tenant(name: &str) -> TenantConfig {
    TenantConfig { name: name.into(), ..TenantConfig::default() }
}

/// Room for so many objects of one grain.
fn master_with(objects: u64, config: MasterConfig) -> Master {
    let mut master = Master::new(config).unwrap();
    let segment = MountSegment {
        node: 1,
        incarnation: 1,
        name: "n1",
        endpoint: "n1:1",
        base: 0,
        len: objects * GRAIN,
        export: Export::default(),
        epoch: 0,
    };
    master.mount(at(0), &segment).unwrap();
    master
}

fn config(tenants: &[TenantConfig]) -> MasterConfig {
    MasterConfig { multi_tenants: true, tenants: tenants.to_vec(), ..MasterConfig::default() }
}

/// One request of a session, and what came back.
fn call(master: &mut Master, session: &mut Session, request: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    master.handle(at(1), session, &Frame::parse(request).unwrap().unwrap().0, &mut out);
    out
}

fn greet(master: &mut Master, session: &mut Session, greeting: &Greeting<'_>) -> Result<(), ErrorCode> {
    let mut request = Vec::new();
    Hello::encode_request(&mut request, 1, greeting, std::iter::empty()).unwrap();
    let answer = call(master, session, &request);
    Hello::decode_response(&Frame::parse(&answer).unwrap().unwrap().0).map(|_| ())
}

fn session(master: &mut Master, tenant: &str) -> Session {
    let mut session = Session::new(Peer::Remote);
    greet(master, &mut session, &Greeting { tenant, ..Greeting::default() }).unwrap();
    session
}

/// Asks something with one item; gives its answer.
macro_rules! one {
    ($master:expr, $session:expr, $operation:ty, $ask:expr, $item:expr) => {{
        let mut request = Vec::new();
        <$operation>::encode_request(&mut request, 1, &$ask, [$item].into_iter()).unwrap();
        let answer = call($master, $session, &request);
        let frame = Frame::parse(&answer).unwrap().unwrap().0;
        <$operation>::decode_response(&frame).map(|(_, mut items)| items.next().unwrap())
    }};
}

fn exists(master: &mut Master, session: &mut Session, key: &[u8]) -> Result<bool, ErrorCode> {
    one!(master, session, Exists, (), Key(key))
}

// ---- who a session is ----

#[test]
fn without_tenants_nobody_needs_to_say_anything_and_whoever_names_a_tenant_is_refused() {
    let mut master = master_with(4, MasterConfig::default());
    let mut session = Session::new(Peer::Remote);
    assert_eq!(exists(&mut master, &mut session, b"k"), Ok(false));
    let named = Greeting { tenant: "a", ..Greeting::default() };
    assert_eq!(greet(&mut master, &mut session, &named), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(greet(&mut master, &mut session, &Greeting::default()), Ok(()));
    assert_eq!(exists(&mut master, &mut session, b"k"), Ok(false));
}

#[test]
fn with_tenants_nothing_is_answered_before_a_known_one_is_named() {
    let mut master = master_with(4, config(&[tenant("a")]));
    let mut session = Session::new(Peer::Local);
    for (kind, _) in Kind::ALL.iter().zip(0..) {
        if *kind == Kind::Hello {
            continue;
        }
        let header = store_core::Header { kind: *kind as u8, response: false, request_id: 1, status: 0 };
        let mut out = Vec::new();
        master.handle(at(1), &mut session, &Frame { header, body: &[] }, &mut out);
        let answer = Frame::parse(&out).unwrap().unwrap().0.header;
        assert_eq!(answer.result(), Err(ErrorCode::TenantNotRegistered), "{kind:?}");
    }
    for name in ["default", "b", "A", "a "] {
        let greeting = Greeting { tenant: name, ..Greeting::default() };
        assert_eq!(
            greet(&mut master, &mut session, &greeting),
            Err(ErrorCode::TenantNotRegistered),
            "{name}"
        );
        assert_eq!(exists(&mut master, &mut session, b"k"), Err(ErrorCode::TenantNotRegistered));
    }
    assert_eq!(greet(&mut master, &mut session, &Greeting { tenant: "a", ..Greeting::default() }), Ok(()));
    assert_eq!(exists(&mut master, &mut session, b"k"), Ok(false));
    // Whoever is refused is nobody, whoever it was before.
    let other = Greeting { tenant: "b", ..Greeting::default() };
    assert_eq!(greet(&mut master, &mut session, &other), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(exists(&mut master, &mut session, b"k"), Err(ErrorCode::TenantNotRegistered));
}

#[test]
fn a_tenant_with_a_secret_needs_it_and_an_admin_needs_only_its_own() {
    let secret = |text: &str| Secret::new(text.as_bytes());
    let guarded = TenantConfig { secret: secret("open sesame"), ..tenant("a") };
    let config = MasterConfig { admin_secret: secret("root"), ..config(&[guarded]) };
    let mut master = master_with(4, config);
    let mut session = Session::new(Peer::Local);
    let mut say = |secret: &str, admin: &str| {
        let (secret, admin) = (Key(secret.as_bytes()), Key(admin.as_bytes()));
        greet(&mut master, &mut session, &Greeting { tenant: "a", secret, admin, ..Greeting::default() })
    };
    assert_eq!(say("", ""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say("open", ""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say("open sesame!", ""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say("open sesame", ""), Ok(()));
    assert_eq!(say("", "root"), Ok(()));
    assert_eq!(say("open sesame", "rooot"), Err(ErrorCode::PermissionDenied), "a wrong one is no none");
    assert_eq!(say(&"x".repeat(257), ""), Err(ErrorCode::InvalidParams));
}

#[test]
fn with_tenants_and_an_admins_secret_only_who_says_it_contributes_memory() {
    let config = MasterConfig { admin_secret: Secret::new(b"root"), ..config(&[tenant("a")]) };
    let mut master = master_with(4, config);
    let mut session = session(&mut master, "a");
    let beat = Heartbeat { node: 1, incarnation: u64::MAX };
    let mut request = Vec::new();
    Beat::encode_request(&mut request, 1, &beat, std::iter::empty()).unwrap();
    let status = |answer: &[u8]| Frame::parse(answer).unwrap().unwrap().0.header.result();
    assert_eq!(status(&call(&mut master, &mut session, &request)), Err(ErrorCode::PermissionDenied));
    assert_eq!(master.stats().segments, 1, "its memory is still there");
    let node = Greeting { tenant: "", admin: Key(b"root"), ..Greeting::default() };
    greet(&mut master, &mut session, &node).unwrap();
    assert_eq!(status(&call(&mut master, &mut session, &request)), Ok(()));
    assert_eq!(
        exists(&mut master, &mut session, b"k"),
        Err(ErrorCode::TenantNotRegistered),
        "a node has no objects"
    );
}

#[test]
fn unknown_tenants_are_created_when_that_is_configured_until_there_are_too_many() {
    let like = TenantConfig { secret: Secret::new(b"s"), ..TenantConfig::default() };
    let config = MasterConfig { tenant_default: Some(like), tenants_max: 3, ..config(&[]) };
    let mut master = master_with(4, config);
    let mut say = |tenant: &str| {
        let greeting = Greeting { tenant, secret: Key(b"s"), ..Greeting::default() };
        greet(&mut master, &mut Session::default(), &greeting)
    };
    assert_eq!([say("a"), say("b"), say("a")], [Ok(()), Ok(()), Ok(())]);
    assert_eq!(say("c"), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say(&"n".repeat(65)), Err(ErrorCode::InvalidParams));
}

#[test]
fn tenants_that_cannot_be_are_no_configuration() {
    let fails = |config: MasterConfig| Master::new(config).unwrap_err().to_string();
    let long = "n".repeat(65);
    for bad in ["", &long] {
        assert!(fails(config(&[tenant(bad)])).contains("1 to 64 bytes"));
    }
    assert!(fails(config(&[tenant("a"), tenant("b"), tenant("a")])).contains("twice"));
    let greedy = TenantConfig { quota_bytes: Some(1), guaranteed_bytes: 2, ..tenant("a") };
    assert!(fails(config(&[greedy])).contains("within the quota"));
    assert!(fails(MasterConfig { multi_tenants: false, ..config(&[tenant("a")]) }).contains("multi_tenants"));
    assert!(
        fails(MasterConfig { tenants_max: 2, ..config(&[tenant("a"), tenant("b")]) }).contains("tenants_max")
    );
}

#[test]
fn a_secret_is_not_printed() {
    let secret = Secret::new(b"open sesame");
    assert_eq!(format!("{secret:?}"), "Secret(…)");
    assert!(secret.matches(b"open sesame") && !secret.matches(b"open sesamf") && !secret.matches(b""));
}

// ---- isolation ----

fn put(master: &mut Master, session: &mut Session, key: &[u8]) -> Result<u64, ErrorCode> {
    let new = NewObject { key: Key(key), len: GRAIN };
    let started = one!(master, session, PutStart, PutAsk::default(), new)??;
    let commit = Commit { key: Key(key), generation: started.generation, checksum: 1 };
    one!(master, session, PutEnd, (), commit)??;
    Ok(started.generation)
}

#[test]
fn the_same_key_of_two_tenants_is_two_objects_and_no_operation_reaches_across() {
    let mut master = master_with(8, config(&[tenant("a"), tenant("b")]));
    let (mut a, mut b) = (session(&mut master, "a"), session(&mut master, "b"));
    let master = &mut master;
    let generation = put(master, &mut a, b"k").unwrap();
    assert_eq!(exists(master, &mut b, b"k"), Ok(false));
    assert_eq!(one!(master, &mut b, Get, (), Key(b"k")), Ok(Err(ErrorCode::ObjectNotFound)));
    assert_eq!(one!(master, &mut b, WhyKept, (), Key(b"k")), Ok(Err(ErrorCode::ObjectNotFound)));
    let removal = Removal { key: Key(b"k"), force: true };
    assert_eq!(one!(master, &mut b, Remove, (), removal), Ok(Err(ErrorCode::ObjectNotFound)));
    let commit = Commit { key: Key(b"k"), generation, checksum: 1 };
    assert_eq!(one!(master, &mut b, PutEnd, (), commit), Ok(Err(ErrorCode::ObjectNotFound)));
    let revocation = Revocation { key: Key(b"k"), generation, quiet: true };
    assert_eq!(one!(master, &mut b, PutRevoke, (), revocation), Ok(Err(ErrorCode::ObjectNotFound)));
    assert_ne!(put(master, &mut b, b"k"), Ok(generation));
    assert_eq!(one!(master, &mut b, Remove, (), removal), Ok(Ok(())));
    assert_eq!((exists(master, &mut a, b"k"), exists(master, &mut b, b"k")), (Ok(true), Ok(false)));
    let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 9 };
    let keys = |tenant| {
        let mut keys = 0;
        master.list_of(at(1), tenant, &query, |_| {
            keys += 1;
            true
        });
        keys
    };
    assert_eq!((keys(0), keys(1), keys(2)), (0, 1, 0));
}

#[test]
fn nobody_vouches_for_the_writer_of_another_tenant() {
    let mut master = master_with(8, config(&[tenant("a"), tenant("b")]));
    let (mut a, mut b) = (session(&mut master, "a"), session(&mut master, "b"));
    let master = &mut master;
    let new = NewObject { key: Key(b"k"), len: GRAIN };
    let generation = one!(master, &mut a, PutStart, PutAsk::default(), new).unwrap().unwrap().generation;
    let noisy = Revocation { key: Key(b"k"), generation, quiet: false };
    let quiet = Revocation { quiet: true, ..noisy };
    assert_eq!(one!(master, &mut a, PutRevoke, (), noisy), Ok(Ok(())));
    assert_eq!(master.stats().quarantined_bytes, GRAIN);
    for theirs in [quiet, noisy] {
        assert_eq!(one!(master, &mut b, PutRevoke, (), theirs), Ok(Err(ErrorCode::ObjectNotFound)));
    }
    let commit = Commit { key: Key(b"k"), generation, checksum: 1 };
    assert_eq!(one!(master, &mut b, PutEnd, (), commit), Ok(Err(ErrorCode::ObjectNotFound)));
    assert_eq!(master.stats().quarantined_bytes, GRAIN, "held back until its own writer says so");
    assert_eq!(one!(master, &mut a, PutRevoke, (), quiet), Ok(Ok(())));
    assert_eq!(master.stats().quarantined_bytes, 0);
}

#[test]
fn groups_of_two_tenants_with_one_number_are_two_groups() {
    let mut master = master_with(4, config(&[tenant("a"), tenant("b")]));
    let grouped = Retention { group: Some(7), ..Retention::DEFAULT };
    let options = PutOptions { retention: grouped, ..PutOptions::DEFAULT };
    for tenant in [1, 2] {
        let key = FullKey { tenant, key: b"k" };
        let put = master.put_start(at(0), key, GRAIN, &options).unwrap();
        if tenant == 1 {
            master.put_end(at(0), key, put.generation, 0).unwrap();
        }
    }
    assert_eq!(master.eviction().groups, 2);
    let key = FullKey { tenant: 1, key: b"k" };
    assert_eq!(master.kept(at(1), key), Ok(None), "that the other's is being written is nothing to it");
}
