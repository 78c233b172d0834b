//! `helper nvmeof disk`: reads and writes the device behind a namespace, past the target.

use crate::helper::print_line;
use anyhow::{Context as _, Result, bail};
use std::fs::{self, File};
use std::io::BufRead as _;
use std::os::unix::fs::FileExt as _;
use te_core::testkit::pattern;

/// Answers `fill SEED OFFSET LEN` with `ok`, and `check SEED OFFSET LEN` with `ok` or `differs OFFSET`. It
/// prints `ready`.
///
/// # Errors
/// When the device cannot be read or written, or with a malformed command.
pub(crate) fn disk(device: &str) -> Result<()> {
    let file = File::options().read(true).write(true).open(device);
    let file = file.with_context(|| format!("cannot open {device}"))?;
    print_line("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [command, seed, offset, len] = words[..] else { bail!("`{line}` is not a command") };
        let (seed, offset, len): (u64, u64, usize) = (seed.parse()?, offset.parse()?, len.parse()?);
        let expected = pattern(seed, len);
        // What the target has written goes past the page cache of this device.
        fs::write("/proc/sys/vm/drop_caches", "1").context("cannot drop the page cache")?;
        if command == "fill" {
            file.write_all_at(&expected, offset)?;
            file.sync_all()?;
            print_line("ok")?;
            continue;
        }
        let mut found = vec![0; len];
        file.read_exact_at(&mut found, offset)?;
        print_line(&match found.iter().zip(&expected).position(|(a, b)| a != b) {
            None => "ok".to_owned(),
            Some(at) => format!("differs {}", offset + at as u64),
        })?;
    }
    Ok(())
}
