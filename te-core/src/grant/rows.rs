//! The rows that an owner and a peer both see: one per grant.

use self::sync::{AtomicU32, Ordering, fence};

/// The largest number of grants that one peer may hold of one owner at a time.
pub const ROWS_MAX: u32 = 1024;

/// Why a grant is revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Revoked {
    /// The region is not exported any more.
    Region = 1,
    /// The peer was expelled.
    Peer = 2,
}

/// How an owner reaches the rows that it shares with one peer.
///
/// Where both see the same memory, these are [`Row`]s. Where they do not, `revoke` always returns false: the
/// grant then ends when the peer sends [`Release`](super::Message::Release), or has ended.
pub trait Rows {
    /// Makes a row fresh for a new grant.
    fn reset(&self, row: u32);

    /// Revokes the grant of a row. Returns whether its holder does not use it, and will not; the owner calls
    /// it again until that is true.
    fn revoke(&self, row: u32, why: Revoked) -> bool;
}

/// One grant, in memory that the owner and the peer share: whether it is revoked, and whether the peer uses
/// it now. Each row has its own cache line.
///
/// Revocation is Dekker's handshake. The peer sets `in_use`, then reads `revoked`; the owner sets `revoked`,
/// then reads `in_use`; sequentially consistent fences lie between. At least one of them sees the other:
/// either the peer stays out, or the owner knows that it must wait. The fabric has to notice when a peer dies
/// inside. `tests/loom_grant.rs` checks the handshake.
///
/// A row of zeroes is fresh, so shared memory that the system has zeroed is an array of fresh rows.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Row {
    /// 0, or a [`Revoked`].
    revoked: AtomicU32,
    in_use: AtomicU32,
}

/// The right to use what a row grants, while the value exists. A fabric whose copies continue by themselves
/// keeps it until the last copy has ended.
#[derive(Debug)]
pub struct Inside<'a>(&'a Row);

impl Row {
    /// A fresh row.
    #[must_use]
    pub fn new() -> Self {
        Self { revoked: AtomicU32::new(0), in_use: AtomicU32::new(0) }
    }

    /// For the owner: makes the row fresh for a new grant, which the peer does not know yet.
    pub fn reset(&self) {
        self.in_use.store(0, Ordering::SeqCst);
        self.revoked.store(0, Ordering::SeqCst);
    }

    /// For the owner: revokes the grant. Returns whether its holder does not use it and will not, and every
    /// access of the holder happened before.
    #[must_use]
    pub fn revoke(&self, why: Revoked) -> bool {
        self.revoked.fetch_max(why as u32, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.in_use.load(Ordering::SeqCst) == 0
    }

    /// For the peer: begins to use the grant. One use at a time: when a second one ended, the first would no
    /// longer be counted.
    ///
    /// # Errors
    /// The reason why it is revoked.
    #[inline]
    pub fn enter(&self) -> Result<Inside<'_>, Revoked> {
        self.in_use.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let inside = Inside(self);
        match self.revoked.load(Ordering::SeqCst) {
            0 => Ok(inside),
            why if why == Revoked::Peer as u32 => Err(Revoked::Peer),
            _ => Err(Revoked::Region),
        }
    }
}

impl Row {
    /// For the peer: why the grant is revoked; `None` while it is not. A peer that is inside already asks
    /// this before it starts another copy.
    #[inline]
    #[must_use]
    pub fn revoked(&self) -> Option<Revoked> {
        match self.revoked.load(Ordering::SeqCst) {
            0 => None,
            why if why == Revoked::Peer as u32 => Some(Revoked::Peer),
            _ => Some(Revoked::Region),
        }
    }

    /// For the peer: ends a use whose [`Inside`] was [kept](Inside::keep).
    #[inline]
    pub fn leave(&self) {
        drop(Inside(self));
    }
}

impl Inside<'_> {
    /// Keeps the use beyond the life of the value: a device copies, and says later that it is done. The peer
    /// ends it by [`Row::leave`]; a peer that dies before is still inside.
    #[inline]
    pub fn keep(self) {
        core::mem::forget(self);
    }
}

impl Default for Row {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: the accesses of the peer happened before the owner sees that it is out.
        self.0.in_use.store(0, Ordering::Release);
    }
}

#[cfg(not(loom))]
mod sync {
    pub(super) use core::sync::atomic::{AtomicU32, Ordering, fence};
}

#[cfg(loom)]
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering, fence};
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_revoked_grant_lets_the_peer_finish_and_never_in_again() {
        let row = Row::new();
        let inside = row.enter().expect("granted");
        assert!(!row.revoke(Revoked::Region));
        drop(inside);
        assert!(row.revoke(Revoked::Region));
        assert!(row.enter().is_err_and(|why| why == Revoked::Region));
        assert!(row.revoke(Revoked::Region), "a refused attempt leaves no trace");
        assert!(row.revoke(Revoked::Peer));
        assert!(row.revoke(Revoked::Region), "the stronger reason stays");
        assert!(row.enter().is_err_and(|why| why == Revoked::Peer));
        row.reset();
        assert!(row.enter().is_ok());
        assert_eq!(size_of::<Row>(), 64, "the layout that both ends use");
    }

    #[test]
    fn a_use_that_is_kept_lasts_until_the_peer_leaves() {
        let row = Row::new();
        row.enter().expect("granted").keep();
        assert_eq!((row.revoked(), row.revoke(Revoked::Region)), (None, false));
        assert_eq!(row.revoked(), Some(Revoked::Region));
        row.leave();
        assert!(row.revoke(Revoked::Peer));
        assert_eq!(row.revoked(), Some(Revoked::Peer));
    }
}
