//! A client that sends arbitrary requests to a master: every request has exactly one response (except those
//! that never have one), and the master does not panic.
//!
//! Input: `flags u8`, then `step u8 | kind u8 | len u8 | body`, repeated. `step` moves the clock, 100 ms per
//! unit. With an odd `flags` the master has secrets and tenants. The kind 255 is a greeting with proofs,
//! which the fuzzer could not guess: its body chooses which of them it has, and which one is wrong.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::time::Duration;
use store_core::message::{Greeting, Hello};
use store_core::{
    Frame, Header, Key, Kind, Master, MasterConfig, Operation, Peer, Role, Secret, Session, TenantConfig,
    prove,
};
use te_core::Instant;

const TENANT: &str = "alice";
const SECRETS: [(Role, &[u8]); 3] =
    [(Role::Tenant, b"alice's"), (Role::Admin, b"the admin's"), (Role::Cluster, b"the cluster's")];

fn config(with_secrets: bool) -> MasterConfig {
    if !with_secrets {
        return MasterConfig::default();
    }
    let tenant =
        TenantConfig { name: TENANT.into(), secret: Secret::new(SECRETS[0].1), ..TenantConfig::default() };
    MasterConfig {
        multi_tenants: true,
        tenants: vec![tenant],
        admin_secret: Secret::new(SECRETS[1].1),
        cluster_secret: Secret::new(SECRETS[2].1),
        ..MasterConfig::default()
    }
}

/// A greeting with the proofs that `body` chooses, all of them right except the one that `body` makes wrong.
fn greeting(body: &[u8], challenge: &[u8; 32]) -> Vec<u8> {
    let [shown, spoiled, bit] = [0, 1, 2].map(|at| body.get(at).copied().unwrap_or(0));
    let proofs = SECRETS.map(|(role, secret)| {
        let mut proof = prove(secret, role, challenge, TENANT);
        if spoiled == role as u8 {
            proof[usize::from(bit / 8)] ^= 1 << (bit % 8);
        }
        proof
    });
    let proof = |at: usize| Key(if shown & (1 << at) != 0 { &proofs[at] } else { &[] });
    let greeting = Greeting {
        tenant: TENANT,
        tenant_proof: proof(0),
        admin_proof: proof(1),
        cluster_proof: proof(2),
        ..Greeting::default()
    };
    let mut out = Vec::new();
    Hello::encode_request(&mut out, 0, &greeting, std::iter::empty()).expect("a greeting fits");
    let (frame, _) = Frame::parse(&out).expect("our own frame").expect("complete");
    frame.body.to_vec()
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&flags, mut rest)) = bytes.split_first() else { return };
    let mut master = Master::new(config(flags % 2 == 1)).expect("the settings are valid");
    let mut challenge = [7; 32];
    let mut session = Session::new(Peer::Remote, challenge);
    let mut now = Instant::ZERO;
    let mut request_id = 0;
    while let [step, kind, len, tail @ ..] = rest {
        let (body, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        now = now + Duration::from_millis(100) * u32::from(*step);
        if master.poll_timeout().is_some_and(|due| due <= now) {
            master.handle_timeout(now);
        }
        request_id += 1;
        let proved = (*kind == u8::MAX).then(|| greeting(body, &challenge));
        let (kind, body) =
            proved.as_ref().map_or((*kind, body), |proved| (Kind::Hello as u8, proved.as_slice()));
        let header = Header { kind, response: false, request_id, status: 0 };
        let mut out = Vec::new();
        master.handle(now, &mut session, &Frame { header, body }, &mut out);
        if Kind::from_byte(kind) == Some(Kind::ReturnLeases) {
            assert!(out.is_empty(), "leases are returned without an answer");
            continue;
        }
        let (answer, answer_len) = Frame::parse(&out).expect("a frame").expect("a whole frame");
        assert_eq!(answer_len, out.len(), "one answer");
        assert!(answer.header.response);
        assert_eq!(answer.header.request_id, request_id);
        if let Ok((welcome, _)) = Hello::decode_response(&answer) {
            challenge = welcome.challenge;
        }
    }
    master.session_ended(now, session);
});
