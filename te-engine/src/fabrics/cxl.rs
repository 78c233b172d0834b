//! The CXL fabric: one rail for all pools.

use std::error::Error as StdError;
use std::fmt;
use std::path::PathBuf;
use std::vec::Vec;

use te_cxl::{CxlTransport, Mount, Pool, PoolError};
use te_fabric::ConfigError;

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// CXL pools: one rail.
pub(super) struct Cxl;

impl Fabric for Cxl {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let settings = &context.config.cxl;
        if settings.pools.is_empty() {
            return Err(Cause::absent(NoPool));
        }
        let mut pools = Vec::with_capacity(settings.pools.len());
        for path in &settings.pools {
            let opened = Pool::open(path, settings.coherence, None);
            pools.push(opened.map_err(|source| NotOpened { path: path.clone(), source })?);
        }
        let mounts = pools.iter().map(|pool| Mount { pool: pool.clone(), seat: None }).collect();
        let transport = CxlTransport::new(
            te_cxl::Config {
                inflight_max: context.config.inflight_slices_max.min(1 << 20),
                identity: context.identity,
                ..settings.clone()
            },
            mounts,
        )?;
        context.pools.opened(pools);
        Ok(Rail::only(transport))
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.cxl.validate()
    }

    fn is_asked_for(&self, config: &Config) -> bool {
        !config.cxl.pools.is_empty()
    }
}

/// No pool is configured.
#[derive(Debug)]
struct NoPool;

impl fmt::Display for NoPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no pool is named: set cxl.pools to the devices or files that `snowskin cxl format` made pools of")
    }
}

impl StdError for NoPool {}

/// A pool that the settings name cannot be opened.
#[derive(Debug)]
struct NotOpened {
    path: PathBuf,
    source: PoolError,
}

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the pool {} of cxl.pools cannot be opened: {}", self.path.display(), self.source)
    }
}

impl StdError for NotOpened {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.source()
    }
}
