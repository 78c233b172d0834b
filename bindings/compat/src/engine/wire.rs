//! [`Wire`]: a session as Mooncake peers see it, and how it finds its own peers.

use std::sync::Arc;

use te_core::{Access, MemSpan};
use te_engine::{Config, StartError, TransferEngine};
use te_mooncake::{Client, MetadataString, MooncakeFabric, MooncakeMetadata, Service};

use super::regions::SHARED;
use super::setup::without_rdma;
use super::{EngineError, Notice};

/// The ports for Mooncake peers, and the entries by which all peers find the session.
pub(super) struct Wire {
    service: Service,
    client: Arc<Client>,
}

impl Wire {
    /// Opens the ports, and starts the engine that reaches Mooncake peers over the rail `mooncake` and
    /// Snowskin peers over its own fabrics. Where the RDMA devices that the caller named are not there, it
    /// uses TCP, as Mooncake's engine does.
    ///
    /// # Errors
    /// `Wire`, `Start`.
    pub(super) fn start(
        config: te_mooncake::Config,
        metadata: &MetadataString,
        engine: Config,
    ) -> Result<(Self, TransferEngine), EngineError> {
        let service = Service::start(config.clone(), metadata)?;
        let client = service.client();
        let fabric = MooncakeFabric::new(config.clone(), client.clone());
        let names = Arc::new(MooncakeMetadata::new(config, client.clone()));
        let start = |config| TransferEngine::start_with_parts(config, Some(names.clone()), &[fabric.entry()]);
        let engine = match start(engine.clone()) {
            Err(StartError::Fabric { name: "rdma", source }) if engine.fabrics.is_auto() => {
                log::error!("the RDMA devices that were named are not used, but TCP: {source}");
                start(without_rdma(engine))
            }
            started => started,
        }?;
        service
            .set_native(engine.name(), engine.incarnation())
            .map_err(|error| EngineError::Wire(te_mooncake::StartError::Publish(error)))?;
        Ok((Self { service, client }, engine))
    }

    /// The name under which peers open the session's memory.
    pub(super) fn name(&self) -> &str {
        self.service.name()
    }

    /// The port for handshakes.
    pub(super) fn rpc_port(&self) -> u16 {
        self.service.rpc_port()
    }

    /// Lets Mooncake peers read and write memory.
    ///
    /// # Errors
    /// `Overlap`, `Export`; none of it is exported.
    ///
    /// # Safety
    /// The memory stays mapped until [`withdraw`](Self::withdraw) returned for it.
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub(super) unsafe fn export(&self, spans: &[MemSpan]) -> Result<(), EngineError> {
        let ranges: Vec<(MemSpan, Access)> = spans.iter().map(|span| (*span, SHARED)).collect();
        // SAFETY: the caller's promise.
        unsafe { self.service.export_all(&ranges) }.map_err(EngineError::from)
    }

    /// Ends exports. After it returned, no Mooncake peer touches the memory. Memory that is not exported is
    /// skipped.
    pub(super) fn withdraw(&self, addrs: &[u64]) {
        if let Err(error) = self.service.withdraw_all(addrs) {
            log::warn!("memory was withdrawn: {error}");
        }
    }

    /// Ends all exports. The directory is not told.
    pub(super) fn revoke(&self) {
        self.service.revoke_all();
    }

    /// The address of the first buffer that the peer `name` exports, in the peer's order. `Ok(None)`: it
    /// exports nothing.
    ///
    /// # Errors
    /// `Peer`.
    pub(super) fn first_buffer(&self, name: &str) -> Result<Option<u64>, EngineError> {
        let segment = self.client.descriptor(name).map_err(EngineError::Peer)?;
        Ok(segment.buffers.first().map(|buffer| buffer.addr))
    }

    /// Checks that the peer `name` answers.
    ///
    /// # Errors
    /// `Peer`.
    pub(super) fn probe(&self, name: &str) -> Result<(), EngineError> {
        self.client.probe(name).map_err(EngineError::Peer)
    }

    /// Messages of Mooncake peers.
    pub(super) fn take_notifications(&self) -> impl Iterator<Item = Notice> {
        let taken = self.service.take_notifications().into_iter();
        taken.map(|taken| Notice { name: taken.name, message: taken.message.into_bytes() })
    }
}
