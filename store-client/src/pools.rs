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
    use te_engine::cxl::{Part, Pool, Seat};

    use crate::engine::Engine;
    use crate::rpc::RpcConnection;

    /// How often a page is asked for that another process of this host was faster to lock.
    const TRIES: u32 = 64;
    /// How long the master is not asked after it has given no page.
    const PAUSE: Duration = Duration::from_secs(1);

    /// The pages that an engine has, by the number of the pool.
    #[derive(Default)]
    pub(crate) struct Pages {
        seats: Vec<Option<Seat>>,
        /// Whether the master knows of them.
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
            let pools = engine.pools();
            let waits = self.asked.is_some_and(|asked| asked.elapsed() < PAUSE);
            if self.known || waits || pools.is_empty() {
                return;
            }
            self.seats.resize(pools.len(), None);
            self.known = true;
            for (pool, seat) in pools.iter().zip(&mut self.seats) {
                match take(pool, rpc, engine.identity(), *seat) {
                    Ok(given) if *seat == Some(given) => {}
                    Ok(given) => {
                        pool.take_seat(given);
                        *seat = Some(given);
                    }
                    Err(why) => {
                        log::warn!("no page of a CXL pool, whose memory is not reached through it: {why}");
                        (self.known, self.asked) = (false, Some(Instant::now()));
                    }
                }
            }
        }
    }

    /// Takes a page, and the lock on it.
    fn take(
        pool: &Arc<Pool>,
        rpc: &mut RpcConnection,
        identity: u64,
        has: Option<Seat>,
    ) -> Result<Seat, String> {
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
                         processes that have ended with `snowskin admin free-page`, or format the pool with more peers",
                        block.peers
                    ));
                }
            };
            let seat = Seat { slot, epoch };
            if has == Some(seat) {
                return Ok(seat);
            }
            let later = records.get(slot as usize).copied().flatten().is_some_and(|it| it.epoch >= epoch);
            if !later && pool.lock(Part::Page(slot)).map_err(|error| text(&error))? {
                return Ok(seat);
            }
        }
        Err(format!("other processes were faster in {TRIES} tries"))
    }
}

#[cfg(not(feature = "cxl"))]
mod not_built {
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
    }
}
