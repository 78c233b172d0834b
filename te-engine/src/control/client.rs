//! Asking another engine's control port. Blocks, within a time limit.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::string::{String, ToString};
use std::time::{Duration, Instant};
use std::vec::Vec;

use super::{Answer, HEADER_BYTES, Malformed, Request, body, body_len, frame};
use crate::error::SegmentError;

/// Longer than anybody waits, and short enough for every system call.
const FOR_EVER: Duration = Duration::from_secs(1 << 31);

/// Asks the engine called `name`. `frame_bytes_max` bounds its answer.
pub(crate) fn call(
    name: &str,
    request: &Request,
    timeout: Duration,
    frame_bytes_max: u32,
) -> Result<Answer, SegmentError> {
    let port =
        name.rsplit_once(':').and_then(|(host, port)| port.parse::<u16>().ok().filter(|_| !host.is_empty()));
    if port.is_none_or(|port| port == 0) {
        return Err(SegmentError::Name(name.into()));
    }
    let unreachable =
        |error: io::Error| SegmentError::Unreachable { name: name.into(), reason: reason(&error) };
    let malformed = |bad: Malformed| SegmentError::Protocol { name: name.into(), what: bad.what() };
    let deadline = Instant::now().checked_add(timeout);
    let mut stream = connect(name, deadline).map_err(unreachable)?;
    stream.set_nodelay(true).map_err(unreachable)?;
    write_all(&mut stream, &frame(request), deadline).map_err(unreachable)?;
    let mut header = [0; HEADER_BYTES];
    read_exact(&mut stream, &mut header, deadline).map_err(unreachable)?;
    let len = body_len(&header, frame_bytes_max as usize).map_err(malformed)?;
    // Grown as bytes arrive: a length that is only claimed costs nothing.
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let at = bytes.len();
        bytes.resize(len.min(at + (64 << 10)), 0);
        read_exact(&mut stream, &mut bytes[at..], deadline).map_err(unreachable)?;
    }
    body(&bytes).map_err(malformed)
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

/// What is left until `deadline`. None: a time too far away to be told, which is as good as for ever.
fn left(deadline: Option<Instant>) -> io::Result<Duration> {
    let Some(deadline) = deadline else { return Ok(FOR_EVER) };
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        // What a socket with a timeout says when it is over.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "timed out".into(),
        _ => error.to_string(),
    }
}
