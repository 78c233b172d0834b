//! `cargo xtask device`: what a host with a GPU runs, which need not have a compiler.

use crate::cmd::Cmd;
use crate::host::Host;
use crate::hw_test::executables;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// What runs there.
const SCRIPT: &str = include_str!("run.sh");
/// The directory of the pack, in the root of the repository; git ignores it.
const DIR: &str = ".device";
/// Test programs that need a GPU: the crate, its features, the test.
const TESTS: [(&str, &str, &str); 2] = [("te-gpu", "cuda", "hardware"), ("te-nvlink", "", "hardware")];

/// Options of `cargo xtask device`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Build the tests that need a GPU and the command line, and put them with a script into `.device/`. On
    /// the host with the GPU, `.device/run.sh DIR` runs everything and writes `DIR/gpu.json`.
    Pack,
}

/// Does what was asked for.
///
/// # Errors
/// A build fails, or the directory cannot be written.
pub(crate) fn run(args: &Args) -> Result<()> {
    match args.what {
        What::Pack => pack(&Host::probe()?),
    }
}

fn pack(host: &Host) -> Result<()> {
    let dir = host.root.join(DIR);
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot replace {}", dir.display()))?;
    }
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for (krate, features, test) in TESTS {
        let features = if features.is_empty() { String::new() } else { format!(" --features {features}") };
        let cmd = format!(
            "cargo test --release --quiet --no-run -p {krate}{features} --test {test} \
             --message-format json-render-diagnostics"
        );
        add(host, &Cmd::new(&cmd), &dir.join(format!("test-{krate}-{test}")))?;
    }
    let cmd = Cmd::new(
        "cargo build --release --quiet -p cli --bin snowskin --message-format json-render-diagnostics",
    );
    add(host, &cmd, &dir.join("snowskin"))?;
    let script = dir.join("run.sh");
    fs::write(&script, SCRIPT).with_context(|| format!("cannot write {}", script.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    println!("device: packed into {DIR}/; on the host with the GPU run `{DIR}/run.sh RESULTS`");
    Ok(())
}

/// Builds one program and puts it there without its symbols.
fn add(host: &Host, build: &Cmd, to: &Path) -> Result<()> {
    let built: Vec<PathBuf> = executables(host, build)?;
    let program = built.last().with_context(|| format!("`{build}` built no program"))?;
    fs::copy(program, to).with_context(|| format!("cannot copy {}", program.display()))?;
    let strip = Cmd::new("strip").arg(to.display().to_string());
    // Without binutils it is only larger.
    if let Err(error) = strip.run(&host.root, None) {
        println!("device: {} keeps its symbols: {error:#}", to.display());
    }
    let bytes = fs::metadata(to)?.len();
    ensure!(bytes > 0, "{} is empty", to.display());
    println!("device: {} has {:.1} MiB", to.display(), bytes as f64 / f64::from(1 << 20));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_one_that_a_shell_reads() {
        let dir = std::env::temp_dir().join(format!("snowskin-device-{}", std::process::id()));
        fs::write(&dir, SCRIPT).unwrap();
        let read = Cmd::new("sh -n").arg(dir.display().to_string()).run(Path::new("."), None);
        fs::remove_file(&dir).unwrap();
        read.unwrap();
    }
}
