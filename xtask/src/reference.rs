//! Writes the pages of `docs/reference/` that the program generates. Tests beside the generators fail when a
//! page is not up to date, so nothing here runs in CI.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::host::Host;

/// A page, and the arguments of `snowskin` that print it.
const PAGES: [(&str, &[&str]); 1] = [("docs/reference/config.md", &["config", "reference"])];

/// Writes every page.
///
/// # Errors
/// The program does not build, or a page cannot be written.
pub(crate) fn run() -> Result<()> {
    let root = Host::probe()?.root;
    for (page, args) in PAGES {
        let output = Command::new("cargo")
            .args(["run", "--quiet", "-p", "cli", "--"])
            .args(args)
            .current_dir(&root)
            .output()
            .context("cannot run cargo")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let file = root.join(page);
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir)?;
        }
        fs::write(&file, output.stdout).with_context(|| format!("cannot write {page}"))?;
        println!("{page}");
    }
    Ok(())
}
