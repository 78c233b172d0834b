//! The master's tenants, and their sessions.

use alloc::string::String;
use alloc::vec::Vec;

use foldhash::quality::FixedState;
use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::{Master, listing};
use crate::map::Map;
use crate::message::{EvictionReport, Greeting, Listed, ReplicaInfos, TenantSetting, TenantUsage};
use crate::proof::{CHALLENGE_BYTES, PROOF_BYTES, Role, is_proved, next_challenge};
use crate::tenant::{DEFAULT_TENANT, TENANT_BYTES_MAX};
use crate::wire::VERSION;
use crate::{
    ErrorCode, FullKey, MasterConfig, Peer, Secret, Session, Stats, TenantConfig, TenantNo, TenantTag,
};

/// The rights of a connection, and its tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    /// No greeting is needed before other requests.
    pub(crate) known: bool,
    pub(crate) tenant: Option<TenantNo>,
    pub(crate) admin: bool,
    /// It may act as a node.
    pub(crate) node: bool,
}

/// All tenants, by number. The default tenant always has number 0.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Tenants {
    list: Vec<Tenant>,
    names: Map<String, TenantNo, FixedState>,
    /// Numbers of tenants that were removed.
    free: Vec<TenantNo>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Tenant {
    name: String,
    /// Its name on disks.
    tag: TenantTag,
    #[serde(with = "crate::snapshot::secret")]
    secret: Secret,
    /// How often the number had been given to a tenant before.
    life: u32,
    /// Whether clients may act for it.
    open: bool,
}

impl Tenants {
    pub(crate) fn new(config: &MasterConfig) -> Self {
        let names = Map::with_seed(config.hash_seed);
        let mut this = Self { list: Vec::new(), names, free: Vec::new() };
        let no = this.add(DEFAULT_TENANT);
        this.list[no.index()].open = !config.multi_tenants;
        this
    }

    fn add(&mut self, name: &str) -> TenantNo {
        let no = self.free.pop().unwrap_or_else(|| {
            self.list.push(Tenant {
                name: String::new(),
                tag: TenantTag::default(),
                secret: Secret::default(),
                life: 0,
                open: false,
            });
            TenantNo::new((self.list.len() - 1) as u16)
        });
        let tenant = &mut self.list[no.index()];
        (tenant.name, tenant.tag) = (name.into(), TenantTag::of(name));
        (tenant.secret, tenant.open) = (Secret::default(), true);
        self.names.insert(name.into(), no);
        no
    }

    /// Ends its sessions. The default tenant keeps its number, because keys without a tenant belong to it.
    fn remove(&mut self, no: TenantNo) {
        let tenant = &mut self.list[no.index()];
        (tenant.secret, tenant.open) = (Secret::default(), false);
        tenant.life = tenant.life.wrapping_add(1);
        if no != TenantNo::DEFAULT {
            self.names.remove(&tenant.name);
            self.free.push(no);
        }
    }

    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    pub(super) fn name(&self, no: TenantNo) -> Option<&str> {
        self.list.get(no.index()).map(|tenant| &*tenant.name)
    }

    /// The tenant's name on disks.
    pub(super) fn tag(&self, no: TenantNo) -> TenantTag {
        self.list.get(no.index()).map_or(TenantTag::default(), |tenant| tenant.tag)
    }

    /// The tenant with this name on disks.
    pub(super) fn tagged(&self, tag: TenantTag) -> Option<TenantNo> {
        let known = |no: &TenantNo| self.list.get(no.index()).is_some_and(|tenant| tenant.tag == tag);
        let found = self.list.iter().position(|tenant| tenant.tag == tag && !tenant.name.is_empty())?;
        self.names.get(&self.list[found].name).copied().filter(known)
    }

    pub(super) fn named(&self, name: &str) -> Option<TenantNo> {
        self.names.get(name).copied().filter(|no| self.list[no.index()].open)
    }

    /// Whether the tenant with this number is still the same one.
    fn is(&self, no: TenantNo, life: u32) -> bool {
        self.list.get(no.index()).is_some_and(|tenant| tenant.open && tenant.life == life)
    }
}

impl Master {
    /// Evaluates a greeting. A session whose greeting is refused has no tenant. A greeting with a proof uses
    /// up the challenge.
    pub(crate) fn greet(&mut self, session: &mut Session, greeting: &Greeting<'_>) -> Result<(), ErrorCode> {
        (session.tenant, session.greeted, session.admin, session.cluster) = (None, false, false, false);
        if greeting.version != VERSION {
            return Err(ErrorCode::InvalidVersion);
        }
        let proofs = [greeting.tenant_proof.0, greeting.admin_proof.0, greeting.cluster_proof.0];
        if greeting.tenant.len() > TENANT_BYTES_MAX
            || proofs.iter().any(|proof| !matches!(proof.len(), 0 | PROOF_BYTES))
        {
            return Err(ErrorCode::InvalidParams);
        }
        let challenge = session.challenge;
        if greeting.has_proof() {
            session.challenge = next_challenge(&challenge);
        }
        let let_in = self.let_in(session, greeting, &challenge);
        if let_in.is_err() && greeting.has_proof() {
            session.proofs_failed = session.proofs_failed.saturating_add(1);
        }
        let_in
    }

    fn let_in(
        &mut self,
        session: &mut Session,
        greeting: &Greeting<'_>,
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Result<(), ErrorCode> {
        let proves = |secret: &Secret, proof: &[u8], role| {
            !proof.is_empty() && is_proved(secret, proof, role, challenge, greeting.tenant)
        };
        // A proof of a secret that is not set is ignored.
        let is_admin = proves(&self.config.admin_secret, greeting.admin_proof.0, Role::Admin);
        let is_cluster = proves(&self.config.cluster_secret, greeting.cluster_proof.0, Role::Cluster);
        let wrong =
            |secret: &Secret, proof: &[u8], proved: bool| secret.is_set() && !proof.is_empty() && !proved;
        if wrong(&self.config.admin_secret, greeting.admin_proof.0, is_admin)
            || wrong(&self.config.cluster_secret, greeting.cluster_proof.0, is_cluster)
        {
            return Err(ErrorCode::PermissionDenied);
        }
        let is_tenant = |secret: &Secret| {
            !secret.is_set() || is_admin || proves(secret, greeting.tenant_proof.0, Role::Tenant)
        };
        if !greeting.tenant.is_empty() {
            let no = match self.tenants.named(greeting.tenant) {
                Some(no) => no,
                None => {
                    // The tenant is created only if the connection could act for it.
                    let like = self.config.tenant_default.as_ref().ok_or(ErrorCode::TenantNotRegistered)?;
                    if !is_tenant(&like.secret) {
                        return Err(ErrorCode::TenantNotRegistered);
                    }
                    self.create_tenant(greeting.tenant)?
                }
            };
            let tenant = &self.tenants.list[no.index()];
            if !is_tenant(&tenant.secret) {
                return Err(ErrorCode::TenantNotRegistered);
            }
            session.tenant = Some((no, tenant.life));
        }
        (session.greeted, session.admin, session.cluster) = (true, is_admin, is_cluster);
        Ok(())
    }

    /// As [`Session::owner`], for the process that runs the master, acting for a tenant as well.
    ///
    /// # Errors
    /// `TenantNotRegistered`.
    pub fn owner_for(&self, tenant: &str) -> Result<Session, ErrorCode> {
        let no = self.tenants.named(tenant).ok_or(ErrorCode::TenantNotRegistered)?;
        let mut session = Session::owner();
        session.tenant = Some((no, self.tenants.list[no.index()].life));
        Ok(session)
    }

    /// What a listing would report of a tenant's object, and where it is; neither leases it nor counts as a
    /// use. For the process that runs the master.
    ///
    /// # Errors
    /// `TenantNotRegistered`, `ObjectNotFound`.
    pub fn inspect(
        &self,
        now: Instant,
        tenant: &str,
        key: &[u8],
    ) -> Result<(Listed<'_>, ReplicaInfos), ErrorCode> {
        let tenant = self.tenants.named(tenant).ok_or(ErrorCode::TenantNotRegistered)?;
        let key = FullKey { tenant, key };
        let index = self.objects.find(key).ok_or(ErrorCode::ObjectNotFound)?;
        Ok((listing(self.objects.entry(index), now), self.find_replicas(key)?))
    }

    pub(crate) fn rights(&self, session: &Session) -> Rights {
        let config = &self.config;
        let (secret, cluster) = (config.admin_secret.is_set(), config.cluster_secret.is_set());
        let tenant = match session.tenant {
            Some((no, life)) => self.tenants.is(no, life).then_some(no),
            None => (!config.multi_tenants).then_some(TenantNo::DEFAULT),
        };
        Rights {
            known: session.greeted || !config.multi_tenants,
            tenant,
            admin: session.admin || (!secret && !config.multi_tenants && session.peer == Peer::Local),
            // Nodes hold the bytes of all tenants, and can drop all objects.
            node: session.admin || session.cluster || !(secret || cluster),
        }
    }

    /// Every tenant that clients may act for, or that still has objects or space, by number.
    pub fn tenants(&self) -> impl Iterator<Item = TenantUsage<'_>> {
        (0..self.tenants.list.len()).filter_map(|no| {
            let usage = self.usage_of(TenantNo::new(no as u16));
            let empty = usage.objects == 0 && usage.held_bytes == 0;
            (self.tenants.list[no].open || !empty).then_some(usage)
        })
    }

    /// What a tenant uses, and its limits.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<TenantUsage<'_>> {
        self.tenants.named(name).map(|no| self.usage_of(no))
    }

    pub(crate) fn usage_of(&self, no: TenantNo) -> TenantUsage<'_> {
        let (tenant, usage) = (&self.tenants.list[no.index()], self.objects.usage(no));
        TenantUsage {
            name: &tenant.name,
            quota_bytes: (usage.quota_bytes != u64::MAX).then_some(usage.quota_bytes),
            quota_objects: (usage.quota_objects != u32::MAX).then_some(usage.quota_objects),
            quota_disk_bytes: (usage.quota_disk_bytes != u64::MAX).then_some(usage.quota_disk_bytes),
            disk_bytes: usage.disk_bytes,
            guaranteed_bytes: usage.guaranteed_bytes,
            has_secret: tenant.secret.is_set(),
            bytes: usage.bytes,
            held_bytes: self.pending_release.charged(no),
            hard_pinned_bytes: usage.hard_bytes,
            objects: usage.objects.into(),
            evictions_total: usage.evictions_total,
            refusals_total: usage.refusals_total,
        }
    }

    /// The part of [`Self::stats`] that a tenant may see: its own objects, and the room for them.
    pub(crate) fn stats_of(&self, no: TenantNo) -> Stats {
        let (usage, held) = (self.objects.usage(no), self.pending_release.charged(no));
        Stats {
            objects: usage.objects.into(),
            object_bytes: usage.bytes,
            segments: self.segments.len() as u64,
            nodes: self.nodes.len() as u64,
            capacity_bytes: self.segments.capacity_bytes().min(usage.quota_bytes),
            used_bytes: usage.bytes + held,
            evictions_total: usage.evictions_total,
            ..Stats::default()
        }
    }

    /// The part of [`Self::eviction`] that a tenant may see: its own objects.
    pub(crate) fn eviction_of(&self, no: TenantNo) -> EvictionReport {
        let usage = self.objects.usage(no);
        let (candidates, soft) = self.objects.may_go(no);
        let quota = self.segments.capacity_bytes().min(usage.quota_bytes);
        EvictionReport {
            policy: self.config.eviction,
            candidates: candidates.into(),
            kept_soft_pinned: soft.into(),
            hard_pinned_bytes: usage.hard_bytes,
            used_bytes: usage.bytes + self.pending_release.charged(no),
            high_mark_bytes: quota,
            low_mark_bytes: quota,
            evictions_total: usage.evictions_total,
            ..EvictionReport::default()
        }
    }

    /// Adds a tenant, or changes its limits. Objects above a lower quota are evicted by its next puts. Its
    /// sessions stay valid, even if the secret changes.
    ///
    /// # Errors
    /// `InvalidParams` for an invalid name, secret or guarantee, and for another tenant than the default one
    /// in a master without tenants; `KeysUltraLimit`: too many tenants.
    pub fn set_tenant(&mut self, setting: &TenantSetting<'_>) -> Result<(), ErrorCode> {
        let known = self.tenants.names.get(setting.name).copied();
        let secret = match (setting.secret, known) {
            (Some(secret), _) => Secret::new(secret.0),
            (None, Some(no)) => self.tenants.list[no.index()].secret.clone(),
            (None, None) => Secret::default(),
        };
        let config = TenantConfig {
            name: setting.name.into(),
            quota_bytes: setting.quota_bytes,
            quota_objects: setting.quota_objects,
            quota_disk_bytes: setting.quota_disk_bytes,
            guaranteed_bytes: setting.guaranteed_bytes,
            secret,
        };
        if !config.is_valid() || (setting.name != DEFAULT_TENANT && !self.config.multi_tenants) {
            return Err(ErrorCode::InvalidParams);
        }
        self.configure_tenant(&config).map(|_| ())
    }

    /// Removes a tenant without objects. Its sessions are refused from here on.
    ///
    /// # Errors
    /// `TenantNotRegistered`; `TenantNotEmpty` while it has objects, or space that is pending release;
    /// `InvalidParams` for the only tenant of a master without tenants.
    pub fn remove_tenant(&mut self, name: &str) -> Result<(), ErrorCode> {
        let no = self.tenants.named(name).ok_or(ErrorCode::TenantNotRegistered)?;
        if !self.config.multi_tenants {
            return Err(ErrorCode::InvalidParams);
        }
        if self.objects.usage(no).objects > 0
            || self.pending_release.charged(no) > 0
            || self.tasks.has_unfinished_of(no)
            || self.shelf.bytes_of(no) > 0
        {
            return Err(ErrorCode::TenantNotEmpty);
        }
        self.tasks.forget(no);
        self.pools.forget_tenant(no);
        self.objects.changes.lose_keys_of(no);
        self.tenants.remove(no);
        self.objects.clear_share(no, self.config.eviction);
        Ok(())
    }

    pub(super) fn add_tenants(&mut self) {
        for tenant in self.config.tenants.clone() {
            // The number of tenants was validated.
            let _ = self.configure_tenant(&tenant);
        }
    }

    fn configure_tenant(&mut self, config: &TenantConfig) -> Result<TenantNo, ErrorCode> {
        let no = match self.tenants.names.get(config.name.as_str()) {
            Some(no) => *no,
            None if self.tenants.count() >= self.config.tenants_max as usize => {
                return Err(ErrorCode::KeysUltraLimit);
            }
            None => self.tenants.add(&config.name),
        };
        let tenant = &mut self.tenants.list[no.index()];
        (tenant.secret, tenant.open) = (config.secret.clone(), true);
        self.objects.add_share(no, self.config.eviction);
        self.objects.limit(no, config);
        Ok(no)
    }

    pub(super) fn create_tenant(&mut self, name: &str) -> Result<TenantNo, ErrorCode> {
        let like = self.config.tenant_default.as_ref().filter(|_| self.config.multi_tenants);
        let tenant =
            TenantConfig { name: name.into(), ..like.ok_or(ErrorCode::TenantNotRegistered)?.clone() };
        self.configure_tenant(&tenant).map_err(|_| ErrorCode::TenantNotRegistered)
    }
}
