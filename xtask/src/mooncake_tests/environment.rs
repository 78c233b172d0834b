//! The Python environment in which the scripts run, and the checkout that they come from.

use super::scripts::{Need, Script};
use super::{COMMIT, scripts::Side};
use crate::cmd::Cmd;
use crate::host::Host;
use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};

/// Timeout for building and installing the wheels, seconds.
const INSTALL_S_MAX: u64 = 1200;

pub(super) struct Environment {
    /// The checkout.
    pub(super) source: PathBuf,
    python: PathBuf,
    peer_python: Option<PathBuf>,
    has_torch: bool,
    has_safetensors: bool,
}

impl Environment {
    /// Finds or makes the environment.
    ///
    /// # Errors
    /// The checkout is not one; the wheels cannot be built or installed.
    pub(super) fn prepare(
        host: &Host,
        source: PathBuf,
        python: Option<PathBuf>,
        peer_python: Option<PathBuf>,
    ) -> Result<Self> {
        let shown = source.display();
        ensure!(
            source.join("mooncake-wheel/tests").is_dir(),
            "{shown}, in MOONCAKE_SRC, is no checkout of Mooncake"
        );
        let head = Cmd::new("git rev-parse HEAD").stdout(&source);
        if !head.as_deref().is_some_and(|head| head.starts_with(COMMIT)) {
            println!("note: {shown} is not known to be at {COMMIT}, whose tests the table counts");
        }
        let python = match python {
            Some(python) => python,
            None => install(host)?,
        };
        let imports = |module: &str| {
            let code = format!("import {module}");
            Cmd::default().arg(python.display().to_string()).arg("-c").arg(code).stdout(&host.root).is_some()
        };
        ensure!(imports("mooncake.store"), "{} cannot import mooncake.store", python.display());
        let known = host.target_dir.join("peers/bin/python");
        let peer_python = peer_python.or_else(|| known.is_file().then_some(known));
        Ok(Self {
            has_torch: imports("torch"),
            has_safetensors: imports("safetensors.torch"),
            source,
            python,
            peer_python,
        })
    }

    /// Why a script cannot run here.
    pub(super) fn missing(&self, script: &Script) -> Option<String> {
        let lacks = |need: &&Need| match need {
            Need::Torch => !self.has_torch,
            Need::Safetensors => !self.has_safetensors,
            Need::Peer => self.peer_python.is_none(),
        };
        if !self.source.join(script.path).is_file() {
            return Some("the checkout does not have it".to_owned());
        }
        script.needs.iter().find(lacks).map(|need| match need {
            Need::Torch => "torch is not installed (Debian: python3-torch)".to_owned(),
            Need::Safetensors => "safetensors is not installed".to_owned(),
            Need::Peer => {
                "Mooncake's wheel is not installed: --peer-python, or cargo xtask bench-peers".to_owned()
            }
        })
    }

    /// The interpreter of a side.
    pub(super) fn python(&self, side: Side) -> &Path {
        match side {
            Side::Ours => &self.python,
            Side::Peer => self.peer_python.as_deref().unwrap_or(&self.python),
        }
    }

    /// The directory with the console scripts of ours.
    pub(super) fn scripts(&self) -> &Path {
        self.python.parent().unwrap_or(Path::new("."))
    }
}

/// Builds the wheels and installs them into an environment of their own, which sees the system's torch.
fn install(host: &Host) -> Result<PathBuf> {
    let built = Cmd::new("cargo xtask wheel")
        .stdout(&host.root)
        .context("`cargo xtask wheel` failed: run it by hand to see why")?;
    let wheels: Vec<&str> = built.lines().filter(|line| line.ends_with(".whl")).collect();
    ensure!(wheels.len() == 2, "`cargo xtask wheel` printed {} paths of wheels, not 2", wheels.len());
    let dir = host.target_dir.join("mooncake-tests");
    let python = dir.join("bin/python");
    Cmd::default()
        .arg(system_python(host))
        .words("-m venv --clear --system-site-packages")
        .arg(dir.display().to_string())
        .run(&host.root, Some(INSTALL_S_MAX))
        .context("cannot make a Python environment: `apt-get install python3-venv`")?;
    let pip = || Cmd::default().arg(python.display().to_string()).words("-m pip install -q");
    pip()
        .words("--no-deps --force-reinstall")
        .words(&wheels.join(" "))
        .run(&host.root, Some(INSTALL_S_MAX))?;
    // Modules of the checkout that run on top of ours import msgpack.
    pip().words("pytest numpy requests aiohttp msgpack").run(&host.root, Some(INSTALL_S_MAX))?;
    if pip().words("safetensors").run(&host.root, Some(INSTALL_S_MAX)).is_err() {
        println!("note: safetensors cannot be installed: its row is ignored");
    }
    Ok(python)
}

/// The interpreter whose packages the environment sees: Debian's where it has torch and the first on the path
/// does not.
fn system_python(host: &Host) -> &'static str {
    let has_torch =
        |python: &&str| Cmd::new(python).words("-c").arg("import torch").stdout(&host.root).is_some();
    ["python3", "/usr/bin/python3"].into_iter().find(has_torch).unwrap_or("python3")
}
