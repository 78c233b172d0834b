//! Where descriptors come from.

use std::string::String;
use std::time::Duration;

use crate::control::{Answer, Request, call};
use crate::descriptor::Descriptor;
use crate::error::SegmentError;

/// A way to learn the descriptor of a segment by its name. Called on the thread that opens a segment; may block.
pub trait Metadata: Send + Sync {
    /// The descriptor of the engine called `name`, as it is now.
    ///
    /// # Errors
    /// `Name`, `Unreachable`, `Protocol`.
    fn fetch(&self, name: &str) -> Result<Descriptor, SegmentError>;
}

/// No server: the name of a segment is `host:port`, and its owner is asked itself.
#[derive(Clone, Copy, Debug)]
pub struct PeerToPeer {
    /// How long one request may take.
    pub timeout: Duration,
    /// Longest descriptor, bytes.
    pub frame_bytes_max: u32,
}

impl Metadata for PeerToPeer {
    fn fetch(&self, name: &str) -> Result<Descriptor, SegmentError> {
        let protocol = |what| SegmentError::Protocol { name: String::from(name), what };
        match call(name, &Request::Descriptor, self.timeout, self.frame_bytes_max)? {
            Answer::Descriptor(bytes) => Descriptor::parse(&bytes).map_err(protocol),
            _ => Err(protocol("it answers another question than it was asked")),
        }
    }
}
