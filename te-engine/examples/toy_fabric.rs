//! A fabric in one file, and two engines that use it: `cargo run -p te-engine --example toy_fabric`.
//!
//! The toy reaches memory through a table that its engines share, as a CXL pool would. CONTRIBUTING.md ("Add
//! a fabric in an afternoon") follows this file.

use std::error::Error as StdError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use te_core::{Access, Error, ErrorKind, Op, RegionId, Slice};
use te_engine::{
    Cause, Config, Fabric, FabricContext, FabricEntry, Fabrics, Rail, Tier, TransferEngine, TransferRequest,
};
use te_host::{Checksum, Copied, Copier, EXPORT_BYTES_MAX, HeldSpan, Reach, Use, carry_out, rights};

/// Every exported region. An export contains the index of its region.
#[derive(Clone, Default)]
struct Pool(Arc<Mutex<Vec<Shared>>>);

/// An exported region: its memory, until its owner withdraws it, and the rights of peers.
type Shared = (Arc<HeldSpan>, Access);

/// 1. How a peer's memory is reached. `Copier` makes a transport of it.
impl Reach for Pool {
    const NAME: &'static str = "toy";
    const EXPORT_BYTES: u32 = 17;
    const OWNER_POLLS: bool = false;
    /// The index of the region.
    type Export = u64;
    type Link = Shared;

    fn share(&mut self, _: RegionId, held: &Arc<HeldSpan>, access: Access) -> Result<Option<u64>, Error> {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pool.push((held.clone(), access));
        Ok(Some(pool.len() as u64 - 1))
    }

    /// Peers copy inside the `HeldSpan`, which its owner has closed before: there is nothing to wait for.
    fn unshare(&mut self, _: RegionId, _: &u64) -> bool {
        true
    }

    fn export(
        &self,
        _: RegionId,
        index: &u64,
        access: Access,
        len: u64,
        out: &mut [u8; EXPORT_BYTES_MAX],
    ) -> usize {
        out[..8].copy_from_slice(&index.to_le_bytes());
        out[8..16].copy_from_slice(&len.to_le_bytes());
        out[16] = access.bits();
        17
    }

    fn attach(&mut self, blob: &[u8]) -> Result<(Shared, u64, Access), Error> {
        let blob: &[u8; 17] = blob.try_into().map_err(|_| ErrorKind::InvalidArgument)?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| blob[at + byte]));
        let access = Access::from_bits(blob[16]).ok_or(ErrorKind::InvalidArgument)?;
        let index = usize::try_from(number(0)).map_err(|_| ErrorKind::InvalidArgument)?;
        let pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = pool.get(index).cloned().ok_or(ErrorKind::Unreachable)?;
        Ok((shared, number(8), access))
    }

    fn copy(&self, (memory, access): &Shared, local: &Use<'_>, slice: &Slice, checksum: Checksum) -> Copied {
        // The rights of the owner's table count, not those of the export (law L6).
        if !access.contains(rights(slice.op).1) {
            return Copied::Failed(ErrorKind::AccessDenied.into());
        }
        match memory.enter() {
            Some(remote) => carry_out(slice, local.window(), remote.window(), checksum),
            None => Copied::Failed(ErrorKind::Stale.into()),
        }
    }
}

/// 2. What the engine opens.
impl Fabric for Pool {
    fn open(&self, _: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        Ok(Rail::only(Copier::over(self.clone())))
    }
}

fn main() -> Result<(), Box<dyn StdError>> {
    let pool = Pool::default();
    // 3. The line that makes it a fabric of an engine.
    let toy = FabricEntry::new("toy", Tier::Cxl, "A table in memory", &pool);

    let start = || {
        let config = Config { fabrics: Fabrics::NONE, ..Config::default() };
        TransferEngine::start_with_fabrics(config, &[toy])
    };
    let (here, there) = (start()?, start()?);
    let remote = there.alloc_shared(4096, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    let local = here.alloc_shared(4096, Access::LOCAL)?;
    let segment = here.open_segment(there.name())?;
    local.write(0, b"kv cache")?;

    let request = |op, offset: u64| TransferRequest {
        op,
        local: (local.id(), offset).into(),
        segment,
        remote_addr: remote.addr() + 100,
        len: 8,
    };
    let timeout = Some(Duration::from_secs(10));
    here.submit(&[request(Op::Write, 0)], timeout)?.wait(None)?;
    here.submit(&[request(Op::Read, 1000)], timeout)?.wait(None)?;

    let mut seen = [0; 8];
    for (region, offset) in [(&remote, 100), (&local, 1000)] {
        region.read(offset, &mut seen)?;
        assert_eq!(&seen, b"kv cache", "at {offset}");
    }
    for rail in here.stats().rails {
        println!("{}: {} bytes moved", rail.name, rail.bytes);
    }
    Ok(())
}

#[test]
fn a_fabric_that_a_program_adds_moves_bytes_between_two_engines() -> Result<(), Box<dyn StdError>> {
    main()
}
