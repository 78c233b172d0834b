//! Opening the control port and the fabrics.

use std::net::{SocketAddr, TcpListener};
use std::string::String;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use std::vec::Vec;

use te_core::{HealthConfig, Location, MultiTransport, Transport};

use crate::config::{Config, TopologySource};
use crate::control::{Inbox, Server};
use crate::descriptor::Published;
use crate::error::StartError;
use crate::local::LocalTransport;
use crate::shm::ShmTransport;
use crate::tiers::Tiers;
use crate::topology::Affinity;

pub(super) type Rails = MultiTransport<Box<dyn Transport + Send>, Tiers>;

/// Which NIC each rail runs over, and which of them are near which memory.
pub(super) struct Nics {
    /// By rail; `None` for one that has no NIC of its own: copies within the host, and sockets, which the system routes.
    names: Vec<Option<String>>,
    affinity: Affinity,
}

impl Nics {
    fn new(config: &Config, names: Vec<Option<String>>) -> Result<Self, StartError> {
        // A file that was named is checked in any case; nobody needs to look at the host when there is no choice.
        let needed = names.iter().any(Option::is_some) || matches!(config.topology, TopologySource::File(_));
        let affinity = if needed {
            Affinity::open(&config.topology).map_err(StartError::Topology)?
        } else {
            Affinity::Unknown
        };
        log::debug!("topology: {affinity}");
        Ok(Self { names, affinity })
    }

    /// What each rail costs for memory at `location`; `None`: all the same.
    pub(super) fn penalties(&self, location: Location) -> Option<Vec<u32>> {
        self.affinity.penalties(location, &self.names)
    }
}

/// What an engine is made of.
pub(super) struct Parts {
    pub(super) rails: Rails,
    pub(super) nics: Nics,
    pub(super) published: Arc<Published>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) server: Server,
}

pub(super) fn open(config: &Config) -> Result<Parts, StartError> {
    let listen = |source| StartError::Listen { addr: config.listen, source };
    let listener = TcpListener::bind(config.listen).map_err(listen)?;
    let addr = listener.local_addr().map_err(listen)?;
    let rails = rails(config, addr)?;
    // A fabric with a rail for each NIC names them here.
    let nics = Nics::new(config, vec![None; rails.rails().len()])?;
    let published = Arc::new(Published::new(name(config, addr), incarnation()));
    let inbox = Arc::new(Inbox::default());
    let server = Server::start(listener, config.control, published.clone(), inbox.clone()).map_err(listen)?;
    Ok(Parts { rails, nics, published, inbox, server })
}

fn rails(config: &Config, addr: SocketAddr) -> Result<Rails, StartError> {
    let mut rails: Vec<Box<dyn Transport + Send>> = Vec::new();
    let mut tiers = Vec::new();
    let mut last = None;
    // What this host lacks is reported, and is an error only when nothing is left.
    let mut add = |tier, name, rail: Result<Box<dyn Transport + Send>, Cause>| match rail {
        Ok(rail) => {
            rails.push(rail);
            tiers.push(tier);
        }
        Err(source) => {
            log::warn!("fabric {name} did not start: {source}");
            last = Some(StartError::Fabric { name, source });
        }
    };
    if config.fabrics.local {
        add(0, "local", LocalTransport::new().map(|rail| Box::new(rail) as _).map_err(Into::into));
    }
    if config.fabrics.shm {
        add(1, "shm", ShmTransport::new().map(|rail| Box::new(rail) as _).map_err(Into::into));
    }
    if config.fabrics.tcp {
        open_tcp(config, addr, &mut add);
    }
    if let (true, Some(error)) = (rails.is_empty(), last) {
        return Err(error);
    }
    let route = Tiers::new(&tiers, HealthConfig::default());
    MultiTransport::new(rails, route, config.inflight_slices_max)
        .map_err(|_| StartError::Config { field: "inflight_slices_max", need: "must be 1 to 16777216" })
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

#[cfg(feature = "tcp")]
fn open_tcp(
    config: &Config,
    addr: SocketAddr,
    add: &mut impl FnMut(u8, &'static str, Result<Box<dyn Transport + Send>, Cause>),
) {
    // Exports carry an address; a name is looked up here, once.
    let advertise = config.advertise_host.as_deref().and_then(|host| {
        let found = std::net::ToSocketAddrs::to_socket_addrs(&(host, 0)).ok()?.next();
        found.map(|found| found.ip())
    });
    let tcp = te_tcp::Config {
        bind: SocketAddr::new(addr.ip(), config.tcp.port),
        advertise,
        lanes: config.tcp.lanes,
        checksum: config.tcp.checksum,
        congestion: config.tcp.congestion.clone(),
        send_buffer_bytes: config.tcp.send_buffer_bytes,
        receive_buffer_bytes: config.tcp.receive_buffer_bytes,
        inflight_max: config.inflight_slices_max.min(1 << 20),
        ..te_tcp::Config::default()
    };
    add(2, "tcp", te_tcp::TcpTransport::new(tcp).map(|rail| Box::new(rail) as _).map_err(Into::into));
}

#[cfg(not(feature = "tcp"))]
fn open_tcp(
    _config: &Config,
    _addr: SocketAddr,
    _add: &mut impl FnMut(u8, &'static str, Result<Box<dyn Transport + Send>, Cause>),
) {
}

/// `host:port`, as peers dial it.
fn name(config: &Config, addr: SocketAddr) -> String {
    match &config.advertise_host {
        Some(host) if host.contains(':') && !host.starts_with('[') => {
            std::format!("[{host}]:{}", addr.port())
        }
        Some(host) => std::format!("{host}:{}", addr.port()),
        None => std::string::ToString::to_string(&addr),
    }
}

/// Microseconds since 1970: never the same for two lives of one address, and people can read which came first.
fn incarnation() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
