//! Quotas of tenants under Mooncake's paths.

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use store_core::message::{ReadStats, TenantList, TenantRemove, TenantSet, TenantSetting, TenantUsage};
use store_core::{DEFAULT_TENANT, ErrorCode};

use super::{Refused, Shared, json, text_param};

/// A tenant, as Mooncake describes it.
#[derive(Debug, Serialize)]
struct Quota {
    tenant_id: String,
    /// Its quota, bytes; 0: none.
    requested_quota_bytes: u64,
    /// Most bytes that it can have.
    effective_quota_bytes: u64,
    charged_bytes: u64,
    /// Whether a put of it has to evict its own objects.
    admission_closed: bool,
    over_quota: bool,
    has_explicit_policy: bool,
    /// What a change of the quota leaves as it is.
    #[serde(skip)]
    kept: (Option<u32>, Option<u64>, u64),
}

impl Quota {
    fn of(usage: &TenantUsage<'_>, capacity_bytes: u64) -> Self {
        let charged_bytes = usage.bytes.saturating_add(usage.held_bytes);
        let quota = usage.quota_bytes.unwrap_or(u64::MAX);
        Self {
            tenant_id: usage.name.to_owned(),
            requested_quota_bytes: usage.quota_bytes.unwrap_or(0),
            effective_quota_bytes: quota.min(capacity_bytes),
            charged_bytes,
            admission_closed: charged_bytes >= quota,
            over_quota: charged_bytes > quota,
            has_explicit_policy: usage.quota_bytes.is_some(),
            kept: (usage.quota_objects, usage.quota_disk_bytes, usage.guaranteed_bytes),
        }
    }
}

#[derive(Serialize)]
struct Answer<T> {
    success: bool,
    data: T,
}

fn answer(data: impl Serialize) -> Response {
    json(StatusCode::OK, &Answer { success: true, data })
}

async fn read_quotas(shared: &Shared) -> Result<Vec<Quota>, Refused> {
    let capacity = shared.asker.ask::<ReadStats, _>(&(), |stats, _| stats.capacity_bytes).await?;
    let quotas = shared
        .asker
        .ask::<TenantList, _>(&(), |(), usages| {
            usages.flatten().map(|usage| Quota::of(&usage, capacity)).collect()
        })
        .await?;
    Ok(quotas)
}

/// All tenants, or the one that `?tenant_id=` names.
pub(super) async fn read(State(shared): State<Shared>, uri: Uri) -> Result<Response, Refused> {
    let quotas = read_quotas(&shared).await?;
    match text_param(&uri, "tenant_id")? {
        None => Ok(answer(quotas)),
        Some(tenant) => Ok(answer(of(quotas, &tenant).ok_or(ErrorCode::TenantNotRegistered)?)),
    }
}

fn of(quotas: Vec<Quota>, tenant: &str) -> Option<Quota> {
    quotas.into_iter().find(|quota| quota.tenant_id == tenant)
}

/// Body of a PUT.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    requested_quota_bytes: u64,
}

/// Sets the quota of a tenant, and adds the tenant if the master does not know it.
pub(super) async fn set(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
    body: Body,
) -> Result<Response, Refused> {
    shared.may_change(peer, &headers).await?;
    let tenant = wanted(&uri)?;
    let Wanted { requested_quota_bytes } = crate::admin::read(&headers, body).await?;
    if !(1..=i64::MAX as u64).contains(&requested_quota_bytes) {
        return Err(Refused::params("requested_quota_bytes must be 1 to 9223372036854775807"));
    }
    change(&shared, &tenant, Some(requested_quota_bytes)).await?;
    let changed = of(read_quotas(&shared).await?, &tenant);
    Ok(answer(changed.ok_or(ErrorCode::TenantNotRegistered)?))
}

/// Removes a tenant; the default tenant of a master without tenants only loses its quota.
pub(super) async fn remove(
    State(shared): State<Shared>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refused> {
    shared.may_change(peer, &headers).await?;
    let tenant = wanted(&uri)?;
    let before = of(read_quotas(&shared).await?, &tenant).ok_or(ErrorCode::TenantNotRegistered)?;
    if tenant == DEFAULT_TENANT && !shared.asker.has_tenants() {
        change(&shared, &tenant, None).await?;
    } else {
        shared.asker.ask::<TenantRemove, _>(&&*tenant, |(), _| ()).await?;
    }
    Ok(answer(before))
}

/// Sets the quota, and leaves everything else as it is.
async fn change(shared: &Shared, tenant: &str, quota_bytes: Option<u64>) -> Result<(), Refused> {
    let known = of(read_quotas(shared).await?, tenant);
    let (quota_objects, quota_disk_bytes, guaranteed_bytes) =
        known.map_or((None, None, 0), |quota| quota.kept);
    let setting = TenantSetting {
        name: tenant,
        quota_bytes,
        quota_objects,
        quota_disk_bytes,
        guaranteed_bytes,
        secret: None,
    };
    Ok(shared.asker.ask::<TenantSet, _>(&setting, |(), _| ()).await?)
}

fn wanted(uri: &Uri) -> Result<String, Refused> {
    text_param(uri, "tenant_id")?.ok_or(Refused::params("Missing or invalid tenant_id"))
}
