//! Extents of a CXL pool as the memory of a node, in place of memory that it allocates.
//!
//! The node takes the kernel's lock on them first: then no other process of this host can store into them.
//! The master gives them to it in a new epoch, and the node writes that into the pool, which makes every
//! export of an earlier owner void. A node that finds a later epoch there has lost them, and takes its memory
//! out of service.

#[cfg(feature = "cxl")]
pub(super) use built::Extents;
#[cfg(not(feature = "cxl"))]
pub(super) use not_built::Extents;

#[cfg(feature = "cxl")]
mod built {
    use std::path::PathBuf;
    use std::sync::Arc;

    use store_core::NodeId;
    use store_core::message::{ClaimExtents, ExtentsGiven, ExtentsReleased, ExtentsWanted, ReleaseExtents};
    use te_core::{Access, ErrorKind};
    use te_engine::cxl::pool::format::OwnerRecord;
    use te_engine::cxl::{Claim, Part, Pool, PoolError};
    use te_engine::{RegisterError, SharedRegion, TransferEngine};

    use crate::config::NodeConfig;
    use crate::error::ConnectError;
    use crate::rpc::RpcConnection;

    /// The bits of an owner's incarnation that are those of its lock domain.
    const DOMAIN: u64 = !0xffff;

    /// How often the master is asked when another one answers, or the pool says something else, than before.
    const TRIES: u32 = 8;

    /// What the pool says of the owners of extents.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Found {
        /// The highest epoch.
        above: u64,
        /// Whether a process of another domain may own one.
        elsewhere: bool,
    }

    impl Found {
        fn of(owners: &[Option<OwnerRecord>], domain: u64) -> Self {
            let foreign = |owner: &OwnerRecord| owner.owned && (owner.incarnation ^ domain) & DOMAIN != 0;
            Self {
                above: owners.iter().flatten().map(|owner| owner.epoch).max().unwrap_or(0),
                // A record that cannot be understood may be any process'.
                elsewhere: owners.iter().any(|owner| owner.as_ref().is_none_or(foreign)),
            }
        }
    }

    /// The extents of a node.
    pub(in crate::node) struct Extents {
        path: PathBuf,
        pool: Arc<Pool>,
        first: u32,
        count: u32,
        /// The name of the node, and whether it takes extents over.
        name: String,
        takeover: bool,
        domain: u64,
        incarnation: u64,
        key: [u8; 16],
        claim: Option<Claim>,
    }

    impl Extents {
        /// The extents that the settings name; `None` if they name no pool.
        ///
        /// # Errors
        /// `Config`; `Pool`: what the engine has mapped is not usable.
        pub(in crate::node) fn of(
            config: &NodeConfig,
            engine: &TransferEngine,
        ) -> Result<Option<Self>, ConnectError> {
            let cxl = &config.cxl;
            if !cxl.is_set() {
                return Ok(None);
            }
            let at = config.engine.cxl.pools.iter().position(|path| *path == cxl.pool);
            let Some(pool) = at.and_then(|at| engine.pools().get(at)).cloned() else {
                let need =
                    "must be opened by the engine: name `cxl` in `engine.fabrics`, or set it to `auto`";
                return Err(ConnectError::Config { field: "cxl.pool", need });
            };
            if engine.stats().rails.iter().any(|rail| rail.name == "rdma") {
                let need = "cannot be used with RDMA, which may write memory of a process that has just ended: name \
                            other fabrics in `engine.fabrics`, such as `shm,cxl,tcp`";
                return Err(ConnectError::Config { field: "cxl.pool", need });
            }
            let extents = u64::from(pool.superblock().extents);
            if u64::from(cxl.first) + u64::from(cxl.count) > extents {
                let need =
                    "must end at the last extent of the pool: `snowskin cxl inspect` shows how many it has";
                return Err(ConnectError::Config { field: "cxl.count", need });
            }
            let domain = pool.lock_domain().map_err(|error| failed(&cxl.pool, &error))?;
            let [number, low, high] = [(); 3].map(|()| super::super::random(engine));
            let mut key = [0; 16];
            key[..8].copy_from_slice(&low.to_ne_bytes());
            key[8..].copy_from_slice(&high.to_ne_bytes());
            Ok(Some(Self {
                path: cxl.pool.clone(),
                pool,
                first: cxl.first,
                count: cxl.count,
                name: config.name.clone(),
                takeover: config.takeover,
                domain,
                incarnation: domain & DOMAIN | number & !DOMAIN,
                key,
                claim: None,
            }))
        }

        /// Bytes of the extents.
        pub(in crate::node) fn bytes(&self) -> u64 {
            u64::from(self.count) * self.pool.superblock().extent_bytes
        }

        /// Asks the master for the extents, and takes possession of them. They are not exported meanwhile.
        /// When the master knows of the claim, nothing changes.
        ///
        /// # Errors
        /// `ExtentsHeld`: another process has some of them. `Rpc`. `Pool`.
        pub(in crate::node) fn take(
            &mut self,
            rpc: &mut RpcConnection,
            node: NodeId,
            key: u64,
        ) -> Result<(), ConnectError> {
            let epoch = self.ask(rpc, node, key)?;
            let Self { first, count, incarnation, key, .. } = *self;
            let claim = Claim { first, count, incarnation, epoch, key };
            self.pool.claim(claim).map_err(|error| failed(&self.path, &error))?;
            if self.claim.replace(claim) != Some(claim) {
                let (path, last) = (self.path.display(), first + count - 1);
                log::info!(
                    "node {}: extents {first} to {last} of {path} claimed in epoch {epoch}",
                    self.name
                );
            }
            Ok(())
        }

        /// Asks the master for the extents. Returns the epoch in which they were given, after what the pool
        /// says now: while the master was asked, another lineage may have given them to another process.
        fn ask(&mut self, rpc: &mut RpcConnection, node: NodeId, key: u64) -> Result<u64, ConnectError> {
            let wrong = |error: PoolError| failed(&self.path, &error);
            let locked = self.pool.lock(Part::Extents(self.first, self.count)).map_err(wrong)?;
            let mut tries_left = TRIES;
            loop {
                tries_left -= 1;
                rpc.ensure_connected()?;
                // Before the records are read: a later lineage refuses what they say.
                let lineage = rpc.welcome().lineage;
                let found = self.found()?;
                let wanted = ExtentsWanted {
                    node,
                    key,
                    lineage,
                    name: &self.name,
                    pool: self.pool.superblock().uuid,
                    first: self.first,
                    count: self.count,
                    incarnation: self.incarnation,
                    domain: self.domain,
                    locked,
                    above: found.above,
                    owned_elsewhere: found.elsewhere,
                    takeover: self.takeover,
                };
                let given =
                    rpc.call::<ClaimExtents>(&wanted, std::iter::empty()).map(|(given, _)| match given {
                        ExtentsGiven::Given { epoch } => Ok(epoch),
                        ExtentsGiven::Held { first, count, name, alive } => Err(ConnectError::ExtentsHeld {
                            pool: self.path.clone(),
                            first,
                            count,
                            node: name.to_owned(),
                            alive,
                            here: !locked,
                        }),
                    });
                match given {
                    Ok(given) => {
                        let epoch = given?;
                        // An operator has said once that the former owner has ended, not every later one.
                        self.takeover = false;
                        let now = self.found()?;
                        if now == found {
                            return Ok(epoch);
                        }
                        if tries_left == 0 {
                            return Err(wrong(PoolError::Stale {
                                number: self.first,
                                found: now.above,
                                given: epoch,
                            }));
                        }
                    }
                    Err(_) if tries_left > 0 && rpc.welcome().lineage != lineage => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }

        /// What the pool says of the owners of the extents.
        fn found(&self) -> Result<Found, ConnectError> {
            let owners = self.pool.owners(self.first, self.count);
            Ok(Found::of(&owners.map_err(|error| failed(&self.path, &error))?, self.domain))
        }

        /// Exports the extents, which were [taken](Self::take).
        ///
        /// # Errors
        /// As [`TransferEngine::register_claimed`]; `Rails` with `Stale`: the extents were lost.
        pub(in crate::node) fn register(
            &self,
            engine: &TransferEngine,
        ) -> Result<SharedRegion, RegisterError> {
            let stale = |kind: ErrorKind| RegisterError::Rails(kind.into());
            let claim = self.claim.ok_or(stale(ErrorKind::Stale))?;
            let span = self.pool.claim(claim).map_err(|error| stale(error.kind()))?;
            engine.register_claimed(&self.pool, span, Access::all())
        }

        /// Checks that no other process was given the extents since.
        ///
        /// # Errors
        /// `Pool`, with the epoch in which they were lost.
        pub(in crate::node) fn check(&self) -> Result<(), ConnectError> {
            let Some(claim) = self.claim else { return Ok(()) };
            self.pool.claim(claim).map(drop).map_err(|error| failed(&self.path, &error))
        }

        /// Gives the extents back. They are not exported any more.
        pub(in crate::node) fn release(&mut self, rpc: &mut RpcConnection, node: NodeId, key: u64) {
            let Some(Claim { first, count, epoch, .. }) = self.claim.take() else { return };
            let released = self.pool.release(first, count, epoch).map_err(|error| failed(&self.path, &error));
            let pool = self.pool.superblock().uuid;
            let told = released.and_then(|()| {
                let released = ExtentsReleased { node, key, pool, first, count, epoch };
                Ok(rpc.call::<ReleaseExtents>(&released, std::iter::empty()).map(drop)?)
            });
            if let Err(error) = told {
                log::warn!(
                    "node {}: extents {first} to {} were not given back, so a node of another host needs `takeover` for \
                     them: {error}",
                    self.name,
                    first + count - 1
                );
            }
        }
    }

    fn failed(path: &std::path::Path, error: &PoolError) -> ConnectError {
        let busy = error.kind() == ErrorKind::Busy;
        ConnectError::Pool { path: path.to_path_buf(), why: error.to_string(), busy }
    }
}

#[cfg(not(feature = "cxl"))]
mod not_built {
    use store_core::NodeId;
    use te_engine::{RegisterError, SharedRegion, TransferEngine};

    use crate::config::NodeConfig;
    use crate::error::ConnectError;
    use crate::rpc::RpcConnection;

    /// No extents: this build has no pools.
    pub(in crate::node) enum Extents {}

    impl Extents {
        pub(in crate::node) const fn of(
            config: &NodeConfig,
            _: &TransferEngine,
        ) -> Result<Option<Self>, ConnectError> {
            match config.cxl.count {
                0 => Ok(None),
                _ => Err(ConnectError::Config {
                    field: "cxl.pool",
                    need: "needs a build with the feature `cxl`",
                }),
            }
        }

        pub(in crate::node) const fn bytes(&self) -> u64 {
            match *self {}
        }

        pub(in crate::node) const fn take(
            &mut self,
            _: &mut RpcConnection,
            _: NodeId,
            _: u64,
        ) -> Result<(), ConnectError> {
            match *self {}
        }

        pub(in crate::node) const fn register(
            &self,
            _: &TransferEngine,
        ) -> Result<SharedRegion, RegisterError> {
            match *self {}
        }

        pub(in crate::node) const fn check(&self) -> Result<(), ConnectError> {
            match *self {}
        }

        pub(in crate::node) const fn release(&mut self, _: &mut RpcConnection, _: NodeId, _: u64) {
            match *self {}
        }
    }
}
