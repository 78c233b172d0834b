//! Metrics of CXL pools, as the master sees them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use store_core::message::PoolEntry;
use store_core::{Instant, Master};

/// What processes have of one pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolUse {
    name: String,
    extents: u64,
    pages: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    pool: String,
}

/// The pools' part of a snapshot.
pub(crate) fn of(master: &Master, now: Instant) -> Vec<PoolUse> {
    let mut all: BTreeMap<[u8; 16], PoolUse> = BTreeMap::new();
    for entry in master.pools(now) {
        match entry {
            PoolEntry::Extents { pool, count, .. } => {
                all.entry(pool).or_default().extents += u64::from(count)
            }
            PoolEntry::Page { pool, free, .. } => all.entry(pool).or_default().pages += u64::from(!free),
        }
    }
    let named = |(pool, used): ([u8; 16], PoolUse)| {
        let name = pool.iter().fold(String::new(), |mut text, byte| {
            // Writing to a text does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        });
        PoolUse { name, ..used }
    };
    all.into_iter().map(named).collect()
}

/// Registers the metrics, by pool.
pub(super) fn register(registry: &mut Registry, pools: &[PoolUse]) {
    let (extents, pages) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
    for pool in pools {
        let labels = Labels { pool: pool.name.clone() };
        extents.get_or_create(&labels).set(super::signed(pool.extents));
        pages.get_or_create(&labels).set(super::signed(pool.pages));
    }
    registry.register("pool_extents", "Extents of a CXL pool that belong to nodes", extents);
    registry.register("pool_pages", "Pages of a CXL pool that belong to processes", pages);
}
