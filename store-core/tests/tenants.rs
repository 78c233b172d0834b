//! Tenants: what one of them does is nothing to another.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::message::*;
use store_core::{
    ErrorCode, Frame, FullKey, Instant, Key, Master, MasterConfig, Peer, Role, Secret, Session, TenantConfig,
    prove,
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
        key: 0,
        takeover: false,
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

/// Greets twice, as those do who know secrets: once for the challenge, then with proofs.
fn greet_with(
    master: &mut Master,
    session: &mut Session,
    tenant: &str,
    secret: &str,
    admin: &str,
) -> Result<(), ErrorCode> {
    let mut request = Vec::new();
    let nobody = Greeting { tenant: "", ..Greeting::default() };
    Hello::encode_request(&mut request, 1, &nobody, std::iter::empty()).unwrap();
    let answer = call(master, session, &request);
    let welcome = Hello::decode_response(&Frame::parse(&answer).unwrap().unwrap().0).unwrap().0;
    let proof = |secret: &str, role| match secret {
        "" => Vec::new(),
        _ => prove(secret.as_bytes(), role, &welcome.challenge, tenant).to_vec(),
    };
    let (secret, admin) = (proof(secret, Role::Tenant), proof(admin, Role::Admin));
    let (tenant_proof, admin_proof) = (Key(&secret), Key(&admin));
    greet(master, session, &Greeting { tenant, tenant_proof, admin_proof, ..Greeting::default() })
}

fn session(master: &mut Master, tenant: &str) -> Session {
    let mut session = Session::new(Peer::Remote, [0; 32]);
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

/// How many objects a tenant has, as a session is told.
fn told(master: &mut Master, session: &mut Session, name: &str) -> Result<u64, ErrorCode> {
    let mut request = Vec::new();
    TenantList::encode_request(&mut request, 1, &(), [name].into_iter()).unwrap();
    let answer = call(master, session, &request);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    TenantList::decode_response(&frame)?.1.next().unwrap().map(|usage| usage.objects)
}

// ---- who a session is ----

#[test]
fn without_tenants_nobody_needs_to_say_anything_and_whoever_names_a_tenant_is_refused() {
    let mut master = master_with(4, MasterConfig::default());
    let mut session = Session::new(Peer::Remote, [0; 32]);
    assert_eq!(exists(&mut master, &mut session, b"k"), Ok(false));
    let named = Greeting { tenant: "a", ..Greeting::default() };
    assert_eq!(greet(&mut master, &mut session, &named), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(greet(&mut master, &mut session, &Greeting::default()), Ok(()));
    assert_eq!(exists(&mut master, &mut session, b"k"), Ok(false));
}

#[test]
fn with_tenants_nothing_is_answered_before_a_known_one_is_named() {
    let mut master = master_with(4, config(&[tenant("a")]));
    let mut session = Session::new(Peer::Local, [0; 32]);
    for (kind, _) in Kind::ALL.iter().zip(0..) {
        if matches!(kind, Kind::Hello | Kind::ReturnLeases) {
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
    let mut session = Session::new(Peer::Local, [0; 32]);
    let mut say = |secret: &str, admin: &str| greet_with(&mut master, &mut session, "a", secret, admin);
    assert_eq!(say("", ""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say("open", ""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say("open sesame!", ""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(say("open sesame", ""), Ok(()));
    assert_eq!(say("", "root"), Ok(()));
    assert_eq!(say("open sesame", "rooot"), Err(ErrorCode::PermissionDenied), "a wrong one is no none");
    assert_eq!(session.proofs_failed(), 3);
    for len in [1, 31, 33] {
        let short = Greeting { tenant: "a", tenant_proof: Key(&[0; 64][..len]), ..Greeting::default() };
        assert_eq!(greet(&mut master, &mut session, &short), Err(ErrorCode::InvalidParams));
    }
}

#[test]
fn a_proof_that_was_overheard_is_worth_nothing_the_second_time_or_on_another_connection() {
    let guarded = TenantConfig { secret: Secret::new(b"open sesame"), ..tenant("a") };
    let mut master = master_with(4, config(&[guarded]));
    let mut session = Session::new(Peer::Remote, [1; 32]);
    let proof = prove(b"open sesame", Role::Tenant, &[1; 32], "a");
    let said = Greeting { tenant: "a", tenant_proof: Key(&proof), ..Greeting::default() };
    assert_eq!(greet(&mut master, &mut session, &said), Ok(()));
    assert_eq!(greet(&mut master, &mut session, &said), Err(ErrorCode::TenantNotRegistered));
    let mut other = Session::new(Peer::Remote, [2; 32]);
    assert_eq!(greet(&mut master, &mut other, &said), Err(ErrorCode::TenantNotRegistered));
    assert_eq!((session.proofs_failed(), other.proofs_failed()), (1, 1));
}

#[test]
fn with_tenants_and_an_admins_secret_only_who_says_it_contributes_memory() {
    let config = MasterConfig { admin_secret: Secret::new(b"root"), ..config(&[tenant("a")]) };
    let mut master = master_with(4, config);
    let mut session = session(&mut master, "a");
    let beat = Heartbeat { node: 1, incarnation: u64::MAX, key: 0 };
    let mut request = Vec::new();
    Beat::encode_request(&mut request, 1, &beat, std::iter::empty()).unwrap();
    let status = |answer: &[u8]| Frame::parse(answer).unwrap().unwrap().0.header.result();
    assert_eq!(status(&call(&mut master, &mut session, &request)), Err(ErrorCode::PermissionDenied));
    assert_eq!(master.stats().segments, 1, "its memory is still there");
    greet_with(&mut master, &mut session, "", "", "root").unwrap();
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
    let mut say = |tenant: &str| greet_with(&mut master, &mut Session::default(), tenant, "s", "");
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

fn put(master: &mut Master, session: &mut Session, key: &[u8]) -> Result<Allocation, ErrorCode> {
    let new = NewObject { key: Key(key), len: GRAIN };
    let started = one!(master, session, PutStart, PutAsk { writer: 1, ..PutAsk::default() }, new)??;
    let commit =
        Commit { key: Key(key), generation: started.generation, handle: started.handle, checksum: 1 };
    one!(master, session, PutEnd, (), commit)??;
    Ok(started)
}

#[test]
fn the_same_key_of_two_tenants_is_two_objects_and_no_operation_reaches_across() {
    let mut master = master_with(8, config(&[tenant("a"), tenant("b")]));
    let (mut a, mut b) = (session(&mut master, "a"), session(&mut master, "b"));
    let master = &mut master;
    let Allocation { generation, handle, .. } = put(master, &mut a, b"k").unwrap();
    assert_eq!(exists(master, &mut b, b"k"), Ok(false));
    assert_eq!(one!(master, &mut b, Get, (), Key(b"k")), Ok(Err(ErrorCode::ObjectNotFound)));
    assert_eq!(one!(master, &mut b, WhyKept, (), Key(b"k")), Ok(Err(ErrorCode::ObjectNotFound)));
    let removal = Removal { key: Key(b"k"), force: true };
    assert_eq!(one!(master, &mut b, Remove, (), removal), Ok(Err(ErrorCode::KeyNotFound)));
    let commit = Commit { key: Key(b"k"), generation, handle, checksum: 1 };
    assert_eq!(one!(master, &mut b, PutEnd, (), commit), Ok(Err(ErrorCode::PutIsOver)));
    let revocation = Revocation { key: Key(b"k"), generation, handle, quiet: true };
    assert_eq!(one!(master, &mut b, PutRevoke, (), revocation), Ok(Err(ErrorCode::PutIsOver)));
    assert_ne!(put(master, &mut b, b"k").unwrap().generation, generation);
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
    let started =
        one!(master, &mut a, PutStart, PutAsk { writer: 1, ..PutAsk::default() }, new).unwrap().unwrap();
    let Allocation { generation, handle, .. } = started;
    let noisy = Revocation { key: Key(b"k"), generation, handle, quiet: false };
    let quiet = Revocation { quiet: true, ..noisy };
    assert_eq!(one!(master, &mut a, PutRevoke, (), noisy), Ok(Ok(())));
    assert_eq!(master.stats().quarantined_bytes, GRAIN);
    for theirs in [quiet, noisy] {
        assert_eq!(one!(master, &mut b, PutRevoke, (), theirs), Ok(Err(ErrorCode::PutIsOver)));
    }
    let commit = Commit { key: Key(b"k"), generation, handle, checksum: 1 };
    assert_eq!(one!(master, &mut b, PutEnd, (), commit), Ok(Err(ErrorCode::PutIsOver)));
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

#[test]
fn a_tenant_learns_of_no_other_from_statistics_explanations_or_lists() {
    let admin_secret = Secret::new(b"root");
    let mut master = master_with(8, MasterConfig { admin_secret, ..config(&[tenant("a"), tenant("b")]) });
    let (mut a, mut b) = (session(&mut master, "a"), session(&mut master, "b"));
    let master = &mut master;
    for key in [b"k1", b"k2"] {
        put(master, &mut a, key).unwrap();
    }
    let mut request = Vec::new();
    ReadStats::encode_request(&mut request, 1, &(), std::iter::empty()).unwrap();
    let answer = call(master, &mut b, &request);
    let stats = ReadStats::decode_response(&Frame::parse(&answer).unwrap().unwrap().0).unwrap().0;
    assert_eq!((stats.objects, stats.object_bytes, stats.used_bytes, stats.put_starts_total), (0, 0, 0, 0));
    assert_eq!(stats.capacity_bytes, 8 * GRAIN);
    let mut request = Vec::new();
    ExplainEviction::encode_request(&mut request, 1, &9, std::iter::empty()).unwrap();
    let answer = call(master, &mut b, &request);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    let (report, next) = ExplainEviction::decode_response(&frame).unwrap();
    assert_eq!((report.candidates, report.used_bytes, next.len()), (0, 0, 0));
    assert_eq!(told(master, &mut b, "a"), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(told(master, &mut b, "b"), Ok(0));
    for set in [61u8, 62] {
        let header = store_core::Header { kind: set, response: false, request_id: 1, status: 0 };
        let mut out = Vec::new();
        master.handle(at(1), &mut b, &Frame { header, body: &[] }, &mut out);
        let answer = Frame::parse(&out).unwrap().unwrap().0.header;
        assert_eq!(answer.result(), Err(ErrorCode::PermissionDenied));
    }
    greet_with(master, &mut b, "", "", "root").unwrap();
    assert_eq!(told(master, &mut b, "a"), Ok(2), "an admin learns of all");
    let answer = call(master, &mut b, &{
        let mut request = Vec::new();
        TenantList::encode_request(&mut request, 1, &(), std::iter::empty()).unwrap();
        request
    });
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    let names: Vec<_> =
        TenantList::decode_response(&frame).unwrap().1.map(|each| each.unwrap().name).collect();
    assert_eq!(names, ["a", "b"]);
}

// ---- quotas ----

/// Puts a key of a tenant, whole.
fn store(
    master: &mut Master,
    ms: u64,
    tenant: u16,
    key: &str,
    options: &PutOptions,
) -> Result<u64, ErrorCode> {
    let key = FullKey { tenant, key: key.as_bytes() };
    let put = master.put_start(at(ms), key, GRAIN, options)?;
    master.put_end(at(ms), key, put.generation, 0)?;
    Ok(put.generation)
}

fn present(master: &mut Master, tenant: u16, keys: &[&str]) -> Vec<bool> {
    keys.iter().map(|key| master.exists(FullKey { tenant, key: key.as_bytes() })).collect()
}

const PLAIN: PutOptions = PutOptions::DEFAULT;
const HARD: PutOptions =
    PutOptions { retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT }, ..PutOptions::DEFAULT };

fn limited(name: &str, bytes: Option<u64>, objects: Option<u32>) -> TenantConfig {
    TenantConfig { quota_bytes: bytes, quota_objects: objects, ..tenant(name) }
}

fn usage<'m>(master: &'m Master, name: &str) -> TenantUsage<'m> {
    master.tenant(name).unwrap()
}

#[test]
fn a_tenant_over_its_quota_evicts_its_own_objects_and_no_others() {
    for limit in [limited("a", Some(2 * GRAIN), None), limited("a", None, Some(2))] {
        let config =
            MasterConfig { eviction: store_core::EvictionPolicy::Lru, ..config(&[limit, tenant("b")]) };
        let mut master = master_with(16, config);
        let master = &mut master;
        store(master, 0, 2, "old", &PLAIN).unwrap();
        for key in ["1", "2", "3", "4"] {
            store(master, 1, 1, key, &PLAIN).unwrap();
        }
        assert_eq!(present(master, 1, &["1", "2", "3", "4"]), [false, false, true, true]);
        assert_eq!(present(master, 2, &["old"]), [true], "the oldest of all, but another's");
        let (a, b) = (usage(master, "a"), usage(master, "b"));
        assert_eq!((a.bytes, a.objects, a.evictions_total, a.refusals_total), (2 * GRAIN, 2, 2, 0));
        assert_eq!((b.bytes, b.objects, b.evictions_total), (GRAIN, 1, 0));
    }
}

#[test]
fn a_put_that_no_eviction_makes_room_for_is_refused_and_costs_nothing() {
    let mut master = master_with(16, config(&[limited("a", Some(2 * GRAIN), None)]));
    let master = &mut master;
    let full = Err(ErrorCode::TenantQuotaExceeded);
    store(master, 0, 1, "k", &PLAIN).unwrap();
    let large = master.put_start(at(0), FullKey { tenant: 1, key: b"large" }, 2 * GRAIN + 1, &PLAIN);
    assert_eq!(large.map(|_| ()), full, "larger than the quota");
    assert_eq!(present(master, 1, &["k"]), [true], "nothing went for what cannot fit");
    let whole = FullKey { tenant: 1, key: b"whole" };
    assert!(master.put_start(at(0), whole, 2 * GRAIN, &PLAIN).is_ok(), "exactly the quota");
    assert_eq!(store(master, 0, 1, "more", &PLAIN).map(|_| ()), full, "what is being written does not go");
    assert_eq!(usage(master, "a").refusals_total, 2);
}

#[test]
fn leased_pinned_and_held_back_bytes_count_until_they_are_free() {
    let mut master = master_with(16, config(&[limited("a", Some(GRAIN), None)]));
    let master = &mut master;
    let key = FullKey { tenant: 1, key: b"k" };
    let full = Err(ErrorCode::TenantQuotaExceeded);
    store(master, 0, 1, "k", &PLAIN).unwrap();
    master.get(at(0), key).unwrap();
    assert_eq!(store(master, 1, 1, "l", &PLAIN).map(|_| ()), full, "leased");
    master.remove(at(1), key, true).unwrap();
    assert_eq!((usage(master, "a").bytes, usage(master, "a").held_bytes), (0, GRAIN));
    assert_eq!(store(master, 2, 1, "l", &PLAIN).map(|_| ()), full, "its reader may still be reading");
    master.handle_timeout(at(6_000));
    let put = master.put_start(at(6_000), key, GRAIN, &PLAIN).unwrap();
    master.put_revoke(at(6_000), key, put.generation, false).unwrap();
    assert_eq!(store(master, 6_001, 1, "l", &PLAIN).map(|_| ()), full, "its writer may still be writing");
    master.put_revoke(at(6_001), key, put.generation, true).unwrap();
    assert!(store(master, 6_002, 1, "l", &PLAIN).is_ok());
    assert_eq!((usage(master, "a").bytes, usage(master, "a").held_bytes), (GRAIN, 0));
}

#[test]
fn further_replicas_are_had_as_far_as_the_quota_goes() {
    let mut master = master_with(16, config(&[limited("a", Some(3 * GRAIN), None)]));
    let second = MountSegment {
        node: 2,
        incarnation: 1,
        name: "n2",
        endpoint: "n2:1",
        base: 0,
        len: 1024,
        export: Export::default(),
        epoch: 0,
        key: 0,
        takeover: false,
    };
    master.mount(at(0), &second).unwrap();
    let two = PutOptions { replicas: 2, ..PLAIN };
    let copies = |master: &mut Master, key: &[u8]| {
        master.put_start(at(0), FullKey { tenant: 1, key }, GRAIN, &two).unwrap().replicas.len()
    };
    assert_eq!((copies(&mut master, b"k"), copies(&mut master, b"l")), (2, 1));
    assert_eq!(usage(&master, "a").bytes, 3 * GRAIN);
    master.handle_timeout(at(100_000_000));
    assert_eq!((usage(&master, "a").bytes, usage(&master, "a").objects), (0, 0), "and all of it comes back");
}

#[test]
fn a_move_whose_source_is_gone_is_one_copy_more_and_not_above_the_quota() {
    let mut master = master_with(16, config(&[limited("a", Some(2 * GRAIN), None)]));
    let node = |node, name| MountSegment {
        node,
        incarnation: 1,
        name,
        endpoint: "n:1",
        base: 0,
        len: 1024,
        export: Export::default(),
        epoch: 0,
        key: 0,
        takeover: false,
    };
    master.mount(at(0), &node(2, "n2")).unwrap();
    let key = FullKey { tenant: 1, key: b"k" };
    let two = PutOptions { replicas: 2, ..PLAIN };
    store(&mut master, 0, 1, "k", &two).unwrap();
    master.mount(at(0), &node(3, "n3")).unwrap();
    let id = master.create_task(at(0), key, Some(1), Some(3)).unwrap();
    let fetch = FetchAsk { node: 3, incarnation: 1, count_max: 1, key: 0 };
    let attempt = master.fetch_tasks(at(1), &fetch).unwrap()[0].attempt;
    master.unmount(at(2), &UnmountSegment { node: 1, incarnation: 1, segment: 1, key: 0 }).unwrap();
    store(&mut master, 3, 1, "l", &PLAIN).unwrap();
    assert_eq!(usage(&master, "a").bytes, 2 * GRAIN, "what was let go of is used again");
    master.end_task(at(4), 3, &TaskEnd { id, attempt, result: Ok(0), quiet: true }).unwrap();
    assert_eq!(master.task(at(5), id).unwrap().error, Some(ErrorCode::ReplicaNotFound));
    assert_eq!(usage(&master, "a").bytes, 2 * GRAIN);
}

#[test]
fn a_tenant_pins_within_its_own_share() {
    let mut master = master_with(16, config(&[limited("a", Some(4 * GRAIN), None), tenant("b")]));
    let master = &mut master;
    let mut pins = |tenant, names: &[&str]| {
        names.iter().filter(|name| store(master, 0, tenant, name, &HARD).is_ok()).count()
    };
    assert_eq!(pins(1, &["1", "2", "3"]), 2, "half of its quota");
    assert_eq!(pins(2, &["1", "2", "3", "4", "5", "6", "7", "8"]), 6, "the rest of half of all");
    let guarded = TenantConfig { guaranteed_bytes: 8 * GRAIN, ..tenant("a") };
    let mut master = master_with(16, config(&[guarded, tenant("b")]));
    let master = &mut master;
    let mut pins = |tenant, names: &[&str]| {
        names.iter().filter(|name| store(master, 0, tenant, name, &HARD).is_ok()).count()
    };
    assert_eq!(
        pins(2, &["1", "2", "3", "4", "5", "6", "7", "8"]),
        4,
        "what is guaranteed to another stays its"
    );
    assert_eq!(pins(1, &["1", "2", "3", "4", "5"]), 4);
}

#[test]
fn tenants_come_change_and_go_while_the_master_runs() {
    let mut master = master_with(16, MasterConfig { tenants_max: 3, ..config(&[tenant("a")]) });
    let mut a = session(&mut master, "a");
    let master = &mut master;
    let setting = TenantSetting { name: "b", quota_objects: Some(1), ..TenantSetting::default() };
    master.set_tenant(&setting).unwrap();
    assert_eq!(master.set_tenant(&TenantSetting { name: "c", ..setting }), Err(ErrorCode::KeysUltraLimit));
    assert_eq!(master.set_tenant(&TenantSetting { name: "", ..setting }), Err(ErrorCode::InvalidParams));
    let greedy = TenantSetting { quota_bytes: Some(1), guaranteed_bytes: 2, ..setting };
    assert_eq!(master.set_tenant(&greedy), Err(ErrorCode::InvalidParams));
    let mut b = session(master, "b");
    put(master, &mut b, b"1").unwrap();
    put(master, &mut b, b"2").unwrap();
    assert_eq!(usage(master, "b").objects, 1);
    assert_eq!(master.remove_tenant("b"), Err(ErrorCode::TenantNotEmpty));
    let every = RemoveQuery { pattern: None, cursor: 0, force: false };
    assert_eq!(master.remove_many(at(1), 2, &every).unwrap().removed, 1);
    assert_eq!(master.remove_tenant("b"), Ok(()));
    assert_eq!(master.remove_tenant("b"), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(exists(master, &mut b, b"2"), Err(ErrorCode::TenantNotRegistered), "its session is over");
    // The number has another owner now, and its quota is gone with it.
    master.set_tenant(&TenantSetting { name: "d", ..TenantSetting::default() }).unwrap();
    assert_eq!(exists(master, &mut b, b"2"), Err(ErrorCode::TenantNotRegistered), "and is not another's");
    let mut d = session(master, "d");
    put(master, &mut d, b"1").unwrap();
    put(master, &mut d, b"2").unwrap();
    assert_eq!(usage(master, "d").objects, 2);
    assert_eq!(exists(master, &mut a, b"1"), Ok(false));
}

// ---- who gives when room is needed for all ----

fn guaranteed(name: &str, objects: u64) -> TenantConfig {
    TenantConfig { guaranteed_bytes: objects * GRAIN, ..tenant(name) }
}

#[test]
fn the_tenant_furthest_above_its_guarantee_gives_first_and_none_within_it_gives_for_others() {
    let config = MasterConfig {
        eviction_high_watermark: 1.0,
        ..config(&[guaranteed("a", 4), tenant("b"), tenant("c")])
    };
    let mut master = master_with(16, config);
    let master = &mut master;
    for (tenant, count) in [(1, 6), (2, 7), (3, 3)] {
        (0..count).for_each(|key| {
            store(master, 0, tenant, &key.to_string(), &PLAIN).unwrap();
        });
    }
    let objects = |master: &Master| ["a", "b", "c"].map(|name| usage(master, name).objects);
    assert_eq!(objects(master), [6, 7, 3], "full");
    let mut seen = Vec::new();
    for key in 100..108 {
        store(master, 1, 3, &key.to_string(), &PLAIN).unwrap();
        seen.push(objects(master));
    }
    // Above their guarantees: 2, 7 and 3 to begin with; always the first of the highest gives.
    let expected: Vec<[u64; 3]> =
        [[6, 6, 4], [6, 5, 5]].into_iter().chain(std::iter::repeat_n([6, 4, 6], 6)).collect();
    assert_eq!(seen, expected);
    // Now it is a that wants more: it is above what it has for sure, but not the furthest.
    for (key, expected) in (200..205).zip([[7, 4, 5], [8, 4, 4], [8, 4, 4], [8, 4, 4], [8, 4, 4]]) {
        store(master, 2, 1, &key.to_string(), &PLAIN).unwrap();
        assert_eq!(objects(master), expected);
    }
}

#[test]
fn who_is_within_its_guarantee_evicts_its_own_only_when_nobody_is_above() {
    let config = MasterConfig {
        eviction: store_core::EvictionPolicy::Lru,
        eviction_high_watermark: 0.5,
        eviction_ratio: 0.1,
        ..config(&[guaranteed("a", 8), guaranteed("b", 8)])
    };
    let mut master = master_with(8, config);
    let master = &mut master;
    for key in ["1", "2", "3", "4"] {
        store(master, 0, 1, key, &PLAIN).unwrap();
        store(master, 0, 2, key, &PLAIN).unwrap();
    }
    master.handle_timeout(at(1));
    assert_eq!(master.stats().objects, 8, "the watermark takes from nobody who is within its guarantee");
    store(master, 2, 1, "5", &PLAIN).unwrap();
    assert_eq!(present(master, 1, &["1", "2", "3", "4", "5"]), [false, true, true, true, true]);
    assert_eq!(present(master, 2, &["1", "2", "3", "4"]), [true; 4]);
}

#[test]
fn a_tenant_that_has_nothing_to_give_is_passed_over() {
    let config = MasterConfig {
        eviction_high_watermark: 1.0,
        hard_pin_share_max: 1.0,
        ..config(&[tenant("a"), tenant("b")])
    };
    let mut master = master_with(8, config);
    let master = &mut master;
    for key in ["1", "2", "3"] {
        store(master, 0, 1, key, &HARD).unwrap();
        store(master, 0, 1, &format!("leased {key}"), &PLAIN).unwrap();
        master.get(at(0), FullKey { tenant: 1, key: format!("leased {key}").as_bytes() }).unwrap();
    }
    store(master, 0, 2, "1", &PLAIN).unwrap();
    store(master, 0, 2, "2", &PLAIN).unwrap();
    store(master, 1, 2, "3", &PLAIN).unwrap();
    assert_eq!(usage(master, "b").objects, 2, "the other has more, but nothing that could go");
    store(master, 6_000, 2, "4", &PLAIN).unwrap();
    assert_eq!((usage(master, "a").objects, usage(master, "b").objects), (5, 3), "its leases are over");
}

/// Two tenants that put, read, pin and remove at random, in a pool that is too small for what they want. After each step the
/// books are compared with what is there, and the one within its guarantee has lost nothing.
#[test]
fn a_tenant_within_its_guarantee_loses_nothing_whatever_another_does() {
    const POOL: u64 = 64;
    for seed in 0..40u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let policy = store_core::EvictionPolicy::ALL[seed as usize % 4];
        let config = MasterConfig {
            eviction: policy,
            eviction_high_watermark: 0.9,
            hard_pin_share_max: 0.25,
            node_ttl_ms: 86_400_000,
            ..config(&[guaranteed("modest", 16), tenant("greedy")])
        };
        let mut master = master_with(POOL, config);
        let mut modest: Vec<String> = Vec::new();
        let mut ms = 0;
        let mut puts = 0;
        for step in 0..3_000u64 {
            ms += draw(40);
            let key = format!("{step}");
            match draw(10) {
                0..=5 => {
                    let options = match draw(4) {
                        0 => HARD,
                        1 => PutOptions {
                            retention: Retention { pin: Pin::Soft, ..Retention::DEFAULT },
                            ..PLAIN
                        },
                        2 => PutOptions {
                            retention: Retention { group: Some(draw(5)), ..Retention::DEFAULT },
                            ..PLAIN
                        },
                        _ => PLAIN,
                    };
                    let _ = store(&mut master, ms, 2, &key, &options);
                    if draw(3) == 0 {
                        let _ = master.get(at(ms), FullKey { tenant: 2, key: key.as_bytes() });
                    }
                }
                6 => {
                    if modest.len() == 16 {
                        let gone = modest.swap_remove(draw(16) as usize);
                        master.remove(at(ms), FullKey { tenant: 1, key: gone.as_bytes() }, true).unwrap();
                    }
                    if store(&mut master, ms, 1, &key, &PLAIN).is_ok() {
                        modest.push(key);
                        puts += 1;
                    }
                    // When all that the other has is leased, pinned or being written, it makes room of its own.
                    modest.retain(|key| master.exists(FullKey { tenant: 1, key: key.as_bytes() }));
                }
                7 => {
                    let _ =
                        master.put_start(at(ms), FullKey { tenant: 2, key: key.as_bytes() }, GRAIN, &PLAIN);
                }
                8 if !modest.is_empty() => {
                    let key = &modest[draw(modest.len() as u64) as usize];
                    master.get(at(ms), FullKey { tenant: 1, key: key.as_bytes() }).unwrap();
                }
                _ => master.handle_timeout(at(ms)),
            }
            for key in &modest {
                let there = master.exists(FullKey { tenant: 1, key: key.as_bytes() });
                assert!(there, "seed {seed}, step {step}: {key} was evicted for another");
            }
            assert_eq!(usage(&master, "modest").bytes, modest.len() as u64 * GRAIN);
            let stats = master.stats();
            let booked: u64 = master.tenants().map(|usage| usage.bytes + usage.held_bytes).sum();
            assert_eq!(booked, stats.used_bytes, "seed {seed}, step {step}");
        }
        assert!(puts > 20, "seed {seed}: the modest one was starved, {puts} puts");
    }
}

// ---- the same queries for each ----

fn matching(master: &mut Master, tenant: u16, pattern: &str) -> Vec<String> {
    let (mut keys, mut cursor) = (Vec::new(), 0);
    loop {
        let query = FindQuery { pattern, cursor, limit: 7 };
        cursor = master
            .find(at(1), tenant, &query, |listed| {
                keys.push(listed.key.to_string());
                true
            })
            .unwrap();
        if cursor == 0 {
            keys.sort();
            return keys;
        }
    }
}

#[test]
fn a_regular_expression_finds_and_removes_what_is_the_tenants_own() {
    let mut master = master_with(64, config(&[tenant("a"), tenant("b")]));
    let master = &mut master;
    for key in 0..20 {
        store(master, 0, 1, &format!("kv/{key}"), &PLAIN).unwrap();
        store(master, 0, 2, &format!("kv/{key}"), &PLAIN).unwrap();
    }
    assert_eq!(matching(master, 1, "^kv/1[0-3]$"), ["kv/10", "kv/11", "kv/12", "kv/13"]);
    let query = RemoveQuery { pattern: Some("1.$"), cursor: 0, force: false };
    let page = master.remove_many(at(1), 1, &query).unwrap();
    assert_eq!((page.removed, page.cursor), (10, 0));
    assert_eq!(matching(master, 1, "."), (0..10).map(|key| format!("kv/{key}")).collect::<Vec<_>>());
    assert_eq!(matching(master, 2, ".").len(), 20, "the other's are all there");
    let every = RemoveQuery { pattern: None, ..query };
    assert_eq!(master.remove_many(at(1), 2, &every).unwrap().removed, 20);
    assert_eq!((usage(master, "a").objects, usage(master, "b").objects), (10, 0));
}

#[test]
fn a_node_that_is_nobodys_reports_bad_replicas_of_what_it_is_told_to_copy_and_of_nothing_else() {
    let mut master = master_with(8, config(&[tenant("a")]));
    let second = MountSegment {
        node: 2,
        incarnation: 1,
        name: "n2",
        endpoint: "n2:1",
        base: 0,
        len: 8 * GRAIN,
        export: Export::default(),
        epoch: 0,
        key: 0,
        takeover: false,
    };
    master.mount(at(0), &second).unwrap();
    let mut put = |key| {
        let key = FullKey { tenant: 1, key };
        let given = master.put_start(at(0), key, GRAIN, &PutOptions::DEFAULT).unwrap();
        master.put_end(at(0), key, given.generation, 7).unwrap();
        (given.generation, given.replicas[0].segment)
    };
    let ((generation, segment), (other, other_segment)) = (put(b"k"), put(b"other"));
    let key = FullKey { tenant: 1, key: b"k" };
    let id = master.create_task(at(0), key, None, Some(3 - segment)).unwrap();
    let mut node = Session::new(Peer::Remote, [0; 32]);
    let fetch = FetchAsk { node: u64::from(3 - segment), incarnation: 1, count_max: 5, key: 0 };
    let attempt = master.fetch_tasks(at(1), &fetch).unwrap()[0].attempt;
    greet(&mut master, &mut node, &Greeting { tenant: "", ..Greeting::default() }).unwrap();
    let bad = BadReplica { key: Key(b"k"), generation, segment };
    let mut report = |master: &mut Master, bad| one!(master, &mut node, ReportReplicas, 7, bad).unwrap();
    assert_eq!(report(&mut master, bad), Ok(Verdict::Noted));
    let misnamed = BadReplica { key: Key(b"other"), ..bad };
    assert_eq!(report(&mut master, misnamed), Err(ErrorCode::ObjectNotFound));
    let unordered = BadReplica { key: Key(b"other"), generation: other, segment: other_segment };
    assert_eq!(report(&mut master, unordered), Err(ErrorCode::ObjectNotFound));
    let end = TaskEnd { id, attempt, result: Ok(7), quiet: true };
    master.end_task(at(2), fetch.node, &end).unwrap();
    assert_eq!(report(&mut master, bad), Err(ErrorCode::ObjectNotFound), "it is told no more");
}

#[test]
fn a_connection_that_named_no_tenant_learns_of_no_export() {
    let config = MasterConfig {
        multi_tenants: true,
        tenants: vec![TenantConfig { name: "a".into(), ..TenantConfig::default() }],
        admin_secret: Secret::new(b"root"),
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    let mut ask = |tenant: &str| {
        let mut session = Session::new(Peer::Remote, [0; 32]);
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        let greeting = Greeting { tenant, ..Greeting::default() };
        Hello::encode_request(&mut request, 1, &greeting, std::iter::empty()).unwrap();
        let frame = Frame::parse(&request).unwrap().unwrap().0;
        master.handle(Instant::from_millis(1), &mut session, &frame, &mut answer);
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        Segments::encode_request(&mut request, 2, &(), std::iter::empty()).unwrap();
        let frame = Frame::parse(&request).unwrap().unwrap().0;
        master.handle(Instant::from_millis(1), &mut session, &frame, &mut answer);
        Frame::parse(&answer).unwrap().unwrap().0.header.result()
    };
    assert_eq!(ask(""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(ask("a"), Ok(()));
}

#[test]
fn a_name_without_the_secret_of_new_tenants_is_not_left_behind() {
    let like = TenantConfig { secret: Secret::new(b"s"), ..TenantConfig::default() };
    let config = MasterConfig {
        multi_tenants: true,
        tenant_default: Some(like),
        admin_secret: Secret::new(b"root"),
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    let before = master.tenants().count();
    for (secret, more) in [("guess", 0), ("", 0), ("s", 1)] {
        let greeted = greet_with(&mut master, &mut Session::new(Peer::Remote, [0; 32]), "new", secret, "");
        assert_eq!(greeted.is_ok(), more == 1);
        assert_eq!(master.tenants().count() - before, more, "{secret:?}");
    }
}
