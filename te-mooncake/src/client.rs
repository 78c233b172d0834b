//! Handshakes with peers, and the look-up of their descriptors. Every call blocks, within time limits.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use te_fabric::{EXPORT_ADDRESSES_MAX, Step};

use crate::config::Config;
use crate::descriptor::SegmentDescriptor;
use crate::error::{PeerError, StartError};
use crate::frame::{self, Kind, LENGTH_BYTES};
use crate::message::{self, RpcMeta};
use crate::metadata::{Entries, MetadataString, join};

/// Bytes that are received at once.
const RECEIVE_BYTES: usize = 64 << 10;

/// Asks Mooncake peers, and the metadata server if there is one. Threads share it.
#[derive(Debug)]
pub struct Client {
    entries: Entries,
    connect: Duration,
    timeout: Duration,
    frame_bytes_max: u32,
}

impl Client {
    /// A client with the time limits of this configuration. Nothing is sent yet.
    ///
    /// # Errors
    /// `Config`, `Setting`; `Publish` when this build lacks the kind of server that `metadata` names.
    pub fn new(config: &Config, metadata: &MetadataString) -> Result<Self, StartError> {
        config.validate()?;
        let cluster_id = config.cluster_id.as_deref();
        let entries =
            Entries::open(metadata, cluster_id, config.timeout(), config.frame_bytes_max, config.peer_port)
                .map_err(StartError::Publish)?;
        Ok(Self {
            entries,
            connect: config.connect_timeout(),
            timeout: config.timeout(),
            frame_bytes_max: config.frame_bytes_max,
        })
    }

    /// The descriptor of the segment `name`: from its owner, or from the metadata server. A server may still
    /// have the descriptor of an owner that is gone.
    ///
    /// # Errors
    /// `Name`, `Unknown`, `Metadata`, `Unreachable`, `Frame`, `Kind`, `Descriptor`.
    pub fn descriptor(&self, name: &str) -> Result<SegmentDescriptor, PeerError> {
        let json = match self.entries.descriptor(name) {
            Some(stored) => stored?,
            None => self.exchange(name, Kind::Metadata, message::EMPTY, self.timeout)?,
        };
        SegmentDescriptor::parse(&json).map_err(|source| PeerError::Descriptor { name: name.into(), source })
    }

    /// The addresses of the data port of a segment, 1 to 4: those of the host that its descriptor names,
    /// otherwise those of its handshake port.
    ///
    /// # Errors
    /// `Name`, `Unknown`, `Metadata`, `Message`; `Unreachable` when the host has no address.
    pub fn data_addresses(
        &self,
        name: &str,
        descriptor: &SegmentDescriptor,
    ) -> Result<Vec<IpAddr>, PeerError> {
        let stated = descriptor.data_host.clone().filter(|host| {
            // An engine that listens on every address and knows no other.
            host.parse::<IpAddr>().map_or(true, |address| !address.is_unspecified())
        });
        let host = match stated {
            Some(host) => host,
            None => self.entries.rpc_meta(name)?.host,
        };
        let found = addresses(&host, descriptor.data_port).map_err(|error| unreachable(name, &error))?;
        let mut hosts: Vec<IpAddr> = Vec::new();
        for address in found {
            let ip = address.ip().to_canonical();
            if !hosts.contains(&ip) && hosts.len() < EXPORT_ADDRESSES_MAX {
                hosts.push(ip);
            }
        }
        match hosts.is_empty() {
            true => {
                Err(PeerError::Unreachable { name: name.into(), reason: format!("{host:?} has no address") })
            }
            false => Ok(hosts),
        }
    }

    /// Sends a notification to the owner of the segment `segment`; returns when it is in the owner's queue.
    ///
    /// # Errors
    /// `Refused`, `TooLong`; those of [`probe`](Self::probe), and `Message`.
    pub fn notify(&self, segment: &str, name: &str, message: &str) -> Result<(), PeerError> {
        let request = message::notify(name, message);
        let bytes = request.len() as u64 + 1;
        if bytes > u64::from(self.frame_bytes_max) {
            return Err(PeerError::TooLong { bytes, bytes_max: self.frame_bytes_max });
        }
        let answer = self.exchange(segment, Kind::Notify, &request, self.timeout)?;
        match message::parse_notify_answer(&answer) {
            Ok(true) => Ok(()),
            Ok(false) => Err(PeerError::Refused { name: segment.into() }),
            Err(source) => Err(PeerError::Message { name: segment.into(), source }),
        }
    }

    /// Checks that the owner of the segment `segment` answers.
    ///
    /// # Errors
    /// `Name`, `Unknown`, `Metadata`, `Message`, `Unreachable`, `Frame`, `Kind`.
    pub fn probe(&self, segment: &str) -> Result<(), PeerError> {
        self.probe_within(segment, self.timeout)
    }

    /// As [`probe`](Self::probe), with another time limit.
    ///
    /// # Errors
    /// As [`probe`](Self::probe).
    pub fn probe_within(&self, segment: &str, timeout: Duration) -> Result<(), PeerError> {
        self.exchange(segment, Kind::Probe, message::EMPTY, timeout).map(|_| ())
    }

    pub(crate) const fn entries(&self) -> &Entries {
        &self.entries
    }

    /// One handshake: sends a frame to the owner of the segment `name`, and returns the body of its answer.
    fn exchange(&self, name: &str, kind: Kind, body: &[u8], timeout: Duration) -> Result<Vec<u8>, PeerError> {
        let RpcMeta { host, port } = self.entries.rpc_meta(name)?;
        let deadline = Instant::now() + timeout;
        let failed = |error: io::Error| unreachable(name, &error);
        let mut stream = self.connected(&host, port, deadline).map_err(failed)?;
        send(&mut stream, &frame::write(kind, body), deadline).map_err(failed)?;
        let mut received = Vec::new();
        let mut wanted = LENGTH_BYTES;
        loop {
            while received.len() < wanted {
                receive(&mut stream, &mut received, wanted, deadline).map_err(failed)?;
            }
            match frame::parse(&received, self.frame_bytes_max) {
                // The buffer grows as bytes arrive: a length that the peer only claims allocates nothing.
                Ok(Step::Need(more)) => wanted = more,
                Ok(Step::Frame(answer, _)) if answer.kind == kind => return Ok(answer.body.to_vec()),
                Ok(Step::Frame(..)) => return Err(PeerError::Kind { name: name.into() }),
                Err(source) => return Err(PeerError::Frame { name: name.into(), source }),
            }
        }
    }

    /// Connects to one address of the host after the other.
    fn connected(&self, host: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in addresses(host, port)? {
            match TcpStream::connect_timeout(&address, left(deadline)?.min(self.connect)) {
                Ok(stream) => {
                    // Without it, handshakes are only slower.
                    let _ = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn addresses(host: &str, port: u16) -> io::Result<impl Iterator<Item = SocketAddr>> {
    join(host, port).to_socket_addrs()
}

fn send(stream: &mut TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives at least one byte, so that there are at most `wanted`.
fn receive(stream: &mut TcpStream, into: &mut Vec<u8>, wanted: usize, deadline: Instant) -> io::Result<()> {
    stream.set_read_timeout(Some(left(deadline)?))?;
    let at = into.len();
    into.resize(wanted.min(at + RECEIVE_BYTES), 0);
    let received = stream.read(&mut into[at..]);
    into.truncate(at + received.as_ref().map_or(0, |count| *count));
    match received {
        Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

fn unreachable(name: &str, error: &io::Error) -> PeerError {
    let reason = match error.kind() {
        // What a socket returns when its timeout has passed.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "timed out".into(),
        _ => error.to_string(),
    };
    PeerError::Unreachable { name: name.into(), reason }
}
