//! The master's settings and their limits.

use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::allocator::GRAIN_BYTES;
use crate::heat::ReplicationConfig;
use crate::master::REPORTERS_MAX;
use crate::message::REPLICAS_MAX;
use crate::tasks::TaskConfig;
use crate::tenant::{DEFAULT_TENANT, SECRET_BYTES_MAX};
use crate::wire;
use crate::{AllocationStrategy, AllocatorKind, EvictionPolicy, Secret, TenantConfig};

/// What can be set, with its default. [`Self::validate`] before use; [`Master::new`](crate::Master::new) does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MasterConfig {
    /// How long a reader may read what a get returned, ms. Default 5,000.
    pub lease_ttl_ms: u32,
    /// How much longer than promised a lease is kept, ms: covers a clock that is read once a loop, and drift. Default 100.
    pub lease_guard_ms: u32,
    /// How long a writer may take before another may displace it, ms. Default 30,000.
    pub put_start_discard_timeout_ms: u32,
    /// After how long the nodes are told to cut off a writer that never said it is quiet, ms; its space comes back when they
    /// have. On nodes that cannot, the space comes back then: there it must be longer than the longest time that a write can
    /// be under way in the fabric. Longer than the discard timeout. Default 600,000.
    pub put_start_release_timeout_ms: u32,
    /// A node that is silent for longer is given up, ms. Default 10,000.
    pub node_ttl_ms: u32,
    /// How a segment's bytes are given out. Default [`AllocatorKind::Offset`].
    pub allocator: AllocatorKind,
    /// How segments are drawn for new replicas. Default [`AllocationStrategy::FreeRatioFirst`].
    pub allocation_strategy: AllocationStrategy,
    /// How long a segment that was just mounted gets fewer new replicas than its share, ms; 0: not at all. Default 60,000.
    pub slow_start_ms: u32,
    /// How the object to evict is chosen. Default [`EvictionPolicy::Trial`].
    pub eviction: EvictionPolicy,
    /// How long a soft pin holds after the object was last read or written, ms. Default 1,800,000.
    pub soft_pin_ttl_ms: u32,
    /// The share of all bytes that may be pinned for good; further such puts find no room. Default 0.5.
    pub hard_pin_share_max: f64,
    /// Eviction begins when this share of all bytes is used. What is above is a reserve for further replicas and copies, for
    /// which nothing is evicted; a put evicts what it needs, which costs little, so the reserve need not be large: every
    /// per cent of it is a per cent less of cache. Default 0.99.
    pub eviction_high_watermark: f64,
    /// Eviction ends this share below the watermark. Default 0.005.
    pub eviction_ratio: f64,
    /// Most objects evicted in one call, and most that are looked at for one of them, so that a call stays short; the rest
    /// follows in the next. A group counts as one. Default 4,096.
    pub evictions_per_call_max: u32,
    /// Most replicas of an object, 1 to 8. Default 8.
    pub replicas_max: u8,
    /// Most objects, those being written included. Default 100,000,000.
    pub objects_max: u32,
    /// Longest key, bytes. Default 1,024.
    pub key_bytes_max: u32,
    /// Most segments mounted at a time. Default 4,096.
    pub segments_max: u32,
    /// Longest segment, bytes. Default 64 TiB.
    pub segment_bytes_max: u64,
    /// Most nodes known at a time, those lately given up included. Default 4,096.
    pub nodes_max: u32,
    /// Which life of the master this is; must be higher in each, and seconds of wall time at its start are meant. Generations
    /// begin at `epoch << 32`, and segment numbers somewhere else in each life, so that whoever still acts on the word of a
    /// former life finds nothing instead of something else. Default 0, for a master that is never started twice.
    pub epoch: u32,
    /// Whether there are other tenants than the default one. A server wants an [`Self::admin_secret`] then: without one, whoever
    /// connects could be a node. Off, everybody is the default tenant, and whoever names another is
    /// refused. On, nothing but `Hello` is answered to a connection that has not named a tenant; the default one exists if
    /// [`Self::tenants`] names it. Default off.
    pub multi_tenants: bool,
    /// The tenants that there are from the beginning. Without [`Self::multi_tenants`] only the default one may be among them.
    /// Default none.
    pub tenants: Vec<TenantConfig>,
    /// A tenant that is not known is created, like this one but for its name. Default none: it is refused.
    pub tenant_default: Option<TenantConfig>,
    /// Most tenants. Eviction looks at each of them for a victim. Default 1,024.
    pub tenants_max: u32,
    /// Who proves to know this is an admin, and may be any tenant. Without one, and without tenants, connections from this host
    /// are admins. Default none.
    pub admin_secret: Secret,
    /// Who proves to know this is of the cluster, as nodes are. As soon as it or [`Self::admin_secret`] is set, whoever wants to
    /// mount memory, to speak for a node, or to drain one has to know one of them. Default none: anybody may who reaches the
    /// master.
    pub cluster_secret: Secret,
    /// Most memory that what the master knows of objects, unfinished puts and readers' leases may need, bytes. At the limit,
    /// a put evicts objects for as much as it needs; if none can go it is refused. Default 16 GiB.
    pub metadata_bytes_max: u64,
    /// Most puts that one connection may have begun and not ended. Default 65,536.
    pub session_puts_max: u32,
    /// Most puts that the connections of one tenant may have begun and not ended. Default 1,048,576.
    pub tenant_puts_max: u32,
    /// Wall time at the zero of the clock that the master is given, ms since 1970; 0: unknown, and the incarnations of nodes are
    /// not compared with it. Set by whoever starts the master.
    #[serde(skip)]
    pub started_wall_ms: u64,
    /// What handles of puts are made with, 128 random bits. Set by whoever starts the master.
    #[serde(skip)]
    pub handle_key: [u64; 2],
    /// Seeds the hash of keys, so that nobody can choose keys that collide. Default 0; give it a random number.
    pub hash_seed: u64,
    /// Tasks, drains and reports.
    pub tasks: TaskConfig,
    /// Further replicas of what is read very often.
    pub replication: ReplicationConfig,
}

impl Default for MasterConfig {
    fn default() -> Self {
        Self {
            lease_ttl_ms: 5_000,
            lease_guard_ms: 100,
            put_start_discard_timeout_ms: 30_000,
            put_start_release_timeout_ms: 600_000,
            node_ttl_ms: 10_000,
            allocator: AllocatorKind::default(),
            allocation_strategy: AllocationStrategy::default(),
            slow_start_ms: 60_000,
            eviction: EvictionPolicy::default(),
            soft_pin_ttl_ms: 1_800_000,
            hard_pin_share_max: 0.5,
            eviction_high_watermark: 0.99,
            eviction_ratio: 0.005,
            evictions_per_call_max: 4_096,
            replicas_max: REPLICAS_MAX as u8,
            objects_max: 100_000_000,
            key_bytes_max: wire::KEY_BYTES_MAX as u32,
            segments_max: 4_096,
            segment_bytes_max: 64 << 40,
            nodes_max: 4_096,
            epoch: 0,
            multi_tenants: false,
            tenants: Vec::new(),
            tenant_default: None,
            tenants_max: 1_024,
            admin_secret: Secret::default(),
            cluster_secret: Secret::default(),
            metadata_bytes_max: 16 << 30,
            session_puts_max: 1 << 16,
            tenant_puts_max: 1 << 20,
            started_wall_ms: 0,
            handle_key: [0; 2],
            hash_seed: 0,
            tasks: TaskConfig::default(),
            replication: ReplicationConfig::default(),
        }
    }
}

impl MasterConfig {
    /// Checks every setting against its limits.
    ///
    /// # Errors
    /// The first that is out of them.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let whole = |setting: &'static str, value: u32, min: u32, max: u32| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(ConfigError {
                    setting,
                    reason: Reason::Range { min: f64::from(min), max: f64::from(max) },
                })
            }
        };
        let share = |setting: &'static str, value: f64, min: f64, max: f64| {
            if value >= min && value <= max {
                Ok(())
            } else {
                Err(ConfigError { setting, reason: Reason::Range { min, max } })
            }
        };
        const DAY_MS: u32 = 86_400_000;
        const SEGMENT_BYTES_MAX: u64 = 1 << 50;
        whole("lease_ttl_ms", self.lease_ttl_ms, 1, DAY_MS)?;
        whole("lease_guard_ms", self.lease_guard_ms, 0, DAY_MS)?;
        whole("put_start_discard_timeout_ms", self.put_start_discard_timeout_ms, 1, DAY_MS)?;
        whole("put_start_release_timeout_ms", self.put_start_release_timeout_ms, 1, DAY_MS)?;
        whole("node_ttl_ms", self.node_ttl_ms, 1, DAY_MS)?;
        whole("slow_start_ms", self.slow_start_ms, 0, DAY_MS)?;
        whole("soft_pin_ttl_ms", self.soft_pin_ttl_ms, 1, 30 * DAY_MS)?;
        share("hard_pin_share_max", self.hard_pin_share_max, 0.0, 1.0)?;
        share("eviction_high_watermark", self.eviction_high_watermark, 0.01, 1.0)?;
        share("eviction_ratio", self.eviction_ratio, 0.0, self.eviction_high_watermark)?;
        whole("evictions_per_call_max", self.evictions_per_call_max, 1, u32::MAX)?;
        whole("replicas_max", self.replicas_max.into(), 1, REPLICAS_MAX as u32)?;
        whole("objects_max", self.objects_max, 1, 1 << 31)?;
        whole("key_bytes_max", self.key_bytes_max, 1, wire::KEY_BYTES_MAX as u32)?;
        whole("session_puts_max", self.session_puts_max, 1, 1 << 31)?;
        whole("tenant_puts_max", self.tenant_puts_max, 1, 1 << 31)?;
        whole("segments_max", self.segments_max, 1, wire::KEYS_PER_BATCH_MAX as u32)?;
        whole("nodes_max", self.nodes_max, 1, 1 << 16)?;
        whole("tasks.unfinished_max", self.tasks.unfinished_max, 1, 1 << 20)?;
        whole("tasks.finished_max", self.tasks.finished_max, 1, 1 << 20)?;
        whole("tasks.per_node_max", self.tasks.per_node_max, 1, 1_024)?;
        whole("tasks.pending_timeout_ms", self.tasks.pending_timeout_ms, 1, DAY_MS)?;
        whole("tasks.processing_timeout_ms", self.tasks.processing_timeout_ms, 1, DAY_MS)?;
        whole("tasks.attempts_max", self.tasks.attempts_max, 1, 1_000)?;
        whole("tasks.drain_moves_max", self.tasks.drain_moves_max, 1, 1_024)?;
        whole("tasks.bad_reports_min", self.tasks.bad_reports_min, 1, REPORTERS_MAX as u32)?;
        share("replication.gets_per_s_min", self.replication.gets_per_s_min, 0.001, 1e6)?;
        whole("replication.window_ms", self.replication.window_ms, 100, 600_000)?;
        whole("replication.replicas_max", self.replication.replicas_max.into(), 1, REPLICAS_MAX as u32)?;
        whole("replication.tasks_per_s_max", self.replication.tasks_per_s_max, 1, 1_000_000)?;
        self.validate_tenants()?;
        const METADATA_BYTES_MIN: u64 = 1 << 20;
        if !(METADATA_BYTES_MIN..=1 << 50).contains(&self.metadata_bytes_max) {
            let (min, max) = (METADATA_BYTES_MIN as f64, (1u64 << 50) as f64);
            return Err(ConfigError { setting: "metadata_bytes_max", reason: Reason::Range { min, max } });
        }
        if !(GRAIN_BYTES..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes_max) {
            let (min, max) = (GRAIN_BYTES as f64, SEGMENT_BYTES_MAX as f64);
            return Err(ConfigError { setting: "segment_bytes_max", reason: Reason::Range { min, max } });
        }
        if self.put_start_release_timeout_ms <= self.put_start_discard_timeout_ms {
            return Err(ConfigError {
                setting: "put_start_release_timeout_ms",
                reason: Reason::ReleaseBeforeDiscard,
            });
        }
        Ok(())
    }

    fn validate_tenants(&self) -> Result<(), ConfigError> {
        const TENANTS_MAX: u32 = 4_096;
        if !(1..=TENANTS_MAX).contains(&self.tenants_max) {
            let reason = Reason::Range { min: 1.0, max: f64::from(TENANTS_MAX) };
            return Err(ConfigError { setting: "tenants_max", reason });
        }
        // One more: the default tenant has a number in any case.
        if self.tenants.len() >= self.tenants_max as usize {
            return Err(ConfigError { setting: "tenants", reason: Reason::TooManyTenants });
        }
        let names = self.tenants.iter().map(|tenant| &*tenant.name);
        let all = self.tenants.iter().chain(&self.tenant_default);
        let long = self.admin_secret.len().max(self.cluster_secret.len()) > SECRET_BYTES_MAX;
        if all.clone().any(|tenant| !tenant.is_valid()) || long {
            return Err(ConfigError { setting: "tenants", reason: Reason::Tenant });
        }
        let twice =
            names.clone().enumerate().any(|(at, name)| names.clone().take(at).any(|other| other == name));
        if twice {
            return Err(ConfigError { setting: "tenants", reason: Reason::TenantTwice });
        }
        if !self.multi_tenants
            && (self.tenant_default.is_some() || names.clone().any(|name| name != DEFAULT_TENANT))
        {
            return Err(ConfigError { setting: "tenants", reason: Reason::OneTenant });
        }
        Ok(())
    }
}

/// A setting that is out of its limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConfigError {
    /// Its name.
    pub setting: &'static str,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reason {
    Range { min: f64, max: f64 },
    ReleaseBeforeDiscard,
    TooManyTenants,
    Tenant,
    TenantTwice,
    OneTenant,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            Reason::Range { min, max } => write!(f, "{}: choose a value from {min} to {max}", self.setting),
            Reason::TooManyTenants => write!(f, "{}: more than tenants_max: raise it", self.setting),
            Reason::Tenant => write!(
                f,
                "{}: names have 1 to 64 bytes, secrets 256 at most, and a guarantee is within the quota",
                self.setting
            ),
            Reason::TenantTwice => write!(f, "{}: a name is there twice", self.setting),
            Reason::OneTenant => write!(f, "{}: only \"default\", or set multi_tenants", self.setting),
            Reason::ReleaseBeforeDiscard => {
                write!(f, "{}: must be longer than put_start_discard_timeout_ms", self.setting)
            }
        }
    }
}

impl core::error::Error for ConfigError {}
