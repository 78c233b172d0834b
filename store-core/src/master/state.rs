//! The state of a master in a snapshot.

use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::{Master, millis};
use crate::event::Events;
use crate::snapshot::{Failed, Put, Take, secret};
use crate::{ConfigChange, ConfigChanges, ConfigError, MasterConfig, Secret};

/// What the settings do not serialise of themselves: secrets, and what each start chooses.
#[derive(Serialize, Deserialize)]
struct Unserialised {
    started_wall_ms: u64,
    handle_key: [u64; 2],
    admin_secret: Hidden,
    cluster_secret: Hidden,
    tenant_secrets: Vec<Hidden>,
    tenant_default_secret: Option<Hidden>,
}

#[derive(Serialize, Deserialize)]
struct Hidden(#[serde(with = "secret")] Secret);

impl Unserialised {
    fn of(config: &MasterConfig) -> Self {
        let MasterConfig { started_wall_ms, handle_key, admin_secret, cluster_secret, .. } = config;
        Self {
            started_wall_ms: *started_wall_ms,
            handle_key: *handle_key,
            admin_secret: Hidden(admin_secret.clone()),
            cluster_secret: Hidden(cluster_secret.clone()),
            tenant_secrets: config.tenants.iter().map(|tenant| Hidden(tenant.secret.clone())).collect(),
            tenant_default_secret: config.tenant_default.as_ref().map(|like| Hidden(like.secret.clone())),
        }
    }

    fn fill(self, config: &mut MasterConfig) {
        let Self {
            started_wall_ms,
            handle_key,
            admin_secret,
            cluster_secret,
            tenant_secrets,
            tenant_default_secret,
        } = self;
        (config.started_wall_ms, config.handle_key) = (started_wall_ms, handle_key);
        (config.admin_secret, config.cluster_secret) = (admin_secret.0, cluster_secret.0);
        for (tenant, secret) in config.tenants.iter_mut().zip(tenant_secrets) {
            tenant.secret = secret.0;
        }
        if let (Some(like), Some(secret)) = (&mut config.tenant_default, tenant_default_secret) {
            like.secret = secret.0;
        }
    }
}

impl Master {
    /// Number of objects, those that are being written included.
    pub(crate) fn objects_in_all(&self) -> u64 {
        self.objects.len().into()
    }

    /// Writes all state. Left out: events, caches, the term, what a recorder or a leader notes on the side.
    pub(crate) fn save(&self, to: &mut impl Put) -> Result<(), Failed> {
        // Without `..`: a new field has to be classed here.
        let Self {
            config,
            overrides,
            tenants,
            segments,
            objects,
            shelf,
            disks,
            promotions,
            pending_release,
            writers,
            events: _,
            nodes,
            pools,
            stats,
            generation,
            sessions,
            lease_bytes,
            metadata_reported,
            wall,
            evicting,
            starved,
            evict_again_at,
            pattern: _,
            report,
            tasks,
            drains,
            hot,
            suspects,
            ended_upserts,
            task_report,
            touches: _,
            lease_floor,
            term: _,
        } = self;
        to.put(config)?;
        to.put(&Unserialised::of(config))?;
        to.put(overrides)?;
        to.put(tenants)?;
        to.put(segments)?;
        to.put(objects)?;
        to.put(shelf)?;
        to.put(&(disks, promotions))?;
        to.put(pending_release)?;
        to.put(writers)?;
        to.put(&(nodes, pools))?;
        to.put(&(stats, report, task_report))?;
        to.put(&(generation, sessions, lease_bytes, metadata_reported))?;
        to.put(&(wall, evicting, starved, evict_again_at))?;
        to.put(&(tasks, drains, hot))?;
        to.put(&(suspects, ended_upserts, lease_floor))
    }

    /// Takes other settings, for a process that continues a store. What differs between two starts of a store
    /// stays, and so does what was [changed](Self::change_config). Returns whether anything has changed. This
    /// is no command: a log that goes on after it begins with a snapshot.
    ///
    /// # Errors
    /// A setting is not within its limits, or cannot be changed.
    pub(crate) fn reconfigure(&mut self, now: Instant, config: MasterConfig) -> Result<bool, ConfigError> {
        let MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, .. } = self.config;
        let mut config = MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, ..config };
        let mut overrides = self.overrides;
        overrides.set_again(&mut config);
        if config == self.config && overrides == self.overrides {
            return Ok(false);
        }
        config.validate()?;
        if config.multi_tenants != self.config.multi_tenants {
            return Err(ConfigError::fixed("multi_tenants"));
        }
        self.overrides = overrides;
        let longest = self.longest_lease();
        self.take_config(now, config);
        // A longer lease than now may have been granted.
        self.lease_floor = self.lease_floor.max(now + longest.max(self.longest_lease()));
        Ok(true)
    }

    /// Changes settings while the master serves. Returns what is set now and would not be without such
    /// changes. A lease that becomes shorter keeps everything from eviction for the time of the former one.
    ///
    /// # Errors
    /// A setting would not be within its limits: nothing is changed.
    pub fn change_config(
        &mut self,
        now: Instant,
        change: &ConfigChange,
    ) -> Result<ConfigChanges, ConfigError> {
        let (mut overrides, mut config) = (self.overrides, self.config.clone());
        overrides.change(change, &mut config);
        config.validate()?;
        self.overrides = overrides;
        let before = self.longest_lease();
        self.take_config(now, config);
        if self.longest_lease() < before {
            self.lease_floor = self.lease_floor.max(now + before);
        }
        Ok(overrides.set)
    }

    /// How long an object may be leased.
    fn longest_lease(&self) -> Duration {
        millis(self.config.lease_ttl_ms) + millis(self.config.lease_guard_ms)
    }

    fn take_config(&mut self, now: Instant, config: MasterConfig) {
        let leased = self.longest_lease();
        let before = core::mem::replace(&mut self.config, config);
        let lease = self.longest_lease();
        let config = &self.config;
        self.segments.strategy = config.allocation_strategy;
        self.segments.slow_start = millis(config.slow_start_ms);
        if (config.soft_pin_ttl_ms, lease) != (before.soft_pin_ttl_ms, leased) {
            self.objects.reconfigure(now, millis(config.soft_pin_ttl_ms), lease);
        }
        if config.eviction != before.eviction {
            self.objects.change_policy(config.eviction);
        }
        self.nodes.reconfigure(now, millis(config.node_ttl_ms), 2 * config.segments_max as usize);
        self.tasks.reconfigure(config.tasks.finished_max);
        if config.replication != before.replication {
            self.hot = super::Hot::new(&config.replication);
        }
        self.evict_again_at = now;
        if config.tenants != before.tenants {
            self.add_tenants();
        }
    }

    /// Reads what [`Self::save`] has written.
    ///
    /// # Errors
    /// Inner: the settings are refused.
    pub(crate) fn load(from: &mut impl Take) -> Result<Result<Self, ConfigError>, Failed> {
        let mut config: MasterConfig = from.take()?;
        from.take::<Unserialised>()?.fill(&mut config);
        if let Err(error) = config.validate() {
            return Ok(Err(error));
        }
        let overrides = from.take()?;
        let (tenants, segments) = (from.take()?, from.take()?);
        let mut objects: crate::objects::Objects = from.take()?;
        objects.reindex(config.hash_seed);
        let mut shelf: crate::shelf::Shelf = from.take()?;
        shelf.reindex(config.hash_seed);
        let (disks, promotions) = from.take()?;
        let (pending_release, writers, (nodes, pools)) = (from.take()?, from.take()?, from.take()?);
        let (stats, report, task_report) = from.take()?;
        let (generation, sessions, lease_bytes, metadata_reported) = from.take()?;
        let (wall, evicting, starved, evict_again_at) = from.take()?;
        let (tasks, drains, hot) = from.take()?;
        let (suspects, ended_upserts, lease_floor): (_, _, Instant) = from.take()?;
        Ok(Ok(Self {
            config,
            overrides,
            tenants,
            segments,
            objects,
            shelf,
            disks,
            promotions,
            pending_release,
            writers,
            events: Events::default(),
            nodes,
            pools,
            stats,
            generation,
            sessions,
            lease_bytes,
            metadata_reported,
            wall,
            evicting,
            starved,
            evict_again_at,
            pattern: None,
            report,
            tasks,
            drains,
            hot,
            suspects,
            ended_upserts,
            task_report,
            touches: None,
            lease_floor,
            term: 1,
        }))
    }
}
