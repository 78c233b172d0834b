//! [`LocalServer`]: accepts local clients and hands each to a worker.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use store_core::allocator::GRAIN_BYTES;
use te_host::fork::Mark;

use super::connection::answers;
use super::error::LocalStartError;
use super::protocol::{Answer, Refusal, encode};
use super::worker::Worker;
use crate::config::ClientConfig;
use crate::metrics::ClientMetrics;

/// Settings of a [`LocalServer`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LocalServerConfig {
    /// Path of the socket. A socket that a dead server left behind is replaced; that of a live server is not.
    pub path: PathBuf,
    /// Mode of the socket. Default `0600`: this user alone.
    pub mode: u32,
    /// User ids, beside our own and root, that are accepted if `mode` lets them connect. Default: none.
    pub allowed_uids: Vec<u32>,
    /// Settings of the workers' clients, with the tenant that they act for. The workers connect when the
    /// first local client comes.
    pub client: ClientConfig,
    /// Number of workers, each with a thread and an engine. 1 to 64. Default 2.
    pub workers: u16,
    /// Most clients at a time. 1 to 2,048. Default 64.
    pub clients_max: u32,
    /// Longest arena of one client, bytes, and with it the longest value that a client can get or put. A
    /// client that requests more gets this much. Arenas are multiples of 64 bytes. At least 64. Default 1
    /// GiB.
    pub arena_bytes_max: u64,
    /// Limit on the arenas of all clients together, bytes. Default 8 GiB.
    pub arenas_bytes_max: u64,
    /// How long a client may take to send its hello, milliseconds. Default 2,000.
    pub hello_ms_max: u32,
    /// How long a worker spins after a request before it sleeps in the kernel, microseconds. Default 50.
    pub spin_us: u32,
}

impl LocalServerConfig {
    /// The defaults, for this path.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, client: ClientConfig) -> Self {
        Self {
            path: path.into(),
            mode: 0o600,
            allowed_uids: Vec::new(),
            client,
            workers: 2,
            clients_max: 64,
            arena_bytes_max: 1 << 30,
            arenas_bytes_max: 8 << 30,
            hello_ms_max: 2_000,
            spin_us: 50,
        }
    }

    /// Checks everything that can be checked before anything is opened.
    ///
    /// # Errors
    /// [`LocalStartError::Config`] with the field and the values that it may have.
    pub fn validate(&self) -> Result<(), LocalStartError> {
        let wrong = |field, need| Err(LocalStartError::Config { field, need });
        if self.client.validate().is_err() {
            return wrong("client", "must be valid settings of a client");
        }
        if !(1..=64).contains(&self.workers) {
            return wrong("workers", "must be 1 to 64");
        }
        if !(1..=2048).contains(&self.clients_max) {
            return wrong("clients_max", "must be 1 to 2048");
        }
        if self.arena_bytes_max < GRAIN_BYTES || usize::try_from(self.arena_bytes_max).is_err() {
            return wrong("arena_bytes_max", "must be at least 64");
        }
        if self.mode & !0o777 != 0 || self.mode & 0o600 != 0o600 {
            return wrong("mode", "must let this user read and write, and have no bits beyond 0777");
        }
        Ok(())
    }
}

/// Serves local clients on its own threads. Dropping it stops it.
#[derive(Debug)]
pub struct LocalServer {
    path: PathBuf,
    /// Device and inode of the socket, so that the socket of another server is not removed.
    file: Option<(u64, u64)>,
    shared: Arc<Shared>,
    /// Wakers of all threads.
    wakers: Vec<Arc<Waker>>,
    threads: Vec<JoinHandle<()>>,
    mark: Mark,
}

/// What a [`LocalServer`] has counted since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalStats {
    /// Clients at present.
    pub clients: u32,
    /// Bytes of arenas: those of the present clients, and those of former clients that a fabric may still
    /// touch.
    pub arenas_bytes: u64,
    /// Clients that were accepted.
    pub clients_total: u64,
    /// Connections that were refused.
    pub refused_total: u64,
    /// Requests that were answered.
    pub requests_total: u64,
    /// Connections that were closed because of an invalid or missing message.
    pub broken_total: u64,
}

/// State that the threads share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(super) stop: AtomicBool,
    pub(super) clients: AtomicU32,
    pub(super) arenas_bytes: AtomicU64,
    pub(super) clients_total: AtomicU64,
    pub(super) refused_total: AtomicU64,
    pub(super) requests_total: AtomicU64,
    pub(super) broken_total: AtomicU64,
    /// Metrics of the workers' clients.
    pub(super) metrics: Mutex<Vec<ClientMetrics>>,
    /// For tests: the next read of a worker looks as if it did not drain, until `unstick` is set.
    #[cfg(test)]
    pub(crate) identities: Mutex<Vec<u64>>,
    #[cfg(test)]
    pub(super) stick: AtomicBool,
    #[cfg(test)]
    pub(super) unstick: AtomicBool,
}

/// The acceptor's handle of a worker.
struct WorkerHandle {
    clients: Sender<UnixStream>,
    waker: Arc<Waker>,
    load: Arc<AtomicU32>,
}

struct Acceptor {
    config: LocalServerConfig,
    listener: UnixListener,
    poll: Poll,
    workers: Vec<WorkerHandle>,
    shared: Arc<Shared>,
}

impl LocalServer {
    /// Listens and starts the threads.
    ///
    /// # Errors
    /// See [`LocalStartError`].
    pub fn start(config: LocalServerConfig) -> Result<Self, LocalStartError> {
        config.validate()?;
        let listener = bind(&config.path, config.mode)?;
        let file = fs::symlink_metadata(&config.path).ok().map(|meta| (meta.dev(), meta.ino()));
        let mut this = Self {
            path: config.path.clone(),
            file,
            shared: Arc::new(Shared::default()),
            wakers: Vec::new(),
            threads: Vec::new(),
            mark: Mark::new(),
        };
        // If a thread does not start, dropping `this` stops the others.
        this.spawn(config, listener).map_err(LocalStartError::System)?;
        Ok(this)
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its counters.
    #[must_use]
    pub fn stats(&self) -> LocalStats {
        LocalStats {
            clients: self.shared.clients.load(Ordering::Relaxed),
            arenas_bytes: self.shared.arenas_bytes.load(Ordering::Relaxed),
            clients_total: self.shared.clients_total.load(Ordering::Relaxed),
            refused_total: self.shared.refused_total.load(Ordering::Relaxed),
            requests_total: self.shared.requests_total.load(Ordering::Relaxed),
            broken_total: self.shared.broken_total.load(Ordering::Relaxed),
        }
    }

    /// Metrics of the workers' clients, for [`metrics_text_of`](crate::metrics_text_of). The list is empty
    /// before the first local client has come.
    #[must_use]
    pub fn client_metrics(&self) -> Vec<ClientMetrics> {
        self.shared.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Finishes what is under way, closes all connections and removes the socket. An operation that waits for
    /// a dead node may take as long as the store's own timeouts allow.
    pub fn stop(mut self) {
        self.end();
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    fn spawn(&mut self, config: LocalServerConfig, listener: UnixListener) -> io::Result<()> {
        let mut workers = Vec::new();
        for index in 0..config.workers {
            let poll = Poll::new()?;
            let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
            let (clients, newcomers) = channel();
            let load = Arc::new(AtomicU32::new(0));
            let worker =
                Worker::new(config.clone(), poll, newcomers, Arc::clone(&load), Arc::clone(&self.shared));
            let thread =
                thread::Builder::new().name(format!("snowskin-local{index}")).spawn(move || worker.run())?;
            self.threads.push(thread);
            self.wakers.push(Arc::clone(&waker));
            workers.push(WorkerHandle { clients, waker, load });
        }
        let poll = Poll::new()?;
        self.wakers.push(Arc::new(Waker::new(poll.registry(), WAKE)?));
        listener.set_nonblocking(true)?;
        let acceptor = Acceptor { config, listener, poll, workers, shared: Arc::clone(&self.shared) };
        let thread = thread::Builder::new().name("snowskin-accept".into()).spawn(move || acceptor.run())?;
        self.threads.push(thread);
        Ok(())
    }

    fn end(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        if self.mark.is_forked() {
            // The threads and the socket belong to the parent.
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        for waker in &self.wakers {
            if let Err(error) = waker.wake() {
                log::warn!("a thread of the local server cannot be woken: {error}");
            }
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::error!("a thread of the local server panicked");
            }
        }
        // Another server may have taken the path over.
        let now = fs::symlink_metadata(&self.path).ok().map(|meta| (meta.dev(), meta.ino()));
        if self.file.is_some() && now == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.end();
    }
}

pub(super) const WAKE: Token = Token(usize::MAX);
const LISTEN: Token = Token(0);
/// Pause after a connection could not be accepted, for example because no file descriptor is left. The
/// waiting connection would wake the acceptor again at once.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

impl Acceptor {
    fn run(mut self) {
        let raw = std::os::fd::AsRawFd::as_raw_fd(&self.listener);
        let registered = self.poll.registry().register(&mut SourceFd(&raw), LISTEN, Interest::READABLE);
        if let Err(error) = registered {
            return log::error!("local clients cannot be accepted: {error}: restart the node");
        }
        let mut events = Events::with_capacity(4);
        let mut backoff = None;
        while !self.shared.stop.load(Ordering::Acquire) {
            match self.poll.poll(&mut events, backoff) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return log::error!(
                        "local clients cannot be accepted any more: {error}: restart the node"
                    );
                }
                _ => {}
            }
            backoff = self.accept();
        }
    }

    /// Accepts all waiting connections. After a failure, returns the pause before the next try.
    fn accept(&self) -> Option<Duration> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    log::warn!(
                        "a local client cannot be accepted: {error}: next try in {} ms",
                        ACCEPT_BACKOFF.as_millis()
                    );
                    return Some(ACCEPT_BACKOFF);
                }
            }
        }
    }

    fn admit(&self, stream: UnixStream) {
        if let Err(refusal) = self.examine(&stream) {
            self.shared.refused_total.fetch_add(1, Ordering::Relaxed);
            log::warn!("a local client was refused: {refusal}");
            send_refusal(&stream, refusal);
            return;
        }
        let Some(worker) = self.workers.iter().min_by_key(|worker| worker.load.load(Ordering::Relaxed))
        else {
            return;
        };
        self.shared.clients.fetch_add(1, Ordering::Relaxed);
        self.shared.clients_total.fetch_add(1, Ordering::Relaxed);
        worker.load.fetch_add(1, Ordering::Relaxed);
        if worker.clients.send(stream).is_err() {
            // The worker has ended, because the server stops or its poller failed.
            self.shared.clients.fetch_sub(1, Ordering::Relaxed);
        } else if let Err(error) = worker.waker.wake() {
            log::warn!("a worker of the local server cannot be woken: {error}");
        }
    }

    fn examine(&self, stream: &UnixStream) -> Result<(), Refusal> {
        let uid = te_host::peer_uid(stream.as_fd()).unwrap_or(u32::MAX);
        let known = uid == 0 || uid == te_host::own_uid() || self.config.allowed_uids.contains(&uid);
        if !known {
            return Err(Refusal::User { uid });
        }
        let clients_max = self.config.clients_max;
        if self.shared.clients.load(Ordering::Relaxed) >= clients_max {
            return Err(Refusal::Clients { clients_max });
        }
        Ok(())
    }
}

/// Sends the reason without waiting, and closes the connection.
fn send_refusal(mut stream: &UnixStream, refusal: Refusal) {
    let mut out = Vec::new();
    if encode(&mut out, 0, true, &Answer::Refused(refusal)).is_ok() && stream.set_nonblocking(true).is_ok() {
        let _ = stream.write(&out);
    }
}

/// Listens at `path`. A socket on which no process listens is replaced.
fn bind(path: &Path, mode: u32) -> Result<UnixListener, LocalStartError> {
    let failed = |source| LocalStartError::Bind { path: path.to_owned(), source };
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if answers(path) {
                return Err(LocalStartError::InUse { path: path.to_owned() });
            }
            let is_socket = fs::symlink_metadata(path)
                .is_ok_and(|meta| std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()));
            if !is_socket {
                return Err(failed(error));
            }
            fs::remove_file(path).map_err(failed)?;
            UnixListener::bind(path).map_err(failed)?
        }
        bound => bound.map_err(failed)?,
    };
    // A client that connected before this is refused if its user is not allowed.
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    Ok(listener)
}
