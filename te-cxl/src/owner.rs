//! The owner's half: the rows of the regions that it exports, and the identities that it has expelled.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use te_core::{Access, Error, ErrorKind, Instant};

use crate::export::Export;
use crate::ledger::{first_user, is_unused, peer, revoke, write_line};
use crate::pool::format::{EXPELLED_MAX, EXPELLED_PER_LINE, ROWS_MAX, Row, write_expelled};
use crate::pool::{Pool, PoolError};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// What one transport owns.
#[derive(Debug)]
pub(crate) struct Owner {
    /// The regions that are exported, by their numbers.
    rows: BTreeMap<u64, Granted>,
    expelled: Vec<u64>,
    /// A peer that renews no sign of life for this long does not count as connected.
    silence: Duration,
    /// The last sign of life of each peer that was asked for, and when it was first seen.
    seen: RefCell<BTreeMap<(u64, u32), (u64, Instant)>>,
}

/// A region that is exported.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    pool: Arc<Pool>,
    export: Export,
}

impl Granted {
    pub(crate) const fn export(&self) -> &Export {
        &self.export
    }

    fn row(&self, expelled: usize) -> Row {
        let Export { rights, number, base, len, .. } = self.export;
        Row { granted: true, rights, number, base, len, expelled: expelled as u32 }
    }

    fn write_row(&self, row: &Row) -> Result<(), Error> {
        let at = self.pool.superblock().row_at(self.export.first, self.export.row);
        Ok(write_line(&mut self.pool.lines(), self.pool.coherence(), at, row.write())?)
    }

    /// Whether the page of the region's first extent is still this owner's to write.
    fn is_ours(&self) -> Result<bool, Error> {
        let Export { first, incarnation, epoch, .. } = self.export;
        self.pool.is_still(first, incarnation, epoch).map_err(|error| match error {
            PoolError::Memory(error) => error,
            other => other.kind().into(),
        })
    }
}

impl Owner {
    pub(crate) fn new(silence: Duration) -> Self {
        Self { rows: BTreeMap::new(), expelled: Vec::new(), silence, seen: RefCell::default() }
    }

    /// Offers a range of a pool to peers. `None`: this process has not claimed its extents.
    ///
    /// # Errors
    /// `InvalidArgument` for a range off the granule. `Stale` when the master has given the first extent to
    /// another owner since. `Full` when as many regions begin in its first extent
    /// as can. The errors of the pool's memory.
    pub(crate) fn grant(
        &mut self,
        pool: &Arc<Pool>,
        base: u64,
        len: u64,
        access: Access,
    ) -> Result<Option<Granted>, Error> {
        let Some((first, count)) = pool.superblock().extents_of(base, len) else { return Ok(None) };
        let Some(claim) = pool.claim_of(first, count) else { return Ok(None) };
        if !base.is_multiple_of(u64::from(pool.coherence().granule_bytes())) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let of_pool = |granted: &&Granted| Arc::ptr_eq(&granted.pool, pool) && granted.export.first == first;
        let taken = |row: &u32| self.rows.values().filter(of_pool).any(|granted| granted.export.row == *row);
        let row = (0..ROWS_MAX).find(|row| !taken(row)).ok_or(ErrorKind::Full)?;
        let number = crate::random().map(u64::from_ne_bytes);
        let number = number.map_err(|error| {
            Error::with_code(ErrorKind::System, error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        let export = Export {
            coherence: pool.coherence(),
            rights: access.intersection(REMOTE),
            row,
            uuid: pool.superblock().uuid,
            first,
            count,
            base,
            len,
            incarnation: claim.incarnation,
            epoch: claim.epoch,
            key: claim.key,
            number,
        };
        let granted = Granted { pool: pool.clone(), export };
        if !granted.is_ours()? {
            return Err(ErrorKind::Stale.into());
        }
        self.write_expelled(&granted)?;
        granted.write_row(&granted.row(self.expelled.len()))?;
        self.rows.insert(number, granted.clone());
        Ok(Some(granted))
    }

    /// Revokes a region. Returns whether no peer uses it, nor will.
    pub(crate) fn revoke(&self, granted: &Granted) -> Result<bool, Error> {
        let Granted { pool, export } = granted;
        let (lines, block) = (&mut pool.lines(), pool.superblock());
        if !granted.is_ours()? {
            // The next owner's records refuse every peer; those that were inside before may still be.
            return Ok(is_unused(lines, pool.coherence(), block, export.number)?);
        }
        let at = (export.first, export.row);
        Ok(revoke(lines, pool.coherence(), block, at, export.number)?)
    }

    /// Forgets a region that no peer uses any more: its row can be used again.
    pub(crate) fn forget(&mut self, granted: &Granted) {
        self.rows.remove(&granted.export.number);
    }

    /// Whether a peer with this identity uses one of the pools, and has renewed its sign of life.
    pub(crate) fn is_connected<'a>(
        &self,
        pools: impl Iterator<Item = &'a Pool>,
        identity: u64,
        now: Instant,
    ) -> bool {
        !self.expelled.contains(&identity)
            && self.records(pools, identity).any(|(slot, beat)| {
                let mut seen = self.seen.borrow_mut();
                let (last, since) = seen.entry((identity, slot)).or_insert((beat, now));
                if *last != beat {
                    (*last, *since) = (beat, now);
                }
                now < *since + self.silence
            })
    }

    /// The pages of a peer with this identity, and their signs of life.
    fn records<'a>(
        &self,
        pools: impl Iterator<Item = &'a Pool>,
        identity: u64,
    ) -> impl Iterator<Item = (u32, u64)> {
        pools.flat_map(move |pool| {
            (0..pool.superblock().peers).filter_map(move |slot| {
                let record = peer(&mut pool.lines(), pool.superblock(), slot).ok()??;
                (record.present && record.identity == identity).then_some((slot, record.beat))
            })
        })
    }

    /// Refuses an identity from now on. Returns whether none of its operations can land any more.
    pub(crate) fn expel<'a>(
        &mut self,
        identity: u64,
        pools: impl Iterator<Item = &'a Pool>,
    ) -> Result<bool, Error> {
        if !self.expelled.contains(&identity) {
            if self.expelled.len() == EXPELLED_MAX {
                return Err(ErrorKind::Full.into());
            }
            self.expelled.push(identity);
            for granted in self.rows.values() {
                if !granted.is_ours()? {
                    continue;
                }
                self.write_expelled(granted)?;
                granted.write_row(&granted.row(self.expelled.len()))?;
            }
        }
        for pool in pools {
            let ours = |number| self.rows.contains_key(&number);
            let inside = |slot, used: Option<crate::pool::format::Use>| {
                let record = peer(&mut pool.lines(), pool.superblock(), slot);
                let may_be = record.ok().flatten().is_none_or(|record| record.identity == identity);
                may_be && used.is_none_or(|used| ours(used.number))
            };
            let user = first_user(&mut pool.lines(), pool.coherence(), pool.superblock(), inside)?;
            if user.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the identities that were expelled to where peers of a region look.
    fn write_expelled(&self, granted: &Granted) -> Result<(), Error> {
        let Granted { pool, export } = granted;
        for (line, identities) in self.expelled.chunks(EXPELLED_PER_LINE).enumerate() {
            let mut whole = [0; EXPELLED_PER_LINE];
            whole[..identities.len()].copy_from_slice(identities);
            let at = pool.superblock().expelled_at(export.first, line as u32);
            write_line(&mut pool.lines(), pool.coherence(), at, write_expelled(whole))?;
        }
        Ok(())
    }
}
