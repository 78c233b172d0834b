//! Pages of CXL pools: a process reaches memory in a pool once the master has given it a page of it.
//!
//! The master is asked when a segment is opened for the first time, and again when it is another lineage of
//! the store: a page that was given by the former one and is not in use yet is then given up. It is told
//! what this process finds in the pool: which pages have a record, and which are locked by other processes
//! of this host ([`te_engine::cxl::Pool::lock`]).

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
        /// The lineage of the master that knows of one page of each pool.
        known: Option<u64>,
        asked: Option<Instant>,
    }

    impl Pages {
        /// The master knows nothing of them any more.
        pub(crate) fn forget(&mut self, engine: &Engine) {
            self.forget_in(engine.pools());
        }

        fn forget_in(&mut self, pools: &[Arc<Pool>]) {
            (self.known, self.asked) = (None, None);
            pools.iter().for_each(|pool| pool.forget_seat());
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
            if pools.is_empty() {
                return;
            }
            let lineage = rpc.welcome().lineage;
            if self.known.is_some_and(|known| known != lineage) {
                self.forget_in(pools);
            }
            let waits = self.asked.is_some_and(|asked| asked.elapsed() < PAUSE);
            if self.known.is_some() || waits {
                return;
            }
            for pool in pools {
                if let Err(why) = take(pool, rpc, identity) {
                    log::warn!("no page of a CXL pool, whose memory is not reached through it: {why}");
                    self.asked = Some(Instant::now());
                    return;
                }
            }
            // The master may have become another one meanwhile: then each page is asked for again.
            self.known = Some(lineage);
        }
    }

    /// Takes a page, and the lock on it, unless the engine has the page already that the master gives it.
    fn take(pool: &Arc<Pool>, rpc: &mut RpcConnection, identity: u64) -> Result<(), String> {
        let text = |error: &dyn Display| error.to_string();
        let block = *pool.superblock();
        let domain = pool.lock_domain().map_err(|error| text(&error))?;
        for _ in 0..TRIES {
            rpc.ensure_connected().map_err(|error| text(&error))?;
            // Before the records are read: a later lineage refuses what they say.
            let lineage = rpc.welcome().lineage;
            let wanted = PageWanted { lineage, pool: block.uuid, pages: block.peers, identity, domain };
            let records = pool.peers().map_err(|error| text(&error))?;
            let mut found = Vec::new();
            for (slot, record) in (0..).zip(&records) {
                let locked = pool.is_locked(Part::Page(slot)).map_err(|error| text(&error))?;
                if let Some(record) = record {
                    let (epoch, identity, domain) = (record.epoch, record.identity, record.domain);
                    found.push(PageFound { slot, epoch, identity, domain, left: !record.present, locked });
                } else if locked {
                    found.push(PageFound { slot, locked, ..PageFound::default() });
                }
            }
            let asked = rpc.call::<TakePage>(&wanted, found.into_iter()).map(|(given, _)| given);
            if asked.is_err() && rpc.welcome().lineage != lineage {
                continue;
            }
            let (slot, epoch) = match asked.map_err(|error| text(&error))? {
                PageGiven::Given { slot, epoch } if slot < block.peers => (slot, epoch),
                PageGiven::Given { slot, .. } => {
                    return Err(format!("the master gave page {slot}, and there are {}", block.peers));
                }
                PageGiven::Limited { of_connection, pages_max } => {
                    let (who, setting) = match of_connection {
                        true => ("this client", "session_pool_pages_max"),
                        false => ("the tenant", "tenant_pool_pages_max"),
                    };
                    return Err(format!(
                        "{who} has {pages_max} pages, as many as the master's {setting} allows: end clients that are not \
                         needed, or raise it"
                    ));
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
                return Ok(());
            }
            let later = record.is_some_and(|record| record.epoch >= epoch);
            if !later && pool.lock(Part::Page(slot)).map_err(|error| text(&error))? {
                pool.take_seat_found(Seat { slot, epoch }, record);
                return Ok(());
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
    pub(crate) struct Pages {}

    impl Pages {
        #[allow(clippy::unused_self, reason = "as where it is built")]
        pub(crate) const fn forget(&mut self, _: &Engine) {}

        #[allow(clippy::unused_self, reason = "as where it is built")]
        pub(crate) const fn ensure(&mut self, _: &mut RpcConnection, _: &Engine) {}

        #[allow(clippy::unused_self, reason = "as where it is built")]
        pub(crate) const fn ensure_of_node(&mut self, _: &mut RpcConnection, _: &TransferEngine) {}
    }
}
