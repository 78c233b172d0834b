//! Handlers of requests that put, read, list and remove objects.

use super::{Call, Keyed, Page, batch};
use crate::codec;
use crate::message::{
    ChangeRetention, ClearReplicas, Exists, ExistsLeased, Find, FindReplicas, Get, Lease, LeaseWanted, List,
    ListPosition, Prefetch, PutEnd, PutRevoke, PutStart, PutWindow, Remove, RemoveMany, RemoveMode,
    ReturnLeases, WhyKept, WriterState,
};
use crate::session::Leases;
use crate::{BatchOrder, ErrorCode, Master, Place, Session};

pub(super) fn put_start(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, tenant, request, .. } = call;
    let head = PutWindow { window_ms: master.config().put_start_discard_timeout_ms };
    let (put, items) = request.read::<PutStart>()?;
    // No node could report whether the writes are over, and the space would stay pending release.
    if put.writer == 0 {
        return Err(ErrorCode::InvalidParams);
    }
    let (len, returning) = (items.len(), master.returning(items.map(|item| item.of(tenant))));
    let no = master.session_no(session);
    let done = batch::<PutStart>(master, tenant, request, &head, |master, at, put, new| {
        let place = Place::new(at, len, returning);
        session.writer = put.writer;
        master.put_start_from(now, new.of(tenant), new.len, &put.item(at), place, no)
    });
    session.puts = master.unfinished_of(no);
    done
}

pub(super) fn put_end(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, tenant, request, .. } = call;
    batch::<PutEnd>(master, tenant, request, &(), |master, at, (), item| {
        master.check_handle(item.generation, item.handle)?;
        master.put_end_in(now, item.of(tenant), item.generation, item.checksum, BatchOrder::of(at))
    })?;
    session.puts = master.unfinished_of(session.no);
    Ok(())
}

pub(super) fn put_revoke(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, tenant, request, .. } = call;
    batch::<PutRevoke>(master, tenant, request, &(), |master, _, (), item| {
        master.check_handle(item.generation, item.handle)?;
        master.put_revoke(now, item.of(tenant), item.generation, WriterState::of(item.quiet))
    })?;
    session.puts = master.unfinished_of(session.no);
    Ok(())
}

pub(super) fn get(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, tenant, request, .. } = call;
    // The keys behind it are decoded below.
    let (wanted, _) = codec::take(request.body)?;
    leasing(master, session, wanted, |master, head, leases| {
        batch::<Get>(master, tenant, request, head, |master, at, _, key| {
            master.get_for(now, key.of(tenant), BatchOrder::of(at), leases)
        })
    })
}

pub(super) fn exists_leased(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, tenant, request, .. } = call;
    leasing(master, session, LeaseWanted::Lasting, |master, head, leases| {
        batch::<ExistsLeased>(master, tenant, request, head, |master, _, (), key| {
            master.exists_for(now, key.of(tenant), leases)
        })
    })
}

pub(super) fn prefetch(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, tenant, request, .. } = call;
    leasing(master, session, LeaseWanted::Lasting, |master, head, leases| {
        batch::<Prefetch>(master, tenant, request, head, |master, _, (), key| {
            master.prefetch_for(now, key.of(tenant), leases)
        })
    })
}

/// Runs a handler that grants leases to a connection, with the head of its response.
fn leasing(
    master: &mut Master,
    session: &mut Session,
    wanted: LeaseWanted,
    run: impl FnOnce(&mut Master, &Lease, &mut Leases) -> Result<(), ErrorCode>,
) -> Result<(), ErrorCode> {
    let head = Lease { lease_ms: master.promised_ms(wanted), first: session.leases.next() };
    let before = session.leases.memory_bytes();
    let done = run(master, &head, &mut session.leases);
    master.lease_bytes += session.leases.memory_bytes() - before;
    done
}

pub(super) fn exists(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { tenant, request, .. } = call;
    batch::<Exists>(master, tenant, request, &(), |master, _, (), key| master.exists(key.of(tenant)))
}

/// Has no response. If the request does not decode, no lease is returned: they end by time.
pub(super) fn return_leases(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, session, request, .. } = call;
    let Ok((_, ranges)) = request.read::<ReturnLeases>() else { return Ok(()) };
    for range in ranges {
        session.leases.take(now, range.first, range.count, |granted| master.lease_returned(now, &granted));
    }
    Ok(())
}

pub(super) fn change_retention(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    batch::<ChangeRetention>(master, tenant, request, &(), |master, _, change, key| {
        master.change_retention(now, key.of(tenant), change)
    })
}

pub(super) fn remove(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    batch::<Remove>(master, tenant, request, &(), |master, _, (), item| {
        master.remove(now, item.of(tenant), RemoveMode::of(item.force))
    })
}

pub(super) fn remove_many(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    let (query, _) = request.read::<RemoveMany>()?;
    let page = master.remove_many(now, tenant, &query)?;
    request.respond_head::<RemoveMany>(&page)
}

pub(super) fn clear_replicas(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    batch::<ClearReplicas>(master, tenant, request, &(), |master, _, segment, key| {
        master.clear_replica(now, key.of(tenant), *segment)
    })
}

pub(super) fn list(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    let (query, _) = request.read::<List>()?;
    let mut page = Page::default();
    let cursor = master.list_of(now, tenant, &query, |listed| page.push(listed, listed.key));
    request.respond::<List>(&ListPosition { cursor }, page.items.into_iter())
}

pub(super) fn find(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    let (query, _) = request.read::<Find>()?;
    let mut page = Page::default();
    let cursor = master.find(now, tenant, &query, |listed| page.push(listed, listed.key))?;
    request.respond::<Find>(&ListPosition { cursor }, page.items.into_iter())
}

pub(super) fn why_kept(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { now, tenant, request, .. } = call;
    batch::<WhyKept>(master, tenant, request, &(), |master, _, (), key| master.kept(now, key.of(tenant)))
}

pub(super) fn find_replicas(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { tenant, request, .. } = call;
    batch::<FindReplicas>(master, tenant, request, &(), |master, _, (), key| {
        master.find_replicas(key.of(tenant))
    })
}
