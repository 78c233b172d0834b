//! `snowskin health`: health check of a server, for containers that have neither a shell nor curl.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::Context as _;

use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::printable;
use crate::{Outcome, fail};

const AFTER_HELP: &str = "Examples:
  snowskin health                                  the master on this machine
  snowskin health 127.0.0.1:9004 --ready           a node's --http: its memory is part of the store
  snowskin health 127.0.0.1:9005                   a gateway";

/// Longest response that is read, bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Check whether a master, node or gateway is healthy
///
/// Requests /health over HTTP, which reports whether the process works, or with --ready /ready, which reports
/// whether it can be used now. The exit code is 0 when the response status is 200; otherwise it is 1, and the
/// server's response is printed.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// HTTP address of the server.
    #[arg(
        env = "SNOWSKIN_HEALTH",
        hide_env_values = true,
        default_value = "127.0.0.1:9003",
        value_name = "ADDR:PORT"
    )]
    address: String,
    /// Check whether the server can be used now.
    #[arg(long)]
    ready: bool,
    /// Timeout for connecting, and for each part of the response, milliseconds.
    #[arg(long, default_value_t = 2_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    timeout_ms: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let path = if args.ready { "/ready" } else { "/health" };
    let address = args.address.trim_start_matches("http://").trim_end_matches('/');
    let timeout = Duration::from_millis(args.timeout_ms);
    let answer = get(address, path, timeout, ANSWER_BYTES_MAX);
    let (status, body) = answer.map_err(|error| {
        Failure::failed(format!("http://{}{path}: {error:#}", printable(address)))
            .hint("give the server's --http address: a master has 127.0.0.1:9003 by default, a node has none by default")
    })?;
    if status == 200 {
        return Ok(Exit::Ok);
    }
    let said = printable(body.lines().next().unwrap_or_default());
    fail(Failure::failed(format!("http://{}{path} answers {status}: {said}", printable(address))))
}

/// Sends a GET request; returns the status and the body of the response.
pub(crate) fn get(
    address: &str,
    path: &str,
    timeout: Duration,
    bytes_max: u64,
) -> anyhow::Result<(u16, String)> {
    let addr = address.to_socket_addrs()?.next().context("no such address")?;
    let mut stream = TcpStream::connect_timeout(&addr, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(bytes_max).read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    anyhow::ensure!(text.starts_with("HTTP/"), "the server there does not speak HTTP");
    let (head, body) = text.split_once("\r\n\r\n").context("not an HTTP response")?;
    let status =
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("not an HTTP response")?;
    Ok((status, body.to_owned()))
}
