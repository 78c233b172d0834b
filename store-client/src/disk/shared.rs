//! What the owner of a disk and its thread share.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use super::inbox::{Command, Inbox};
use super::outbox::Outbox;
use super::request::{DiskEvent, NotDone, Stage};
use super::stats::DiskStats;

pub(super) struct Shared {
    pub(super) inbox: Inbox,
    pub(super) stats: Mutex<DiskStats>,
    /// When the thread ends at the latest, once the inbox is closed.
    pub(super) close_by: Mutex<Option<Instant>>,
    /// Where extents begin on the disk, by sequence, ascending; kept if `locates`.
    pub(super) extents: RwLock<Vec<(u64, u64)>>,
    /// Whether the owner wants to know where extents are.
    pub(super) locates: AtomicBool,
}

/// Tells the owner that the thread has ended, even when it has panicked.
pub(super) struct Last {
    pub(super) shared: Arc<Shared>,
    pub(super) outbox: Arc<Outbox>,
    /// Whether the end is a clean one.
    pub(super) clean: bool,
}

impl Drop for Last {
    fn drop(&mut self) {
        for command in self.shared.inbox.close() {
            match command {
                Command::Demote(request) => {
                    let (id, source) = (request.id, Some(request.source));
                    self.outbox.push(DiskEvent::DemoteFailed { id, why: NotDone::Closed, source });
                }
                Command::Stage(Stage { id, buffer, .. }) => {
                    let buffer = Some(buffer);
                    self.outbox.push(DiskEvent::ReadFailed { id, why: NotDone::Closed, buffer });
                }
                _ => {}
            }
        }
        self.outbox.push(DiskEvent::Closed { clean: self.clean });
    }
}
