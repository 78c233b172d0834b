//! Mooncake's own Rust crates and their tests, from the checkout that `MOONCAKE_SRC` names.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A copy of one of the crates: its build writes nothing to the checkout.
pub(crate) struct Crate {
    dir: tempfile::TempDir,
    name: &'static str,
}

impl Crate {
    /// The crate at this path of the checkout, with its dependencies downloaded; or why there is none.
    pub(crate) fn copy(path: &'static str) -> Result<Self, String> {
        let checkout = std::env::var_os("MOONCAKE_SRC")
            .ok_or("MOONCAKE_SRC is not set: the path of a checkout of Mooncake")?;
        let from = Path::new(&checkout).join(path);
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let name = path.split('/').next().unwrap_or(path);
        copy_tree(&from, &dir.path().join(name)).map_err(|error| format!("{}: {error}", from.display()))?;
        let this = Self { dir, name };
        let fetched = this.cargo("fetch").output().map_err(|error| error.to_string())?;
        if !fetched.status.success() {
            let why = String::from_utf8_lossy(&fetched.stderr).into_owned();
            return Err(format!("its dependencies cannot be downloaded: {why}"));
        }
        Ok(this)
    }

    /// `cargo COMMAND` in the crate, with a target directory that later runs use again.
    pub(crate) fn cargo(&self, command: &str) -> Command {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut cargo = Command::new(cargo);
        cargo.arg(command).current_dir(self.dir.path().join(self.name));
        cargo.env("CARGO_TARGET_DIR", PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(self.name));
        // What cargo tells this test is not meant for another package.
        for (name, _) in std::env::vars() {
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") || name == "RUSTFLAGS" {
                cargo.env_remove(name);
            }
        }
        cargo
    }
}

fn copy_tree(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                copy_tree(&from, &to)?;
            }
        } else {
            fs::copy(&from, &to)?;
        }
    }
    Ok(())
}
