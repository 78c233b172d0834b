//! Sessions and their tenants.

use store_core::message::*;
use store_core::{
    ErrorCode, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId, Peer, Role, Secret, Session,
    TenantConfig, prove,
};

use crate::common::*;

#[test]
fn without_tenants_no_greeting_is_needed_and_one_that_names_a_tenant_is_refused() {
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
    // A session whose greeting is refused has no tenant, whatever it was before.
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
    assert_eq!(
        say("open sesame", "rooot"),
        Err(ErrorCode::PermissionDenied),
        "a wrong proof is not the same as none"
    );
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
    let beat = Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(u64::MAX), key: 0 };
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
    assert!(fails(config(&[greedy])).contains("must not exceed the quota"));
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

#[test]
fn a_connection_that_named_no_tenant_learns_of_no_export() {
    let config = MasterConfig {
        multi_tenants: true,
        tenants: vec![TenantConfig { name: "a".into(), ..TenantConfig::default() }],
        admin_secret: Secret::new(b"root"),
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    let mut send = |tenant: &str| {
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
    assert_eq!(send(""), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(send("a"), Ok(()));
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
