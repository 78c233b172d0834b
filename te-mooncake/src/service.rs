//! [`Service`]: this engine as Mooncake peers see it.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use te_core::{Access, MemSpan, MemoryKinds};
use te_fabric::net::{Listener, host_addresses};
use te_host::fork::Mark;

use crate::client::Client;
use crate::config::Config;
use crate::daemon::{self, Inbox};
use crate::descriptor::{Native, SegmentDescriptor};
use crate::error::{ExportError, StartError, WithdrawError};
use crate::header::Version;
use crate::message::{Notification, RpcMeta};
use crate::metadata::{MetadataString, join};
use crate::published::Published;
use crate::server::{Server, ServerStats, listen};
use crate::sys::ExportedRange;
use crate::target::{self, Counters, Exports, TargetStats};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
/// How long the end of a service waits for the metadata server.
const REMOVAL: Duration = Duration::from_secs(2);
/// The length of a descriptor that every Mooncake peer accepts, bytes.
const DESCRIPTOR_BYTES_SAFE: usize = 1 << 20;

/// The side of Mooncake's wire that peers see: the handshake port, the data port, the entries on the metadata
/// server. With the mode `initiator` it has neither ports nor entries, and only its [`Client`] is of use.
///
/// Dropping it, or [`stop`](Self::stop), closes the ports, removes the entries and withdraws every range.
pub struct Service {
    config: Config,
    client: Arc<Client>,
    /// Before the rest, so that its threads end first. `None`: no ports.
    ports: Option<Ports>,
    inbox: Arc<Inbox>,
    mark: Mark,
}

struct Ports {
    handshakes: Server,
    data: Server,
    name: String,
    rpc_meta: RpcMeta,
    exports: Arc<Exports>,
    counters: Arc<Counters>,
    published: Arc<Published>,
    /// Held while the descriptor is changed and stored, so that the last one that is stored is the last one.
    publishing: Mutex<()>,
}

/// Counters of a [`Service`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServiceStats {
    /// The connections of the handshake port.
    pub handshakes: ServerStats,
    /// The connections of the data port.
    pub data: ServerStats,
    /// What peers did with exported memory.
    pub target: TargetStats,
    /// Notifications that were refused because the queue was full.
    pub notifications_refused: u64,
}

impl Service {
    /// Opens the ports and stores this engine's entries. Nothing is exported yet. Logs one warning that the
    /// ports are not authenticated, with the networks that may connect.
    ///
    /// # Errors
    /// `Off` for the mode `off`; otherwise the first thing that failed.
    pub fn start(config: Config, metadata: &MetadataString) -> Result<Self, StartError> {
        if config.mode == crate::Mode::Off {
            return Err(StartError::Off);
        }
        let client = Arc::new(Client::new(&config, metadata)?);
        let inbox = Arc::new(Inbox::new(&config));
        let mut this = Self { config, client, ports: None, inbox, mark: Mark::new() };
        if let Some(bind) = this.config.bind.filter(|_| this.config.mode.is_target()) {
            this.ports = Some(this.open(bind)?);
            this.republish().map_err(StartError::Publish)?;
        }
        Ok(this)
    }

    fn open(&self, bind: IpAddr) -> Result<Ports, StartError> {
        let config = &self.config;
        let opened = |port: u16| -> Result<(Listener, SocketAddr), StartError> {
            let address = SocketAddr::new(bind, port);
            let failed = |source| StartError::Listen { address, source };
            let listener = listen(address, config.port_min, config.port_max).map_err(failed)?;
            let address = listener.local_address().map_err(failed)?;
            Ok((listener, address))
        };
        let ((rpc, rpc_address), (data, data_address)) =
            (opened(config.rpc_port)?, opened(config.data_port)?);
        let host = config.advertise_host.clone().unwrap_or_else(|| advertised(bind));
        let place = join(&host, rpc_address.port());
        let name = match &config.name {
            Some(name) if !self.client.entries().is_peer_to_peer() => name.clone(),
            _ => place,
        };
        let published = Arc::new(Published::new(SegmentDescriptor {
            name: name.clone(),
            data_host: Some(host.clone()),
            data_port: data_address.port(),
            version: Version::V2,
            buffers: Vec::new(),
            native: None,
        }));
        let (exports, counters) = (Arc::new(Exports::new(config.exports_max)), Arc::new(Counters::default()));
        let data =
            target::start(data, config, exports.clone(), counters.clone()).map_err(StartError::System)?;
        let handshakes =
            daemon::start(rpc, config, published.clone(), self.inbox.clone()).map_err(StartError::System)?;
        let peers: Vec<String> = config.peers.iter().map(ToString::to_string).collect();
        log::warn!(
            "segment {name:?} is served to Mooncake peers on {rpc_address} and {data_address}, without authentication: every \
             process of {} can read and write all that is exported",
            peers.join(", ")
        );
        let rpc_meta = RpcMeta { host, port: rpc_address.port() };
        let publishing = Mutex::new(());
        Ok(Ports { handshakes, data, name, rpc_meta, exports, counters, published, publishing })
    }

    /// The settings that it runs with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The handshake port; 0 when there is none.
    #[must_use]
    pub fn rpc_port(&self) -> u16 {
        self.ports.as_ref().map_or(0, |ports| ports.handshakes.address().port())
    }

    /// The data port; 0 when there is none.
    #[must_use]
    pub fn data_port(&self) -> u16 {
        self.ports.as_ref().map_or(0, |ports| ports.data.address().port())
    }

    /// The name under which peers open this engine's segment; empty when it has none.
    #[must_use]
    pub fn name(&self) -> &str {
        self.ports.as_ref().map_or("", |ports| &ports.name)
    }

    /// What asks peers.
    #[must_use]
    pub fn client(&self) -> Arc<Client> {
        self.client.clone()
    }

    /// Lets peers access `span` as `access` says: `REMOTE_READ`, `REMOTE_WRITE` or both. The new descriptor
    /// is stored on the metadata server, if there is one, before this returns.
    ///
    /// # Errors
    /// Nothing is exported, and why. `Metadata` when the descriptor could not be stored.
    ///
    /// # Safety
    /// Until [`withdraw`](Self::withdraw) has returned for the range, or the service is gone, `span` stays
    /// mapped, and no `&` exists to bytes that peers may write, and no `&mut` to bytes that they may read.
    #[allow(unsafe_code, reason = "only the caller can promise what an export needs")]
    pub unsafe fn export(&self, span: MemSpan, access: Access) -> Result<(), ExportError> {
        // SAFETY: the caller's promise.
        unsafe { self.export_all(&[(span, access)]) }
    }

    /// As [`export`](Self::export), for several ranges: all or none, and the descriptor is stored once.
    ///
    /// # Errors
    /// As [`export`](Self::export), for the first range that was refused.
    ///
    /// # Safety
    /// That of [`export`](Self::export), for each range.
    #[allow(unsafe_code, reason = "only the caller can promise what an export needs")]
    pub unsafe fn export_all(&self, ranges: &[(MemSpan, Access)]) -> Result<(), ExportError> {
        if self.mark.is_forked() {
            return Err(ExportError::Forked);
        }
        let ports = self.ports.as_ref().ok_or(ExportError::NotTarget)?;
        let _publishing = ports.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        let mut result = Ok(());
        for &(span, access) in ranges {
            result = check(span, access).and_then(|()| {
                // SAFETY: the caller's promise, until the range is revoked.
                let range = unsafe { ExportedRange::new(span, access.intersection(REMOTE)) };
                ports.exports.insert(range)
            });
            if result.is_err() {
                break;
            }
            ports.published.insert(span.as_ptr().addr() as u64, span.len() as u64);
            done += 1;
        }
        if result.is_ok() {
            result = self.store(ports).map_err(ExportError::Metadata);
        }
        if result.is_err() {
            ranges[..done].iter().for_each(|(span, _)| ports.withdraw(span.as_ptr().addr() as u64));
        }
        result
    }

    /// Ends the export of the range that begins at `addr`. When this returns, no peer accesses it any more; a
    /// peer in the middle of an operation on it loses its connection.
    ///
    /// # Errors
    /// `NotFound`; `Metadata` when the range *is* withdrawn and the metadata server still shows it.
    pub fn withdraw(&self, addr: u64) -> Result<(), WithdrawError> {
        self.withdraw_all(&[addr])
    }

    /// As [`withdraw`](Self::withdraw), for several ranges; the descriptor is stored once.
    ///
    /// # Errors
    /// `NotFound` for the first address at which no range begins; the others are withdrawn nevertheless.
    pub fn withdraw_all(&self, addrs: &[u64]) -> Result<(), WithdrawError> {
        if self.mark.is_forked() {
            return Err(WithdrawError::Forked);
        }
        let none = || addrs.first().map_or(Ok(()), |addr| Err(WithdrawError::NotFound(*addr)));
        let Some(ports) = &self.ports else { return none() };
        let _publishing = ports.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut result = Ok(());
        let mut changed = false;
        for &addr in addrs {
            match ports.exports.remove(addr) {
                Some(range) => {
                    ports.published.remove(addr);
                    ports.end(&range);
                    changed = true;
                }
                None if result.is_ok() => result = Err(WithdrawError::NotFound(addr)),
                None => {}
            }
        }
        match changed.then(|| self.store(ports)) {
            Some(Err(error)) if result.is_ok() => Err(WithdrawError::Metadata(error)),
            _ => result,
        }
    }

    /// Ends every export at once. The directory still names the memory: for the end of an engine, whose
    /// entries are removed later. After it returned, no peer touches the memory.
    pub fn revoke_all(&self) {
        if let Some(ports) = self.ports.as_ref().filter(|_| !self.mark.is_forked()) {
            ports.end_all();
        }
    }

    /// States in the descriptor where this engine is reached over its own fabrics: `host:port` of its control
    /// port, and its incarnation. A Snowskin initiator uses those; others ignore the member.
    ///
    /// # Errors
    /// The metadata server did not take the new descriptor.
    pub fn set_native(&self, endpoint: &str, incarnation: u64) -> Result<(), te_metadata::MetadataError> {
        let Some(ports) = self.ports.as_ref().filter(|_| !self.mark.is_forked()) else { return Ok(()) };
        let _publishing = ports.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        ports.published.set_native(Native { endpoint: endpoint.into(), incarnation });
        self.store(ports)
    }

    /// Takes all notifications that peers have sent since the last call, oldest first.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        if self.mark.is_forked() {
            return Vec::new();
        }
        self.inbox.take()
    }

    /// Stores this engine's entries again: a metadata server that was restarted may have lost them.
    ///
    /// # Errors
    /// The server did not take them.
    pub fn republish(&self) -> Result<(), te_metadata::MetadataError> {
        let Some(ports) = self.ports.as_ref().filter(|_| !self.mark.is_forked()) else { return Ok(()) };
        let _publishing = ports.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        self.client.entries().put_rpc_meta(&ports.name, &ports.rpc_meta)?;
        self.store(ports)
    }

    /// Counters since the start.
    #[must_use]
    pub fn stats(&self) -> ServiceStats {
        let ports = self.ports.as_ref();
        ServiceStats {
            handshakes: ports.map(|ports| ports.handshakes.stats()).unwrap_or_default(),
            data: ports.map(|ports| ports.data.stats()).unwrap_or_default(),
            target: ports.map(|ports| ports.counters.stats()).unwrap_or_default(),
            notifications_refused: self.inbox.refused(),
        }
    }

    /// Withdraws every range, removes the entries from the metadata server, for which it waits at most 2 s,
    /// and closes the ports, as dropping does.
    pub fn stop(self) {}

    fn store(&self, ports: &Ports) -> Result<(), te_metadata::MetadataError> {
        let json = ports.published.json();
        if json.len() > DESCRIPTOR_BYTES_SAFE {
            log::warn!(
                "the descriptor of {:?} has {} bytes: peers accept 1 MiB unless MC_HANDSHAKE_MAX_LENGTH is set there",
                ports.name,
                json.len()
            );
        }
        self.client.entries().put_descriptor(&ports.name, &json)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let Some(ports) = self.ports.take() else { return };
        if self.mark.is_forked() {
            // The entries are the parent's.
            return;
        }
        // First of all: the server of the entries may take long to answer.
        ports.end_all();
        let Ports { handshakes, data, name, .. } = ports;
        remove_entries(&self.client, name);
        drop(handshakes);
        // Joins the only thread that accesses exported memory.
        drop(data);
    }
}

impl Ports {
    /// Takes back a range that was just exported.
    fn withdraw(&self, addr: u64) {
        if let Some(range) = self.exports.remove(addr) {
            self.published.remove(addr);
            self.end(&range);
        }
    }

    /// Ends all exports, without a word to the directory.
    fn end_all(&self) {
        for range in self.exports.take_all() {
            self.end(&range);
        }
    }

    /// Waits until no system call accesses the range. None of them blocks.
    fn end(&self, range: &ExportedRange) {
        while !range.revoke() {
            std::thread::yield_now();
        }
        // Connections in the middle of an operation on the range are closed.
        self.data.wake();
    }
}

/// Removes the entries of this engine. Waits at most [`REMOVAL`]: a server that hangs does not hang the end
/// of a process.
fn remove_entries(client: &Arc<Client>, name: String) {
    if client.entries().is_peer_to_peer() {
        return;
    }
    let (done, ended) = std::sync::mpsc::channel();
    let (remover, removed) = (client.clone(), name.clone());
    let thread = std::thread::Builder::new().name("mooncake-end".into()).spawn(move || {
        let _ = done.send(remover.entries().remove(&removed));
    });
    let result = thread.map_err(|error| error.to_string()).and_then(|_| match ended.recv_timeout(REMOVAL) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the metadata server does not answer".into()),
    });
    if let Err(error) = result {
        log::warn!("segment {name:?}: its entries may be left behind: {error}");
    }
}

fn check(span: MemSpan, access: Access) -> Result<(), ExportError> {
    let (addr, len) = (span.as_ptr().addr() as u64, span.len() as u64);
    if addr == 0 || len == 0 || addr.checked_add(len).is_none() {
        return Err(ExportError::Range { addr, len });
    }
    if !access.intersects(REMOTE) {
        return Err(ExportError::Access);
    }
    if !span.location().kind().contains(MemoryKinds::HOST) {
        return Err(ExportError::Device);
    }
    Ok(())
}

/// The host that peers are told, where none is configured.
fn advertised(bind: IpAddr) -> String {
    let found = match bind.is_unspecified() {
        false => Some(bind),
        true => host_addresses().into_iter().find(|address| address.is_ipv4() || bind.is_ipv6()),
    };
    match found {
        Some(address) => address.to_string(),
        None => (if bind.is_ipv4() { "127.0.0.1" } else { "::1" }).into(),
    }
}

impl core::fmt::Debug for Service {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Service")
            .field("mode", &self.config.mode)
            .field("name", &self.name())
            .field("rpc_port", &self.rpc_port())
            .field("data_port", &self.data_port())
            .finish_non_exhaustive()
    }
}
