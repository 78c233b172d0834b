//! The master's settings and their limits.

mod changes;

use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::allocator::GRAIN_BYTES;
use crate::master::REPORTERS_MAX;
use crate::message::{POOL_PAGES_MAX, REPLICAS_MAX, SOFT_PIN_TTL_MS_MAX};
use crate::read_rates::ReplicationConfig;
use crate::tasks::TaskConfig;
use crate::tenant::{DEFAULT_TENANT, SECRET_BYTES_MAX};
use crate::wire;
use crate::{AllocationStrategy, AllocatorKind, EvictionPolicy, Secret, TenantConfig};

pub(crate) use changes::Overrides;
pub use changes::{ChangeHow, ConfigChange, ConfigChanges};

/// The longest lease that a get is granted before the other masters, or the journal, have it, ms. After a
/// failover or a restart the master frees no space for as long, because it may not know such leases. A reader
/// that needs more time asks for a [lasting](crate::message::LeaseWanted::Lasting) lease.
pub const QUICK_LEASE_MS: u32 = 250;

/// The master's settings with their defaults. [`Master::new`](crate::Master::new) calls [`Self::validate`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MasterConfig {
    /// How long a reader may read what a get returned, ms. With other masters or a journal, a get that does
    /// not ask for a lasting lease is answered before the lease is confirmed, and may read for 250 ms at
    /// most. Default 5,000.
    pub lease_ttl_ms: u32,
    /// How much longer than promised a lease is kept, ms: covers drift, and a clock that is read once per
    /// loop. Default 100.
    pub lease_guard_ms: u32,
    /// How long a writer may take before another writer may displace its put, ms. Default 30,000.
    pub put_start_discard_timeout_ms: u32,
    /// After this time the nodes are told to cut off a writer that never reported that it is quiet, ms; its
    /// space is released when they have. On nodes that cannot cut off writers, the space is held until the
    /// segment is mounted anew. Space of a copy task that was given up is released at this time at the
    /// latest. Must be longer than the discard timeout. Default 600,000.
    pub put_start_release_timeout_ms: u32,
    /// A node that is silent for longer than this is given up, ms. Default 10,000.
    pub node_ttl_ms: u32,
    /// The allocator of segments. Default [`AllocatorKind::Offset`].
    pub allocator: AllocatorKind,
    /// How segments are drawn for new replicas. Default [`AllocationStrategy::FreeRatioFirst`].
    pub allocation_strategy: AllocationStrategy,
    /// How long a segment that was just mounted gets fewer new replicas than its share, ms; 0: never. Default
    /// 60,000.
    pub slow_start_ms: u32,
    /// The policy that chooses the object to evict. Default [`EvictionPolicy::Trial`].
    pub eviction: EvictionPolicy,
    /// How long a soft pin is valid after the object was last read or written, ms, unless the object has a
    /// validity of its own. Default 1,800,000.
    pub soft_pin_ttl_ms: u32,
    /// The share of all bytes that may be pinned for good, 0 to 1; puts above it find no room. Default 0.5.
    pub hard_pin_share_max: f64,
    /// Eviction begins when this share of all bytes is used. The rest is a reserve for further replicas and
    /// copies, for which nothing is evicted. A put evicts what it needs, which costs little, so the reserve
    /// need not be large: every per cent of it makes the cache a per cent smaller. Default 0.99.
    pub eviction_high_watermark: f64,
    /// Eviction ends when the used share is this far below the watermark. Default 0.005.
    pub eviction_ratio: f64,
    /// The share of all bytes that is chosen for eviction ahead of time, so that the objects are copied to
    /// the disks of their nodes before their space is needed, 0 to 0.5; 0: nothing is copied to disks.
    /// Without disks it has no effect. Default 0.1.
    pub demote_ahead: f64,
    /// How long the objects on a disk are remembered when its node is gone, ms. A disk that returns later is
    /// cleared. Default 600,000.
    pub disk_away_ms: u32,
    /// Most objects evicted in one call, and most candidates examined for one eviction, so that a call stays
    /// short; the rest follows in the next call. A group counts as one. Default 4,096.
    pub evictions_per_call_max: u32,
    /// Most replicas per object, 1 to 8. Default 8.
    pub replicas_max: u8,
    /// Most objects, including those that are being written. Default 100,000,000.
    pub objects_max: u32,
    /// Length limit of a key, bytes. Default 1,024.
    pub key_bytes_max: u32,
    /// Most segments that are mounted at the same time. Default 4,096.
    pub segments_max: u32,
    /// Length limit of a segment, bytes. Default 64 TiB.
    pub segment_bytes_max: u64,
    /// Most nodes that are known at the same time, including those that were given up lately. Default 4,096.
    pub nodes_max: u32,
    /// The number of this start of the master, higher than that of every earlier start; seconds of wall time
    /// are intended. Generations begin at `epoch << 32`, and each epoch has its own range of segment numbers,
    /// so that a request that relies on a response of an earlier epoch finds nothing instead of something
    /// else. Default 0, for a master that is never started twice.
    pub epoch: u32,
    /// Whether there are other tenants than the default one. A server needs an [`Self::admin_secret`] then:
    /// without it, every peer could act as a node. When off, every connection acts for the default tenant,
    /// and a connection that names another tenant is refused. When on, a connection that has not named a
    /// tenant may only send `Hello`; the default tenant exists if [`Self::tenants`] names it. Default off.
    pub multi_tenants: bool,
    /// The tenants at the start. Without [`Self::multi_tenants`] only the default tenant may be among them.
    /// Default none.
    pub tenants: Vec<TenantConfig>,
    /// The template of tenants that are created when they are first named; everything but the name is copied.
    /// Default none: unknown tenants are refused.
    pub tenant_default: Option<TenantConfig>,
    /// Most tenants. Eviction examines each of them to find a victim. Default 1,024.
    pub tenants_max: u32,
    /// A connection that proves this secret has the rights of an admin, and may act for any tenant. If no
    /// secret is set and there are no other tenants, connections from this host are admins. Default none.
    pub admin_secret: Secret,
    /// A connection that proves this secret is of the cluster, as nodes are. As soon as it or
    /// [`Self::admin_secret`] is set, mounting memory, acting for a node and draining a node require one of
    /// the two. Default none: every peer that reaches the master may.
    pub cluster_secret: Secret,
    /// Memory limit for the metadata of objects, unfinished puts and leases, bytes. At the limit, a put
    /// evicts as many objects as it needs, and is refused if none can go. Default 16 GiB.
    pub metadata_bytes_max: u64,
    /// Most unfinished puts per connection. Default 65,536.
    pub session_puts_max: u32,
    /// Most unfinished puts per tenant, over all of its connections. Default 1,048,576.
    pub tenant_puts_max: u32,
    /// Most pages of one CXL pool that are given over one connection, to processes that may be alive, 1 to
    /// 1,024. A client needs one per pool. Default 4.
    pub session_pool_pages_max: u32,
    /// Most pages of one CXL pool that the processes of one tenant have at a time, 1 to 1,024. Nodes that act
    /// for no tenant are not counted. Default 1,024, which is no limit: a pool has no more pages.
    pub tenant_pool_pages_max: u32,
    /// Wall time at the zero of the clock that the master is given, ms since 1970; 0: unknown, and the
    /// incarnations of nodes are not compared with it. Set by the process that starts the master.
    #[serde(skip)]
    pub started_wall_ms: u64,
    /// The key of put handles, 128 random bits. Set by the process that starts the master.
    #[serde(skip)]
    pub handle_key: [u64; 2],
    /// Seeds the hash of keys, so that clients cannot choose keys that collide. Default 0; set it to a random
    /// number.
    pub hash_seed: u64,
    /// Limits of tasks, drains and reports.
    pub tasks: TaskConfig,
    /// Further replicas of objects that are read very often.
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
            demote_ahead: 0.1,
            disk_away_ms: 600_000,
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
            session_pool_pages_max: 4,
            tenant_pool_pages_max: POOL_PAGES_MAX,
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
    /// The first setting that is not within its limits.
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
        whole("soft_pin_ttl_ms", self.soft_pin_ttl_ms, 1, SOFT_PIN_TTL_MS_MAX)?;
        share("hard_pin_share_max", self.hard_pin_share_max, 0.0, 1.0)?;
        share("eviction_high_watermark", self.eviction_high_watermark, 0.01, 1.0)?;
        share("eviction_ratio", self.eviction_ratio, 0.0, self.eviction_high_watermark)?;
        share("demote_ahead", self.demote_ahead, 0.0, 0.5)?;
        whole("disk_away_ms", self.disk_away_ms, 1, 7 * DAY_MS)?;
        whole("evictions_per_call_max", self.evictions_per_call_max, 1, u32::MAX)?;
        whole("replicas_max", self.replicas_max.into(), 1, REPLICAS_MAX as u32)?;
        whole("objects_max", self.objects_max, 1, 1 << 30)?;
        whole("key_bytes_max", self.key_bytes_max, 1, wire::KEY_BYTES_MAX as u32)?;
        whole("session_puts_max", self.session_puts_max, 1, 1 << 31)?;
        whole("tenant_puts_max", self.tenant_puts_max, 1, 1 << 31)?;
        whole("session_pool_pages_max", self.session_pool_pages_max, 1, POOL_PAGES_MAX)?;
        whole("tenant_pool_pages_max", self.tenant_pool_pages_max, 1, POOL_PAGES_MAX)?;
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
        // One less: the default tenant always has a number.
        if self.tenants.len() >= self.tenants_max as usize {
            return Err(ConfigError { setting: "tenants", reason: Reason::TooManyTenants });
        }
        let names = self.tenants.iter().map(|tenant| &*tenant.name);
        let all = self.tenants.iter().chain(&self.tenant_default);
        for (setting, secret) in
            [("admin_secret", &self.admin_secret), ("cluster_secret", &self.cluster_secret)]
        {
            if secret.len() > SECRET_BYTES_MAX {
                return Err(ConfigError { setting, reason: Reason::SecretTooLong });
            }
        }
        if all.clone().any(|tenant| !tenant.is_valid()) {
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

/// A setting that is not within its limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConfigError {
    /// The name of the setting.
    pub setting: &'static str,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reason {
    Range { min: f64, max: f64 },
    ReleaseBeforeDiscard,
    TooManyTenants,
    SecretTooLong,
    Tenant,
    TenantTwice,
    OneTenant,
    Fixed,
}

impl ConfigError {
    /// The setting cannot be changed while there is state.
    pub(crate) const fn fixed(setting: &'static str) -> Self {
        Self { setting, reason: Reason::Fixed }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            Reason::Range { min, max } => {
                write!(f, "{}: the value must be between {min} and {max}", self.setting)
            }
            Reason::TooManyTenants => write!(
                f,
                "{}: at most tenants_max - 1 can be configured: raise tenants_max, or \
                 remove some",
                self.setting
            ),
            Reason::SecretTooLong => {
                write!(f, "{}: a secret must have at most {SECRET_BYTES_MAX} bytes", self.setting)
            }
            Reason::Tenant => write!(
                f,
                "{}: names must have 1 to 64 bytes, secrets at most {SECRET_BYTES_MAX}, and a guarantee must not \
                 exceed the quota",
                self.setting
            ),
            Reason::TenantTwice => write!(f, "{}: a name occurs twice", self.setting),
            Reason::Fixed => write!(
                f,
                "{}: cannot be changed for a store that continues: set it as it was, or begin with an empty journal",
                self.setting
            ),
            Reason::OneTenant => {
                write!(f, "{}: without multi_tenants, only \"default\" is allowed", self.setting)
            }
            Reason::ReleaseBeforeDiscard => {
                write!(f, "{}: must be longer than put_start_discard_timeout_ms", self.setting)
            }
        }
    }
}

impl core::error::Error for ConfigError {}
