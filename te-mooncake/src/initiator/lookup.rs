//! Fetching a descriptor again, on a thread of its own: a transport never waits.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::client::Client;
use crate::descriptor::SegmentDescriptor;
use crate::error::PeerError;

/// Questions that wait for the thread.
const QUESTIONS_MAX: usize = 64;

/// Finds the current descriptor of a segment. May block.
pub trait Lookup: Send + Sync {
    /// The descriptor of the segment `name` as it is now.
    ///
    /// # Errors
    /// Why there is none.
    fn descriptor(&self, name: &str) -> Result<SegmentDescriptor, PeerError>;
}

impl Lookup for Client {
    fn descriptor(&self, name: &str) -> Result<SegmentDescriptor, PeerError> {
        Client::descriptor(self, name)
    }
}

struct Question {
    peer: u32,
    life: u64,
    segment: String,
}

/// The descriptor of a peer, or none when it could not be fetched.
pub(super) struct Answer {
    /// The number of the peer.
    pub(super) peer: u32,
    /// Its life when the question was asked.
    pub(super) life: u64,
    pub(super) descriptor: Option<SegmentDescriptor>,
}

#[derive(Debug)]
pub(super) struct Lookups {
    questions: SyncSender<Question>,
    shared: Arc<Shared>,
}

struct Shared {
    answers: Mutex<VecDeque<Answer>>,
    ready: EventFd,
}

impl Lookups {
    /// Starts the thread. It ends by itself after the `Lookups` was dropped.
    pub(super) fn start(lookup: Arc<dyn Lookup>) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let ready = EventFd::from_flags(flags).map_err(io::Error::from)?;
        let shared = Arc::new(Shared { answers: Mutex::default(), ready });
        let (questions, asked) = sync_channel::<Question>(QUESTIONS_MAX);
        let answers = shared.clone();
        std::thread::Builder::new().name("mooncake-lookup".into()).spawn(move || {
            for Question { peer, life, segment } in asked {
                let found = lookup.descriptor(&segment);
                if let Err(error) = &found {
                    log::debug!("the descriptor was not fetched again: {error}");
                }
                answers.lock().push_back(Answer { peer, life, descriptor: found.ok() });
                // This fails only when the counter is full, and then the descriptor is readable anyway.
                let _ = answers.ready.write(1);
            }
        })?;
        Ok(Self { questions, shared })
    }

    /// The file descriptor that is readable while there are answers.
    pub(super) fn ready(&self) -> &EventFd {
        &self.shared.ready
    }

    /// Asks for the descriptor of a peer. False: too many questions wait.
    pub(super) fn ask(&self, peer: u32, life: u64, segment: &str) -> bool {
        self.questions.try_send(Question { peer, life, segment: segment.into() }).is_ok()
    }

    /// All answers. What arrives after the descriptor was read makes it readable again.
    pub(super) fn answers(&self) -> VecDeque<Answer> {
        let _ = self.shared.ready.read();
        std::mem::take(&mut *self.shared.lock())
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl core::fmt::Debug for Shared {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Shared").field("answers", &self.lock().len()).finish_non_exhaustive()
    }
}
