//! The Transfer Engine. (Being filled in; the public API stands.)
#![deny(unsafe_code)]

mod config;
mod error;
mod handle;
mod request;
mod transfer;

pub use config::{Config, ControlConfig, Fabrics, TcpConfig};
pub use error::{RegisterError, RequestProblem, SegmentError, StartError, TransferError};
pub use handle::{SharedRegion, TransferEngine};
pub use request::{
    BatchReport, Liveness, LocalAddr, Notification, RailStats, RemoteRegion, RequestStatus, SegmentHandle,
    Stats, TransferRequest,
};
pub use te_core::{Access, Buffer, Location, MemSpan, Op, Outcome, RegionId, Registered, Status};
pub use transfer::Transfer;
