//! The CXL pool of a benchmark: named by the user, or a file for the time of the measurement.

#[cfg(not(feature = "cxl"))]
use te_engine::{Config, Engine, TransferEngine};

#[cfg(not(feature = "cxl"))]
use crate::exit::Failure;

/// The pool that fabric cxl uses.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct PoolArgs {
    /// CXL pool for fabric cxl: a devdax device or a file (see `snowskin cxl format`), of which free extents
    /// are used. Default: a file for the time of the measurement, with no CXL device behind it.
    #[cfg(feature = "cxl")]
    #[arg(long, value_name = "PATH")]
    pool: Option<std::path::PathBuf>,
    /// The caches of the hosts that map the pool are coherent. Both ends say the same.
    #[cfg(feature = "cxl")]
    #[arg(long)]
    coherent: bool,
}

/// Extents of a pool that this process has claimed.
pub(super) struct Claimed {
    #[cfg(feature = "cxl")]
    of: (std::sync::Arc<te_cxl::Pool>, te_cxl::Claim),
    /// Their memory.
    pub(super) span: te_core::MemSpan,
}

/// A pool in a file, which is removed at the end.
#[derive(Debug, Default)]
pub(super) struct TemporaryPool {
    #[cfg(feature = "cxl")]
    path: Option<std::path::PathBuf>,
}

#[cfg(not(feature = "cxl"))]
impl PoolArgs {
    /// Has an engine use the pool.
    #[allow(clippy::unused_self, reason = "as in a build with CXL")]
    pub(super) fn apply(&self, _config: &mut Config) {}

    /// The flags for a child.
    #[allow(clippy::unused_self, reason = "as in a build with CXL")]
    pub(super) fn to_args(&self) -> Vec<String> {
        Vec::new()
    }

    /// Makes a pool, in builds with CXL.
    #[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "as in a build with CXL")]
    pub(super) fn or_temporary(&self, _bytes: u64, _is_used: bool) -> Result<(Self, TemporaryPool), Failure> {
        Ok((self.clone(), TemporaryPool::default()))
    }
}

/// Takes the page of the pool that this thread uses.
#[cfg(not(feature = "cxl"))]
pub(super) fn take_page(_engine: &Engine, _page: u32) {}

/// Extents for the memory of a target; `None`: it has no pool.
#[cfg(not(feature = "cxl"))]
#[allow(clippy::unnecessary_wraps, reason = "as in a build with CXL")]
pub(super) fn claim(_engine: &TransferEngine, _bytes: usize) -> Result<Option<Claimed>, Failure> {
    Ok(None)
}

#[cfg(not(feature = "cxl"))]
impl Claimed {
    /// Gives the extents back.
    #[allow(clippy::unused_self, reason = "as in a build with CXL")]
    pub(super) fn release(&self) {}
}

#[cfg(feature = "cxl")]
mod cxl {
    use std::fs::{self, File};
    use std::path::{Path, PathBuf};
    use std::time::SystemTime;

    use te_cxl::{Claim, Coherence, FormatOptions, Pool, Seat};
    use te_engine::{Config, Engine, TransferEngine};

    use super::{Claimed, PoolArgs, TemporaryPool};
    use crate::exit::Failure;
    use crate::size::ByteSize;

    /// Where a temporary pool is: memory, where the host has it as files.
    const DIRS: [&str; 2] = ["/dev/shm", "/tmp"];
    /// Bytes of a temporary pool besides the target's memory: its records, and the rest of the last extent.
    const RECORDS_BYTES: u64 = 32 << 20;

    /// A number that grows from start to start of a benchmark.
    fn epoch() -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }

    impl PoolArgs {
        /// Has an engine use the pool.
        pub(in super::super) fn apply(&self, config: &mut Config) {
            config.cxl.pools = self.pool.iter().cloned().collect();
            config.cxl.coherence = if self.coherent { Coherence::Hardware } else { Coherence::Flush };
            if !config.fabrics.named().any(|entry| entry.name == "cxl") {
                config.cxl.pools.clear();
            }
        }

        /// The flags for a child.
        pub(in super::super) fn to_args(&self) -> Vec<String> {
            let path = self.pool.iter().map(|path| path.display().to_string());
            let path = path.flat_map(|path| ["--pool".to_owned(), path]);
            path.chain(self.coherent.then(|| "--coherent".to_owned())).collect()
        }

        /// The same, with a pool of its own for a target of `bytes` if none is named and one is used.
        ///
        /// # Errors
        /// No file of that size can be made.
        pub(in super::super) fn or_temporary(
            &self,
            bytes: u64,
            is_used: bool,
        ) -> Result<(Self, TemporaryPool), Failure> {
            if self.pool.is_some() || !is_used {
                return Ok((self.clone(), TemporaryPool::default()));
            }
            let dir = DIRS.iter().map(Path::new).find(|dir| dir.is_dir()).unwrap_or(Path::new("."));
            let path = dir.join(format!("snowskin-bench-pool-{}", std::process::id()));
            let made = TemporaryPool { path: Some(path.clone()) };
            make(&path, bytes.saturating_add(RECORDS_BYTES)).map_err(|why| {
                Failure::failed(format!("a pool in {}: {why}", path.display()))
                    .hint("name another one with --pool, or choose a smaller --window")
            })?;
            Ok((Self { pool: Some(path), ..self.clone() }, made))
        }
    }

    fn make(path: &PathBuf, bytes: u64) -> Result<(), String> {
        let file = File::create_new(path).map_err(|error| error.to_string())?;
        file.set_len(bytes.next_multiple_of(2 << 20)).map_err(|error| error.to_string())?;
        Pool::format(path, FormatOptions { peers: 1_024, ..FormatOptions::default() })
            .map(drop)
            .map_err(|error| error.to_string())
    }

    impl Drop for TemporaryPool {
        fn drop(&mut self) {
            if let Some(path) = &self.path {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Takes the page of the pool that this thread uses.
    pub(in super::super) fn take_page(engine: &Engine, page: u32) {
        for pool in engine.pools() {
            pool.take_seat(Seat { slot: page, epoch: epoch() });
        }
    }

    /// Extents for the memory of a target; `None`: it has no pool.
    ///
    /// # Errors
    /// The pool has no run of free extents that is long enough.
    pub(in super::super) fn claim(engine: &TransferEngine, bytes: usize) -> Result<Option<Claimed>, Failure> {
        let Some((pool, path)) = engine.pools().first().zip(engine.config().cxl.pools.first()) else {
            return Ok(None);
        };
        let failed = |why: String| Failure::failed(format!("{}: {why}", path.display()));
        let block = pool.superblock();
        let count = (bytes as u64).div_ceil(block.extent_bytes).max(1);
        let owners = Pool::inspect(path).map_err(|error| failed(error.to_string()))?.owners;
        let is_free = |first: u64| {
            let run = owners.get(first as usize..(first + count) as usize);
            run.is_some_and(|run| run.iter().flatten().all(|owner| !owner.owned))
        };
        let first = (0..u64::from(block.extents)).find(|first| is_free(*first)).ok_or_else(|| {
            failed(format!("there are no {count} extents of {} that are free", ByteSize(block.extent_bytes)))
                .hint("`snowskin cxl inspect` lists their owners")
        })?;
        let claim = Claim {
            first: u32::try_from(first).unwrap_or(u32::MAX),
            count: u32::try_from(count).unwrap_or(u32::MAX),
            incarnation: engine.incarnation(),
            epoch: epoch(),
            key: key().map_err(|error| failed(error.to_string()))?,
        };
        let span = pool
            .claim(claim)
            .and_then(|span| span.part(0, bytes as u64).map_err(|_| te_cxl::PoolError::Layout));
        let span = span.map_err(|error| failed(error.to_string()))?;
        Ok(Some(Claimed { of: (pool.clone(), claim), span }))
    }

    fn key() -> std::io::Result<[u8; 16]> {
        use std::io::Read as _;
        let mut key = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        Ok(key)
    }

    impl Claimed {
        /// Gives the extents back.
        pub(in super::super) fn release(&self) {
            let (pool, claim) = &self.of;
            if let Err(error) = pool.release(claim.first, claim.count, claim.epoch) {
                tracing::warn!("extents {}+{} of the pool stay claimed: {error}", claim.first, claim.count);
            }
        }
    }
}

#[cfg(feature = "cxl")]
pub(super) use cxl::{claim, take_page};
