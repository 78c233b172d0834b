//! Memory of the node's regions, lent to its disks.

use te_core::Location;
use te_engine::SharedRegion;

use crate::disk::Lent;

/// Lends `bytes` bytes of a region, from the address `addr` on, as peers have written them. `None`: they are
/// not within it, or their memory has failed.
#[allow(unsafe_code, reason = "memory of regions is reached by address")]
pub(super) fn lend(region: &SharedRegion, addr: u64, bytes: u64) -> Option<Lent> {
    let offset = addr.checked_sub(region.addr())?;
    let span = region.span().part(offset, bytes).ok()?;
    // In a pool without coherent caches, the kernel and the disk would find what this host's caches hold. An
    // object that is stored does not change, so it is host memory for them from here on.
    region.refresh(offset, bytes).ok()?;
    let span = if region.is_apart() { span.at(Location::Host) } else { span };
    // SAFETY: the span is within the region, which is host memory and stays mapped as long as the owner that
    // is passed along. Peers may write to it at any time, so nothing has a reference to it. What changes
    // while it is written to a disk has another checksum there, and no reader accepts it.
    Some(unsafe { Lent::new(span, Box::new(region.clone())) })
}

#[cfg(all(test, feature = "cxl"))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use te_core::Access;
    use te_engine::cxl::{Claim, Coherence, FormatOptions, Pool};
    use te_engine::{Config, Fabrics, TransferEngine};

    use super::*;

    #[test]
    fn memory_of_a_pool_without_coherent_caches_is_refreshed_before_a_disk_gets_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        Pool::format(&path, FormatOptions::default()).unwrap();
        for (epoch, coherence, refreshed) in [(1, Coherence::Flush, 300), (2, Coherence::Hardware, 0)] {
            let mut config = Config { fabrics: Fabrics::CXL, ..Config::default() };
            (config.cxl.pools, config.cxl.coherence) = (vec![path.clone()], coherence);
            let engine = TransferEngine::start(config).unwrap();
            let pool = &engine.pools()[0];
            let claim = Claim { first: 0, count: 1, incarnation: 1, epoch, key: [7; 16] };
            let span = pool.claim(claim).unwrap();
            let region = engine.register_claimed(pool, span, Access::all()).unwrap();
            let before = pool.refreshed_bytes();
            let lent = lend(&region, region.addr() + 100, 300).unwrap();
            assert_eq!((lent.span().len(), lent.span().location()), (300, Location::Host));
            drop(lent);
            assert_eq!(pool.refreshed_bytes() - before, refreshed, "{coherence:?}");
            assert!(lend(&region, region.addr() - 1, 300).is_none());
            engine.unregister(region.id()).unwrap();
        }
    }
}
