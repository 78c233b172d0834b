//! Who may use a region, and who uses it now: the handshake between the owner of a region and its peers, in
//! lines of the pool that one host each writes.
//!
//! ```text
//!   peer                                     owner
//!     its line: "I use region 7"               the region's row: "revoked"
//!     fence                                    fence
//!     drop the row from the cache, read it     drop the peers' lines from the cache, read them
//!     granted? copy : leave                    none names region 7? the memory is free
//! ```
//!
//! At least one of the two sees the other's store: it was in memory before the other's load began. That is
//! the handshake of [`te_core::grant::Row`]. Its two words lie in one line, which two hosts write; where
//! caches are not coherent, each needs a line of its own. The reasons for which a row is refused are the same
//! ([`Revoked`]). There are no messages: the pool is all that both ends share.

use te_core::grant::Revoked;
use te_core::{Access, Error, ErrorKind};

use crate::Coherence;
use crate::lines::{Fault, Fence, LINE, Lines, Local};
use crate::pool::format::{EXPELLED_LINES, Expelled, ROWS_MAX, write_expelled};
use crate::pool::format::{
    EXPELLED_PER_LINE, LineBytes, LineError, OwnerRecord, PeerRecord, Row, Superblock, Use, parse_expelled,
};

/// What an export states about a region, and the pool must confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The first extent of the region.
    pub first: u32,
    /// The number of its extents.
    pub count: u32,
    /// The number of the region's row in the page of its first extent.
    pub row: u32,
    /// The random number of the region.
    pub number: u64,
    /// Where the region begins in the pool, in bytes.
    pub base: u64,
    /// The length of the region, in bytes.
    pub len: u64,
    /// The rights of peers.
    pub rights: Access,
    /// The incarnation of the owner.
    pub incarnation: u64,
    /// The epoch in which the owner was given the extents.
    pub epoch: u64,
    /// The hash of the owner's key.
    pub key_hash: [u8; 16],
}

/// A peer: the page that it alone writes, and by what owners know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The number of its page.
    pub slot: u32,
    /// Its identity.
    pub identity: u64,
}

/// Writes a line, and waits until every host can see it: where caches are not coherent, it is read back from
/// the memory, because a store that has left the processor may still be on its way to the device.
///
/// # Errors
/// As [`Lines::nt_store`] and [`Lines::load`].
pub fn write_line<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    at: u64,
    line: LineBytes,
) -> Result<(), Fault> {
    let written = store_line(lines, coherence, at, line);
    lines.fence(Fence::All);
    written?;
    if coherence == Coherence::Flush {
        fetch_line(lines, at)?;
    }
    Ok(())
}

/// Writes a line after everything that was [put](crate::lines::put) before; every host can see it soon.
fn store_line<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    at: u64,
    mut line: LineBytes,
) -> Result<(), Fault> {
    let line = Local::of(&mut line);
    match coherence {
        Coherence::Flush => lines.nt_store(at, line),
        Coherence::Hardware => lines.store(at, line),
    }
}

/// Reads a line that another host may have written. `dropped`: the caller has dropped it from the cache, and
/// has fenced.
fn read_line<L: Lines>(lines: &mut L, at: u64) -> Result<LineBytes, Fault> {
    let mut line = [0; LINE as usize];
    lines.load(at, Local::of(&mut line))?;
    Ok(line)
}

/// Reads a line that its owner may be writing meanwhile: half of it would be refused without a reason. The
/// caller has dropped it from the cache, and has fenced.
fn read_whole<L: Lines, T>(
    lines: &mut L,
    at: u64,
    parse: impl Fn(&LineBytes) -> Result<T, LineError>,
) -> Result<T, Error> {
    let line = read_line(lines, at)?;
    parse_whole(lines, at, line, parse)
}

/// As [`read_whole`], of a line that was read once.
fn parse_whole<L: Lines, T>(
    lines: &mut L,
    at: u64,
    mut line: LineBytes,
    parse: impl Fn(&LineBytes) -> Result<T, LineError>,
) -> Result<T, Error> {
    const ATTEMPTS_MAX: usize = 16;
    for _ in 1..ATTEMPTS_MAX {
        match parse(&line) {
            Ok(parsed) => return Ok(parsed),
            Err(_) => line = fetch_line(lines, at)?,
        }
    }
    parse(&line).map_err(|_| ErrorKind::Stale.into())
}

/// Reads a line as it is in memory.
///
/// # Errors
/// As [`Lines::load`].
pub fn fetch_line<L: Lines>(lines: &mut L, at: u64) -> Result<LineBytes, Fault> {
    lines.flush(at, LINE)?;
    lines.fence(Fence::All);
    read_line(lines, at)
}

/// A peer begins to use a region, of which it touches `extents`. After `Ok` the owner does not reuse the
/// region until the peer [leaves](leave).
///
/// # Errors
/// Why it may not; then it does not use it.
pub fn enter<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    guest: Guest,
    grant: &Grant,
    extents: (u32, u32),
) -> Result<(), Error> {
    let used = Use { number: grant.number, first: grant.first, count: grant.count };
    // Whatever fails from here on, the line is cleared again.
    let entered = write_line(lines, coherence, block.use_at(guest.slot), used.write())
        .map_err(Error::from)
        .and_then(|()| check(lines, coherence, block, guest, grant, extents));
    if entered.is_err() {
        let _ = leave(lines, coherence, block, guest);
    }
    entered
}

/// A peer does not use its region any more. What it wrote was [put](crate::lines::put) before.
///
/// # Errors
/// As [`Lines::nt_store`].
pub fn leave<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    guest: Guest,
) -> Result<(), Fault> {
    let left = store_line(lines, coherence, block.use_at(guest.slot), Use::NONE);
    // The peer does not wait until owners can see it: an owner that looks too early looks again.
    lines.fence(Fence::Stores);
    left
}

/// Checks what an export states against what the owner has written: the row of the region, and who owns the
/// extents that will be touched, and the first one, in whose page the row is. Lines that were written in
/// another epoch confirm nothing.
///
/// # Errors
/// `Stale`: another owner, an older or newer epoch, or the region is revoked. `PeerRestarted`: the extents
/// were given to another incarnation since. `AccessDenied`: another key, range or rights. `Expelled`.
pub fn check<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    guest: Guest,
    grant: &Grant,
    (first, count): (u32, u32),
) -> Result<(), Error> {
    let row_at = block.row_at(grant.first, grant.row);
    let touched = first..first.saturating_add(count);
    let beside = (!touched.contains(&grant.first)).then_some(grant.first);
    let extents = beside.into_iter().chain(touched);
    if coherence == Coherence::Flush {
        lines.flush(row_at, LINE)?;
        for extent in extents.clone() {
            lines.flush(block.owner_at(extent), LINE)?;
        }
        lines.fence(Fence::All);
    }
    // The lines of most slices are read before any is looked at, so that they come from memory side by side.
    let (mut ahead, mut row) = ([[0; LINE as usize]; 3], [0; LINE as usize]);
    for (line, extent) in ahead.iter_mut().zip(extents.clone()) {
        lines.load(block.owner_at(extent), Local::of(line))?;
    }
    lines.load(row_at, Local::of(&mut row))?;
    for (nth, extent) in extents.enumerate() {
        let record = match ahead.get(nth) {
            Some(line) => OwnerRecord::parse(line),
            None => OwnerRecord::parse(&read_line(lines, block.owner_at(extent))?),
        };
        check_owner(record.ok(), block, extent, grant)?;
    }
    let row = parse_whole(lines, row_at, row, Row::parse)?;
    // A row of another epoch was written by a process that had lost the page, or did not have it yet.
    if !row.granted || row.number != grant.number || row.epoch != grant.epoch {
        return Err(refusal(Revoked::Region));
    }
    if (row.base, row.len, row.rights) != (grant.base, grant.len, grant.rights) {
        return Err(ErrorKind::AccessDenied.into());
    }
    if row.expelled > 0 && is_expelled(lines, coherence, block, grant, row.expelled, guest.identity)? {
        return Err(refusal(Revoked::Peer));
    }
    Ok(())
}

fn refusal(why: Revoked) -> Error {
    match why {
        Revoked::Region => ErrorKind::Stale.into(),
        Revoked::Peer => ErrorKind::Expelled.into(),
    }
}

fn check_owner(
    record: Option<OwnerRecord>,
    block: &Superblock,
    extent: u32,
    grant: &Grant,
) -> Result<(), Error> {
    let stale = Err(Error::new(ErrorKind::Stale));
    let Some(record) = record else { return stale };
    if record.uuid != block.uuid || record.extent != extent {
        return stale;
    }
    if record.epoch > grant.epoch && record.owned && record.incarnation != grant.incarnation {
        return Err(ErrorKind::PeerRestarted.into());
    }
    if !record.owned || record.epoch != grant.epoch || record.incarnation != grant.incarnation {
        return stale;
    }
    match same_bytes(&record.key_hash, &grant.key_hash) {
        true => Ok(()),
        false => Err(ErrorKind::AccessDenied.into()),
    }
}

/// Whether two hashes are equal, in a time that does not depend on where they differ.
fn same_bytes(a: &[u8; 16], b: &[u8; 16]) -> bool {
    core::hint::black_box(a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b))) == 0
}

fn is_expelled<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    grant: &Grant,
    count: u32,
    identity: u64,
) -> Result<bool, Error> {
    let whole = count.div_ceil(EXPELLED_PER_LINE as u32).min(EXPELLED_LINES);
    for line in 0..whole {
        let at = block.expelled_at(grant.first, line);
        if coherence == Coherence::Flush {
            lines.flush(at, LINE)?;
            lines.fence(Fence::All);
        }
        let expelled = read_whole(lines, at, parse_expelled)?;
        if expelled.epoch != grant.epoch as u32 {
            // Another owner's list does not tell which peers this one has expelled.
            return Err(ErrorKind::Stale.into());
        }
        if expelled.identities.contains(&identity) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a peer uses something that `of` names. A peer whose line cannot be understood, because it is being
/// written, may be using anything. `who`: peers that are not asked for need not be looked at.
///
/// # Errors
/// As [`Lines::load`].
pub fn first_user<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    mut of: impl FnMut(u32, Option<Use>) -> bool,
) -> Result<Option<u32>, Fault> {
    if coherence == Coherence::Flush {
        for slot in 0..block.peers {
            lines.flush(block.use_at(slot), LINE)?;
        }
        lines.fence(Fence::All);
    }
    for slot in 0..block.peers {
        let line = read_line(lines, block.use_at(slot))?;
        let used = match Use::parse(&line) {
            Ok(None) => continue,
            Ok(used) => used,
            Err(_) => None,
        };
        if of(slot, used) {
            return Ok(Some(slot));
        }
    }
    Ok(None)
}

/// Whether the process is known to have ended that has written what was read of a page. It is asked after the
/// page was read: the page may be another process' by then.
pub type Ended<'a> = &'a dyn Fn(u32) -> bool;

/// The owner revokes a region. Returns whether no peer uses it, nor will; the owner calls it again until that
/// is true.
///
/// # Errors
/// As [`Lines::nt_store`].
pub fn revoke<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    (extent, row): (u32, u32),
    number: u64,
    ended: Ended<'_>,
) -> Result<bool, Fault> {
    write_line(lines, coherence, block.row_at(extent, row), Row::FREE.write())?;
    is_unused(lines, coherence, block, number, ended)
}

/// Whether no peer uses the region with this number.
///
/// # Errors
/// As [`Lines::load`].
pub fn is_unused<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    number: u64,
    ended: Ended<'_>,
) -> Result<bool, Fault> {
    let names = |slot, used: Option<Use>| used.is_none_or(|used| used.number == number) && !ended(slot);
    Ok(first_user(lines, coherence, block, names)?.is_none())
}

/// Writes the whole page of an extent: its owner, no regions, no expelled identities.
///
/// # Errors
/// As [`Lines::nt_store`].
pub fn write_page<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    owner: &OwnerRecord,
) -> Result<(), Fault> {
    let extent = owner.extent;
    write_line(lines, coherence, block.owner_at(extent), owner.write())?;
    let none = Expelled { identities: [0; EXPELLED_PER_LINE], epoch: owner.epoch as u32 };
    let rows = || (0..ROWS_MAX).map(|row| block.row_at(extent, row));
    let lists = || (0..EXPELLED_LINES).map(|line| block.expelled_at(extent, line));
    for at in rows() {
        store_line(lines, coherence, at, Row::FREE.write())?;
    }
    for at in lists() {
        store_line(lines, coherence, at, write_expelled(none))?;
    }
    lines.fence(Fence::All);
    if coherence == Coherence::Flush {
        // As in `write_line`, for all of them at once.
        rows().chain(lists()).try_for_each(|at| lines.flush(at, LINE))?;
        lines.fence(Fence::All);
        rows().chain(lists()).try_for_each(|at| read_line(lines, at).map(drop))?;
    }
    Ok(())
}

/// An owner takes possession of extents: first it writes the pages that are not yet its own, so that no peer
/// of an earlier owner begins to use them; then it looks for a peer that did. Returns that peer; the owner
/// calls it again until there is none.
///
/// # Errors
/// As [`Lines::nt_store`].
pub fn take<L: Lines>(
    lines: &mut L,
    coherence: Coherence,
    block: &Superblock,
    fresh: &[OwnerRecord],
    (first, count): (u32, u32),
    ended: Ended<'_>,
) -> Result<Option<u32>, Fault> {
    for owner in fresh {
        write_page(lines, coherence, block, owner)?;
    }
    let touches =
        |slot, used: Option<Use>| used.is_none_or(|used| used.touches(first, count)) && !ended(slot);
    first_user(lines, coherence, block, touches)
}

/// The identity that holds a peer's page; `None` when none ever did.
///
/// # Errors
/// `Stale` when the record cannot be understood: it is damaged. As [`Lines::load`].
pub fn holder<L: Lines>(lines: &mut L, block: &Superblock, slot: u32) -> Result<Option<u64>, Error> {
    let at = block.peer_at(slot);
    if fetch_line(lines, at)? == [0; LINE as usize] {
        return Ok(None);
    }
    // The peer renews it now and then.
    Ok(Some(read_whole(lines, at, PeerRecord::parse)?.identity))
}

/// The record of a peer; `None` for a page that none has used, and for a damaged one.
///
/// # Errors
/// As [`Lines::load`].
pub fn peer<L: Lines>(lines: &mut L, block: &Superblock, slot: u32) -> Result<Option<PeerRecord>, Error> {
    let at = block.peer_at(slot);
    if fetch_line(lines, at)? == [0; LINE as usize] {
        return Ok(None);
    }
    match read_whole(lines, at, PeerRecord::parse) {
        Ok(record) => Ok(Some(record).filter(|peer| peer.uuid == block.uuid && peer.slot == slot)),
        Err(error) if error.kind == ErrorKind::Stale => Ok(None),
        Err(error) => Err(error),
    }
}
