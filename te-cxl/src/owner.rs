//! The owner's half: the rows of the regions that a process exports from one pool, and the identities that it
//! has expelled. All transports of the process share it: they write the same pages.

use std::collections::{BTreeMap, BTreeSet};

use te_core::{Access, Error, ErrorKind};

use crate::export::Export;
use crate::ledger::{first_user, holder, is_unused, peer, revoke, write_line};
use crate::pool::format::{EXPELLED_MAX, EXPELLED_PER_LINE, Expelled, ROWS_MAX, Row, Use, write_expelled};
use crate::pool::{Claim, Pool};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// What this process owns in a pool.
#[derive(Debug, Default)]
pub(crate) struct Owned {
    /// The extents.
    pub(crate) claims: Vec<Claim>,
    /// The regions that are exported, by their numbers.
    rows: BTreeMap<u64, Export>,
    /// Those of them that were revoked: their rows grant nothing any more, and are not used again yet.
    closing: BTreeSet<u64>,
    expelled: Vec<u64>,
}

impl Owned {
    /// The claim in which a range of extents lies.
    pub(crate) fn claim_of(&self, first: u32, count: u32) -> Option<Claim> {
        let inside = |held: &&Claim| {
            held.first <= first
                && u64::from(first) + u64::from(count) <= u64::from(held.first) + u64::from(held.count)
        };
        self.claims.iter().find(inside).copied()
    }

    fn row_of(&self, export: &Export) -> Row {
        let Export { rights, number, base, len, epoch, .. } = *export;
        Row { granted: true, rights, number, base, len, expelled: self.expelled.len() as u32, epoch }
    }

    /// Offers a range of the pool to peers. `None`: this process has not claimed its extents.
    ///
    /// # Errors
    /// `InvalidArgument` for a range off the granule. `Stale` when the master has given the first extent to
    /// another owner since. `Full` when as many regions begin in it as can. The errors of the pool's memory.
    pub(crate) fn grant(
        &mut self,
        pool: &Pool,
        base: u64,
        len: u64,
        access: Access,
    ) -> Result<Option<Export>, Error> {
        let Some((first, count)) = pool.superblock().extents_of(base, len) else { return Ok(None) };
        let Some(claim) = self.claim_of(first, count) else { return Ok(None) };
        if !base.is_multiple_of(u64::from(pool.coherence().granule_bytes())) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let beside = self.rows.values().filter(|export| export.first == first);
        let taken: BTreeSet<u32> = beside.map(|export| export.row).collect();
        let row = (0..ROWS_MAX).find(|row| !taken.contains(row)).ok_or(ErrorKind::Full)?;
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
        if !pool.is_still_owned(&export)? {
            return Err(ErrorKind::Stale.into());
        }
        self.write(pool, &export)?;
        self.rows.insert(number, export);
        Ok(Some(export))
    }

    /// Revokes a region. Returns whether no peer uses it, nor will. From the first call on no other call
    /// writes its row as granted, until it is [forgotten](Self::forget).
    pub(crate) fn revoke(&mut self, pool: &Pool, export: &Export) -> Result<bool, Error> {
        let (lines, block) = (&mut pool.lines(), pool.superblock());
        self.closing.insert(export.number);
        if !pool.is_still_owned(export)? {
            // The next owner's records refuse every peer; those that were inside before may still be.
            return Ok(is_unused(lines, pool.coherence(), block, export.number, &|slot| {
                pool.has_ended(slot)
            })?);
        }
        let at = (export.first, export.row);
        Ok(revoke(lines, pool.coherence(), block, at, export.number, &|slot| pool.has_ended(slot))?)
    }

    /// Forgets a region that no peer uses any more: its row can be used again.
    pub(crate) fn forget(&mut self, export: &Export) {
        self.rows.remove(&export.number);
        self.closing.remove(&export.number);
    }

    /// Where in the list an identity is, or can be put. When the list is full, that is the place of one which
    /// holds no page of the pool: it cannot use the pool before the master gives it a page again. Others keep
    /// their places, because a peer may be reading the list.
    pub(crate) fn place_of(&self, pool: &Pool, identity: u64) -> Result<usize, Error> {
        if let Some(at) = self.expelled.iter().position(|expelled| *expelled == identity) {
            return Ok(at);
        }
        if self.expelled.len() < EXPELLED_MAX {
            return Ok(self.expelled.len());
        }
        let block = pool.superblock();
        let mut holders = BTreeSet::new();
        for slot in 0..block.peers {
            holders.extend(holder(&mut pool.lines(), block, slot)?);
        }
        let gone = self.expelled.iter().position(|expelled| !holders.contains(expelled));
        gone.ok_or_else(|| ErrorKind::Full.into())
    }

    /// Refuses an identity from now on. Returns whether none of its operations can land any more.
    pub(crate) fn expel(&mut self, pool: &Pool, identity: u64) -> Result<bool, Error> {
        let at = self.place_of(pool, identity)?;
        match self.expelled.get_mut(at) {
            Some(expelled) => *expelled = identity,
            None => self.expelled.push(identity),
        }
        for export in self.rows.values().filter(|export| !self.closing.contains(&export.number)) {
            if pool.is_still_owned(export)? {
                self.write(pool, export)?;
            }
        }
        let block = pool.superblock();
        let inside = |slot, used: Option<Use>| {
            let record = peer(&mut pool.lines(), block, slot).ok().flatten();
            let may_be = record.is_none_or(|record| record.identity == identity);
            may_be && used.is_none_or(|used| self.rows.contains_key(&used.number)) && !pool.has_ended(slot)
        };
        Ok(first_user(&mut pool.lines(), pool.coherence(), block, inside)?.is_none())
    }

    /// Writes the identities that were expelled to where peers of a region look, then its row.
    fn write(&self, pool: &Pool, export: &Export) -> Result<(), Error> {
        let (lines, block, coherence) = (&mut pool.lines(), pool.superblock(), pool.coherence());
        for (line, identities) in self.expelled.chunks(EXPELLED_PER_LINE).enumerate() {
            let mut whole = Expelled { identities: [0; EXPELLED_PER_LINE], epoch: export.epoch as u32 };
            whole.identities[..identities.len()].copy_from_slice(identities);
            let at = block.expelled_at(export.first, line as u32);
            write_line(lines, coherence, at, write_expelled(whole))?;
        }
        let at = block.row_at(export.first, export.row);
        Ok(write_line(lines, coherence, at, self.row_of(export).write())?)
    }
}
