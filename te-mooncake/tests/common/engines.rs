//! Engines with the rail and the metadata of this crate, as the drop-in starts them.

use std::sync::Arc;
use std::time::Duration;

use te_core::{Access, MemSpan, Op, RegionId};
use te_engine::{
    BatchReport, Fabrics, LocalAddr, SegmentHandle, SubmitOptions, TransferEngine, TransferError,
    TransferRequest,
};
use te_fabric::testkit::Block;
use te_mooncake::{Config, MetadataString, MooncakeFabric, MooncakeMetadata, Service};

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// An engine and a service, with one block of memory that is registered and exported.
pub(crate) struct Side {
    pub(crate) engine: TransferEngine,
    pub(crate) service: Service,
    pub(crate) block: Block,
    pub(crate) region: RegionId,
}

impl Side {
    /// A side that treats every peer as a Mooncake peer.
    pub(crate) fn foreign(config: Config, metadata: &MetadataString, bytes: usize) -> Self {
        Self::start(config, metadata, bytes, false, Fabrics::NONE)
    }

    pub(crate) fn start(
        config: Config,
        metadata: &MetadataString,
        bytes: usize,
        upgrades: bool,
        fabrics: Fabrics,
    ) -> Self {
        let service = Service::start(config.clone(), metadata).unwrap();
        let fabric = MooncakeFabric::new(config.clone(), service.client());
        let mut found = MooncakeMetadata::new(config, service.client());
        if !upgrades {
            found = found.without_upgrade();
        }
        let config = te_engine::Config { fabrics, ..te_engine::Config::default() };
        let engine =
            TransferEngine::start_with_parts(config, Some(Arc::new(found)), &[fabric.entry()]).unwrap();
        let block = Block::new(bytes);
        // SAFETY: the block is read and written through volatile copies alone, and outlives engine and
        // service (field order).
        let region = unsafe {
            service.export(block.span(), super::ALL).unwrap();
            engine.register(block.span(), Access::LOCAL | super::ALL).unwrap()
        };
        Self { engine, service, block, region }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.block.span().as_ptr().addr() as u64
    }

    /// Moves bytes between offset `local` of the block and address `remote` of the segment.
    pub(crate) fn transfer(
        &self,
        op: Op,
        segment: SegmentHandle,
        local: u64,
        remote: u64,
        len: u64,
    ) -> Result<BatchReport, TransferError> {
        self.submit(&[self.request(op, segment, local, remote, len)], &SubmitOptions::new())
    }

    pub(crate) fn request(
        &self,
        op: Op,
        segment: SegmentHandle,
        local: u64,
        remote: u64,
        len: u64,
    ) -> TransferRequest {
        TransferRequest {
            op,
            local: LocalAddr::from((self.region, local)),
            segment,
            remote_addr: remote,
            len,
        }
    }

    pub(crate) fn submit(
        &self,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<BatchReport, TransferError> {
        self.engine.submit_with(requests, &options.clone().timeout(LONG))?.wait(Some(2 * LONG))
    }
}

/// A span of a block, for exports.
pub(crate) fn span(block: &Block, offset: u64, len: u64) -> MemSpan {
    block.span().part(offset, len).unwrap()
}
