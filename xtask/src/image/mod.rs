//! The container image without a container engine: assembled by the script that the Dockerfile calls, and
//! run.
//!
//! ```text
//!   deploy/rootfs.sh ──> a directory with the files of the image
//!       listed     it has exactly the expected files
//!       run        `--version`, and `replay`, a whole cluster of processes
//!       compose    the services of deploy/compose.yaml, with its commands and health checks, used through the gateway
//!       units      the command lines of deploy/systemd, likewise
//! ```
//!
//! The containers are namespaces (see `container`), on a network that nothing else can reach.

mod cluster;
mod container;

use crate::deploy::compose::Compose;
use crate::deploy::{scrape, units};
use crate::{deploy, host};
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of `cargo xtask image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The built program; by default that of the release profile.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// This process is in the containers' network already; the image is assembled in this directory.
    #[arg(long, hide = true, value_name = "DIR")]
    within: Option<PathBuf>,
}

/// Assembles the image and runs it; reports where it can only be assembled.
///
/// # Errors
/// Files are missing or unexpected, or a service in it does not work.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(root) = &args.within {
        return run_within(root);
    }
    let binary = deploy::binary(args.binary.as_deref())?;
    let scratch = tempfile::tempdir()?;
    // The image's user must be able to read it.
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755))?;
    let root = scratch.path().join("root");
    let script = host::workspace_root().join("deploy/rootfs.sh");
    let status = Command::new(&script).arg(&binary).arg(&root).status()?;
    ensure!(status.success(), "{}: {status}", script.display());
    check_files(&files(&root)?)?;
    if let Some(obstacle) = container::obstacle() {
        println!("      the image was assembled, but not run: {obstacle}");
        return Ok(());
    }

    let again = std::env::current_exe().context("where is this program?")?;
    let [a, b, c] = cluster::NETWORK;
    let network = format!("ip link set lo up && ip addr add {a}.{b}.{c}.0/24 dev lo && exec \"$@\"");
    let status = container::unshare(&container::OWN_NETWORK)
        .args(["sh", "-euc", &network, "sh"])
        .arg(again)
        .args(["image", "--within"])
        .arg(&root)
        .status()?;
    ensure!(status.success(), "the run within the image failed: {status}");
    Ok(())
}

fn run_within(root: &Path) -> Result<()> {
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let version = container::run(root, &words("--version"))?;
    println!("      in the image: {}", version.trim());
    let replayed = container::run(root, &words("replay --requests 100 --json"))?;
    let replayed: serde_json::Value = serde_json::from_str(&replayed).context("replay gave no JSON")?;
    println!("      in the image: replay of 100 requests, hit rate {}", replayed["hit_rate"]);

    let deploy = host::workspace_root().join("deploy");
    let compose = Compose::read(&deploy.join("compose.yaml"))?;
    mount_by_hand(root, &deploy, &compose)?;
    cluster::compose(root, &compose, &scrape::targets(&deploy)?).context("the services of compose.yaml")?;
    println!("      compose.yaml: every service became healthy, worked and stopped");
    cluster::units(root, &units::read(&deploy.join("systemd"))?).context("the units")?;
    println!("      units: every service became healthy, worked and stopped");
    Ok(())
}

/// Adds the files that an engine or systemd would mount: host names, secrets, settings.
fn mount_by_hand(root: &Path, deploy: &Path, compose: &Compose) -> Result<()> {
    let mut hosts = "127.0.0.1 localhost\n".to_owned();
    for (name, address) in cluster::addresses(compose) {
        let _ = writeln!(hosts, "{address} {name}");
    }
    fs::write(root.join("etc/hosts"), hosts)?;
    fs::create_dir_all(root.join("run/secrets"))?;
    fs::write(root.join("run/secrets/cluster-secret"), "a secret of the cluster\n")?;
    fs::copy(deploy.join("systemd/snowskin.toml"), root.join("etc/snowskin/snowskin.toml"))?;
    Ok(())
}

/// All files, relative to the root.
fn files(root: &Path) -> Result<BTreeSet<String>> {
    let mut files = BTreeSet::new();
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                dirs.push(entry.path());
            } else {
                let path = entry.path();
                files.insert(path.strip_prefix(root).unwrap_or(&path).display().to_string());
            }
        }
    }
    Ok(files)
}

/// Checks the list of files. A further library is a further dependency, which has to be a decision. On other
/// processors the loader has another name.
fn check_files(files: &BTreeSet<String>) -> Result<()> {
    const EXPECTED: [&str; 8] = [
        "etc/group",
        "etc/nsswitch.conf",
        "etc/passwd",
        "ld-linux",
        "libc.so.6",
        "libgcc_s.so.1",
        "libm.so.6",
        "usr/bin/snowskin",
    ];
    let is = |file: &str, expected: &str| {
        file == expected || file.rsplit('/').next().is_some_and(|name| name.starts_with(expected))
    };
    let extra: Vec<&String> =
        files.iter().filter(|file| !EXPECTED.iter().any(|expected| is(file, expected))).collect();
    let missing: Vec<&&str> =
        EXPECTED.iter().filter(|expected| !files.iter().any(|file| is(file, expected))).collect();
    if extra.is_empty() && missing.is_empty() {
        println!("      the image is {} files", files.len());
        return Ok(());
    }
    bail!("the image has unexpected files {extra:?}, and lacks {missing:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unexpected_library_is_found() {
        let listed = |more: &[&str]| {
            let usual = [
                "etc/group",
                "etc/nsswitch.conf",
                "etc/passwd",
                "lib64/ld-linux-x86-64.so.2",
                "lib/x86_64-linux-gnu/libc.so.6",
                "lib/x86_64-linux-gnu/libgcc_s.so.1",
                "lib/x86_64-linux-gnu/libm.so.6",
                "usr/bin/snowskin",
            ];
            usual.iter().chain(more).map(|file| (*file).to_owned()).collect::<BTreeSet<String>>()
        };
        assert!(check_files(&listed(&[])).is_ok());
        assert!(check_files(&listed(&["lib/x86_64-linux-gnu/libssl.so.3"])).is_err());
        let mut without = listed(&[]);
        without.remove("lib64/ld-linux-x86-64.so.2");
        assert!(check_files(&without).is_err());
    }
}
