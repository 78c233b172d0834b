//! What the command log needs of a master: which objects a request has leased, the same once more on a
//! standby, and a digest of all state.

use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use te_core::Instant;

use super::{Master, NOT_IN_MEMORY, ON_DISK, millis};
use crate::config::QUICK_LEASE_MS;
use crate::eviction::BatchOrder;
use crate::message::LeaseWanted;
use crate::{ErrorCode, FullKey, Session, TenantNo};

impl Master {
    /// From here on the objects that requests lease are noted, for [`Self::take_touches`].
    pub(crate) fn note_touches(&mut self) {
        self.touches = Some(Vec::new());
    }

    /// The objects that were leased since the last call, and whether each follows another one of its request.
    pub(crate) fn take_touches(&mut self) -> impl Iterator<Item = (u32, bool)> {
        self.touches.iter_mut().flat_map(|touches| touches.drain(..))
    }

    /// How long a reader may count on a lease that it is granted now, ms.
    pub(crate) fn promised_ms(&self, wanted: LeaseWanted) -> u32 {
        let confirmed = wanted == LeaseWanted::Lasting || self.touches.is_none();
        if confirmed { self.config.lease_ttl_ms } else { self.config.lease_ttl_ms.min(QUICK_LEASE_MS) }
    }

    /// From here on the keys whose objects change are noted, for [`Self::take_changes`].
    pub(crate) fn note_changes(&mut self) {
        self.objects.changes.note_hashes();
    }

    /// The hashes of the keys whose objects have changed since the last call.
    pub(crate) fn take_changes(&mut self) -> impl Iterator<Item = u64> {
        self.objects.changes.take_hashes()
    }

    /// The hash of a key of the tenant that a connection acts for.
    pub(crate) fn key_hash(&self, session: &Session, key: &[u8]) -> Option<u64> {
        let tenant = self.rights(session).tenant?;
        Some(self.objects.key_number(FullKey { tenant, key }))
    }

    /// Leases objects once more that a request has leased on the leader.
    ///
    /// # Errors
    /// The slot of an object that is not there. The objects before it are leased.
    pub(crate) fn repeat_touches(
        &mut self,
        now: Instant,
        session: &mut Session,
        get: bool,
        touched: impl Iterator<Item = (u32, bool)>,
    ) -> Result<(), u32> {
        let before = session.leases.memory_bytes();
        let mut done = Ok(());
        for (index, follows) in touched {
            let order = if follows { BatchOrder::Follows } else { BatchOrder::First };
            if index & ON_DISK != 0 {
                let record = index & !ON_DISK;
                if get && self.repeat_disk_hit(record, order).is_err() {
                    done = Err(index);
                    break;
                }
                let generation = if get { self.shelf.record(record).generation } else { 0 };
                session.leases.note(now, NOT_IN_MEMORY, generation, now + self.lease());
                continue;
            }
            if !self.objects.get(index).is_some_and(|entry| entry.is_complete()) {
                done = Err(index);
                break;
            }
            let generation = self.objects.entry(index).generation;
            if get {
                self.stats.gets_total += 1;
                self.read_at(now, index, order);
            } else {
                self.objects.hold(now, index, now + self.lease(), false);
            }
            session.leases.note(now, index, generation, now + self.lease());
        }
        self.lease_bytes += session.leases.memory_bytes() - before;
        done
    }

    /// Another process leads from here on. What the former leader has told its peers and not written to the
    /// log are quick leases of objects; so no space is reused before the longest of them has ended, unless it
    /// has handed over. Nodes and writers have their whole time to connect again.
    pub(crate) fn took_over(
        &mut self,
        now: Instant,
        handed_over: bool,
        sessions: impl Iterator<Item = Session>,
    ) {
        if !handed_over {
            let longest = millis(self.config.lease_ttl_ms.min(QUICK_LEASE_MS));
            self.lease_floor = self.lease_floor.max(now + longest + millis(self.config.lease_guard_ms));
        }
        self.nodes.heard_all(now);
        for session in sessions {
            self.lease_bytes = self.lease_bytes.saturating_sub(session.leases.memory_bytes());
        }
    }

    /// Number of tenants.
    pub(crate) fn tenants_len(&self) -> usize {
        self.tenants.count()
    }

    /// The name of the tenant of a connection; empty if it has none.
    pub(crate) fn tenant_of(&self, session: &Session) -> &str {
        let no = session.tenant.map(|(no, _)| no);
        no.and_then(|no: TenantNo| self.tenants.name(no)).unwrap_or_default()
    }

    /// Creates a tenant once more that a greeting has created on the leader.
    ///
    /// # Errors
    /// `TenantNotRegistered`.
    pub(crate) fn repeat_tenant(&mut self, name: &str) -> Result<(), ErrorCode> {
        match self.tenants.named(name) {
            Some(_) => Err(ErrorCode::TenantNotRegistered),
            None => self.create_tenant(name).map(|_| ()),
        }
    }

    /// A digest of all state that decides what the master does from here on: of everything but counters,
    /// events and caches. Equal for a leader and a standby that has applied the same commands.
    ///
    /// Takes time in proportion to the number of objects: for tests, and to be compared seldom.
    #[must_use]
    pub fn digest(&self) -> u64 {
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
            stats: _,
            generation,
            sessions,
            lease_bytes,
            metadata_reported,
            wall,
            evicting,
            starved,
            evict_again_at,
            pattern: _,
            report: _,
            tasks,
            drains,
            hot,
            suspects,
            ended_upserts,
            task_report: _,
            touches: _,
            lease_floor,
            term: _,
        } = self;
        let mut digest = Digest(FixedState::with_seed(0).build_hasher());
        // What all types print of themselves is all that they hold. Writing to a hash does not fail.
        let _ = write!(
            digest,
            "{config:?}{overrides:?}{tenants:?}{segments:?}{objects:?}{shelf:?}{disks:?}{pending_release:?}"
        );
        let _ = write!(digest, "{promotions:?}{writers:?}");
        let _ = write!(
            digest,
            "{nodes:?}{pools:?}{generation}{sessions}{lease_bytes}{metadata_reported}{wall:?}"
        );
        let _ = write!(digest, "{evicting}{starved}{evict_again_at:?}{tasks:?}{drains:?}{hot:?}");
        let _ = write!(digest, "{suspects:?}{ended_upserts:?}{lease_floor:?}");
        digest.0.finish()
    }
}

struct Digest<H>(H);

impl<H: Hasher> Write for Digest<H> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}
