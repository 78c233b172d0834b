//! What an engine needs of Mooncake: the fabric that opens the rail, and the metadata that finds segments.

use std::collections::HashMap;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use te_core::Access;
use te_engine::{
    Cause, Descriptor, Fabric, FabricContext, FabricEntry, Liveness, Located, Metadata, Rail,
    RegionDescriptor, SegmentError, Tier,
};

use crate::client::Client;
use crate::config::Config;
use crate::descriptor::SegmentDescriptor;
use crate::error::PeerError;
use crate::export::{Export, SEGMENT_BYTES_MAX};
use crate::header::Version;
use crate::transport::{MooncakeTransport, RAIL};

/// How long a native control port may take to accept a connection.
const REACHABLE: Duration = Duration::from_secs(1);
/// Names for which a native owner was found, and which the engine asks for next.
const LOCATED_MAX: usize = 1_024;

/// Opens the rail `mooncake` in an engine.
#[derive(Debug)]
pub struct MooncakeFabric {
    config: Config,
    client: Arc<Client>,
}

impl MooncakeFabric {
    /// The fabric with these settings. `client` is that of the [`Service`](crate::Service), or one of its own.
    #[must_use]
    pub fn new(config: Config, client: Arc<Client>) -> Self {
        Self { config, client }
    }

    /// The line that an engine is started with:
    /// [`start_with_fabrics`](te_engine::TransferEngine::start_with_fabrics).
    #[must_use]
    pub const fn entry(&self) -> FabricEntry<'_> {
        FabricEntry::new(RAIL, Tier::Tcp, "Mooncake's TCP transport, towards Mooncake peers", self)
    }
}

impl Fabric for MooncakeFabric {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let inflight_max = context.config.inflight_slices_max.min(1 << 20);
        let config = Config { inflight_max, ..self.config.clone() };
        Ok(Rail::only(MooncakeTransport::new(&config, Some(self.client.clone()))?))
    }
}

/// Finds segments by Mooncake's metadata: those of Mooncake peers are described from their JSON, and those of
/// Snowskin engines that say so are opened natively.
#[derive(Debug)]
pub struct MooncakeMetadata {
    client: Arc<Client>,
    config: Config,
    /// Whether segments of Snowskin engines are opened natively.
    upgrades: bool,
    /// Native owners that `describe` has found, until `locate` asks for them.
    located: Mutex<HashMap<String, Located>>,
}

impl MooncakeMetadata {
    /// Metadata that asks `client`. `config` is that of the rail.
    #[must_use]
    pub fn new(config: Config, client: Arc<Client>) -> Self {
        Self { client, config, upgrades: true, located: Mutex::default() }
    }

    /// The same metadata, which treats Snowskin engines as Mooncake peers.
    #[must_use]
    pub fn without_upgrade(self) -> Self {
        Self { upgrades: false, ..self }
    }

    /// The engine's descriptor of a Mooncake segment: one region per range, with an export for the rail.
    ///
    /// # Errors
    /// `Name` for too long a name; what [`Client::data_addresses`] returns; `Protocol`.
    fn described(&self, name: &str, segment: &SegmentDescriptor) -> Result<Descriptor, SegmentError> {
        if name.len() > SEGMENT_BYTES_MAX {
            return Err(SegmentError::Name(name.chars().take(128).collect()));
        }
        let addresses = self.client.data_addresses(name, segment).map_err(segment_error)?;
        let life = segment.life();
        let version = if self.config.force_v1 { Version::V1 } else { segment.version };
        let mut access = Access::REMOTE_READ;
        if version == Version::V2 || self.config.allow_unacknowledged_v1 {
            access |= Access::REMOTE_WRITE;
        } else {
            log::warn!(
                "segment {name:?} speaks version 1 alone, which does not acknowledge writes: only reads are possible \
                 (allow_unacknowledged_v1 allows writes)"
            );
        }
        let protocol = |what| SegmentError::Protocol { name: name.into(), what };
        let region = |range: crate::descriptor::Range| {
            let export = Export {
                access,
                addresses: addresses.clone(),
                port: segment.data_port,
                version: segment.version,
                addr: range.addr,
                len: range.len,
                life,
                segment: name.into(),
            };
            let export =
                export.to_bytes().map_err(|_| protocol("its descriptor lists an impossible range"))?;
            RegionDescriptor::new(range.addr, range.len, access, &[(RAIL, &export)]).map_err(protocol)
        };
        let regions: Vec<RegionDescriptor> =
            segment.ranges().into_iter().map(region).collect::<Result<_, _>>()?;
        Descriptor::new(name, life, regions).map_err(protocol)
    }

    fn located(&self) -> std::sync::MutexGuard<'_, HashMap<String, Located>> {
        self.located.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn native(&self, segment: &SegmentDescriptor) -> Option<Located> {
        let native = segment.native.as_ref().filter(|_| self.upgrades)?;
        Some(Located { endpoint: native.endpoint.clone(), incarnation: Some(native.incarnation) })
    }
}

impl Metadata for MooncakeMetadata {
    /// The native owner of a segment.
    fn locate(&self, name: &str) -> Result<Located, SegmentError> {
        if let Some(located) = self.located().remove(name) {
            return Ok(located);
        }
        let segment = self.client.descriptor(name).map_err(segment_error)?;
        let what = "it is not a Snowskin engine, and has no control port";
        self.native(&segment).ok_or_else(|| SegmentError::Protocol { name: name.into(), what })
    }

    fn describe(&self, name: &str) -> Option<Result<Descriptor, SegmentError>> {
        let segment = match self.client.descriptor(name) {
            Ok(segment) => segment,
            Err(error) => return Some(Err(segment_error(error))),
        };
        let Some(native) = self.native(&segment) else { return Some(self.described(name, &segment)) };
        if !is_reachable(&native.endpoint) {
            log::warn!(
                "segment {name:?} is of a Snowskin engine whose control port {} cannot be reached: Mooncake's wire is used",
                native.endpoint
            );
            return Some(self.described(name, &segment));
        }
        let mut located = self.located();
        if located.len() >= LOCATED_MAX {
            located.clear();
        }
        located.insert(name.into(), native);
        None
    }

    fn notify(&self, segment: &str, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        // Mooncake's messages are text.
        let message = String::from_utf8_lossy(message);
        self.client.notify(segment, name, &message).map_err(segment_error)
    }

    fn probe(&self, segment: &str, timeout: Duration) -> Result<Liveness, SegmentError> {
        match self.client.probe_within(segment, timeout) {
            // A Mooncake peer has no incarnation.
            Ok(()) => Ok(Liveness::Alive { incarnation: 0 }),
            Err(PeerError::Unreachable { .. }) => Ok(Liveness::Unreachable),
            Err(error) => Err(segment_error(error)),
        }
    }
}

/// Whether a process listens at the endpoint. The engine itself finds out whether it is the right process.
fn is_reachable(endpoint: &str) -> bool {
    let Ok(mut addresses) = endpoint.to_socket_addrs() else { return false };
    let until = Instant::now() + REACHABLE;
    addresses.any(|address| {
        let left = until.saturating_duration_since(Instant::now());
        !left.is_zero() && TcpStream::connect_timeout(&address, left).is_ok()
    })
}

/// The engine's error for one of a peer.
fn segment_error(error: PeerError) -> SegmentError {
    match error {
        PeerError::Name(name) => SegmentError::Name(name),
        PeerError::Unknown { name, server } => SegmentError::Unknown { name, server },
        PeerError::Metadata(error) => SegmentError::Metadata(error),
        PeerError::Unreachable { name, reason } => SegmentError::Unreachable { name, reason },
        PeerError::Refused { name } => SegmentError::Refused {
            name,
            what: "the notification was refused: its queue is full, or it takes none",
        },
        PeerError::TooLong { .. } => SegmentError::Refused {
            name: String::new(),
            what: "the message is longer than frame_bytes_max here: write it to memory instead",
        },
        PeerError::Frame { ref name, .. }
        | PeerError::Kind { ref name }
        | PeerError::Descriptor { ref name, .. }
        | PeerError::Message { ref name, .. } => {
            // The engine's error has no room for the details.
            log::warn!("{error}");
            let what = match error {
                PeerError::Descriptor { .. } => {
                    "its descriptor is wrong or of another transport (see the log)"
                }
                PeerError::Message { .. } => "its entry or answer is not as Mooncake writes it (see the log)",
                _ => "its answer is not a handshake of Mooncake (see the log)",
            };
            SegmentError::Protocol { name: name.clone(), what }
        }
    }
}
