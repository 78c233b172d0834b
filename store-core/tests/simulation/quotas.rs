//! The operator changes the limits of tenants while they use the store.
//!
//! A limit or guarantee holds from the response on: the tenant gets no more than its quota, keeps its
//! guarantee, and loses nothing because of the change itself. Above a lowered quota it may keep what it had.

use store_core::chunks::stored_len;
use store_core::message::{TaskQuery, TenantSet, TenantSetting, TenantUsage};
use store_core::{ErrorCode, Frame, MasterConfig, TenantConfig};
use te_core::testkit::Rng;

use crate::common::{Core, Event};
use crate::follower::operate;
use crate::scenario::{Lies, NODES, TENANTS};
use crate::shadow::Violation;
use crate::trouble::ms;
use crate::world::World;

/// The limits that a tenant has been given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Promise {
    pub(crate) quota_bytes: Option<u64>,
    pub(crate) quota_objects: Option<u32>,
    pub(crate) guaranteed_bytes: u64,
    /// What it had, or was about to have, when they were set: it may keep so much whatever its quota is.
    had: (u64, u64),
}

impl Promise {
    fn of(config: &TenantConfig) -> Self {
        let TenantConfig { quota_bytes, quota_objects, guaranteed_bytes, .. } = *config;
        Self { quota_bytes, quota_objects, guaranteed_bytes, had: (0, 0) }
    }

    /// The limits under which a master starts.
    pub(crate) fn all(config: &MasterConfig) -> [Self; TENANTS.len()] {
        std::array::from_fn(|at| Self::of(&config.tenants[at]))
    }

    /// Whether a tenant has no more than it may.
    pub(crate) fn holds(&self, usage: &TenantUsage<'_>) -> bool {
        let bytes = self.quota_bytes.is_none_or(|quota| usage.bytes <= quota.max(self.had.0));
        let objects =
            self.quota_objects.is_none_or(|quota| usage.objects <= u64::from(quota).max(self.had.1));
        bytes && objects
    }

    /// Whether it has been above its quota since that was set, as far as is known.
    pub(crate) fn is_above(&self) -> bool {
        self.had != (0, 0)
    }

    /// Usage that was within the quota once has to stay within. Copies that were begun before count when they
    /// are made.
    pub(crate) fn settle(&mut self, usage: &TenantUsage<'_>, copied_bytes: u64) {
        if self.quota_bytes.is_none_or(|quota| usage.bytes + copied_bytes <= quota) {
            self.had.0 = 0;
        }
        if self.quota_objects.is_none_or(|quota| usage.objects <= u64::from(quota)) {
            self.had.1 = 0;
        }
    }
}

/// What tenants have, and their limits.
type Accounts = [([u64; 6], Promise); TENANTS.len()];

impl World {
    /// Changes the limits of a random tenant.
    pub(crate) fn set_tenant(&mut self) -> Result<(), Violation> {
        if self.core.now >= self.busy_until {
            return Ok(());
        }
        if self.core.away_until().is_none() {
            let at = self.rng.index(TENANTS.len());
            let promise = self.core.random_promise(&mut self.rng, at);
            self.core.set_tenant(at, promise)?;
        }
        let next = self.core.now + ms(&mut self.rng, 1_000, 9_000);
        self.core.at(next, Event::SetTenant);
        Ok(())
    }
}

impl Core {
    /// May be invalid.
    fn random_promise(&self, rng: &mut Rng, at: usize) -> Promise {
        let all = self.scenario.segment_bytes * NODES as u64;
        let usage = self.master.tenant(TENANTS[at]).unwrap();
        let quota_bytes = match rng.below(6) {
            0..3 => None,
            3 => Some(all / 4),
            // Less than it has.
            4 => Some(usage.bytes * 3 / 4),
            _ => Some(all / 8 + rng.below(all / 2)),
        };
        let quota_objects = (rng.below(8) == 0).then(|| 8 + rng.below(30) as u32);
        let most = quota_bytes.unwrap_or(all).min(all / 4);
        let guaranteed_bytes = match rng.below(8) {
            0..3 => 0,
            3 => quota_bytes.unwrap_or(0) + 1,
            _ => rng.below(most + 1),
        };
        Promise { quota_bytes, quota_objects, guaranteed_bytes, had: (0, 0) }
    }

    fn accounts(&self) -> Accounts {
        TENANTS.map(|name| {
            let usage = self.master.tenant(name).unwrap();
            let TenantUsage { quota_bytes, quota_objects, guaranteed_bytes, .. } = usage;
            let has = [
                usage.bytes,
                usage.held_bytes,
                usage.hard_pinned_bytes,
                usage.objects,
                usage.evictions_total,
                usage.refusals_total,
            ];
            (has, Promise { quota_bytes, quota_objects, guaranteed_bytes, had: (0, 0) })
        })
    }

    /// Bytes of copies that nodes may be making.
    pub(crate) fn copied_bytes(&self) -> u64 {
        let mut bytes = 0;
        let query = TaskQuery { cursor: 0, limit: 4096, state: None };
        self.master.list_tasks(self.shown(), &query, |task| {
            if !task.state.is_finished() {
                bytes += stored_len(task.len).next_multiple_of(64);
            }
            true
        });
        bytes
    }

    /// Sets the limits of a tenant, and checks that exactly that has changed.
    fn set_tenant(&mut self, at: usize, promise: Promise) -> Result<(), Violation> {
        let Promise { quota_bytes, quota_objects, guaranteed_bytes, .. } = promise;
        let setting = TenantSetting {
            name: TENANTS[at],
            quota_bytes,
            quota_objects,
            guaranteed_bytes,
            ..TenantSetting::default()
        };
        let mut expected = self.accounts();
        let possible = guaranteed_bytes <= quota_bytes.unwrap_or(u64::MAX);
        if possible {
            expected[at].1 = promise;
        }
        let now = self.shown();
        let out = operate::<TenantSet>(
            &mut self.follower.recorder,
            &mut self.master,
            now,
            &setting,
            core::iter::empty(),
        );
        let (answer, _) = Frame::parse(&out).unwrap().unwrap();
        let expected_result = if possible { Ok(()) } else { Err(ErrorCode::InvalidParams) };
        let lost = self.note_losses();
        let found = self.accounts();
        if found != expected || answer.header.result() != expected_result || !lost.is_empty() {
            let (result, lost) = (answer.header.result(), lost.len());
            let text = format!("{setting:?}: {result:?}, {lost} lost, {found:?}");
            return self.judge(Err(Violation::Books(text)));
        }
        if possible {
            let [bytes, _, _, objects, ..] = found[at].0;
            self.promised[at] = Promise { had: (bytes + self.copied_bytes(), objects), ..promise };
            self.report.settings += 1;
            self.report.lowered += u64::from(quota_bytes.is_some_and(|quota| bytes > quota));
            if self.lies.contains(Lies::QUOTA) {
                let forgotten = TenantSetting { name: TENANTS[at], ..TenantSetting::default() };
                assert_eq!(self.master.set_tenant(&forgotten), Ok(()));
            }
        }
        let found = self.audit();
        self.judge(found)
    }
}
