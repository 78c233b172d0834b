//! The RPC server: one thread, one poller, one [`Master`].

use std::collections::VecDeque;
use std::fmt::Display;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::net::{TcpListener, UnixListener};
use mio::{Interest, Poll, Waker};
use store_core::{Master, MasterConfig};
use tracing::{info, warn};

use crate::Config;
use crate::answering::Answering;
use crate::connections::Connections;
use crate::epoch;
use crate::error::{BindError, ConfigError, ServeError};
use crate::ha;
use crate::http::{Http, Question};
use crate::http_server::HttpServer;
use crate::journal::Opened;
use crate::keeper::Keeper;
use crate::kv_events::{Feed, Publisher};
use crate::liveness::Liveness;
use crate::metadata;
use crate::mooncake::metadata::{SameRpcMeta, mooncake_metadata as mooncake_metadata_routes};
use crate::reclaim::Reclaim;
use crate::service::{Service, TCP, UNIX, WAKE};

/// A master that is bound to its addresses. It serves once it is [`run`](Self::run) or
/// [`spawn`](Self::spawn)ed.
#[derive(Debug)]
pub struct MasterServer {
    config: Config,
    store: Store,
    waker: Arc<Waker>,
    poll: Poll,
    tcp: TcpListener,
    unix: Option<(UnixListener, PathBuf)>,
    rpc_addr: SocketAddr,
    http: Option<Http>,
    mooncake_metadata: Option<HttpServer>,
    kv_events: Option<(Publisher, Feed)>,
    questions: Option<Receiver<Question>>,
    liveness: Arc<Liveness>,
    stopper: Stopper,
    next: Next,
}

/// Settings of the store that a running master is to take.
pub(crate) type Next = Arc<Mutex<Option<Box<MasterConfig>>>>;

/// Stops a master gracefully from any thread. Clones stop the same master.
#[derive(Clone, Debug)]
pub struct Stopper {
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) waker: Arc<Waker>,
}

/// A master on its own thread. Dropping it stops it.
#[derive(Debug)]
pub struct MasterHandle {
    rpc_addr: SocketAddr,
    http_addr: Option<SocketAddr>,
    stopper: Stopper,
    next: Next,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

/// The state that a master begins with.
#[derive(Debug)]
enum Store {
    /// It is kept in memory only.
    Memory(Box<Master>),
    /// It is kept in a directory, too.
    Journal(Box<Opened>),
    /// Other masters have it, too.
    Masters(Box<ha::Joining>),
}

impl Store {
    /// The master and what keeps its state, and its time.
    fn start(self, config: &Config, waker: Arc<Waker>) -> Result<(Keeper, store_core::Instant), ServeError> {
        match self {
            Self::Memory(master) => Ok((Keeper::Memory(master), store_core::Instant::ZERO)),
            Self::Masters(joining) => {
                let ha = joining.start(config, waker).map_err(ServeError::Poll)?;
                Ok((Keeper::Masters(Box::new(ha)), store_core::Instant::ZERO))
            }
            Self::Journal(opened) => {
                let at = opened.at;
                let (master, journal) = opened.start(config, waker).map_err(ServeError::Journal)?;
                Ok((Keeper::Journal(Box::new(master), Box::new(journal)), at))
            }
        }
    }
}

impl MasterServer {
    /// Binds all addresses and opens everything else that can fail. Requests are not answered before
    /// [`run`](Self::run).
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(mut config: Config) -> Result<Self, BindError> {
        config.validate()?;
        let poll = Poll::new()?;
        let mut tcp =
            TcpListener::bind(config.rpc_listen).map_err(listen_error("rpc_listen", &config.rpc_listen))?;
        let rpc_addr = tcp.local_addr()?;
        poll.registry().register(&mut tcp, TCP, Interest::READABLE)?;
        let unix = match config.rpc_unix.clone() {
            Some(path) => {
                let mut unix = bind_unix(&path).map_err(listen_error("rpc_unix", &path.display()))?;
                poll.registry().register(&mut unix, UNIX, Interest::READABLE)?;
                Some((unix, path))
            }
            None => None,
        };
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let stopper = Stopper { stop: Arc::new(AtomicBool::new(false)), waker: Arc::clone(&waker) };
        let store = match &config.journal {
            Some(dir) => {
                Store::Journal(Box::new(Opened::open(dir, &mut config.store).map_err(BindError::Journal)?))
            }
            None if config.ha.is_on() => {
                epoch::fill(&mut config.store);
                Store::Masters(Box::new(ha::Joining::bind(&config, rpc_addr)?))
            }
            None => {
                epoch::fill(&mut config.store);
                let master = Master::new(config.store.clone()).map_err(|error| ConfigError {
                    field: error.setting,
                    need: "is out of its range: see its description in the reference of settings",
                })?;
                Store::Memory(Box::new(master))
            }
        };
        let liveness = Arc::new(Liveness::new(config.store.epoch));
        let (http, questions) = match config.http_listen {
            Some(addr) => {
                let (http, questions) = Http::bind(addr, &config, &stopper, Arc::clone(&liveness))
                    .map_err(listen_error("http_listen", &addr))?;
                (Some(http), Some(questions))
            }
            None => (None, None),
        };
        let mooncake_metadata = match config.mooncake_metadata_listen {
            Some(addr) => {
                Some(HttpServer::bind(addr).map_err(listen_error("mooncake_metadata_listen", &addr))?)
            }
            None => None,
        };
        let kv_events = Publisher::start(&config.kv_events, Arc::clone(&waker)).map_err(|source| {
            let field = if source.kind() == io::ErrorKind::AddrInUse {
                "kv_events.listen or .replay_listen"
            } else {
                "kv_events.listen"
            };
            listen_error(field, &format_args!("{:?}", config.kv_events.listen))(source)
        })?;
        Ok(Self {
            config,
            store,
            waker,
            poll,
            tcp,
            unix,
            rpc_addr,
            http,
            mooncake_metadata,
            kv_events,
            questions,
            liveness,
            stopper,
            next: Next::default(),
        })
    }

    /// The address at which nodes and clients connect.
    #[must_use]
    pub fn rpc_addr(&self) -> SocketAddr {
        self.rpc_addr
    }

    /// The address of the HTTP server, if there is one.
    #[must_use]
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(Http::addr)
    }

    /// The address of the metadata server for Mooncake's engines, if there is one.
    #[must_use]
    pub fn mooncake_metadata_addr(&self) -> Option<SocketAddr> {
        self.mooncake_metadata.as_ref().map(HttpServer::addr)
    }

    /// Where followers subscribe to KV events, and where they ask for those that they missed, if there are
    /// any.
    #[must_use]
    pub fn kv_events_addrs(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.kv_events.as_ref().map(|(publisher, _)| (publisher.addr(), publisher.replay_addr()))
    }

    /// A handle that stops this master.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves on the calling thread until the [`stopper`](Self::stopper) is used. Then it accepts no more
    /// requests, answers those that it has read, sends the answers for at most `stop_ms_max`, and closes all
    /// connections.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn run(self) -> Result<(), ServeError> {
        let mut http = self.http;
        if let Some(http) = &mut http {
            let metadata = self.config.metadata_server.then(|| metadata::router(self.config.metadata));
            http.start(metadata.unwrap_or_default()).map_err(ServeError::Poll)?;
        }
        let mut mooncake_metadata = self.mooncake_metadata;
        if let Some(server) = &mut mooncake_metadata {
            let routes = mooncake_metadata_routes(self.config.metadata, SameRpcMeta::Accepted);
            server.serve(routes, self.config.http, Duration::ZERO).map_err(ServeError::Poll)?;
        }
        info!(rpc = %self.rpc_addr, "master serves");
        let store = &self.config.store;
        if !self.rpc_addr.ip().is_loopback() && !store.admin_secret.is_set() && !store.cluster_secret.is_set()
        {
            warn!(
                rpc = %self.rpc_addr,
                "every peer that reaches this address can mount memory as a node and receive all tenants' bytes: set a cluster secret"
            );
        }
        let (keeper, at) = self.store.start(&self.config, self.waker)?;
        let mut answering = Answering::new(keeper, at, self.config.slow_request_ms);
        answering.set_wall();
        let (publisher, feed) = self.kv_events.unzip();
        let mut service = Service {
            feed,
            answering,
            connections: Connections::new(&self.config),
            config: self.config,
            poll: self.poll,
            tcp: Some(self.tcp),
            unix: self.unix,
            questions: self.questions,
            accept_at: None,
            asked: false,
            liveness: self.liveness,
            unpublished: Some(Instant::now()),
            reclaim: Reclaim::default(),
            stop: self.stopper.stop,
            next: self.next,
            started_s: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            late: VecDeque::new(),
            confirmed: None,
        };
        let result = service.run();
        drop((http, mooncake_metadata, publisher));
        result
    }

    /// Serves on a new thread.
    ///
    /// # Errors
    /// `System` when the operating system did not create a thread.
    pub fn spawn(self) -> Result<MasterHandle, BindError> {
        let (rpc_addr, http_addr, stopper) = (self.rpc_addr, self.http_addr(), self.stopper());
        let next = Arc::clone(&self.next);
        let thread = thread::Builder::new().name("snowskin-master".into()).spawn(move || self.run())?;
        Ok(MasterHandle { rpc_addr, http_addr, stopper, next, thread: Some(thread) })
    }
}

impl Stopper {
    /// Begins a graceful stop, without waiting for its end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        // Waking fails only when the poller is gone, and then the master has ended.
        let _ = self.waker.wake();
    }
}

impl MasterHandle {
    /// The address at which nodes and clients connect.
    #[must_use]
    pub fn rpc_addr(&self) -> SocketAddr {
        self.rpc_addr
    }

    /// The address of the HTTP server, if there is one.
    #[must_use]
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.http_addr
    }

    /// Whether the master has ended: it was stopped, or cannot go on. [`Self::stop`] returns why.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// A handle that stops this master.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Gives the master other settings of the store, as if it had been started with them: what
    /// [`ConfigChanges`](store_core::ConfigChanges) has of them, and limits of tenants. Others are ignored.
    /// One of several masters that does not lead uses them when it takes over. The master logs what has
    /// changed.
    pub fn reload(&self, store: MasterConfig) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(store));
        // Waking fails only when the poller is gone, and then the master has ended.
        let _ = self.stopper.waker.wake();
    }

    /// Stops the master gracefully and waits for its end.
    ///
    /// # Errors
    /// Why it had ended before, or failed to end.
    pub fn stop(mut self) -> Result<(), ServeError> {
        self.stopper.stop();
        self.join()
    }

    fn join(&mut self) -> Result<(), ServeError> {
        match self.thread.take() {
            Some(thread) => thread.join().map_err(|_| ServeError::Panicked)?,
            None => Ok(()),
        }
    }
}

impl Drop for MasterHandle {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Err(error) = self.join() {
            warn!(%error, "the master ended with an error");
        }
    }
}

/// Adds the address to an error.
fn listen_error(field: &'static str, addr: &dyn Display) -> impl FnOnce(io::Error) -> BindError + use<> {
    let addr = addr.to_string();
    move |source| BindError::Listen { field, addr, source }
}

/// Binds a Unix socket; replaces one on which no process listens.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket || std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        result => result,
    }
}
