//! The Transfer Engine. (Being filled in; the public API stands.)
#![deny(unsafe_code)]

mod blob;
mod config;
mod copier;
mod error;
mod handle;
mod local;
mod request;
mod shm;
mod sys;
mod transfer;

pub use config::{Config, ControlConfig, Fabrics, TcpConfig};
pub use error::{RegisterError, RequestProblem, SegmentError, StartError, TransferError};
pub use handle::{SharedRegion, TransferEngine};
pub use local::LocalTransport;
pub use request::{
    BatchReport, Liveness, LocalAddr, Notification, RailStats, RemoteRegion, RequestStatus, SegmentHandle,
    Stats, TransferRequest,
};
pub use shm::ShmTransport;
pub use te_core::{Access, Buffer, Location, MemSpan, Op, Outcome, RegionId, Registered, Status};
pub use transfer::Transfer;
