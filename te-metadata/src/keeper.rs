//! [`Keeper`]: the thread that keeps an engine's name registered.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Directory, Entry, MetadataError};

/// Backoff after the first failure. It doubles with each further one, up to a third of the time to live.
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// The state of an engine's name in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Registration {
    /// The engine has no name, or there is no directory.
    None,
    /// The first attempt to register is under way.
    Pending,
    /// The name is registered.
    Registered,
    /// The last attempt failed; further ones follow. If the name was registered before, peers find it until
    /// its time to live is over.
    Failed(MetadataError),
}

/// Registers an entry, renews it, and removes it when dropped. Only `drop` waits for a request.
#[derive(Debug)]
pub struct Keeper {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    state: KeeperState,
}

/// The state of a [`Keeper`], for other threads.
#[derive(Clone, Debug)]
pub struct KeeperState(Arc<(Mutex<Registration>, Condvar)>);

impl Keeper {
    /// Starts the thread, which registers `entry` for `ttl` and renews it after a third of that.
    ///
    /// # Errors
    /// The system did not create a thread.
    pub fn start(directory: Arc<Directory>, entry: Entry, ttl: Duration) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let state = KeeperState::new(Registration::Pending);
        let shared = state.clone();
        let thread = std::thread::Builder::new()
            .name("te-metadata".into())
            .spawn(move || keep(&directory, &entry, ttl, &shared, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread), state })
    }

    /// The state of the entry, for other threads.
    #[must_use]
    pub fn state(&self) -> KeeperState {
        self.state.clone()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The thread ends when its channel is closed.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that renews the segment's name panicked: the name will expire");
        }
    }
}

impl KeeperState {
    /// A state that is not kept by a [`Keeper`].
    #[must_use]
    pub fn new(registration: Registration) -> Self {
        Self(Arc::new((Mutex::new(registration), Condvar::new())))
    }

    /// The state now.
    #[must_use]
    pub fn registration(&self) -> Registration {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits while the state is `Pending`, at most `timeout`.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Registration {
        let deadline = Instant::now().checked_add(timeout);
        let mut now = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while *now == Registration::Pending {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break;
            }
            let left = left.unwrap_or(Duration::from_secs(1));
            now = self.0.1.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        now.clone()
    }

    fn set(&self, registration: Registration) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = registration;
        self.0.1.notify_all();
    }
}

fn keep(directory: &Directory, entry: &Entry, ttl: Duration, state: &KeeperState, stopped: &Receiver<()>) {
    let mut pause = PAUSE_MIN;
    let mut held = false;
    loop {
        let done = if held { directory.renew(entry, ttl) } else { directory.publish(entry, ttl) };
        let before = state.registration();
        let wait = match done {
            Ok(()) => {
                if before != Registration::Registered {
                    log::info!("segment {:?} is registered: {}", entry.name, directory.server());
                    state.set(Registration::Registered);
                }
                (held, pause) = (true, PAUSE_MIN);
                ttl / 3
            }
            Err(error) => {
                // The same error is logged once.
                if before != Registration::Failed(error.clone()) {
                    log::warn!("segment {:?} is not registered: {error}", entry.name);
                    state.set(Registration::Failed(error));
                }
                let wait = pause;
                pause = (pause * 2).min(ttl / 3).max(PAUSE_MIN);
                wait
            }
        };
        if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    // With a server that does not answer, the name expires.
    if state.registration() == Registration::Registered
        && let Err(error) = directory.withdraw(entry)
    {
        log::warn!("segment {:?} stays registered until its time to live is over: {error}", entry.name);
    }
}
