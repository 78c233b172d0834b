//! One error per area. Each message says what to do next.

use core::fmt;
use std::error::Error as StdError;
use std::io;
use std::net::SocketAddr;

use te_metadata::{MetadataError, SourceError};

use crate::descriptor::DescriptorError;
use crate::frame::FrameError;
use crate::message::MessageError;

/// Why a service did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The mode is `off`.
    Off,
    /// A field of [`Config`](crate::Config) has an invalid value.
    Config {
        /// The field.
        field: &'static str,
        /// The condition that the value violates: a phrase that follows the field's name.
        need: &'static str,
    },
    /// A number of [`Config`](crate::Config) is out of its limits.
    Setting(te_fabric::ConfigError),
    /// The metadata string names no metadata.
    Metadata(MetadataStringError),
    /// A port could not be opened.
    Listen {
        /// The address; port 0 stands for any port that may be chosen.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// The metadata server did not take the entries of this engine.
    Publish(MetadataError),
    /// The system refused a thread or a file descriptor.
    System(io::Error),
}

/// A text that names no metadata. It is not repeated: it may contain a password.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetadataStringError {
    /// The text is empty.
    Empty,
    /// It names a server over TLS.
    Tls,
    /// The rest of the text is not an address, a user or a database.
    Source(SourceError),
}

/// Why memory was not exported.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportError {
    /// The mode is not `target` or `both`.
    NotTarget,
    /// The range has no bytes, no address, or ends past the last address.
    Range {
        /// Its first address.
        addr: u64,
        /// Its length, bytes.
        len: u64,
    },
    /// Neither `REMOTE_READ` nor `REMOTE_WRITE` was granted.
    Access,
    /// The memory is not the host's.
    Device,
    /// Some of the bytes are exported already.
    Overlap {
        /// First address of the exported range.
        addr: u64,
        /// Length of the exported range, bytes.
        len: u64,
    },
    /// As many ranges are exported as there may be.
    Full {
        /// [`Config::exports_max`](crate::Config::exports_max).
        exports_max: u32,
    },
    /// The metadata server did not take the new descriptor. The range is not exported.
    Metadata(MetadataError),
    /// This process is a fork of the one that started the service.
    Forked,
}

/// Why a range was not withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WithdrawError {
    /// No exported range begins at this address.
    NotFound(u64),
    /// The metadata server did not take the new descriptor and may show the range further on. The range *is*
    /// withdrawn: peers are refused.
    Metadata(MetadataError),
    /// This process is a fork of the one that started the service.
    Forked,
}

/// Why a request to a peer failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerError {
    /// The name is not one under which a peer can be found.
    Name(String),
    /// The metadata server has no segment of this name.
    Unknown {
        /// The name.
        name: String,
        /// Kind and address of the server.
        server: String,
    },
    /// The metadata server could not be read.
    Metadata(MetadataError),
    /// The peer does not answer, or not in time.
    Unreachable {
        /// The name of the peer.
        name: String,
        /// The system's reason.
        reason: String,
    },
    /// The peer's answer is not a handshake frame.
    Frame {
        /// The name of the peer.
        name: String,
        /// What is wrong with it.
        source: FrameError,
    },
    /// The peer answered with a frame of another type.
    Kind {
        /// The name of the peer.
        name: String,
    },
    /// The peer's descriptor is wrong, or of a peer that cannot be reached over TCP.
    Descriptor {
        /// The name of the peer.
        name: String,
        /// What is wrong with it.
        source: DescriptorError,
    },
    /// The peer's answer, or an entry of the metadata server, is not the message that it should be.
    Message {
        /// The name of the peer.
        name: String,
        /// What is wrong with it.
        source: MessageError,
    },
    /// The peer has refused a notification.
    Refused {
        /// The name of the peer.
        name: String,
    },
    /// The request is longer than [`Config::frame_bytes_max`](crate::Config::frame_bytes_max).
    TooLong {
        /// Its length, bytes.
        bytes: u64,
        /// The limit, bytes.
        bytes_max: u32,
    },
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("Mooncake's wire is off: set mode to initiator, target or both"),
            Self::Config { field, need } => write!(f, "setting {field} {need}"),
            Self::Setting(error) => write!(f, "setting {error}"),
            Self::Metadata(error) => fmt::Display::fmt(error, f),
            Self::Listen { address, source } => write!(f, "cannot listen on {address}: {source}"),
            Self::Publish(error) => write!(f, "this engine's entries were not taken: {error}"),
            Self::System(error) => write!(f, "the system refused a thread or a descriptor: {error}"),
        }
    }
}

impl StdError for StartError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Setting(error) => Some(error),
            Self::Metadata(error) => Some(error),
            Self::Listen { source, .. } | Self::System(source) => Some(source),
            Self::Publish(error) => Some(error),
            Self::Off | Self::Config { .. } => None,
        }
    }
}

impl fmt::Display for MetadataStringError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the metadata string is empty: write P2PHANDSHAKE, or the address of a server"),
            Self::Tls => {
                f.write_str("the metadata server is named with https, rediss or etcds: TLS is not supported, use a network that you trust")
            }
            Self::Source(error) => write!(
                f,
                "{error}; Mooncake's forms are P2PHANDSHAKE, http://HOST:PORT/PATH, redis://HOST:PORT, etcd://HOST:PORT[;HOST:PORT…]"
            ),
        }
    }
}

impl StdError for MetadataStringError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Source(error) => Some(error),
            Self::Empty | Self::Tls => None,
        }
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTarget => {
                f.write_str("nothing is exported to Mooncake peers: set mode to target or both")
            }
            Self::Range { addr, len } => {
                write!(f, "{len} bytes at {addr:#x} are no range: it has a first byte and ends before 2^64")
            }
            Self::Access => f.write_str("the export grants nothing: allow reads, writes or both"),
            Self::Device => f.write_str("the memory is a device's: only host memory is served over TCP"),
            Self::Overlap { addr, len } => {
                write!(
                    f,
                    "some of the bytes are exported already, with {len} bytes at {addr:#x}: withdraw those first"
                )
            }
            Self::Full { exports_max } => {
                write!(f, "{exports_max} ranges are exported: withdraw some, or raise exports_max")
            }
            Self::Metadata(error) => write!(f, "the range is not exported: {error}"),
            Self::Forked => {
                f.write_str("this process is a fork of the one that started the service: start another")
            }
        }
    }
}

impl StdError for ExportError {}

impl fmt::Display for WithdrawError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound(addr) => write!(f, "no exported range begins at {addr:#x}"),
            Self::Metadata(error) => {
                write!(f, "the range is withdrawn, but the metadata may show it further on: {error}")
            }
            Self::Forked => f.write_str("this process is a fork of the one that started the service"),
        }
    }
}

impl StdError for WithdrawError {}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => {
                write!(
                    f,
                    "{name:?} is not the name of a Mooncake segment: without a metadata server it is host:port"
                )
            }
            Self::Unknown { name, server } => {
                write!(f, "{server} has no segment {name:?}: check the name and that its owner runs")
            }
            Self::Metadata(error) => fmt::Display::fmt(error, f),
            Self::Unreachable { name, reason } => {
                write!(
                    f,
                    "the Mooncake peer {name:?} does not answer ({reason}): check that it runs and is reachable"
                )
            }
            Self::Frame { name, source } => write!(f, "{name:?}: {source}"),
            Self::Kind { name } => {
                write!(f, "{name:?} answered with a frame of another type: it is not a Mooncake peer")
            }
            Self::Descriptor { name, source } => write!(f, "{name:?}: {source}"),
            Self::Message { name, source } => write!(f, "{name:?}: {source}"),
            Self::Refused { name } => {
                write!(f, "{name:?} has refused the notification: its queue is full, or it takes none")
            }
            Self::TooLong { bytes, bytes_max } => {
                write!(
                    f,
                    "the message has {bytes} bytes, where {bytes_max} are allowed: write it to memory instead"
                )
            }
        }
    }
}

impl StdError for PeerError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Metadata(error) => Some(error),
            Self::Frame { source, .. } => Some(source),
            Self::Descriptor { source, .. } => Some(source),
            Self::Message { source, .. } => Some(source),
            _ => None,
        }
    }
}
