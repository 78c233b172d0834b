//! A non-blocking socket of either kind, with a way to sleep until bytes arrive.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::Address;
use crate::error::RpcError;

/// A non-blocking socket.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(super) fn connect(address: &Address, deadline: Instant) -> Result<Self, RpcError> {
        let failed = |source| RpcError::Connect { address: address.to_string(), source };
        match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(failed)?;
                stream.set_nonblocking(true).map_err(failed)?;
                Ok(Self::Unix(stream))
            }
            Address::Tcp(name) => {
                let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
                for addr in name.to_socket_addrs().map_err(failed)? {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    match TcpStream::connect_timeout(&addr, left) {
                        Ok(stream) => {
                            stream.set_nodelay(true).map_err(failed)?;
                            stream.set_nonblocking(true).map_err(failed)?;
                            return Ok(Self::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(failed(last))
            }
        }
    }

    pub(super) fn read_some(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        retry(|| match self {
            Self::Tcp(stream) => stream.read(buf),
            Self::Unix(stream) => stream.read(buf),
        })
    }

    pub(super) fn write_some(&mut self, buf: &[u8]) -> io::Result<usize> {
        retry(|| match self {
            Self::Tcp(stream) => stream.write(buf),
            Self::Unix(stream) => stream.write(buf),
        })
    }

    /// Sleeps until bytes arrive, at most `timeout`. It may wake early.
    pub(super) fn wait(&self, timeout: Duration) {
        let fd = match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        };
        te_host::wait_readable(fd, timeout);
    }
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
