//! What agents start on the target: processes that own memory and answer questions about it on stdin and stdout.

use crate::sys::DevDax;
use crate::tests::conformance;
use crate::{agent, content, engines, far};
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use te_core::Access;
use te_engine::SharedRegion;
use te_rdma::sys::Device;
use te_rdma::{Config, RdmaTransport};

/// Runs the helper of that name.
///
/// # Errors
/// When there is none, or it fails.
pub(crate) fn run(name: &str, args: &[&str]) -> Result<()> {
    match (name, args) {
        ("target", [fabric, listen, bytes]) => target(fabric, listen, bytes.parse()?),
        ("far", [device, port, address, control]) => far(device, port.parse()?, address, control),
        ("cxl", ["write", path, seed, bytes]) => {
            let mut dax = DevDax::open(Path::new(path), bytes.parse()?)?;
            dax.write(&content::pattern(seed.parse()?, bytes.parse()?));
            Ok(())
        }
        _ => bail!("no helper `{name}` with {} arguments", args.len()),
    }
}

/// A process that exports memory. It says `ready NAME ADDRESS` and answers `fill SEED OFFSET LEN` with `ok`, and
/// `check SEED OFFSET LEN` with `ok` or `differs OFFSET`.
fn target(fabric: &str, listen: &str, bytes: usize) -> Result<()> {
    let engine = engines::start(fabric, listen)?;
    let region = engine.alloc_shared(bytes, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    say(&format!("ready {} {}", engine.name(), region.addr()))?;
    for line in std::io::stdin().lock().lines() {
        say(&answer(&region, &line?)?)?;
    }
    Ok(())
}

/// A target of the conformance suite on one port of a device, with its side channel at `address`. It says
/// `ready SIDE_CHANNEL CONTROL` and does what the first one asks who connects to CONTROL and knows the token.
fn far(device: &str, port: u8, address: &str, control: &str) -> Result<()> {
    let token = agent::token()?;
    let config = Config { bind: address.parse()?, ..conformance::config() };
    let transport = RdmaTransport::new(Device::open(device, port)?, config)?;
    let listener = TcpListener::bind((control, 0)).with_context(|| format!("cannot listen on {control}"))?;
    say(&format!("ready {} {}", transport.local_addr(), listener.local_addr()?))?;
    let (mut stream, _) = listener.accept()?;
    let mut said = vec![0; token.len()];
    stream.read_exact(&mut said)?;
    ensure!(said == token.as_bytes(), "a caller with a wrong token");
    far::serve(stream, transport)
}

fn answer(region: &SharedRegion, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [what, seed, offset, len] = words[..] else { bail!("`{line}` is no command") };
    let (seed, offset, len) = (seed.parse()?, offset.parse()?, len.parse()?);
    match what {
        "fill" => {
            content::fill(region, seed, offset, len)?;
            Ok("ok".to_owned())
        }
        "check" => Ok(match content::first_difference(region, seed, offset, len)? {
            None => "ok".to_owned(),
            Some(at) => format!("differs {at}"),
        }),
        _ => bail!("`{line}` is no command"),
    }
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
