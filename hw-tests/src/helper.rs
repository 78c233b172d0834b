//! The processes that agents start on the target: they own memory and carry out commands on it, which they
//! read from stdin and answer on stdout.

use crate::sys::DevDax;
use crate::tests::conformance;
use crate::{agent, content, cxl, engines, nvmeof, remote_target};
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use te_core::Access;
use te_core::testkit::pattern;
use te_engine::SharedRegion;
use te_rdma::sys::Device;
use te_rdma::{Config, RdmaTransport};

/// Runs the helper `name`.
///
/// # Errors
/// When there is no such helper, or it fails.
pub(crate) fn run(name: &str, args: &[&str]) -> Result<()> {
    match (name, args) {
        ("target", [fabric, listen, bytes]) => target(fabric, listen, bytes.parse()?),
        ("conformance-target", [device, port, address, management]) => {
            conformance_target(device, port.parse()?, address, management)
        }
        ("nvmeof", ["serve", address, bytes]) => nvmeof::serve(address, bytes.parse()?),
        ("nvmeof", ["write-read", address, port, nqn, nsid]) => nvmeof::write_read(address, port, nqn, nsid),
        ("nvmeof", ["load", export]) => nvmeof::stoppable(export),
        ("nvmeof", ["disk", device]) => nvmeof::disk(device),
        ("cxl", ["own", path]) => cxl::own(path),
        ("cxl", ["write", path, slot, epoch, export, len]) => cxl::write(path, slot, epoch, export, len),
        ("cxl", ["store-node", path, master, host]) => cxl::store_node(path, master, host),
        ("cxl", ["store-peer", path, master, rounds]) => cxl::store_peer(path, master, rounds),
        ("cxl", ["poison", path, at]) => cxl::poison(path, at),
        ("cxl", ["paint", path, seed, bytes]) => {
            let mut dax = DevDax::open(Path::new(path), bytes.parse()?)?;
            dax.write(&pattern(seed.parse()?, bytes.parse()?));
            Ok(())
        }
        _ => bail!("no helper `{name}` with {} arguments", args.len()),
    }
}

/// A process that exports memory. It prints `ready NAME ADDRESS` and answers `fill SEED OFFSET LEN` with
/// `ok`, and `check SEED OFFSET LEN` with `ok` or `differs OFFSET`.
fn target(fabric: &str, listen: &str, bytes: usize) -> Result<()> {
    let engine = engines::start(fabric, listen)?;
    let region = engine.alloc_shared(bytes, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    print_line(&format!("ready {} {}", engine.name(), region.addr()))?;
    for line in std::io::stdin().lock().lines() {
        print_line(&answer(&region, &line?)?)?;
    }
    Ok(())
}

/// A target of the conformance suite on one port of a device, whose transport accepts control connections at
/// `address`. It prints `ready CONTROL MANAGEMENT`: the address of the transport, and the address on
/// `management` where it accepts one connection, reads the token and carries out the requests of the suite.
fn conformance_target(device: &str, port: u8, address: &str, management: &str) -> Result<()> {
    let token = agent::token()?;
    let config = Config { bind: address.parse()?, ..conformance::config() };
    let transport = RdmaTransport::new(Device::open(device, port)?, config)?;
    let listener =
        TcpListener::bind((management, 0)).with_context(|| format!("cannot listen on {management}"))?;
    print_line(&format!("ready {} {}", transport.local_address(), listener.local_addr()?))?;
    let (mut stream, _) = listener.accept()?;
    let mut received = vec![0; token.len()];
    stream.read_exact(&mut received)?;
    ensure!(received == token.as_bytes(), "a caller with a wrong token");
    remote_target::serve(stream, transport)
}

fn answer(region: &SharedRegion, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [command, seed, offset, len] = words[..] else { bail!("`{line}` is not a command") };
    let (seed, offset, len) = (seed.parse()?, offset.parse()?, len.parse()?);
    match command {
        "fill" => {
            content::fill(region, seed, offset, len)?;
            Ok("ok".to_owned())
        }
        "check" => Ok(match content::first_difference(region, seed, offset, len)? {
            None => "ok".to_owned(),
            Some(at) => format!("differs {at}"),
        }),
        _ => bail!("`{line}` is not a command"),
    }
}

/// Prints a line at once.
///
/// # Errors
/// When stdout is closed.
pub(crate) fn print_line(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
