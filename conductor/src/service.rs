//! [`Conductor`]: everything together, from settings to threads.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use store_master::HttpServer;
use tracing::{info, warn};

use conductor_core::knowledge::Knowledge;

use crate::config::{Config, ConfigError, EngineConfig};
#[cfg(feature = "gateway")]
use crate::gateway::GatewayServer;
use crate::http::{App, router};
use crate::io::{EventThread, Prepared};
use crate::keeper::Keeper;
#[cfg(feature = "kubernetes")]
use crate::kubernetes::Watcher;
use crate::proxy::{self, Place, ProxyServer};
use crate::registry::{self, Positions, RegisterError};
use crate::replicas::Copier;
use crate::shared::{Shared, knowledge_settings};
use crate::snapshot;

/// Time for requests under way to end when the Conductor stops.
const GRACE: Duration = Duration::from_millis(500);

/// Threads of the proxy.
const PROXY_THREADS: usize = 2;

/// Why a Conductor cannot start.
#[derive(Debug)]
pub enum StartError {
    /// A setting is out of its range.
    Config(ConfigError),
    /// It cannot listen at this address.
    Listen(SocketAddr, io::Error),
    /// The system refused a thread or a poller.
    System(io::Error),
    /// An engine of the settings was refused; its name.
    Engine(String, RegisterError),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Listen(addr, error) => write!(f, "cannot listen at {addr}: {error}"),
            Self::System(error) => write!(f, "the system refused a thread or a poller: {error}"),
            Self::Engine(name, error) => write!(f, "the engine {name} of the settings: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

/// A Conductor that is bound to its address.
#[derive(Debug)]
pub struct Conductor {
    shared: Arc<Shared>,
    http: HttpServer,
    app: App,
    prepared: Prepared,
    restored: Restored,
}

/// What a snapshot had.
#[derive(Debug, Default)]
struct Restored {
    engines: Vec<EngineConfig>,
    positions: Positions,
}

/// A running Conductor. Dropping it stops it.
#[derive(Debug)]
pub struct ConductorHandle {
    // The order of the fields is the order in which they are stopped.
    http: HttpServer,
    proxy: Option<ProxyServer<Shared>>,
    #[cfg(feature = "gateway")]
    gateway: Option<GatewayServer>,
    #[cfg(feature = "kubernetes")]
    kubernetes: Option<Watcher>,
    copier: Option<Copier>,
    keeper: Keeper,
    events: EventThread,
    app: App,
}

impl Conductor {
    /// Checks the settings and binds the HTTP address. Nothing is answered before [`spawn`](Self::spawn).
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn bind(config: Config) -> Result<Self, StartError> {
        config.validate().map_err(StartError::Config)?;
        let listen = config.listen;
        let http = HttpServer::bind(listen).map_err(|error| StartError::Listen(listen, error))?;
        let (commander, prepared) = EventThread::prepare().map_err(StartError::System)?;
        let (shared, restored) = restored(config);
        let shared = Arc::new(shared);
        let app = App { shared: Arc::clone(&shared), commander };
        Ok(Self { shared, http, app, prepared, restored })
    }

    /// The address of the HTTP interface.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.http.addr()
    }

    /// Starts the threads, and subscribes to the engines of the settings.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn spawn(self) -> Result<ConductorHandle, StartError> {
        let Self { shared, mut http, app, prepared, restored } = self;
        let events = EventThread::start(prepared, Arc::clone(&shared)).map_err(StartError::System)?;
        let known = |engine: &&EngineConfig| engine.block_tokens > 0 && engine.dp_ranks > 0;
        for engine in shared.config.engines.iter().filter(known) {
            registry::register(&shared, &app.commander, engine, &restored.positions)
                .map_err(|error| StartError::Engine(engine.instance.clone(), error))?;
        }
        let of_settings = |engine: &&EngineConfig| {
            shared.config.engines.iter().filter(known).any(|own| {
                let ranks = own.dp_rank..own.dp_rank + own.dp_ranks;
                (&own.tenant, &own.instance, &own.lora) == (&engine.tenant, &engine.instance, &engine.lora)
                    && ranks.contains(&engine.dp_rank)
            })
        };
        for engine in restored.engines.iter().filter(|engine| !of_settings(engine)) {
            // The settings go first, also where an engine has moved, and what contradicts them is gone.
            if let Err(error) = registry::register(&shared, &app.commander, engine, &restored.positions) {
                info!(engine = engine.instance, %error, "an engine of the snapshot is not registered");
            }
        }
        forget_unregistered(&shared);
        let proxy = shared.config.proxy_listen.map(|listen| {
            let connections = proxy::ConnectionLimits::default();
            ProxyServer::start(
                listen,
                Arc::clone(&shared),
                proxy::Limits::default(),
                connections,
                PROXY_THREADS,
            )
            .map_err(|error| StartError::Listen(listen, error))
        });
        let proxy = proxy.transpose()?;
        #[cfg(feature = "gateway")]
        let gateway = GatewayServer::start(&shared)?;
        #[cfg(feature = "kubernetes")]
        let kubernetes = Watcher::start(&app)?;
        let copier = Copier::start(&shared).map_err(StartError::System)?;
        let keeper = Keeper::start(app.clone()).map_err(StartError::System)?;
        http.serve(router(app.clone()), shared.config.http, GRACE).map_err(StartError::System)?;
        info!(addr = %http.addr(), engines = shared.config.engines.len(), "serving");
        if !http.addr().ip().is_loopback() && !shared.config.admin_secret.is_set() {
            warn!(
                "the Conductor listens at {} without an admin secret: engines on other hosts cannot register",
                http.addr()
            );
        }
        Ok(ConductorHandle {
            http,
            proxy,
            #[cfg(feature = "gateway")]
            gateway,
            #[cfg(feature = "kubernetes")]
            kubernetes,
            copier,
            keeper,
            events,
            app,
        })
    }
}

/// The state to begin with: that of the snapshot, if there is one.
fn restored(config: Config) -> (Shared, Restored) {
    let read = config.snapshot.as_ref().map(|path| (path.display().to_string(), snapshot::read(path)));
    let (path, stored) = match read {
        Some((path, Ok(Some(stored)))) => (path, stored),
        Some((path, Err(error))) => {
            warn!(path, %error, "the snapshot cannot be read: the index begins empty");
            return (Shared::new(config), Restored::default());
        }
        _ => return (Shared::new(config), Restored::default()),
    };
    match Knowledge::restore(stored.knowledge(), knowledge_settings(&config)) {
        Ok((knowledge, positions)) => {
            let positions =
                positions.into_iter().filter_map(|(id, position)| Some((id, position?))).collect();
            info!(path, engines = stored.engines.len(), "the index goes on with a snapshot");
            (Shared::with(config, knowledge), Restored { engines: stored.engines, positions })
        }
        Err(error) => {
            warn!(path, %error, "the snapshot cannot be used: the index begins empty");
            let engines = stored.engines;
            (Shared::new(config), Restored { engines, ..Restored::default() })
        }
    }
}

/// Takes out publishers of a snapshot that are not registered any more.
fn forget_unregistered(shared: &Shared) {
    let directory = shared.directory();
    let mut knowledge = shared.knowledge.write();
    let gone: Vec<_> = knowledge.publishers().map(|(id, ..)| id).collect();
    for id in gone.into_iter().filter(|id| !directory.publishers.contains_key(id)) {
        knowledge.unregister(id);
    }
}

impl ConductorHandle {
    /// The address of the proxy, if there is one.
    #[must_use]
    pub fn proxy_addr(&self) -> Option<SocketAddr> {
        self.proxy.as_ref().map(ProxyServer::addr)
    }

    /// The address at which gateways ask for engines, if there is one.
    #[cfg(feature = "gateway")]
    #[must_use]
    pub fn gateway_addr(&self) -> Option<SocketAddr> {
        self.gateway.as_ref().map(GatewayServer::addr)
    }

    /// What the proxy has done so far, if there is one.
    #[must_use]
    pub fn proxy_figures(&self) -> Option<proxy::Figures> {
        self.proxy.as_ref().map(ProxyServer::figures)
    }

    /// The address of the HTTP interface.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.http.addr()
    }

    /// What the proxy, or another program in this process, asks for places.
    #[must_use]
    pub fn place(&self) -> Arc<impl Place + use<>> {
        Arc::clone(&self.app.shared)
    }

    /// Whether the events of every publisher are heard, so that requests are placed on every engine.
    #[must_use]
    pub fn hears_all(&self) -> bool {
        self.app.shared.directory().publishers.values().all(|publisher| publisher.served)
    }

    /// Whether a thread has ended by itself, after which nothing is right.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.events.has_ended()
    }

    /// Stops in order: requests first, then, after a last snapshot, the subscriptions.
    pub fn stop(self) {
        let Self {
            http,
            proxy,
            #[cfg(feature = "gateway")]
            gateway,
            #[cfg(feature = "kubernetes")]
            kubernetes,
            copier,
            keeper,
            events,
            app: _,
        } = self;
        drop((http, proxy));
        #[cfg(feature = "gateway")]
        drop(gateway);
        #[cfg(feature = "kubernetes")]
        drop(kubernetes);
        drop((copier, keeper));
        drop(events);
    }
}
