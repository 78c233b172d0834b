//! Opening the control port and the fabrics.

use std::net::{SocketAddr, TcpListener};
use std::string::String;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use std::vec::Vec;

use te_core::{HealthConfig, MultiTransport, RAILS_MAX, Transport};

use crate::affinity::Affinity;
use crate::config::{Config, TopologySource};
use crate::control::{Inbox, Server};
use crate::descriptor::{EXPORT_BYTES_MAX, Published};
use crate::error::StartError;
use crate::fabrics::{Cause, FabricContext, FabricEntry, Rail, Tier, UnknownFabric, Wanted, fabrics};
use crate::gpu::GpuMemory;
use crate::pools::PoolMemory;
use crate::tiers::Tiers;

/// The parts of an engine that are opened at its start.
pub(super) struct Parts {
    pub(super) rails: MultiTransport<Box<dyn Transport + Send>, Tiers>,
    /// Device and port of each rail.
    pub(super) devices: Vec<String>,
    /// Which devices are near which memory.
    pub(super) affinity: Affinity,
    pub(super) gpus: GpuMemory,
    pub(super) pools: PoolMemory,
    pub(super) published: Arc<Published>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) server: Server,
}

/// Opens the control port and the fabrics: those of the registry that the configuration wants, and all of
/// `given`.
pub(super) fn open(config: &Config, identity: u64, given: &[FabricEntry<'_>]) -> Result<Parts, StartError> {
    let listen = |source| StartError::Listen { addr: config.listen, source };
    let listener = TcpListener::bind(config.listen).map_err(listen)?;
    let addr = listener.local_addr().map_err(listen)?;
    let gpus = GpuMemory::open(config)?;
    let pools = PoolMemory::default();
    let context = FabricContext {
        config,
        control: addr,
        identity,
        gpus: &gpus,
        #[cfg(feature = "cxl")]
        pools: &pools,
    };
    let mut opened = open_fabrics(&context, given)?;
    // A mask of rails and a descriptor have limits. The farthest rails beyond them are left out.
    let mut export_bytes = 1;
    let fits = |(_, rail): &&(Tier, Rail)| {
        let transport = &rail.transport;
        export_bytes += 4 + transport.name().len() + transport.capabilities().export_bytes_max as usize;
        export_bytes <= EXPORT_BYTES_MAX
    };
    let count = opened.iter().take(RAILS_MAX).take_while(fits).count();
    if count < opened.len() {
        log::warn!("{} rails are left out: an engine has at most {count} of these", opened.len() - count);
        opened.truncate(count);
    }
    let tiers: Vec<u8> = opened.iter().map(|(tier, _)| *tier as u8).collect();
    let (devices, transports): (Vec<String>, Vec<_>) =
        opened.into_iter().map(|(_, rail)| (rail.device, rail.transport)).unzip();
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
    Ok(Parts { rails, devices, affinity, gpus, pools, published, inbox, server })
}

/// Reads the topology. A configured file is always validated; the host is not read if there is at most one
/// NIC to choose from.
fn affinity(config: &Config, devices: &[String]) -> Result<Affinity, StartError> {
    let is_choice = devices.iter().filter(|device| !device.is_empty()).count() > 1;
    if !is_choice && !matches!(config.topology, TopologySource::File(_)) {
        return Ok(Affinity::Unknown);
    }
    let affinity = Affinity::open(&config.topology).map_err(StartError::Topology)?;
    log::info!("topology: {affinity}");
    Ok(affinity)
}

/// The rails of all fabrics with their tiers, nearest first. A fabric that does not start and need not is
/// logged.
fn open_fabrics(
    context: &FabricContext<'_>,
    given: &[FabricEntry<'_>],
) -> Result<Vec<(Tier, Rail)>, StartError> {
    let mut rails = Vec::new();
    let mut last_error = None;
    let given = given.iter().map(|entry| (entry, Wanted::Must));
    let known = fabrics().iter().map(|entry| (entry, wanted(context.config, entry)));
    for (entry, wanted) in given.chain(known).filter(|(_, wanted)| *wanted != Wanted::No) {
        let opened = match entry.fabric {
            Some(fabric) => fabric.open(context),
            None => Err(UnknownFabric::NotBuilt(entry.name).into()),
        };
        match opened {
            Ok(opened) => rails.extend(opened.into_iter().map(|rail| (entry.tier, rail))),
            Err(cause) if wanted == Wanted::Must => {
                return Err(StartError::Fabric { name: entry.name, source: cause.error });
            }
            Err(cause) => {
                log_absence(entry.name, &cause);
                last_error = Some(StartError::Fabric { name: entry.name, source: cause.error });
            }
        }
    }
    // The sort is stable: rails of one tier stay in the order of their fabrics.
    rails.sort_by_key(|(tier, _)| *tier);
    match last_error {
        Some(error) if rails.is_empty() => Err(error),
        _ => Ok(rails),
    }
}

/// A fabric of the registry must start if `fabrics` names it, or if its settings name a port or a device.
fn wanted(config: &Config, entry: &FabricEntry<'_>) -> Wanted {
    let is_auto = config.fabrics.is_auto();
    match (config.fabrics.wanted(entry), entry.fabric) {
        (_, Some(fabric)) if is_auto && fabric.is_asked_for(config) => Wanted::Must,
        (wanted, _) => wanted,
    }
}

/// Logs that a fabric did not start: as information, and once per process, if the host has no device of it.
fn log_absence(name: &'static str, cause: &Cause) {
    static LOGGED: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    if !cause.absent {
        log::warn!("fabric {name} did not start: {}", cause.error);
        return;
    }
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if !logged.contains(&name) {
        logged.push(name);
        log::info!("fabric {name} is not used: {}", cause.error);
    }
}

/// `host:port` of the control port, to which peers connect.
fn name(config: &Config, addr: SocketAddr) -> String {
    match &config.advertise_host {
        Some(host) if host.contains(':') && !host.starts_with('[') => {
            std::format!("[{host}]:{}", addr.port())
        }
        Some(host) => std::format!("{host}:{}", addr.port()),
        None => std::string::ToString::to_string(&addr),
    }
}

/// Microseconds since 1970: different for two processes that follow each other at one address, and ordered by
/// their starts.
fn incarnation() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
