//! [`Fault`]: an error on its way to Python.
//!
//! The threads of this module have no interpreter, so they report faults, and the calling thread turns them
//! into exceptions. The classes of the exceptions are defined in Python (`snowskin/_errors.py`).
//!
//! A fault has one of few classes, by which programs decide what to do, and a code, which tells faults of one
//! class apart. Codes are part of the interface: a code is never renamed.

use std::fmt;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use store_client::{ConnectError, ErrorCode, RpcError, StoreError};
use te_core::ErrorKind;
use te_engine::{RegisterError, SegmentError, StartError, TransferError};

use crate::keys;

/// The class of an exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// None of the others.
    Other,
    NotFound,
    NoSpace,
    Leased,
    Closed,
    PeerUnreachable,
    TransferUnknown,
    InvalidArgument,
    Timeout,
    PermissionDenied,
}

impl Kind {
    /// The name of the class in Python, and its place in [`CLASSES`].
    const ALL: [(Self, &'static str); 10] = [
        (Self::Other, "SnowskinError"),
        (Self::NotFound, "NotFound"),
        (Self::NoSpace, "NoSpace"),
        (Self::Leased, "Leased"),
        (Self::Closed, "Closed"),
        (Self::PeerUnreachable, "PeerUnreachable"),
        (Self::TransferUnknown, "TransferUnknown"),
        (Self::InvalidArgument, "InvalidArgument"),
        (Self::Timeout, "Timeout"),
        (Self::PermissionDenied, "PermissionDenied"),
    ];
}

/// Why an operation failed.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// Stable name, in words with underscores.
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) key: Option<Box<[u8]>>,
    /// Whether the same call may succeed later.
    pub(crate) retryable: bool,
}

impl Fault {
    pub(crate) fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind, code, message: message.into(), key: None, retryable: false }
    }

    /// An argument that is refused before anything is sent.
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(Kind::InvalidArgument, "invalid_argument", message)
    }

    pub(crate) fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }

    /// Names the key that it concerns.
    pub(crate) fn of_key(mut self, key: &[u8]) -> Self {
        self.key = Some(key.into());
        self
    }

    /// What was used is closed; `what` is the name of its class.
    pub(crate) fn closed(what: &str) -> Self {
        Self::new(Kind::Closed, "closed", format!("the {what} is closed: open another"))
    }

    /// This process is a fork of the one that made what was used.
    pub(crate) fn forked() -> Self {
        let message = "this process was forked: what the parent opened belongs to the parent; open it anew in the child";
        Self::new(Kind::Closed, "forked", message)
    }

    /// The time of the caller was up.
    pub(crate) fn timeout(seconds: f64) -> Self {
        let message = format!(
            "not finished after {seconds} s: the operation goes on and keeps its buffers until its end; wait longer, \
             or look at the log for the peer that does not answer"
        );
        Self::new(Kind::Timeout, "timeout", message).retryable()
    }

    /// The exception.
    pub(crate) fn into_err(self, py: Python<'_>) -> PyErr {
        match self.into_exception(py) {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        }
    }

    /// The exception as a value, for results of batches.
    pub(crate) fn into_exception(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let class = class(py, self.kind)?;
        let details = PyDict::new(py);
        details.set_item("code", self.code)?;
        details.set_item("retryable", self.retryable)?;
        if let Some(key) = &self.key {
            details.set_item("key", keys::to_python(py, key)?)?;
        }
        class.call((self.message,), Some(&details))
    }
}

static CLASSES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

fn class(py: Python<'_>, kind: Kind) -> PyResult<&Bound<'_, PyType>> {
    let classes = CLASSES.get_or_try_init(py, || -> PyResult<Vec<Py<PyType>>> {
        let module = py.import("snowskin._errors")?;
        let class = |(_, name): &(Kind, &str)| Ok(module.getattr(*name)?.cast_into::<PyType>()?.unbind());
        Kind::ALL.iter().map(class).collect()
    })?;
    let place = Kind::ALL.iter().position(|(known, _)| *known == kind).unwrap_or(0);
    classes
        .get(place)
        .map(|class| class.bind(py))
        .ok_or_else(|| PyRuntimeError::new_err("snowskin._errors lacks a class"))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.code)
    }
}

/// Class, code, and whether the same call may succeed later.
type Entry = (Kind, &'static str, bool);

/// The one table of the store's error codes in Python.
const fn entry(code: ErrorCode) -> Entry {
    use ErrorCode as E;
    match code {
        E::ObjectNotFound | E::KeyNotFound => (Kind::NotFound, "not_found", false),
        E::SegmentNotFound => (Kind::NotFound, "segment_not_found", true),
        E::ReplicaNotFound => (Kind::NotFound, "replica_not_found", false),
        E::TaskNotFound => (Kind::NotFound, "task_not_found", false),
        E::NoAvailableHandle => (Kind::NoSpace, "no_space", true),
        E::NoSegment => (Kind::NoSpace, "no_segment", true),
        E::ObjectTooLarge => (Kind::NoSpace, "object_too_large", false),
        E::SegmentsExcluded => (Kind::NoSpace, "segments_excluded", false),
        E::SegmentsClosed => (Kind::NoSpace, "segments_closed", true),
        E::PinnedShareReached => (Kind::NoSpace, "pinned_share_reached", true),
        E::MetadataFull => (Kind::NoSpace, "metadata_full", true),
        E::TooManyPuts => (Kind::NoSpace, "too_many_puts", true),
        E::TenantQuotaExceeded => (Kind::NoSpace, "quota_exceeded", true),
        E::KeysUltraLimit => (Kind::NoSpace, "too_many_keys", true),
        E::ObjectHasLease => (Kind::Leased, "leased", true),
        E::ReplicaIsNotReady => (Kind::Leased, "being_written", true),
        E::ObjectAlreadyExists => (Kind::Other, "exists", false),
        E::InvalidKey => (Kind::InvalidArgument, "invalid_key", false),
        E::InvalidParams => (Kind::InvalidArgument, "invalid_argument", false),
        E::InvalidPattern => (Kind::InvalidArgument, "invalid_pattern", false),
        E::BufferOverflow => (Kind::InvalidArgument, "buffer_too_small", false),
        E::RpcFail => (Kind::PeerUnreachable, "master_unreachable", true),
        E::RpcTimeout => (Kind::PeerUnreachable, "master_timeout", true),
        E::NotLeader => (Kind::PeerUnreachable, "not_leader", true),
        E::TransferFail => (Kind::PeerUnreachable, "transfer_failed", true),
        E::LeaseExpired => (Kind::PeerUnreachable, "lease_expired", true),
        E::ChecksumMismatch => (Kind::Other, "checksum_mismatch", true),
        E::UnavailableInCurrentStatus => (Kind::Other, "unavailable", true),
        E::Forked => (Kind::Closed, "forked", false),
        E::Expelled => (Kind::Closed, "expelled", false),
        E::PermissionDenied => (Kind::PermissionDenied, "permission_denied", false),
        E::TenantNotRegistered => (Kind::PermissionDenied, "unknown_tenant", false),
        E::InvalidVersion => (Kind::Other, "other_version", false),
        E::NotSupported => (Kind::Other, "not_supported", false),
        _ => (Kind::Other, "internal", false),
    }
}

fn from_code(code: ErrorCode, message: String) -> Fault {
    let (kind, code, retryable) = entry(code);
    Fault { kind, code, message, key: None, retryable }
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match &error {
            StoreError::Held => Self::new(Kind::TransferUnknown, "buffer_held", message).retryable(),
            StoreError::Stopped => Self::new(Kind::Closed, "closed", message),
            StoreError::Memory(error) => Self::from(error.clone()),
            StoreError::ForeignMemory => Self::new(Kind::InvalidArgument, "foreign_memory", message),
            StoreError::Rpc(rpc) if matches!(**rpc, RpcError::Address { .. }) => Self::argument(message),
            error => from_code(error.code(), message),
        }
    }
}

impl From<ConnectError> for Fault {
    fn from(error: ConnectError) -> Self {
        let message = error.to_string();
        match error {
            ConnectError::Config { .. } => Self::argument(message),
            ConnectError::Rpc(RpcError::Address { .. }) => Self::argument(message),
            ConnectError::Rpc(error) => from_code(error.code(), message),
            ConnectError::Forked => Self::forked(),
            ConnectError::Held { .. } => Self::new(Kind::Other, "name_taken", message).retryable(),
            ConnectError::Engine(error) => Self::from(error),
            ConnectError::Memory(error) => Self::from(error),
            error => Self::new(Kind::Other, "system", error.to_string()),
        }
    }
}

impl From<StartError> for Fault {
    fn from(error: StartError) -> Self {
        let message = error.to_string();
        match error {
            StartError::Config { .. }
            | StartError::Setting { .. }
            | StartError::Topology(_)
            | StartError::Gpu(_) => Self::argument(message),
            StartError::Listen { .. } => Self::new(Kind::Other, "listen_failed", message),
            StartError::Fabric { .. } => Self::new(Kind::Other, "rail_failed", message),
            _ => Self::new(Kind::Other, "system", message),
        }
    }
}

impl From<RegisterError> for Fault {
    fn from(error: RegisterError) -> Self {
        let message = error.to_string();
        match error {
            RegisterError::Empty => Self::argument(message),
            RegisterError::Overlap { .. } => Self::new(Kind::InvalidArgument, "overlap", message),
            RegisterError::Full { .. } => Self::new(Kind::NoSpace, "too_many_regions", message),
            RegisterError::NotFound => Self::new(Kind::NotFound, "region_not_found", message),
            RegisterError::Busy { .. } => Self::new(Kind::Other, "busy", message).retryable(),
            RegisterError::Alloc(_) => Self::new(Kind::NoSpace, "out_of_memory", message),
            RegisterError::Forked => Self::forked(),
            RegisterError::Closed => Self::new(Kind::Closed, "closed", message),
            _ => Self::new(Kind::Other, "memory_refused", message),
        }
    }
}

impl From<SegmentError> for Fault {
    fn from(error: SegmentError) -> Self {
        let message = error.to_string();
        match error {
            SegmentError::Name(_) => Self::argument(message),
            SegmentError::NotFound => Self::new(Kind::Closed, "peer_closed", message),
            SegmentError::Unknown { .. } => Self::new(Kind::NotFound, "unknown_peer", message),
            SegmentError::Unreachable { .. } => {
                Self::new(Kind::PeerUnreachable, "peer_unreachable", message).retryable()
            }
            SegmentError::Metadata(_) => {
                Self::new(Kind::PeerUnreachable, "metadata_unreachable", message).retryable()
            }
            SegmentError::Protocol { .. } => Self::new(Kind::PeerUnreachable, "not_a_peer", message),
            SegmentError::Restarted { .. } => Self::new(Kind::PeerUnreachable, "peer_restarted", message),
            SegmentError::NoRail { .. } => Self::new(Kind::PeerUnreachable, "no_rail", message),
            SegmentError::Full { .. } => Self::new(Kind::NoSpace, "too_many_remote_regions", message),
            SegmentError::Busy => Self::new(Kind::Other, "busy", message).retryable(),
            SegmentError::Refused { .. } => Self::new(Kind::PermissionDenied, "refused", message),
            SegmentError::Forked => Self::forked(),
            SegmentError::Closed => Self::new(Kind::Closed, "closed", message),
            _ => Self::new(Kind::Other, "internal", message),
        }
    }
}

impl From<TransferError> for Fault {
    fn from(error: TransferError) -> Self {
        let message = error.to_string();
        match error {
            TransferError::BatchLength { .. } | TransferError::Request { .. } => Self::argument(message),
            TransferError::Segment { source, .. } => Self { message, ..Self::from(source) },
            TransferError::Full => Self::new(Kind::NoSpace, "too_many_batches", message).retryable(),
            TransferError::NotFound => Self::new(Kind::NotFound, "batch_not_found", message),
            TransferError::Busy => Self::new(Kind::Other, "busy", message).retryable(),
            TransferError::WaitTimedOut => Self::new(Kind::Timeout, "timeout", message).retryable(),
            TransferError::Ended { error, fence_needed, .. } => ended(error.kind, fence_needed, message),
            TransferError::Forked => Self::forked(),
            TransferError::Closed => Self::new(Kind::Closed, "closed", message),
            _ => Self::new(Kind::Other, "internal", message),
        }
    }
}

/// A batch that ended other than completed. Whether bytes of it may still land at the target comes first:
/// until a fence, their destination must not be used for anything else.
fn ended(kind: ErrorKind, fence_needed: bool, message: String) -> Fault {
    if fence_needed {
        return Fault::new(Kind::TransferUnknown, "fence_needed", message);
    }
    match kind {
        ErrorKind::Canceled => Fault::new(Kind::Other, "cancelled", message),
        ErrorKind::TimedOut => Fault::new(Kind::Timeout, "transfer_timeout", message).retryable(),
        ErrorKind::Forked => Fault::forked(),
        ErrorKind::Expelled => Fault::new(Kind::Closed, "expelled", message),
        ErrorKind::AccessDenied => Fault::new(Kind::PermissionDenied, "access_denied", message),
        ErrorKind::PeerRestarted => Fault::new(Kind::PeerUnreachable, "peer_restarted", message),
        _ => Fault::new(Kind::PeerUnreachable, "transfer_failed", message).retryable(),
    }
}
