//! No operation reaches the objects of another tenant.

use store_core::message::*;
use store_core::{
    ErrorCode, Frame, FullKey, Incarnation, Key, Master, MasterConfig, NodeId, Peer, Secret, SegmentNo,
    Session, TenantNo,
};

use crate::common::*;

#[test]
fn the_same_key_of_two_tenants_is_two_objects_and_no_operation_reaches_across() {
    let mut master = master_with(8, config(&[tenant("a"), tenant("b")]));
    let (mut a, mut b) = (session(&mut master, "a"), session(&mut master, "b"));
    let master = &mut master;
    let Allocation { generation, handle, .. } = put(master, &mut a, b"k").unwrap();
    assert_eq!(exists(master, &mut b, b"k"), Ok(false));
    assert_eq!(one!(master, &mut b, Get, LeaseWanted::Quick, Key(b"k")), Ok(Err(ErrorCode::ObjectNotFound)));
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
    assert_eq!((keys(TenantNo::new(0)), keys(TenantNo::new(1)), keys(TenantNo::new(2))), (0, 1, 0));
}

#[test]
fn no_session_reports_for_the_writer_of_another_tenant() {
    let mut master = master_with(8, config(&[tenant("a"), tenant("b")]));
    let (mut a, mut b) = (session(&mut master, "a"), session(&mut master, "b"));
    let master = &mut master;
    let new = NewObject { key: Key(b"k"), len: GRAIN };
    let started = one!(master, &mut a, PutStart, PutRequest { writer: 1, ..PutRequest::default() }, new)
        .unwrap()
        .unwrap();
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
    assert_eq!(
        master.stats().quarantined_bytes,
        GRAIN,
        "pending release until its own writer reports that it is quiet"
    );
    assert_eq!(one!(master, &mut a, PutRevoke, (), quiet), Ok(Ok(())));
    assert_eq!(master.stats().quarantined_bytes, 0);
}

#[test]
fn groups_of_two_tenants_with_one_number_are_two_groups() {
    let mut master = master_with(4, config(&[tenant("a"), tenant("b")]));
    let grouped = Retention { group: Some(7), ..Retention::DEFAULT };
    let options = PutOptions { retention: grouped, ..PutOptions::DEFAULT };
    for tenant in [1, 2] {
        let key = FullKey { tenant: TenantNo::new(tenant), key: b"k" };
        let put = master.put_start(at(0), key, GRAIN, &options).unwrap();
        if tenant == 1 {
            master.put_end(at(0), key, put.generation, 0).unwrap();
        }
    }
    assert_eq!(master.eviction().groups, 2);
    let key = FullKey { tenant: TenantNo::new(1), key: b"k" };
    assert_eq!(master.kept(at(1), key), Ok(None), "the unfinished put of the other tenant has no effect");
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
    assert_eq!(objects_of(master, &mut b, "a"), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(objects_of(master, &mut b, "b"), Ok(0));
    for set in [61u8, 62] {
        let header = store_core::Header { kind: set, response: false, request_id: 1, status: 0 };
        let mut out = Vec::new();
        master.handle(at(1), &mut b, &Frame { header, body: &[] }, &mut out);
        let answer = Frame::parse(&out).unwrap().unwrap().0.header;
        assert_eq!(answer.result(), Err(ErrorCode::PermissionDenied));
    }
    greet_with(master, &mut b, "", "", "root").unwrap();
    assert_eq!(objects_of(master, &mut b, "a"), Ok(2), "an admin sees all tenants");
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

fn matching(master: &mut Master, tenant: u16, pattern: &str) -> Vec<String> {
    let (mut keys, mut cursor) = (Vec::new(), 0);
    loop {
        let query = FindQuery { pattern, cursor, limit: 7 };
        cursor = master
            .find(at(1), TenantNo::new(tenant), &query, |listed| {
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
    let page = master.remove_many(at(1), TenantNo::new(1), &query).unwrap();
    assert_eq!((page.removed, page.cursor), (10, 0));
    assert_eq!(matching(master, 1, "."), (0..10).map(|key| format!("kv/{key}")).collect::<Vec<_>>());
    assert_eq!(matching(master, 2, ".").len(), 20, "the other tenant's objects all exist");
    let every = RemoveQuery { pattern: None, ..query };
    assert_eq!(master.remove_many(at(1), TenantNo::new(2), &every).unwrap().removed, 20);
    assert_eq!((usage(master, "a").objects, usage(master, "b").objects), (10, 0));
}

#[test]
fn a_node_without_a_tenant_reports_bad_replicas_of_what_it_has_to_copy_and_of_nothing_else() {
    let mut master = master_with(8, config(&[tenant("a")]));
    let second = MountSegment {
        node: NodeId::new(2),
        incarnation: Incarnation::new(1),
        name: "n2",
        endpoint: "n2:1",
        len: 8 * GRAIN,
        ..MountSegment::default()
    };
    master.mount(at(0), &second).unwrap();
    let mut put = |key| {
        let key = FullKey { tenant: TenantNo::new(1), key };
        let given = master.put_start(at(0), key, GRAIN, &PutOptions::DEFAULT).unwrap();
        master.put_end(at(0), key, given.generation, 7).unwrap();
        (given.generation, given.replicas[0].segment)
    };
    let ((generation, segment), (other, other_segment)) = (put(b"k"), put(b"other"));
    let key = FullKey { tenant: TenantNo::new(1), key: b"k" };
    let target = SegmentNo::new(3 - segment.get());
    let id = master.create_task(at(0), key, None, Some(target)).unwrap();
    let mut node = Session::new(Peer::Remote, [0; 32]);
    let fetch = FetchRequest {
        node: NodeId::new(target.get().into()),
        incarnation: Incarnation::new(1),
        count_max: 5,
        key: 0,
    };
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
    assert_eq!(report(&mut master, bad), Err(ErrorCode::ObjectNotFound), "the response reveals nothing");
}
