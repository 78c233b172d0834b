//! [`Conductor`]: everything together, from settings to threads.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use store_master::HttpServer;
use tracing::{info, warn};

use crate::config::{Config, ConfigError};
use crate::http::{App, router};
use crate::io::{EventThread, Prepared};
use crate::proxy::Place;
use crate::registry::{self, Positions, RegisterError};
use crate::shared::Shared;

/// Time for requests under way to end when the Conductor stops.
const GRACE: Duration = Duration::from_millis(500);

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
}

/// A running Conductor. Dropping it stops it.
#[derive(Debug)]
pub struct ConductorHandle {
    // The order of the fields is the order in which they are stopped.
    http: HttpServer,
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
        let shared = Arc::new(Shared::new(config));
        let app = App { shared: Arc::clone(&shared), commander };
        Ok(Self { shared, http, app, prepared })
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
        let Self { shared, mut http, app, prepared } = self;
        let events = EventThread::start(prepared, Arc::clone(&shared)).map_err(StartError::System)?;
        let positions = Positions::new();
        for engine in &shared.config.engines {
            if engine.block_tokens == 0 || engine.dp_ranks == 0 {
                continue;
            }
            registry::register(&shared, &app.commander, engine, &positions)
                .map_err(|error| StartError::Engine(engine.instance.clone(), error))?;
        }
        http.serve(router(app.clone()), shared.config.http, GRACE).map_err(StartError::System)?;
        info!(addr = %http.addr(), engines = shared.config.engines.len(), "serving");
        if !http.addr().ip().is_loopback() && !shared.config.admin_secret.is_set() {
            warn!(
                "the Conductor listens at {} without an admin secret: engines on other hosts cannot register",
                http.addr()
            );
        }
        Ok(ConductorHandle { http, events, app })
    }
}

impl ConductorHandle {
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

    /// Whether a thread has ended by itself, after which nothing is right.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.events.has_ended()
    }

    /// Stops in order.
    pub fn stop(self) {
        drop(self);
    }
}
