//! Handlers of greetings, reports and administration.

use alloc::vec::Vec;

use super::{Call, Page};
use crate::master::PAGE_ITEMS_MAX;
use crate::message::{
    ChangeConfig, EvictNow, ExplainEviction, Hello, ReadConfig, ReadStats, TenantList, TenantRemove,
    TenantSet, Welcome,
};
use crate::wire::{KEYS_PER_BATCH_MAX, VERSION};
use crate::{ErrorCode, Master};

pub(super) fn hello(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { session, request, .. } = call;
    let (greeting, _) = request.read::<Hello>()?;
    master.greet(session, &greeting)?;
    let (config, term) = (master.config(), master.term());
    let welcome = Welcome {
        version: VERSION,
        lineage: config.epoch.into(),
        term,
        keys_per_batch_max: KEYS_PER_BATCH_MAX as u32,
        key_bytes_max: config.key_bytes_max,
        replicas_max: config.replicas_max,
        lease_ms: config.lease_ttl_ms,
        node_ttl_ms: config.node_ttl_ms,
        challenge: session.challenge,
    };
    request.respond_head::<Hello>(&welcome)
}

pub(super) fn read_stats(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let all = sees_all(master, &call);
    let stats = if all { master.stats() } else { master.stats_of(call.tenant) };
    call.request.respond_head::<ReadStats>(&stats)
}

pub(super) fn explain_eviction(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let all = sees_all(master, &call);
    let Call { now, tenant, request, .. } = call;
    let (limit, _) = request.read::<ExplainEviction>()?;
    let limit = (limit.min(PAGE_ITEMS_MAX)) as usize;
    let mut next = Page::default();
    master.next_victims(now, tenant, |victim| next.items.len() < limit && next.push(victim, victim.key));
    let report = if all { master.eviction() } else { master.eviction_of(tenant) };
    request.respond::<ExplainEviction>(&report, next.items.into_iter())
}

pub(super) fn read_config(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    call.request.respond_head::<ReadConfig>(master.config())
}

pub(super) fn change_config(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (change, _) = call.request.read::<ChangeConfig>()?;
    let set = master.change_config(call.now, &change).map_err(|_| ErrorCode::InvalidParams)?;
    call.request.respond_head::<ChangeConfig>(&set)
}

pub(super) fn evict_now(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (leave, _) = call.request.read::<EvictNow>()?;
    let evicted = master.evict_now(call.now, leave);
    call.request.respond_head::<EvictNow>(&evicted)
}

pub(super) fn tenant_list(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let Call { rights, tenant, request, .. } = call;
    let (_, names) = request.read::<TenantList>()?;
    let unknown = ErrorCode::TenantNotRegistered;
    if !rights.admin {
        // A tenant cannot see that there are others.
        let own = master.usage_of(tenant);
        let all = core::iter::repeat_n(Ok(own), usize::from(names.is_empty()));
        let named = names.map(|name| if name == own.name { Ok(own) } else { Err(unknown) });
        let items: Vec<_> = all.chain(named).collect();
        return request.respond::<TenantList>(&(), items.into_iter());
    }
    if names.is_empty() {
        let all: Vec<_> = master.tenants().take(KEYS_PER_BATCH_MAX).map(Ok).collect();
        return request.respond::<TenantList>(&(), all.into_iter());
    }
    request.respond::<TenantList>(&(), names.map(|name| master.tenant(name).ok_or(unknown)))
}

pub(super) fn tenant_set(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (setting, _) = call.request.read::<TenantSet>()?;
    master.set_tenant(&setting)?;
    call.request.respond_head::<TenantSet>(&())
}

pub(super) fn tenant_remove(master: &mut Master, call: Call<'_>) -> Result<(), ErrorCode> {
    let (name, _) = call.request.read::<TenantRemove>()?;
    master.remove_tenant(name)?;
    call.request.respond_head::<TenantRemove>(&())
}

/// Whether the caller sees numbers of the whole store: an admin does, and the only tenant of a master without
/// tenants.
fn sees_all(master: &Master, call: &Call<'_>) -> bool {
    call.rights.admin || !master.config().multi_tenants
}
