//! The epoch: one life of a master.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use store_core::MasterConfig;

/// 2026-01-01T00:00:00Z in seconds since the Unix epoch.
const BEGIN_S: u64 = 1_767_225_600;
/// Milliseconds per epoch: eight epochs per second, so that 32 bits last until 2043.
const TICK_MS: u64 = 125;

/// Sets the values that must differ in each life, unless they are configured: the epoch (from the wall clock)
/// and the hash seed (random).
pub(crate) fn fill(config: &mut MasterConfig) {
    let default = MasterConfig::default();
    if config.epoch == default.epoch {
        config.epoch = next();
    }
    if config.hash_seed == default.hash_seed {
        config.hash_seed = RandomState::new().build_hasher().finish();
    }
    if config.handle_key == default.handle_key {
        config.handle_key = [(); 2].map(|()| getrandom::u64().unwrap_or_default());
    }
    if config.started_wall_ms == 0 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        config.started_wall_ms = since.as_millis() as u64;
    }
}

/// The next tick of the clock, after waiting for it: a master that binds the same address later has a higher
/// epoch.
fn next() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = since.saturating_sub(Duration::from_secs(BEGIN_S)).as_millis() as u64;
    thread::sleep(Duration::from_millis(TICK_MS - ms % TICK_MS));
    u32::try_from(ms / TICK_MS + 1).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masters_that_follow_at_once_have_different_epochs() {
        let (mut first, mut second) = (MasterConfig::default(), MasterConfig::default());
        fill(&mut first);
        fill(&mut second);
        assert!(first.epoch < second.epoch);
        assert_ne!(first.hash_seed, second.hash_seed);
    }

    #[test]
    fn a_configured_epoch_stays() {
        let mut config = MasterConfig { epoch: 7, hash_seed: 9, ..MasterConfig::default() };
        fill(&mut config);
        assert_eq!((config.epoch, config.hash_seed), (7, 9));
    }
}
