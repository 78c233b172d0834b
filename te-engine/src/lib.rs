//! The Transfer Engine. (Being filled in; the public API stands.)
#![deny(unsafe_code)]

mod blob;
mod config;
mod control;
mod copier;
mod descriptor;
mod engine;
mod error;
mod handle;
mod local;
mod metadata;
mod payload;
mod region;
mod request;
mod shm;
mod sys;
mod tiers;
mod transfer;
mod worker;

pub use config::{Config, ControlConfig, Fabrics, TcpConfig};
pub use descriptor::{Descriptor, RegionDescriptor};
pub use engine::{Engine, FenceHandle};
pub use error::{GivenBack, RegisterError, RequestProblem, SegmentError, StartError, TransferError};
pub use handle::TransferEngine;
pub use local::LocalTransport;
pub use metadata::{Metadata, PeerToPeer};
pub use payload::Payload;
pub use region::SharedRegion;
pub use request::{
    BatchReport, Liveness, LocalAddr, Notification, RailStats, RemoteRegion, RequestStatus, SegmentHandle,
    Stats, TransferRequest,
};
pub use shm::ShmTransport;
pub use te_core::{
    Access, BatchHandle, Buffer, Error, ErrorKind, Location, MemSpan, Op, Outcome, RegionId, Registered,
    Status,
};
pub use transfer::Transfer;
