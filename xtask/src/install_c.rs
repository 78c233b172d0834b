//! `cargo xtask install-c`: builds the C libraries and installs them with headers and pkg-config files.
//!
//! ```text
//! DESTDIR/PREFIX/lib/libNAME.so.VERSION, libNAME.so.0 ─▶ it, libNAME.so ─▶ it, libNAME.a
//! DESTDIR/PREFIX/lib/pkgconfig/NAME.pc
//! DESTDIR/PREFIX/include/HEADER
//! ```

use crate::cmd::Cmd;
use crate::host::Host;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Options of `cargo xtask install-c`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory below which the files are put. `/`, or that of a package that is being made.
    #[arg(value_name = "DESTDIR")]
    destdir: PathBuf,
    /// Where the files will be on the machine that uses them.
    #[arg(long, default_value = "/usr/local", value_name = "DIR")]
    prefix: PathBuf,
    /// Only these libraries (repeat the option, or separate them with commas).
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
}

/// A library: its name, its package, its header.
const LIBRARIES: [(&str, &str, &str); 3] = [
    ("transfer_engine", "snowskin-transfer-engine-c", "transfer_engine_c.h"),
    ("mooncake_store", "snowskin-mooncake-store-c", "store_c.h"),
    ("snowskin", "snowskin-c", "snowskin.h"),
];
/// The number in the name by which programs find a shared library (`build.rs` of each).
const SONAME_VERSION: u32 = 0;

/// Builds with the profile `ffi`, in which a panic unwinds to the function that C has called, and installs.
///
/// # Errors
/// An unknown library, a build that fails, a file that cannot be written.
pub(crate) fn run(args: &Args) -> Result<()> {
    let host = Host::probe()?;
    ensure!(args.prefix.is_absolute(), "--prefix {} is not absolute", args.prefix.display());
    for name in &args.only {
        let known = LIBRARIES.map(|(name, ..)| name).join(", ");
        ensure!(LIBRARIES.iter().any(|(known, ..)| known == name), "no library `{name}`; there are: {known}");
    }
    let chosen = LIBRARIES
        .iter()
        .filter(|(name, ..)| args.only.is_empty() || args.only.iter().any(|only| only == name));
    for (name, package, header) in chosen {
        let build =
            Cmd::new("cargo rustc --profile ffi --lib --crate-type cdylib,staticlib -p").arg(*package);
        println!("    $ {build}");
        build.run(&host.root, None)?;
        install(&host.root, &host.target_dir.join("ffi"), args, name, header)?;
    }
    Ok(())
}

fn install(root: &Path, built: &Path, args: &Args, name: &str, header: &str) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let into = args.destdir.join(args.prefix.strip_prefix("/").unwrap_or(&args.prefix));
    let (lib, include) = (into.join("lib"), into.join("include"));
    for dir in [&lib.join("pkgconfig"), &include] {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let shared = format!("lib{name}.so.{version}");
    copy(&built.join(format!("lib{name}.so")), &lib.join(&shared))?;
    copy(&built.join(format!("lib{name}.a")), &lib.join(format!("lib{name}.a")))?;
    for link in [format!("lib{name}.so.{SONAME_VERSION}"), format!("lib{name}.so")] {
        let link = lib.join(link);
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link).with_context(|| format!("cannot replace {}", link.display()))?;
        }
        symlink(&shared, &link).with_context(|| format!("cannot link {}", link.display()))?;
    }
    let sources = root.join("bindings/c");
    copy(&sources.join("include").join(header), &include.join(header))?;
    let template = sources.join(format!("pkgconfig/{name}.pc.in"));
    let text =
        fs::read_to_string(&template).with_context(|| format!("cannot read {}", template.display()))?;
    let text = text.replace("@PREFIX@", &args.prefix.display().to_string()).replace("@VERSION@", version);
    let file = lib.join("pkgconfig").join(format!("{name}.pc"));
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    println!("    {}", lib.join(&shared).display());
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_installed_has_its_links_and_its_prefix() {
        let root = crate::host::workspace_root();
        let dir = tempfile::tempdir().unwrap();
        let built = dir.path().join("built");
        fs::create_dir(&built).unwrap();
        for name in ["libsnowskin.so", "libsnowskin.a"] {
            fs::write(built.join(name), name).unwrap();
        }
        let args = Args { destdir: dir.path().join("root"), prefix: "/opt/kv".into(), only: Vec::new() };
        // The second time, links and files are replaced.
        for _ in 0..2 {
            install(&root, &built, &args, "snowskin", "snowskin.h").unwrap();
        }
        let lib = dir.path().join("root/opt/kv/lib");
        assert_eq!(fs::read_to_string(lib.join("libsnowskin.so.0")).unwrap(), "libsnowskin.so");
        assert_eq!(fs::read_to_string(lib.join("libsnowskin.so")).unwrap(), "libsnowskin.so");
        assert!(
            fs::read_to_string(lib.join("pkgconfig/snowskin.pc")).unwrap().starts_with("prefix=/opt/kv\n")
        );
        assert!(dir.path().join("root/opt/kv/include/snowskin.h").exists());
    }
}
