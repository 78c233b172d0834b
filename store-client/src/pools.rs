//! Pages of CXL pools: a process reaches memory in a pool once the master has given it a page of it.
//!
//! The master is asked when a segment is opened for the first time, and again when it is another lineage of
//! the store. It is told what this process finds in the pool: which pages have a record, and which are locked
//! by other processes of this host ([`te_engine::cxl::Pool::lock`]).

#[cfg(feature = "cxl")]
pub(crate) use built::Pages;
#[cfg(not(feature = "cxl"))]
pub(crate) use not_built::Pages;

#[cfg(feature = "cxl")]
mod built {
    use std::fmt::Display;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use store_core::message::{PageFound, PageGiven, PageWanted, TakePage};
    use te_engine::TransferEngine;
    use te_engine::cxl::{Part, Pool, Seat};

    use crate::engine::Engine;
    use crate::rpc::RpcConnection;

    /// How often a page is asked for that another process of this host was faster to lock.
    const TRIES: u32 = 64;
    /// How long the master is not asked after it has given no page.
    const PAUSE: Duration = Duration::from_secs(1);

    /// The pages of an engine.
    #[derive(Default)]
    pub(crate) struct Pages {
        /// Whether there is one of each pool, and the master knows of it.
        known: bool,
        asked: Option<Instant>,
    }

    impl Pages {
        /// The master knows nothing of them any more.
        pub(crate) fn forget(&mut self) {
            (self.known, self.asked) = (false, None);
        }

        /// Asks for the pages that the engine lacks. Without one, memory in the pool is reached over other
        /// fabrics, or not at all.
        pub(crate) fn ensure(&mut self, rpc: &mut RpcConnection, engine: &Engine) {
            self.ensure_in(rpc, engine.pools(), engine.identity());
        }

        /// As [`ensure`](Self::ensure), for the engine of a node.
        pub(crate) fn ensure_of_node(&mut self, rpc: &mut RpcConnection, engine: &TransferEngine) {
            self.ensure_in(rpc, engine.pools(), engine.identity());
        }

        fn ensure_in(&mut self, rpc: &mut RpcConnection, pools: &[Arc<Pool>], identity: u64) {
            let waits = self.asked.is_some_and(|asked| asked.elapsed() < PAUSE);
            if self.known || waits || pools.is_empty() {
                return;
            }
            self.known = true;
            for pool in pools {
                match take(pool, rpc, identity) {
                    Ok(given) => given.into_iter().for_each(|seat| pool.take_seat(seat)),
                    Err(why) => {
                        log::warn!("no page of a CXL pool, whose memory is not reached through it: {why}");
                        (self.known, self.asked) = (false, Some(Instant::now()));
                    }
                }
            }
        }
    }

    /// Takes a page, and the lock on it. `None`: the engine has the page already that the master gives it.
    fn take(pool: &Arc<Pool>, rpc: &mut RpcConnection, identity: u64) -> Result<Option<Seat>, String> {
        let text = |error: &dyn Display| error.to_string();
        let block = *pool.superblock();
        let domain = pool.lock_domain().map_err(|error| text(&error))?;
        let wanted = PageWanted { pool: block.uuid, pages: block.peers, identity, domain };
        for _ in 0..TRIES {
            let records = pool.peers().map_err(|error| text(&error))?;
            let mut found = Vec::new();
            for (slot, record) in (0..).zip(&records) {
                let locked = pool.is_locked(Part::Page(slot)).map_err(|error| text(&error))?;
                let (epoch, identity) = record.map_or((0, 0), |record| (record.epoch, record.identity));
                if record.is_some() || locked {
                    found.push(PageFound { slot, epoch, identity, locked });
                }
            }
            let asked = rpc.call::<TakePage>(&wanted, found.into_iter()).map(|(given, _)| given);
            let (slot, epoch) = match asked.map_err(|error| text(&error))? {
                PageGiven::Given { slot, epoch } if slot < block.peers => (slot, epoch),
                PageGiven::Given { slot, .. } => {
                    return Err(format!("the master gave page {slot}, and there are {}", block.peers));
                }
                PageGiven::Full { elsewhere } => {
                    return Err(format!(
                        "all {} pages are taken, {elsewhere} of them by processes of other hosts: free those of \
                         processes that have ended with `snowskin admin pools --free-page`, or format the pool with more peers",
                        block.peers
                    ));
                }
            };
            let record = records.get(slot as usize).copied().flatten();
            if record.is_some_and(|record| (record.identity, record.epoch) == (identity, epoch)) {
                return Ok(None);
            }
            let later = record.is_some_and(|record| record.epoch >= epoch);
            if !later && pool.lock(Part::Page(slot)).map_err(|error| text(&error))? {
                return Ok(Some(Seat { slot, epoch }));
            }
        }
        Err(format!("other processes were faster in {TRIES} tries"))
    }
}

#[cfg(not(feature = "cxl"))]
mod not_built {
    use te_engine::TransferEngine;

    use crate::engine::Engine;
    use crate::rpc::RpcConnection;

    /// No pages: this build has no pools.
    #[derive(Default)]
    pub(crate) struct Pages;

    impl Pages {
        #[allow(clippy::unused_self, reason = "as where it is built")]
        pub(crate) const fn forget(&mut self) {}

        #[allow(clippy::unused_self, reason = "as where it is built")]
        pub(crate) const fn ensure(&mut self, _: &mut RpcConnection, _: &Engine) {}

        #[allow(clippy::unused_self, reason = "as where it is built")]
        pub(crate) const fn ensure_of_node(&mut self, _: &mut RpcConnection, _: &TransferEngine) {}
    }
}
