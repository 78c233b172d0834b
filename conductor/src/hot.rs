//! Prefixes that are asked for often: counted by the key of a block early in the prompt, decayed over time.

use std::collections::HashMap;
use std::time::Duration;

use conductor_core::knowledge::Matches;
use conductor_core::{BlockKey, InstanceId};
use te_core::Instant;

/// Prefixes that are counted; beyond it the coldest half is forgotten.
const PREFIXES_MAX: usize = 512;
/// The time in which a count becomes half.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// The block whose key names a prefix: requests that share less, such as a common first line, are not one
/// prefix yet.
const NAMED_BY_BLOCK: usize = 3;

/// A prefix.
#[derive(Clone, Debug)]
pub(crate) struct Prefix {
    pub(crate) model: String,
    pub(crate) key: BlockKey,
    pub(crate) tokens: u64,
    pub(crate) instances: Vec<InstanceId>,
    count: f64,
    at: Instant,
}

impl Prefix {
    /// Its decayed count at `now`.
    pub(crate) fn count(&self, now: Instant) -> f64 {
        self.count * 0.5_f64.powf((now - self.at).as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

/// Counts.
#[derive(Debug, Default)]
pub(crate) struct Hot(HashMap<BlockKey, Prefix>);

impl Hot {
    /// A prompt with these blocks was asked about.
    pub(crate) fn asked(
        &mut self,
        now: Instant,
        model: &str,
        block_tokens: u32,
        keys: &[BlockKey],
        matches: &Matches,
    ) {
        let Some(key) = keys.get(NAMED_BY_BLOCK.min(keys.len().saturating_sub(1))) else { return };
        if self.0.len() >= PREFIXES_MAX && !self.0.contains_key(key) {
            let mut counts: Vec<f64> = self.0.values().map(|prefix| prefix.count(now)).collect();
            counts.sort_by(f64::total_cmp);
            let median = counts.get(counts.len() / 2).copied().unwrap_or_default();
            self.0.retain(|_, prefix| prefix.count(now) > median);
        }
        let prefix = self.0.entry(*key).or_insert_with(|| Prefix {
            model: model.to_owned(),
            key: *key,
            tokens: 0,
            instances: Vec::new(),
            count: 0.0,
            at: now,
        });
        prefix.count = prefix.count(now) + 1.0;
        prefix.at = now;
        let best = matches.instances.iter().map(|it| it.disk).max().unwrap_or_default();
        prefix.tokens = u64::from(best) * u64::from(block_tokens);
        prefix.instances.clear();
        prefix.instances.extend(matches.instances.iter().map(|it| it.instance));
    }

    /// The hottest, the hottest first.
    pub(crate) fn hottest(&self, now: Instant, count: usize) -> Vec<Prefix> {
        let mut all: Vec<&Prefix> = self.0.values().collect();
        all.sort_by(|a, b| b.count(now).total_cmp(&a.count(now)).then(a.key.cmp(&b.key)));
        all.into_iter().take(count).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_more_often_is_hotter_and_cools_down() {
        let mut hot = Hot::default();
        let now = Instant::from_millis(1);
        for n in 0..2_000_u64 {
            let keys = [BlockKey(n), BlockKey(7)];
            hot.asked(now, "m", 16, &keys[..1], &Matches::default());
            hot.asked(now, "m", 16, &keys, &Matches::default());
        }
        let hottest = hot.hottest(now, 3);
        assert_eq!((hottest[0].key, hottest.len()), (BlockKey(7), 3));
        assert!(hot.0.len() <= PREFIXES_MAX);
        assert!((hottest[0].count(now + HALF_LIFE) - hottest[0].count(now) / 2.0).abs() < 1e-6);
    }
}
