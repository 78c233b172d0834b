//! Tests of the rights that operations need.

use alloc::string::String;

use super::*;
use crate::{Header, MasterConfig, Peer, Secret, TenantConfig};

/// The tenant whose objects a request is about, or why it is refused, by the rights of the connection. In
/// each row first connections without, then those with the rights of an admin; in each group a connection
/// without further rights, a tenant, a node, a tenant and a node.
///
/// `t` the tenant's own objects, `*` those of all tenants, `0` no object; `.` `TenantNotRegistered`, `x`
/// `PermissionDenied`.
const EXPECTED: &[(Kind, &str, &str)] = &[
    (Kind::Hello, "0000", "0000"),
    (Kind::Mount, "xx00", "xx00"),
    (Kind::Unmount, "xx00", "xx00"),
    (Kind::Beat, "xx00", "xx00"),
    (Kind::PutStart, ".t.t", ".t.t"),
    (Kind::PutEnd, ".t.t", ".t.t"),
    (Kind::PutRevoke, ".t.t", ".t.t"),
    (Kind::Get, ".t.t", ".t.t"),
    (Kind::Exists, ".t.t", ".t.t"),
    (Kind::ExistsLeased, ".t.t", ".t.t"),
    (Kind::Prefetch, ".t.t", ".t.t"),
    (Kind::ChangeRetention, ".t.t", ".t.t"),
    (Kind::ReturnLeases, "0000", "0000"),
    (Kind::ReportSegments, ".t.t", ".t.t"),
    (Kind::FetchExpulsions, "xx00", "xx00"),
    (Kind::EndExpulsions, "xx00", "xx00"),
    (Kind::Remove, ".t.t", ".t.t"),
    (Kind::List, ".t.t", ".t.t"),
    (Kind::Segments, ".000", ".000"),
    (Kind::ReadStats, ".t.t", "0t0t"),
    (Kind::ExplainEviction, ".t.t", "0t0t"),
    (Kind::ReadConfig, "xxxx", "0000"),
    (Kind::ChangeConfig, "xxxx", "0000"),
    (Kind::EvictNow, "xxxx", "0000"),
    (Kind::ListNodes, "xxxx", "0000"),
    (Kind::WhyKept, ".t.t", ".t.t"),
    (Kind::ReportReplicas, ".t*t", ".t*t"),
    (Kind::FindReplicas, ".t.t", ".t.t"),
    (Kind::CreateTasks, ".t.t", ".t.t"),
    (Kind::QueryTasks, ".t.t", "****"),
    (Kind::ListTasks, ".t.t", "****"),
    (Kind::CancelTasks, ".t.t", "****"),
    (Kind::RetryTasks, ".t.t", "****"),
    (Kind::FetchTasks, "xx00", "xx00"),
    (Kind::EndTasks, "xx00", "xx00"),
    (Kind::OrderSegments, "xx00", "xx00"),
    (Kind::DrainStatus, "xx00", "xx00"),
    (Kind::ReadTaskReport, "xx00", "xx00"),
    (Kind::TenantList, ".t.t", "0t0t"),
    (Kind::TenantSet, "xxxx", "0000"),
    (Kind::TenantRemove, "xxxx", "0000"),
    (Kind::Find, ".t.t", ".t.t"),
    (Kind::RemoveMany, ".t.t", ".t.t"),
    (Kind::QueryHosts, ".000", ".000"),
    (Kind::ClearReplicas, ".t.t", ".t.t"),
    (Kind::MountDisks, "xx00", "xx00"),
    (Kind::AdoptObjects, "xx00", "xx00"),
    (Kind::DiskReady, "xx00", "xx00"),
    (Kind::FetchDiskOrders, "xx00", "xx00"),
    (Kind::EndDiskOrders, "xx00", "xx00"),
    (Kind::ReclaimExtents, "xx00", "xx00"),
    (Kind::Stage, ".000", ".000"),
    (Kind::ReleaseStaged, ".000", ".000"),
    (Kind::LocateExtents, ".000", ".000"),
    (Kind::ClaimExtents, "xx00", "xx00"),
    (Kind::ReleaseExtents, "xx00", "xx00"),
    (Kind::TakePage, ".000", ".000"),
    (Kind::FreePage, "xxxx", "0000"),
    (Kind::ListPools, "xxxx", "0000"),
];

/// A tenant's number in a master with one tenant besides the default one.
const TENANT: TenantNo = TenantNo::new(1);

/// Every combination of rights: of connections without a greeting, or with one, in the order of the table's
/// columns.
fn combinations(known: bool) -> impl Iterator<Item = Rights> {
    (0..8).map(move |at| Rights {
        known,
        tenant: (at & 1 != 0).then_some(TENANT),
        node: at & 2 != 0,
        admin: at & 4 != 0,
    })
}

fn letter(permitted: Result<TenantNo, ErrorCode>) -> char {
    match permitted {
        Ok(TENANT) => 't',
        Ok(ALL_TENANTS) => '*',
        Ok(_) => '0',
        Err(ErrorCode::TenantNotRegistered) => '.',
        Err(ErrorCode::PermissionDenied) => 'x',
        Err(other) => panic!("no right is refused with {other}"),
    }
}

#[test]
fn every_operation_is_permitted_with_its_right_and_refused_without() {
    let rows: Vec<Kind> = EXPECTED.iter().map(|(kind, ..)| *kind).collect();
    let missing: Vec<_> = Kind::ALL.iter().filter(|kind| !rows.contains(kind)).collect();
    assert!(missing.is_empty() && rows.len() == Kind::ALL.len(), "no row, or two: {missing:?}");
    for (kind, others, admins) in EXPECTED {
        let right = Right::of(*kind);
        let known: String = combinations(true).map(|rights| letter(right.permit(rights))).collect();
        assert_eq!(known, [*others, *admins].concat(), "{kind:?}");
        let unknown: String = combinations(false).map(|rights| letter(right.permit(rights))).collect();
        let free = matches!(kind, Kind::Hello | Kind::ReturnLeases);
        assert_eq!(unknown, (if free { "0" } else { "." }).repeat(8), "{kind:?} before a greeting");
    }
}

/// The same through [`Master::handle`], with every possible session: a request without the needed right is
/// refused whatever its body is, and one with the right is not.
#[test]
fn a_request_is_refused_before_it_is_read() {
    let config = MasterConfig {
        multi_tenants: true,
        admin_secret: Secret::new(b"admin"),
        cluster_secret: Secret::new(b"cluster"),
        tenants: [TenantConfig { name: "a".into(), ..TenantConfig::default() }].into(),
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    let mut seen = 0;
    for rights in combinations(true).chain(combinations(false)) {
        let mut session = Session::new(Peer::Remote, [7; 32]);
        (session.greeted, session.admin, session.cluster) = (rights.known, rights.admin, rights.node);
        session.tenant = rights.tenant.map(|no| (no, 0));
        if master.rights(&session) != rights {
            assert!(rights.admin && !rights.node, "an admin has the rights of a node: {rights:?}");
            continue;
        }
        for kind in Kind::ALL {
            // A body that no operation can decode.
            let header = Header { kind: *kind as u8, response: false, request_id: 3, status: 0 };
            let mut out = Vec::new();
            master.handle(Instant::ZERO, &mut session, &Frame { header, body: &[] }, &mut out);
            if *kind == Kind::ReturnLeases {
                assert!(out.is_empty());
                continue;
            }
            let (frame, len) = Frame::parse(&out).unwrap().unwrap();
            assert_eq!((len, frame.header.kind, frame.header.request_id), (out.len(), *kind as u8, 3));
            let unread =
                [Kind::ReadStats, Kind::ReadConfig, Kind::ListNodes, Kind::ReadTaskReport, Kind::ListPools];
            let permitted = if unread.contains(kind) { Ok(()) } else { Err(ErrorCode::InvalidParams) };
            let expected = Right::of(*kind).permit(rights).and(permitted);
            assert_eq!(frame.header.result(), expected, "{kind:?} for {rights:?}");
            seen += 1;
        }
    }
    assert_eq!(seen, 12 * (Kind::ALL.len() - 1), "all but an admin without the rights of a node");
}
