//! The latest reign that a process has met, over all its connections to the masters of one store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use store_core::ha::Reign;

use crate::error::RpcError;

/// The latest reign that was met at any connection that shares it. It only rises, and only by welcomes: what
/// a master says about another one is a hint. The exception is a lone master that has begun anew while its
/// clock was behind: its lineage counts though it is lower, because no other master can be meant.
///
/// Each answer is compared with it before the caller sees it: a leader that was replaced without having
/// learned of it gives no more orders here as soon as any connection of the process has met its successor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    latest: Mutex<Reign>,
    /// How often it has risen, so that answers are checked without the lock.
    rises: AtomicU64,
}

impl Standing {
    /// The latest reign; zeros: none.
    pub(crate) fn latest(&self) -> Reign {
        *self.0.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the reign of a welcome. `lone`: it is that of the only master that is known.
    ///
    /// # Errors
    /// `Outdated` when a later one is known.
    pub(super) fn meet(&self, theirs: Reign, lone: bool) -> Result<(), RpcError> {
        let mut latest = self.0.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let anew = lone && theirs.lineage < latest.lineage;
        if theirs < *latest && !anew {
            return Err(RpcError::Outdated { theirs, latest: *latest });
        }
        if theirs != *latest {
            *latest = theirs;
            self.0.rises.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    /// Whether what comes over a connection of this reign still counts. `checked` is the connection's own,
    /// 0 at first.
    ///
    /// # Errors
    /// `Outdated`.
    pub(super) fn check(&self, theirs: Reign, checked: &mut u64) -> Result<(), RpcError> {
        // One more than the number of rises, so that a new connection is always compared.
        let now = self.0.rises.load(Ordering::Acquire) + 1;
        if *checked == now {
            return Ok(());
        }
        let latest = self.latest();
        if theirs < latest {
            return Err(RpcError::Outdated { theirs, latest });
        }
        *checked = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_reign_only_rises_and_earlier_ones_are_refused() {
        let reign = |lineage, term| Reign { lineage, term };
        let (standing, mut checked) = (Standing::default(), 0);
        assert!(standing.meet(reign(0, 0), false).is_ok(), "a service that has no reign");
        assert!(standing.meet(reign(2, 5), false).is_ok());
        assert!(standing.check(reign(2, 5), &mut checked).is_ok());
        for (theirs, ok) in
            [((2, 4), false), ((1, 9), false), ((2, 5), true), ((2, 6), true), ((2, 5), false)]
        {
            assert_eq!(standing.meet(reign(theirs.0, theirs.1), false).is_ok(), ok, "{theirs:?}");
        }
        let other = standing.clone();
        assert!(other.meet(reign(3, 1), false).is_ok());
        let refused = standing.check(reign(2, 6), &mut checked);
        assert!(matches!(refused, Err(RpcError::Outdated { latest, .. }) if latest == reign(3, 1)));
        assert!(standing.check(reign(3, 1), &mut checked).is_ok() && standing.latest() == reign(3, 1));
        // A lone master whose clock went back has begun anew; one of several is outdated.
        assert!(standing.meet(reign(2, 1), false).is_err() && standing.meet(reign(2, 1), true).is_ok());
        assert!(standing.check(reign(2, 1), &mut checked).is_ok() && standing.latest() == reign(2, 1));
        assert!(standing.meet(reign(2, 3), true).is_ok() && standing.meet(reign(2, 2), true).is_err());
    }
}
