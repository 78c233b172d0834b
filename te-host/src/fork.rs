//! Detects that this process is a fork of the one in which something was made.
//!
//! A child that forks without `exec` has copies of everything: of locks held by threads that it does not
//! have, of the descriptors of its parent's sockets, of mappings that its parent's peers rely on. Whatever it
//! did with them, peers would attribute to its parent. So mapped memory, an engine, and everything that an
//! engine handed out refuse to work in a child; the child starts an engine of its own.
//!
//! ```
//! let mark = te_host::fork::Mark::new();
//! assert!(!mark.is_forked());
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::wiped_on_fork;
pub use crate::sys::{Own, PerProcess};

/// Remembers the process in which it was made. A check costs a load and a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// Holds the number of the current process; 0 in a child that has not taken a number.
    here: &'static AtomicU64,
    made_in: u64,
}

/// The number of the next process. A child inherits it, so no two processes with a common ancestor have the
/// same number.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Mark {
    /// A mark of this process.
    #[must_use]
    pub fn new() -> Self {
        let here = wiped_on_fork();
        let known = here.load(Ordering::Relaxed);
        if known != 0 {
            return Self { here, made_in: known };
        }
        let fresh = NEXT.fetch_add(1, Ordering::Relaxed);
        // Another thread may have done the same meanwhile.
        let taken = here.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed);
        Self { here, made_in: taken.err().unwrap_or(fresh) }
    }

    /// Whether this process is a fork of the one in which the mark was made.
    #[inline]
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.here.load(Ordering::Relaxed) != self.made_in
    }
}

impl Default for Mark {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
#[allow(unsafe_code, clippy::unwrap_used, reason = "a test that forks, and says where it cannot go on")]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    #[test]
    fn a_mark_tells_a_child_from_its_parent_and_a_childs_own_mark_is_good() {
        let mark = Mark::new();
        assert!(!mark.is_forked());
        // SAFETY: the child reads atomics, forks, waits and exits: nothing that another thread could have
        // locked.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                let own = Mark::new();
                let mut good = mark.is_forked() && !own.is_forked();
                // SAFETY: as above.
                match unsafe { fork() } {
                    Ok(ForkResult::Child) => {
                        let good = mark.is_forked() && own.is_forked() && !Mark::new().is_forked();
                        // SAFETY: ends the process without running code that belongs to its parent.
                        unsafe { libc::_exit(i32::from(!good)) }
                    }
                    Ok(ForkResult::Parent { child }) => {
                        good &= waitpid(child, None) == Ok(WaitStatus::Exited(child, 0));
                    }
                    Err(_) => good = false,
                }
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(!good || own.is_forked())) }
            }
        };
        assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
        assert!(!mark.is_forked());
    }
}
