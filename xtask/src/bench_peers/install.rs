//! The programs to compare with, and their installation: from PyPI into `target/peers/`, from Debian with
//! apt-get.

use super::contest::Contestant;
use crate::cmd::Cmd;
use crate::host::Host;
use crate::wheel;
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};

/// Timeout for installing one of them, seconds.
const INSTALL_S_MAX: u64 = 600;

/// The installed programs.
pub(crate) struct Peers {
    /// Python of the virtual environment.
    pub(crate) python: PathBuf,
    /// Mooncake's master.
    pub(crate) mooncake_master: PathBuf,
    /// Python of an environment with both wheels of this repository, if there is one.
    pub(crate) our_python: Option<PathBuf>,
    /// Names and versions.
    pub(crate) versions: Vec<(&'static str, String)>,
    /// Names of the missing ones, with the reason.
    pub(crate) missing: Vec<(&'static str, String)>,
}

impl Peers {
    /// Whether a contestant's program is installed.
    pub(crate) fn has(&self, contestant: Contestant) -> bool {
        let program = contestant.program();
        contestant.is_ours() || self.versions.iter().any(|(name, _)| *name == program)
    }
}

/// Installs what is missing, then checks what is present.
///
/// # Errors
/// There is no Python with which to create an environment. A program that cannot be installed is left out,
/// with the reason.
pub(crate) fn install(host: &Host) -> Result<Peers> {
    let before = present(host);
    let mut failed = Vec::new();
    let mut attempt = |name: &'static str, cmd: Cmd| {
        eprintln!("$ {cmd}");
        if let Err(error) = cmd.run(&host.root, Some(INSTALL_S_MAX)) {
            failed.push((name, format!("`{cmd}`: {error}")));
        }
    };
    let is_missing = |name: &str| before.missing.iter().any(|(missing, _)| *missing == name);
    let debian: Vec<&str> = [
        ("mooncake", "libibverbs1 libnuma1 libcurl4"),
        ("redis", "redis-server redis-tools"),
        ("ucx", "ucx-utils"),
        ("iperf3", "iperf3"),
    ]
    .into_iter()
    .filter(|(name, _)| is_missing(name))
    .map(|(_, packages)| packages)
    .collect();
    if !debian.is_empty() {
        attempt(
            "debian",
            Cmd::new("apt-get install -y -qq --no-install-recommends").words(&debian.join(" ")),
        );
    }
    if ["mooncake", "nixl", "dynamo", "sglang-router"].into_iter().any(is_missing) {
        let environment = environment(host);
        Cmd::new("python3 -m venv")
            .arg(environment.display().to_string())
            .run(&host.root, Some(INSTALL_S_MAX))
            .context("cannot make a Python environment: `apt-get install python3-venv`")?;
        let pip = || Cmd::default().arg(before.python.display().to_string()).words("-m pip install -q");
        attempt("mooncake", pip().words("mooncake-transfer-engine-non-cuda"));
        // All dependencies together take 6 GB, but only numpy is needed.
        attempt("nixl", pip().words("numpy"));
        attempt("nixl", pip().words("--no-deps nixl nixl-cu12"));
        let dynamo = "ai-dynamo-runtime pyyaml packaging zstandard aiohttp pyzmq msgspec";
        attempt("dynamo", pip().words(dynamo));
        attempt("sglang-router", pip().words("sglang-router"));
    }
    let mut after = present(host);
    for (name, why) in &mut after.missing {
        if let Some((_, reason)) = failed.iter().find(|(failed, _)| failed == name) {
            why.clone_from(reason);
        }
    }
    Ok(after)
}

/// Builds the wheels of this repository and installs them into an environment of their own.
///
/// # Errors
/// They cannot be built or installed.
pub(crate) fn install_ours(host: &Host) -> Result<()> {
    let wheels = wheel::build(&wheel::Args::default())?;
    let environment = our_environment(host);
    Cmd::new("python3 -m venv --clear")
        .arg(environment.display().to_string())
        .run(&host.root, Some(INSTALL_S_MAX))
        .context("cannot make a Python environment: `apt-get install python3-venv`")?;
    let mut pip = Cmd::default()
        .arg(environment.join("bin/python").display().to_string())
        .words("-m pip install -q --disable-pip-version-check");
    for wheel in &wheels {
        pip = pip.arg(wheel.display().to_string());
    }
    pip.run(&host.root, Some(INSTALL_S_MAX)).context("the wheels cannot be installed")
}

/// Checks which programs are present.
pub(crate) fn present(host: &Host) -> Peers {
    let bin = environment(host).join("bin");
    let python = bin.join("python");
    let mooncake_master = bin.join("mooncake_master");
    let module = |distribution: &str, import: &str| {
        let code =
            format!("import {import}, importlib.metadata as m; print('V', m.version('{distribution}'))");
        let text = Cmd::default().arg(python.display().to_string()).arg("-c").arg(code).stdout(&host.root)?;
        text.lines().find_map(|line| line.strip_prefix("V ")).map(str::to_owned)
    };
    let first_line = |text: String| text.lines().next().unwrap_or_default().trim().to_owned();
    let program = |line: &str| Cmd::new(line).stdout(&host.root).map(first_line);
    let debian = |program: &str, package: &str| {
        on_path(program).then(|| {
            let version = Cmd::new("dpkg-query -W -f=${Version}").arg(package).stdout(&host.root);
            version.unwrap_or_else(|| "of unknown version".to_owned())
        })
    };
    let found = [
        ("mooncake", module("mooncake-transfer-engine-non-cuda", "mooncake.engine, mooncake.store")),
        ("nixl", module("nixl-cu12", "nixl")),
        ("ucx", debian("ucx_perftest", "ucx-utils")),
        ("redis", program("redis-server --version")),
        ("iperf3", program("iperf3 --version")),
        ("dynamo", module("ai-dynamo-runtime", "dynamo.indexer, msgspec, zmq")),
        ("sglang-router", module("sglang-router", "sglang_router")),
        ("memcpy", Some("of the C library".to_owned())),
    ];
    let our_python = our_python(host);
    let mut peers = Peers { python, mooncake_master, our_python, versions: Vec::new(), missing: Vec::new() };
    for (name, version) in found {
        match version {
            Some(version) => peers.versions.push((name, version)),
            None => peers.missing.push((name, "not installed".to_owned())),
        }
    }
    peers
}

fn environment(host: &Host) -> PathBuf {
    host.target_dir.join("peers")
}

/// Where the wheels of this repository are installed.
fn our_environment(host: &Host) -> PathBuf {
    host.target_dir.join("peers-ours")
}

fn our_python(host: &Host) -> Option<PathBuf> {
    let python = our_environment(host).join("bin/python");
    let imports =
        Cmd::default().arg(python.display().to_string()).words("-c").arg("import mooncake.store, snowskin");
    imports.stdout(&host.root).map(|_| python)
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| Path::new(&dir).join(program).is_file())
}
