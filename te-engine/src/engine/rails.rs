//! Opening the control port and the fabrics.

use std::error::Error as StdError;
#[cfg(any(feature = "tcp", feature = "rdma"))]
use std::net::{IpAddr, ToSocketAddrs};
use std::net::{SocketAddr, TcpListener};
use std::string::String;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use std::vec::Vec;

use te_core::{HealthConfig, MultiTransport, RAILS_MAX, Transport};
use te_host::{LocalConfig, LocalTransport, ShmConfig, ShmTransport};

use crate::affinity::Affinity;
use crate::config::{Config, TopologySource};
use crate::control::{Inbox, Server};
use crate::descriptor::{EXPORT_BYTES_MAX, Published};
use crate::error::StartError;
use crate::tiers::Tiers;

/// How far a fabric is: rails of the nearest usable tier share the work.
const LOCAL: u8 = 0;
const SHM: u8 = 1;
const RDMA: u8 = 2;
const TCP: u8 = 3;

type Cause = Box<dyn StdError + Send + Sync>;

/// One rail, before it is one of many.
#[cfg_attr(not(feature = "testkit"), allow(unreachable_pub, reason = "public with the feature"))]
pub struct Rail {
    /// Device and port, for people: `mlx5_0:1`. Empty where its fabric has only one.
    pub device: String,
    /// What moves the bytes.
    pub transport: Box<dyn Transport + Send>,
}

/// What an engine is made of.
pub(super) struct Parts {
    pub(super) rails: MultiTransport<Box<dyn Transport + Send>, Tiers>,
    /// Device and port of each rail.
    pub(super) devices: Vec<String>,
    /// Which of them are near which memory.
    pub(super) affinity: Affinity,
    pub(super) published: Arc<Published>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) server: Server,
}

/// Opens the control port and the fabrics; `extra` rails are as near as RDMA is.
pub(super) fn open(config: &Config, identity: u64, extra: Vec<Rail>) -> Result<Parts, StartError> {
    let listen = |source| StartError::Listen { addr: config.listen, source };
    let listener = TcpListener::bind(config.listen).map_err(listen)?;
    let addr = listener.local_addr().map_err(listen)?;
    let mut opened = open_fabrics(config, addr, identity, extra);
    if let Some(error) = opened.first_required {
        return Err(error);
    }
    if let (true, Some(error)) = (opened.rails.is_empty(), opened.last_error) {
        return Err(error);
    }
    // More than a mask or a descriptor holds: the farthest are left out.
    let mut export_bytes = 1;
    let fits = |(_, rail): &&(u8, Rail)| {
        let transport = &rail.transport;
        export_bytes += 4 + transport.name().len() + transport.capabilities().export_bytes_max as usize;
        export_bytes <= EXPORT_BYTES_MAX
    };
    let count = opened.rails.iter().take(RAILS_MAX).take_while(fits).count();
    if count < opened.rails.len() {
        log::warn!("{} rails are left out: {count} are as many as there may be", opened.rails.len() - count);
        opened.rails.truncate(count);
    }
    let tiers: Vec<u8> = opened.rails.iter().map(|(tier, _)| *tier).collect();
    let (devices, transports): (Vec<String>, Vec<_>) =
        opened.rails.into_iter().map(|(_, rail)| (rail.device, rail.transport)).unzip();
    let affinity = affinity(config, &devices)?;
    let route = Tiers::new(&tiers, HealthConfig::default());
    let rails = MultiTransport::new(transports, route, config.inflight_slices_max)
        .map_err(|_| StartError::Config { field: "inflight_slices_max", need: "must be 1 to 16777216" })?;
    let published = Arc::new(Published::new(name(config, addr), incarnation()));
    let inbox = Arc::new(Inbox::default());
    let server = Server::start(
        listener,
        config.control,
        config.cluster_secret.clone(),
        published.clone(),
        inbox.clone(),
    )
    .map_err(listen)?;
    Ok(Parts { rails, devices, affinity, published, inbox, server })
}

/// A file that was named is checked in any case; nobody needs to look at the host when there is no choice.
fn affinity(config: &Config, devices: &[String]) -> Result<Affinity, StartError> {
    let is_choice = devices.iter().filter(|device| !device.is_empty()).count() > 1;
    if !is_choice && !matches!(config.topology, TopologySource::File(_)) {
        return Ok(Affinity::Unknown);
    }
    let affinity = Affinity::open(&config.topology).map_err(StartError::Topology)?;
    log::info!("topology: {affinity}");
    Ok(affinity)
}

/// Rails with their tiers, nearest first, and why the last fabric that did not start did not.
struct Opened {
    rails: Vec<(u8, Rail)>,
    last_error: Option<StartError>,
    /// Why the first fabric that must start did not.
    first_required: Option<StartError>,
}

impl Opened {
    fn add(&mut self, tier: u8, name: &'static str, required: bool, rails: Result<Vec<Rail>, Cause>) {
        match rails {
            Ok(rails) => self.rails.extend(rails.into_iter().map(|rail| (tier, rail))),
            // Whoever asked for it is told with the error.
            Err(source) if required => {
                self.first_required.get_or_insert(StartError::Fabric { name, source });
            }
            Err(source) => {
                // A host without RDMA is nothing to worry about; that it has none was said where it was noticed.
                if tier != RDMA {
                    log::warn!("fabric {name} did not start: {source}");
                }
                self.last_error = Some(StartError::Fabric { name, source });
            }
        }
    }
}

/// What this host lacks is reported, and is an error only when it was asked for, or nothing is left.
fn open_fabrics(config: &Config, addr: SocketAddr, identity: u64, extra: Vec<Rail>) -> Opened {
    let mut opened = Opened { rails: Vec::new(), last_error: None, first_required: None };
    let required = config.required();
    if config.fabrics.local {
        let local = LocalConfig { identity };
        opened.add(LOCAL, "local", required.local, one(LocalTransport::new(local)));
    }
    if config.fabrics.shm {
        let shm = ShmConfig { identity, ..ShmConfig::default() };
        opened.add(SHM, "shm", required.shm, one(ShmTransport::new(shm)));
    }
    opened.rails.extend(extra.into_iter().map(|rail| (RDMA, rail)));
    #[cfg(feature = "rdma")]
    if config.fabrics.rdma {
        opened.add(RDMA, "rdma", required.rdma, crate::rdma::open(config, addr, identity));
    }
    #[cfg(not(feature = "rdma"))]
    if required.rdma {
        opened.add(RDMA, "rdma", true, Err("this build lacks it".into()));
    }
    #[cfg(feature = "tcp")]
    if config.fabrics.tcp {
        opened.add(TCP, "tcp", required.tcp, open_tcp(config, addr, identity));
    }
    #[cfg(not(feature = "tcp"))]
    if required.tcp {
        opened.add(TCP, "tcp", true, Err("this build lacks it".into()));
    }
    #[cfg(not(any(feature = "tcp", feature = "rdma")))]
    let _ = addr;
    opened
}

/// A fabric that is one rail.
fn one<T: Transport + Send + 'static>(opened: Result<T, impl Into<Cause>>) -> Result<Vec<Rail>, Cause> {
    let transport = Box::new(opened.map_err(Into::into)?);
    Ok(vec![Rail { device: String::new(), transport }])
}

#[cfg(feature = "tcp")]
fn open_tcp(config: &Config, addr: SocketAddr, identity: u64) -> Result<Vec<Rail>, Cause> {
    let tcp = te_tcp::Config {
        bind: SocketAddr::new(addr.ip(), config.tcp.port),
        advertise: advertised(config),
        lanes: config.tcp.lanes,
        checksum: config.tcp.checksum,
        congestion: config.tcp.congestion.clone(),
        send_buffer_bytes: config.tcp.send_buffer_bytes,
        receive_buffer_bytes: config.tcp.receive_buffer_bytes,
        connections_max: config.tcp.connections_max,
        inflight_max: config.inflight_slices_max.min(1 << 20),
        identity,
        ..te_tcp::Config::default()
    };
    one(te_tcp::TcpTransport::new(tcp))
}

/// Exports carry an address; a name is looked up here, once.
#[cfg(any(feature = "tcp", feature = "rdma"))]
pub(crate) fn advertised(config: &Config) -> Option<IpAddr> {
    let found = (config.advertise_host.as_deref()?, 0).to_socket_addrs().ok()?.next();
    found.map(|found| found.ip())
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
