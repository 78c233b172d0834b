//! Requests to the control port of another engine. They block, within a time limit.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::string::{String, ToString};
use std::time::{Duration, Instant};
use std::vec::Vec;

use te_core::Secret;
use te_host::keys::random;

use super::proof::{Side, is_proved, prove};
use super::{Answer, HEADER_BYTES, Malformed, Request, body, body_len, frame};
use crate::error::SegmentError;

/// The timeout of a request without a deadline: 68 years, which every system call accepts.
const FOR_EVER: Duration = Duration::from_secs(1 << 31);

/// How to make requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester<'a> {
    /// For the whole exchange.
    pub(crate) timeout: Duration,
    /// Maximum length of an answer, bytes.
    pub(crate) frame_bytes_max: u32,
    /// The secret that both sides prove to know. If it is not set, every answer is accepted.
    pub(crate) secret: &'a Secret,
}

/// Makes one request to the engine whose control port is at `name`.
pub(crate) fn call(name: &str, request: &Request, requester: Requester<'_>) -> Result<Answer, SegmentError> {
    let port =
        name.rsplit_once(':').and_then(|(host, port)| port.parse::<u16>().ok().filter(|_| !host.is_empty()));
    if port.is_none_or(|port| port == 0) {
        return Err(SegmentError::Name(name.into()));
    }
    let deadline = Instant::now().checked_add(requester.timeout);
    let stream = connect(name, deadline).map_err(|error| unreachable(name, &error))?;
    stream.set_nodelay(true).map_err(|error| unreachable(name, &error))?;
    let mut line = Line { name, stream, deadline, frame_bytes_max: requester.frame_bytes_max as usize };
    // A probe needs no proof.
    if !requester.secret.is_set() || *request == Request::Probe {
        return line.exchange_one(request);
    }
    let Answer::Challenge(challenge) = line.exchange_one(&Request::Challenge)? else {
        return Err(line.protocol("its answer is not one to this request"));
    };
    let nonce = random().map_err(|error| {
        let error = io::Error::from_raw_os_error(error.code);
        SegmentError::Unreachable { name: name.into(), reason: error.to_string() }
    })?;
    let request = postcard::to_allocvec(request).unwrap_or_default();
    let proof = prove(requester.secret, Side::Requester, &challenge, &nonce, &request);
    match line.exchange_one(&Request::Proven { nonce, request, proof })? {
        Answer::Proven { answer, proof } => {
            if !is_proved(&proof, requester.secret, Side::Owner, &challenge, &nonce, &answer) {
                return Err(line.refused(OTHER_SECRET));
            }
            body(&answer).map_err(|bad| line.protocol(bad.what()))
        }
        other => Ok(other),
    }
}

/// The two sides have different secrets, or the peer has none.
const OTHER_SECRET: &str =
    "its cluster secret is another one, or not set: set the same cluster secret on both sides";

/// A connection to a control port.
struct Line<'a> {
    name: &'a str,
    stream: TcpStream,
    deadline: Option<Instant>,
    frame_bytes_max: usize,
}

impl Line<'_> {
    /// Sends one request and receives its answer.
    fn exchange_one(&mut self, request: &Request) -> Result<Answer, SegmentError> {
        let frame_bytes_max = self.frame_bytes_max;
        let bytes = self.exchange(&frame(request), frame_bytes_max)?;
        match body(&bytes).map_err(|bad| self.protocol(bad.what()))? {
            Answer::NeedsProof => {
                Err(self.refused("it requires the cluster secret: set the same cluster secret here"))
            }
            Answer::WrongProof => Err(self.refused(OTHER_SECRET)),
            answer => Ok(answer),
        }
    }

    fn exchange(&mut self, question: &[u8], bytes_max: usize) -> Result<Vec<u8>, SegmentError> {
        let (name, deadline) = (self.name, self.deadline);
        let unreachable = |error: io::Error| unreachable(name, &error);
        write_all(&mut self.stream, question, deadline).map_err(unreachable)?;
        let mut header = [0; HEADER_BYTES];
        read_exact(&mut self.stream, &mut header, deadline).map_err(unreachable)?;
        let len = body_len(&header, bytes_max).map_err(|bad: Malformed| self.protocol(bad.what()))?;
        // The buffer grows as bytes arrive, so a length that the peer only claims allocates nothing.
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let at = bytes.len();
            bytes.resize(len.min(at + (64 << 10)), 0);
            read_exact(&mut self.stream, &mut bytes[at..], deadline).map_err(unreachable)?;
        }
        Ok(bytes)
    }

    fn protocol(&self, what: &'static str) -> SegmentError {
        SegmentError::Protocol { name: self.name.into(), what }
    }

    fn refused(&self, what: &'static str) -> SegmentError {
        SegmentError::Refused { name: self.name.into(), what }
    }
}

fn unreachable(name: &str, error: &io::Error) -> SegmentError {
    SegmentError::Unreachable { name: name.into(), reason: reason(error) }
}

fn connect(name: &str, deadline: Option<Instant>) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let addrs: Vec<SocketAddr> = name.to_socket_addrs()?.collect();
    for addr in addrs {
        match TcpStream::connect_timeout(&addr, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn write_all(stream: &mut TcpStream, mut bytes: &[u8], deadline: Option<Instant>) -> io::Result<()> {
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

fn read_exact(stream: &mut TcpStream, mut out: &mut [u8], deadline: Option<Instant>) -> io::Result<()> {
    while !out.is_empty() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(out) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(count) => out = &mut out[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time until `deadline`. `None`: the deadline overflowed `Instant`, and there is none.
fn left(deadline: Option<Instant>) -> io::Result<Duration> {
    let Some(deadline) = deadline else { return Ok(FOR_EVER) };
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        // What a socket returns when its timeout has passed.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "timed out".into(),
        _ => error.to_string(),
    }
}
