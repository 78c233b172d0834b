//! Requests to a Conductor, on one connection that is kept.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::Context as _;

/// Longest answer, bytes.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// Longest line of a head, bytes.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// A connection.
pub(super) struct Client {
    address: String,
    stream: BufReader<TcpStream>,
    request: Vec<u8>,
}

impl Client {
    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// There is no such address, or nothing listens there.
    pub(super) fn connect(address: &str, timeout: Duration) -> anyhow::Result<Self> {
        let address = address.trim_start_matches("http://").trim_end_matches('/').to_owned();
        let addr = address.to_socket_addrs()?.next().context("no such address")?;
        let stream = TcpStream::connect_timeout(&addr, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { address, stream: BufReader::with_capacity(256 << 10, stream), request: Vec::new() })
    }

    /// Sends a request and reads the answer: its status and body.
    ///
    /// # Errors
    /// The connection is lost, or what comes is not HTTP.
    pub(super) fn send(&mut self, method: &str, path: &str, body: &[u8]) -> anyhow::Result<(u16, Vec<u8>)> {
        self.request.clear();
        write!(
            self.request,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        )?;
        self.request.extend_from_slice(body);
        self.stream.get_mut().write_all(&self.request)?;
        let (mut status, mut len) = (None, None);
        loop {
            let mut line = String::new();
            (&mut self.stream).take(LINE_BYTES_MAX).read_line(&mut line)?;
            anyhow::ensure!(line.ends_with('\n'), "the connection ended within the answer");
            let line = line.trim_end();
            if status.is_none() {
                anyhow::ensure!(line.starts_with("HTTP/1."), "the server there does not speak HTTP");
                status = line.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
            } else if line.is_empty() {
                break;
            } else if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                len = value.trim().parse::<u64>().ok();
            }
        }
        let len = match status {
            Some(204) => 0,
            _ => len.context("the answer has no Content-Length")?,
        };
        anyhow::ensure!(len <= ANSWER_BYTES_MAX, "the answer is too long: {len} bytes");
        let mut body = vec![0; usize::try_from(len)?];
        self.stream.read_exact(&mut body)?;
        Ok((status.context("not an HTTP answer")?, body))
    }
}
