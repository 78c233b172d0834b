//! Block devices past the page cache, which does not notice what a target or another host writes. And
//! `helper nvmeof disk`: the device behind a namespace.

use super::same;
use crate::helper::print_line;
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, Write as _};
use std::process::{Command, Stdio};
use te_core::testkit::pattern;

/// Reads `len` bytes of a block device, a multiple of 4,096.
///
/// # Errors
/// When dd fails.
pub(crate) fn read_direct(device: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
    let output = dd(len)
        .args([&format!("if={device}"), &format!("skip={offset}"), "iflag=direct,skip_bytes"])
        .output()
        .context("cannot start dd")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && output.stdout.len() == len, "reading {device}: {errors}");
    Ok(output.stdout)
}

/// Writes bytes to a block device, a multiple of 4,096.
///
/// # Errors
/// When dd fails.
pub(crate) fn write_direct(device: &str, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut child = dd(bytes.len())
        .args([&format!("of={device}"), &format!("seek={offset}"), "iflag=fullblock"])
        .args(["oflag=direct,seek_bytes", "conv=notrunc"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start dd")?;
    let written = child.stdin.take().context("no stdin")?.write_all(bytes);
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "writing {device}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(written?)
}

fn dd(len: usize) -> Command {
    // The largest block of which `len` is a multiple, up to 1 MiB.
    let block = (1 << len.trailing_zeros()).min(1 << 20);
    let mut dd = Command::new("dd");
    dd.args([&format!("bs={block}"), &format!("count={}", len / block), "status=none"]);
    dd
}

/// Answers `fill SEED OFFSET LEN` with `ok`, and `check SEED OFFSET LEN` with `ok` or with what differs. It
/// prints `ready`.
///
/// # Errors
/// When the device cannot be read or written, or with a malformed command.
pub(crate) fn disk(device: &str) -> Result<()> {
    print_line("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [command, seed, offset, len] = words[..] else { bail!("`{line}` is not a command") };
        let (seed, offset, len): (u64, u64, usize) = (seed.parse()?, offset.parse()?, len.parse()?);
        if command == "fill" {
            write_direct(device, offset, &pattern(seed, len))?;
            print_line("ok")?;
        } else {
            let compared = same(&read_direct(device, offset, len)?, seed);
            print_line(&compared.map_or_else(|error| error.to_string(), |()| "ok".to_owned()))?;
        }
    }
    Ok(())
}
