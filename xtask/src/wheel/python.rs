//! Interpreters and virtual environments.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::cmd::Cmd;

/// Programs that are tried, in this order.
const CANDIDATES: [&str; 6] = ["python3", "python3.11", "python3.12", "python3.13", "python3.14", "python"];
/// Prints the version if it is new enough and can make virtual environments.
const PROBE: &str =
    "import ensurepip, sys, venv; assert sys.version_info >= (3, 11); print(sys.version.split()[0])";

/// A Python of at least 3.11.
#[derive(Clone, Debug)]
pub(super) struct Python {
    program: String,
    version: String,
}

impl fmt::Display for Python {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Python {} ({})", self.version, self.program)
    }
}

/// Finds an interpreter: the one that is named, or the first that is new enough.
///
/// # Errors
/// There is none.
pub(super) fn find(named: Option<&str>) -> Result<Python> {
    let named_by_variable = std::env::var("PYTHON").ok();
    let named = named.or(named_by_variable.as_deref());
    let candidates = named.map_or(CANDIDATES.to_vec(), |named| vec![named]);
    for program in &candidates {
        let probe = Cmd::new("").arg(*program).arg("-c").arg(PROBE);
        if let Some(version) = probe.stdout(Path::new(".")) {
            return Ok(Python { program: (*program).to_owned(), version: version.trim().to_owned() });
        }
    }
    bail!(
        "no Python from 3.11 on with venv (tried {}): install python3-venv, or name one with --python",
        candidates.join(", ")
    )
}

impl Python {
    /// A command of this interpreter.
    pub(super) fn cmd(&self) -> Cmd {
        // What is tested is what is installed, not what the caller's environment adds.
        Cmd::new("env -u PYTHONPATH -u PYTHONHOME -u SNOWSKIN_BINARY").arg(&self.program)
    }

    /// Path or name of the interpreter.
    pub(super) fn program(&self) -> &str {
        &self.program
    }

    /// The interpreter of a virtual environment, which is made if it does not exist, or anew.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn environment(&self, dir: &Path, anew: bool) -> Result<Self> {
        let program: PathBuf = dir.join("bin/python");
        let works = || {
            Cmd::new("").arg(program.display().to_string()).words("-m pip --version").stdout(Path::new("."))
        };
        if anew || works().is_none() {
            if dir.exists() {
                fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
            }
            let cmd = self.cmd().words("-m venv").arg(dir.display().to_string());
            cmd.run(Path::new("."), None).with_context(|| format!("`{cmd}` failed"))?;
        }
        Ok(Self { program: program.display().to_string(), version: self.version.clone() })
    }

    /// Installs packages.
    ///
    /// # Errors
    /// pip fails.
    pub(super) fn install(&self, root: &Path, packages: &[&str]) -> Result<()> {
        let mut cmd = self.cmd().words("-m pip install --quiet --disable-pip-version-check");
        for package in packages {
            cmd = cmd.arg(*package);
        }
        println!("    $ {cmd}");
        cmd.run(root, None).context("pip could not install what is needed: see above")
    }
}
