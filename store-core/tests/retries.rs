//! Every request may be repeated when its response was lost.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::OnceLock;
use store_core::client::{Action, ClientConfig, PutItem, PutOp, TransferEnd};
use store_core::message::*;

use store_core::{
    ChangeHow, ConfigChange, ConfigChanges, ErrorCode, Frame, Incarnation, Key, Kind, Master, MasterConfig,
    NodeId, Place, Role, Secret, SegmentNo, Session, TaskId, TenantConfig, TenantNo, TenantTag, prove,
};
use te_core::Instant;

const LEN: u64 = 4096;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn master() -> Master {
    let config = MasterConfig {
        put_start_discard_timeout_ms: 3_000,
        put_start_release_timeout_ms: 60_000,
        node_ttl_ms: 1_000_000,
        multi_tenants: true,
        tenants: ["default", "spare"]
            .map(|name| TenantConfig { name: name.into(), ..TenantConfig::default() })
            .to_vec(),
        admin_secret: Secret::new(b"root"),
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    master.mount(at(0), &segment(1)).unwrap();
    master.mount(at(0), &segment(2)).unwrap();
    master
}

fn segment(node: u64) -> MountSegment<'static> {
    MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(1),
        name: ["a", "b", "c"][node as usize - 1],
        endpoint: "host:1",
        len: 1 << 20,
        ..MountSegment::default()
    }
}

fn nonce(nonce: u32) -> PutRequest {
    PutRequest { nonce, options: PutOptions::DEFAULT, writer: 9 }
}

fn start(master: &mut Master, ms: u64, request: &PutRequest, len: u64) -> Result<Allocation, ErrorCode> {
    master.put_start_in(at(ms), b"k", len, request, Place::ALONE)
}

fn request<O: Operation>(head: &O::Request<'_>, item: Option<O::RequestItem<'_>>) -> Vec<u8> {
    let mut out = Vec::new();
    O::encode_request(&mut out, 7, head, item.into_iter()).unwrap();
    out
}

/// An admin's first greeting on a connection whose challenge is 32 zero bytes.
fn proved() -> Greeting<'static> {
    static PROOF: OnceLock<[u8; 32]> = OnceLock::new();
    let proof = PROOF.get_or_init(|| prove(b"root", Role::Admin, &[0; 32], "default"));
    Greeting { admin_proof: Key(proof), ..Greeting::default() }
}

/// A session with all rights.
fn admin(master: &mut Master) -> Session {
    let mut session = Session::default();
    let greeting = request::<Hello>(&proved(), None);
    master.handle(at(0), &mut session, &Frame::parse(&greeting).unwrap().unwrap().0, &mut Vec::new());
    session
}

fn handle(master: &mut Master, ms: u64, request: &[u8]) -> Vec<u8> {
    let mut session = admin(master);
    let mut out = Vec::new();
    master.handle(at(ms), &mut session, &Frame::parse(request).unwrap().unwrap().0, &mut out);
    out
}

#[test]
fn a_start_that_comes_again_is_given_the_same_space() {
    let mut master = master();
    let first = start(&mut master, 0, &nonce(9), LEN).unwrap();
    for ms in [1, 2_000, 10_000] {
        assert_eq!(start(&mut master, ms, &nonce(9), LEN), Ok(first));
    }
    let stats = master.stats();
    assert_eq!((stats.used_bytes, stats.put_starts_total, stats.objects_processing), (LEN, 1, 1));
    master.put_end(at(3), b"k", first.generation, 5).unwrap();
    assert_eq!(master.get(at(4), b"k").unwrap().checksum, 5, "the checksum has replaced the nonce");
}

#[test]
fn another_writer_another_length_and_a_writer_without_a_nonce_find_the_key_taken() {
    let mut master = master();
    start(&mut master, 0, &nonce(9), LEN).unwrap();
    let taken = Err(ErrorCode::ObjectAlreadyExists);
    assert_eq!(start(&mut master, 1, &nonce(8), LEN), taken);
    assert_eq!(start(&mut master, 1, &nonce(9), LEN + 1), taken);
    assert_eq!(start(&mut master, 1, &nonce(0), LEN), taken);
    master.put_start(at(1), b"other", LEN, &PutOptions::DEFAULT).unwrap();
    let again = master.put_start(at(1), b"other", LEN, &PutOptions::DEFAULT);
    assert_eq!(again.unwrap_err(), ErrorCode::ObjectAlreadyExists, "0 is not a nonce");
}

#[test]
fn a_start_that_comes_again_after_another_writer_took_over_finds_the_key_taken() {
    let mut master = master();
    let first = start(&mut master, 0, &nonce(9), LEN).unwrap();
    let second = start(&mut master, 3_000, &nonce(8), LEN).unwrap();
    assert_ne!(first.generation, second.generation);
    assert_eq!(start(&mut master, 3_001, &nonce(9), LEN), Err(ErrorCode::ObjectAlreadyExists));
    assert_eq!(start(&mut master, 3_001, &nonce(8), LEN), Ok(second));
}

#[test]
fn a_start_that_comes_again_after_the_commit_finds_the_key_taken() {
    let mut master = master();
    let first = start(&mut master, 0, &nonce(9), LEN).unwrap();
    // Even if the checksum equals the nonce.
    master.put_end(at(1), b"k", first.generation, 9).unwrap();
    assert_eq!(start(&mut master, 2, &nonce(9), LEN), Err(ErrorCode::ObjectAlreadyExists));
}

#[test]
fn a_key_that_a_batch_has_twice_is_taken_the_second_time() {
    let mut master = master();
    let mut batch = Vec::new();
    let items = [NewObject { key: Key(b"k"), len: LEN }; 2];
    PutStart::encode_request(&mut batch, 7, &nonce(9), items.into_iter()).unwrap();
    let mut answers = [at(0), at(1)].map(|now| {
        let (mut session, mut out) = (admin(&mut master), Vec::new());
        master.handle(now, &mut session, &Frame::parse(&batch).unwrap().unwrap().0, &mut out);
        out
    });
    let [first, again] = &mut answers;
    assert_eq!(first, again);
    let frame = Frame::parse(first).unwrap().unwrap().0;
    let results: Vec<_> = PutStart::decode_response(&frame).unwrap().1.collect();
    assert!(results[0].is_ok());
    assert_eq!(results[1], Err(ErrorCode::ObjectAlreadyExists));
}

#[test]
fn a_put_whose_start_got_no_answer_goes_on_within_its_first_window() {
    let mut master = master();
    let mut put = PutOp::new(ClientConfig::default());
    put.start([PutItem { key: b"k", len: LEN, checksum: 5 }], nonce(9));
    let mut lost = Vec::new();
    assert_eq!(put.poll(at(0), 1, &mut lost), Some(Action::Call));
    handle(&mut master, 0, &lost);
    put.handle_call_failed(1, ErrorCode::RpcTimeout);
    assert!(!put.is_done());
    let mut again = Vec::new();
    assert_eq!(put.poll(at(1_000), 2, &mut again), Some(Action::Call));
    let answer = handle(&mut master, 1_000, &again);
    put.handle_response(at(1_001), &Frame::parse(&answer).unwrap().unwrap().0);
    let Some(Action::Transfer(write)) = put.poll(at(1_001), 3, &mut Vec::new()) else { panic!("no write") };
    assert_eq!(put.poll_timeout(), Some(at(3_000)), "measured from the first request");
    put.handle_transfer(write.id, TransferEnd::written());
    let mut end = Vec::new();
    assert_eq!(put.poll(at(1_002), 3, &mut end), Some(Action::Call));
    let answer = handle(&mut master, 1_002, &end);
    put.handle_response(at(1_002), &Frame::parse(&answer).unwrap().unwrap().0);
    assert!(put.result(0).unwrap().is_ok());
    assert_eq!(master.stats().used_bytes, LEN, "no other space is used");
}

#[test]
fn a_start_is_given_up_after_its_tries_and_tried_once_without_a_nonce() {
    for (nonce_given, tries) in [(9, 3), (0, 1)] {
        let mut put = PutOp::new(ClientConfig::default());
        put.start([PutItem { key: b"k", len: LEN, checksum: 5 }], nonce(nonce_given));
        let mut tried = 0;
        while put.poll(at(0), tried + 1, &mut Vec::new()) == Some(Action::Call) {
            tried += 1;
            put.handle_call_failed(tried, ErrorCode::RpcFail);
        }
        assert_eq!((tried, put.result(0)), (tries, Some(Err(ErrorCode::RpcFail))));
    }
}

/// The expected result of the second of two equal requests.
#[derive(Clone, Copy)]
enum Again {
    /// The same response.
    Same,
    /// Success, with less work done.
    Less,
    /// An error, for its only item or as a whole: there is nothing left to do.
    Refused(ErrorCode),
}

/// An operation, a request of it that succeeds the first time, and the result of the second time.
type Case = (Kind, Vec<u8>, Again);

/// Every operation.
fn every_request(master: &mut Master) -> Vec<Case> {
    let now = at(10);
    let committed = start(master, 10, &nonce(1), LEN).unwrap();
    master.put_end(now, b"k", committed.generation, 5).unwrap();
    let task = master.create_task(now, b"k", None, None).unwrap();
    let mut cases = about_objects(master, now);
    cases.extend(about_tasks(master, now, task));
    cases.extend(about_expulsions(master, now));
    cases.extend(about_disks(master, now));
    cases.extend(about_pools(master, now));
    cases.extend(about_the_store());
    cases
}

/// A put of a whole object; returns its generation and its segment.
fn put(master: &mut Master, now: Instant, key: &[u8], options: &PutOptions) -> (u64, SegmentNo) {
    let put = master.put_start(now, key, LEN, options).unwrap();
    master.put_end(now, key, put.generation, 7).unwrap();
    (put.generation, put.replicas[0].segment)
}

fn about_objects(master: &mut Master, now: Instant) -> Vec<Case> {
    let (key, gone) = (Key(b"k"), Again::Refused(ErrorCode::KeyNotFound));
    let open = master.put_start(now, b"open", LEN, &PutOptions::DEFAULT).unwrap();
    let (generation, handle) = (open.generation, open.handle);
    let commit = Commit { key: Key(b"open"), generation, handle, checksum: 6 };
    let given_up = master.put_start(now, b"given up", LEN, &PutOptions::DEFAULT).unwrap();
    let (generation, handle) = (given_up.generation, given_up.handle);
    let revocation = Revocation { key: Key(b"given up"), generation, handle, quiet: true };
    let new = NewObject { key: Key(b"new"), len: LEN };
    put(master, now, b"idle", &PutOptions::DEFAULT);
    let (generation, _) = put(master, now, b"bad", &PutOptions { replicas: 2, ..PutOptions::DEFAULT });
    let bad = BadReplica { key: Key(b"bad"), generation, segment: SegmentNo::new(1) };
    master.report_replica(now, 1, TenantNo::new(0), &bad).unwrap();
    let bad = request::<ReportReplicas>(&2, Some(bad));
    let every = RemoveQuery { pattern: None, cursor: 0, force: true };
    let list = ListQuery { prefix: Key(b""), cursor: 0, limit: 10 };
    let find = FindQuery { pattern: "^k$", cursor: 0, limit: 10 };
    let soft = RetentionChange { pin: Some(Pin::Soft), ..RetentionChange::default() };
    vec![
        (Kind::PutStart, request::<PutStart>(&nonce(3), Some(new)), Again::Same),
        (Kind::PutEnd, request::<PutEnd>(&(), Some(commit)), Again::Same),
        (Kind::PutRevoke, request::<PutRevoke>(&(), Some(revocation)), Again::Refused(ErrorCode::PutIsOver)),
        (Kind::Get, request::<Get>(&LeaseWanted::Quick, Some(key)), Again::Same),
        (Kind::Exists, request::<Exists>(&(), Some(key)), Again::Same),
        (Kind::ChangeRetention, request::<ChangeRetention>(&soft, Some(key)), Again::Same),
        (Kind::ExistsLeased, request::<ExistsLeased>(&(), Some(key)), Again::Same),
        (Kind::Prefetch, request::<Prefetch>(&(), Some(key)), Again::Same),
        (Kind::List, request::<List>(&list, None), Again::Same),
        (Kind::WhyKept, request::<WhyKept>(&(), Some(key)), Again::Same),
        (Kind::Remove, request::<Remove>(&(), Some(Removal { key, force: true })), gone),
        (Kind::ReportReplicas, bad, Again::Refused(ErrorCode::ReplicaNotFound)),
        (Kind::FindReplicas, request::<FindReplicas>(&(), Some(key)), Again::Same),
        (Kind::Find, request::<Find>(&find, None), Again::Same),
        (Kind::ClearReplicas, request::<ClearReplicas>(&None, Some(Key(b"idle"))), gone),
        (Kind::RemoveMany, request::<RemoveMany>(&every, None), Again::Less),
    ]
}

fn about_tasks(master: &mut Master, now: Instant, task: TaskId) -> Vec<Case> {
    // With two segments, the other one is the only target; each belongs to the node of the same number.
    let other = |no: SegmentNo| SegmentNo::new(3 - no.get());
    let node_of = |no: SegmentNo| NodeId::new(no.get().into());
    let incarnation = Incarnation::new(1);
    let target = other(put(master, now, b"copied", &PutOptions::DEFAULT).1);
    let copy = NewTask { key: Key(b"copied"), source: None, target: Some(target) };
    let fetch = FetchRequest { node: node_of(target), incarnation, count_max: 5, key: 0 };
    let node = node_of(other(put(master, now, b"moved", &PutOptions::DEFAULT).1));
    let begun = master.create_task(now, b"moved", None, None).unwrap();
    let all = FetchRequest { node, incarnation, count_max: 10, key: 0 };
    let orders = master.fetch_tasks(now, &all).unwrap();
    let attempt = orders.iter().find(|order| order.id == begun).unwrap().attempt;
    let end = TaskEnd { id: begun, attempt, result: Ok(7), quiet: true };
    let tasks = TaskQuery { cursor: 0, limit: 10, state: None };
    vec![
        (Kind::CreateTasks, request::<CreateTasks>(&(), Some(copy)), Again::Same),
        (Kind::QueryTasks, request::<QueryTasks>(&(), Some(task)), Again::Same),
        (Kind::ListTasks, request::<ListTasks>(&tasks, None), Again::Same),
        (Kind::CancelTasks, request::<CancelTasks>(&(), Some(task)), Again::Same),
        (Kind::RetryTasks, request::<RetryTasks>(&(), Some(task)), Again::Same),
        (Kind::FetchTasks, request::<FetchTasks>(&fetch, None), Again::Same),
        (Kind::EndTasks, request::<EndTasks>(&NodeProof { node, key: 0 }, Some(end)), Again::Same),
        (Kind::ReadTaskReport, request::<ReadTaskReport>(&(), None), Again::Same),
    ]
}

/// A writer that is gone, and the node that has to cut it off.
fn about_expulsions(master: &mut Master, now: Instant) -> Vec<Case> {
    let mut session = admin(master);
    let lost = NewObject { key: Key(b"lost"), len: LEN };
    let lost = request::<PutStart>(&PutRequest { writer: 9, ..PutRequest::default() }, Some(lost));
    let mut out = Vec::new();
    master.handle(now, &mut session, &Frame::parse(&lost).unwrap().unwrap().0, &mut out);
    let frame = Frame::parse(&out).unwrap().unwrap().0;
    let lost = PutStart::decode_response(&frame).unwrap().1.next().unwrap().unwrap();
    assert!(session.holds());
    master.session_ended(now, session);
    let node = master.segment(lost.replicas[0].segment).unwrap().node;
    let fetch = FetchRequest { node, incarnation: Incarnation::new(1), count_max: 9, key: 0 };
    let ticket = master.fetch_expulsions(now, &fetch).unwrap()[0].ticket;
    let end =
        request::<EndExpulsions>(&NodeProof { node, key: 0 }, Some(ExpulsionEnd { ticket, gone: true }));
    vec![
        (Kind::FetchExpulsions, request::<FetchExpulsions>(&fetch, None), Again::Same),
        (Kind::EndExpulsions, end, Again::Refused(ErrorCode::TaskNotFound)),
    ]
}

fn about_disks(master: &mut Master, now: Instant) -> Vec<Case> {
    let (node, incarnation) = (NodeId::new(1), Incarnation::new(1));
    let mount = |uuid| MountDisk {
        shared: "",
        node,
        incarnation,
        uuid: [uuid; 16],
        bytes: 1 << 30,
        extent_bytes: 1 << 26,
        endpoint: "host:1",
        stage: "host:2",
        ..MountDisk::default()
    };
    let disk = master.mount_disk(now, &mount(1)).unwrap().disk;
    let proof = DiskProof { node: NodeProof { node, key: 0 }, disk };
    let tenant = TenantTag::of("default");
    let found =
        FoundObject { tenant, key: Key(b"found"), generation: 1, len: LEN, crc32c: 5, locator: 4_096 };
    let fetch = FetchRequest { node, incarnation, count_max: 9, key: 0 };
    let fetch = FetchDisk { fetch, disk, bytes_max: 1 << 20 };
    let end = DiskEnd::Forgotten { generation: 77 };
    vec![
        (Kind::MountDisks, request::<MountDisks>(&(), Some(mount(2))), Again::Same),
        (Kind::AdoptObjects, request::<AdoptObjects>(&proof, Some(found)), Again::Same),
        (Kind::DiskReady, request::<DiskReady>(&proof, None), Again::Same),
        (Kind::FetchDiskOrders, request::<FetchDiskOrders>(&fetch, None), Again::Same),
        (Kind::EndDiskOrders, request::<EndDiskOrders>(&proof, Some(end)), Again::Same),
        (Kind::ReclaimExtents, request::<ReclaimExtents>(&proof, Some(3)), Again::Same),
    ]
}

/// A pool of which a node has extents, and a process a page.
fn about_pools(master: &mut Master, now: Instant) -> Vec<Case> {
    let (node, pool) = (NodeId::new(7), [7; 16]);
    let wanted = ExtentsWanted {
        node,
        key: 7,
        name: "in a pool",
        pool,
        count: 2,
        incarnation: 1,
        domain: 5,
        locked: true,
        ..ExtentsWanted::default()
    };
    let Ok(ExtentsGiven::Given { epoch }) = master.claim_extents(now, &wanted) else {
        panic!("the extents are free");
    };
    let release = ExtentsReleased { node, key: 7, pool, first: 0, count: 2, epoch };
    let page = PageWanted { pool, pages: 8, identity: 3, domain: 5, ..PageWanted::default() };
    let Ok(PageGiven::Given { slot, epoch }) = master.take_page(now, &page, std::iter::empty()) else {
        panic!("a page is free");
    };
    let freed = PageFreed { pool, slot, epoch };
    let (others, another) = (ExtentsWanted { first: 4, ..wanted }, PageWanted { identity: 4, ..page });
    let released = Again::Refused(ErrorCode::SegmentNotFound);
    vec![
        (Kind::ClaimExtents, request::<ClaimExtents>(&others, None), Again::Same),
        (Kind::ReleaseExtents, request::<ReleaseExtents>(&release, None), released),
        (Kind::TakePage, request::<TakePage>(&another, None), Again::Same),
        (Kind::FreePage, request::<FreePage>(&freed, None), Again::Same),
        (Kind::ListPools, request::<ListPools>(&(), None), Again::Same),
    ]
}

fn about_the_store() -> Vec<Case> {
    let one = SegmentNo::new(1);
    let (node, incarnation) = (NodeId::new(1), Incarnation::new(1));
    let beat = Heartbeat { node, incarnation, key: 0 };
    let maintain = SegmentOrder { segment: one, state: SegmentState::Maintenance };
    let leave = Evict { objects_max: 5, used_bytes_max: u64::MAX };
    let unmount = UnmountSegment { node: NodeId::new(2), incarnation, segment: SegmentNo::new(2), key: 0 };
    let setting = TenantSetting { name: "default", ..TenantSetting::default() };
    let changes = ConfigChanges { demote_ahead: Some(0.2), ..ConfigChanges::default() };
    let change = ConfigChange { how: ChangeHow::Set, changes };
    let not_registered = Again::Refused(ErrorCode::TenantNotRegistered);
    vec![
        (Kind::Hello, request::<Hello>(&Greeting::default(), None), Again::Same),
        (Kind::Mount, request::<Mount>(&segment(3), None), Again::Same),
        (Kind::Beat, request::<Beat>(&beat, None), Again::Same),
        (Kind::ReportSegments, request::<ReportSegments>(&(), Some(one)), Again::Same),
        (Kind::Segments, request::<Segments>(&(), Some(one)), Again::Same),
        (Kind::ReadStats, request::<ReadStats>(&(), None), Again::Same),
        (Kind::ExplainEviction, request::<ExplainEviction>(&5, None), Again::Same),
        (Kind::ReadConfig, request::<ReadConfig>(&(), None), Again::Same),
        (Kind::ChangeConfig, request::<ChangeConfig>(&change, None), Again::Same),
        (Kind::EvictNow, request::<EvictNow>(&leave, None), Again::Same),
        (Kind::ListNodes, request::<ListNodes>(&(), None), Again::Same),
        (Kind::OrderSegments, request::<OrderSegments>(&(), Some(maintain)), Again::Same),
        (Kind::DrainStatus, request::<DrainStatus>(&(), Some(one)), Again::Same),
        (Kind::TenantList, request::<TenantList>(&(), Some("default")), Again::Same),
        (Kind::TenantSet, request::<TenantSet>(&setting, None), Again::Same),
        (Kind::TenantRemove, request::<TenantRemove>(&"spare", None), not_registered),
        (Kind::QueryHosts, request::<QueryHosts>(&(), Some(HostQuery::Node(node))), Again::Same),
        (Kind::Unmount, request::<Unmount>(&unmount, None), Again::Refused(ErrorCode::SegmentNotFound)),
    ]
}

#[test]
fn every_request_that_is_sent_twice_does_what_it_does_once() {
    let mut covered: Vec<Kind> = Vec::new();
    let cases = every_request(&mut master()).len();
    for case in 0..cases {
        let mut master = master();
        let (kind, request, again) = every_request(&mut master).swap_remove(case);
        // Replicas of an object are cleared when half a lease has passed since its last use.
        let ms = if kind == Kind::ClearReplicas { 2_600 } else { 20 };
        let first = handle(&mut master, ms, &request);
        let status = Frame::parse(&first).unwrap().unwrap().0.header.status;
        assert_eq!(status, 0, "{kind:?} must succeed the first time");
        let before = master.stats();
        let second = handle(&mut master, ms, &request);
        match again {
            Again::Same => assert_eq!(first, second, "{kind:?}"),
            Again::Less => {
                let frame = Frame::parse(&second).unwrap().unwrap().0;
                let (page, _) = RemoveMany::decode_response(&frame).unwrap();
                assert_eq!((page.cursor, page.removed), (0, 0), "{kind:?}");
            }
            Again::Refused(code) => {
                let frame = Frame::parse(&second).unwrap().unwrap().0;
                let found = match kind {
                    Kind::PutRevoke => PutRevoke::decode_response(&frame).map(|(_, mut items)| items.next()),
                    Kind::ClearReplicas => {
                        ClearReplicas::decode_response(&frame).map(|(_, mut items)| items.next())
                    }
                    Kind::EndExpulsions => {
                        EndExpulsions::decode_response(&frame).map(|(_, mut items)| items.next())
                    }
                    Kind::Remove => Remove::decode_response(&frame).map(|(_, mut items)| items.next()),
                    Kind::ReportReplicas => ReportReplicas::decode_response(&frame)
                        .map(|(_, mut items)| items.next().map(|found| found.map(|_| ()))),
                    _ => Ok(frame.header.result().err().map(Err)),
                };
                assert_eq!(found, Ok(Some(Err(code))), "{kind:?}");
            }
        }
        let after = master.stats();
        let state = |stats: &store_core::Stats| {
            (
                stats.objects,
                stats.objects_processing,
                stats.used_bytes,
                stats.quarantined_bytes,
                stats.segments,
            )
        };
        assert_eq!(state(&before), state(&after), "{kind:?} changed something the second time");
        covered.push(kind);
    }
    // This operation has no response; `tests/leases.rs` sends it twice.
    covered.push(Kind::ReturnLeases);
    // Nodes take these, and a master refuses them.
    covered.extend([Kind::Stage, Kind::ReleaseStaged, Kind::LocateExtents]);
    let missing: Vec<_> = Kind::ALL.iter().filter(|kind| !covered.contains(kind)).collect();
    assert!(missing.is_empty(), "no request of {missing:?} is tried: add it to `every_request`");
}
