//! `snowskin health`: whether a server is well, for health checks that have neither a shell nor curl.

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

/// Longest answer that is read, bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Ask a master, node or gateway whether it is well
///
/// Asks over HTTP for /health, which says whether the process works, or with --ready for /ready, which says whether it can be used
/// now. Ends with 0 when the answer is 200, and else with 1 and what the server said.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Where it serves HTTP.
    #[arg(
        env = "SNOWSKIN_HEALTH",
        hide_env_values = true,
        default_value = "127.0.0.1:9003",
        value_name = "ADDR:PORT"
    )]
    address: String,
    /// Whether it can be used now.
    #[arg(long)]
    ready: bool,
    /// How long connecting, and each part of the answer, may take, milliseconds.
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
            .hint("it wants the address of --http: 127.0.0.1:9003 of a master, unless it was told another; a node has none by itself")
    })?;
    if status == 200 {
        return Ok(Exit::Ok);
    }
    let said = printable(body.lines().next().unwrap_or_default());
    fail(Failure::failed(format!("http://{}{path} answers {status}: {said}", printable(address))))
}

/// Status and body of an answer over HTTP.
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
    anyhow::ensure!(text.starts_with("HTTP/"), "what listens there does not speak HTTP");
    let (head, body) = text.split_once("\r\n\r\n").context("no HTTP answer")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP answer")?;
    Ok((status, body.to_owned()))
}
