//! What this machine and this workspace offer. Determined once, before the first step.

use crate::cmd::Cmd;
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The workspace and the installed tools.
pub(crate) struct Host {
    /// Root of the workspace.
    pub(crate) root: PathBuf,
    /// Cargo's target directory.
    pub(crate) target_dir: PathBuf,
    /// Members, in the order of the manifest.
    pub(crate) packages: Vec<Package>,
    /// Installed targets without an operating system.
    pub(crate) bare_metal_targets: Vec<String>,
    /// The target of this machine.
    pub(crate) host_target: String,
    /// Whether promtool is installed, which checks rules of Prometheus.
    pub(crate) promtool: bool,
    /// Whether `cargo-nextest` is installed.
    pub(crate) nextest: bool,
    /// Whether `cargo-deny` is installed.
    pub(crate) deny: bool,
    /// Whether there is a nightly toolchain.
    pub(crate) nightly: bool,
    /// Whether that toolchain has Miri.
    pub(crate) miri: bool,
    /// The oldest supported compiler.
    pub(crate) rust_version: String,
    /// Whether that toolchain is installed.
    pub(crate) rust_version_installed: bool,
    /// Why features that link a system library are left out; `None` when they are built.
    pub(crate) without_linked: Option<String>,
}

/// The feature that links a system library and needs its headers.
const LINKED: &str = "topology-hwloc";

/// One member of the workspace.
pub(crate) struct Package {
    /// Its name in cargo.
    pub(crate) name: String,
    /// Features by name, without `default`.
    pub(crate) features: Vec<String>,
    /// Whether it has a library.
    pub(crate) has_lib: bool,
    /// Path of its `Cargo.toml`.
    pub(crate) manifest: PathBuf,
}

/// Root of the workspace: the parent directory of this crate.
pub(crate) fn workspace_root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

impl Host {
    /// Queries cargo and rustup.
    ///
    /// # Errors
    /// `cargo metadata` fails.
    pub(crate) fn probe() -> Result<Self> {
        let root = workspace_root();
        let metadata = Cmd::new("cargo metadata --no-deps --format-version 1 --quiet")
            .stdout(&root)
            .context("`cargo metadata` failed: run it by hand to see why")?;
        let metadata: Value = serde_json::from_str(&metadata).context("`cargo metadata` gave no JSON")?;
        let target_dir = metadata["target_directory"].as_str().context("no target_directory")?.into();
        let mut packages: Vec<Package> =
            metadata["packages"].as_array().into_iter().flatten().map(package).collect();
        packages.sort_by(|a, b| a.name.cmp(&b.name));

        let rust_version =
            metadata["packages"][0]["rust_version"].as_str().context("no rust-version")?.to_owned();
        let toolchains = Cmd::new("rustup toolchain list").stdout(&root).unwrap_or_default();
        let installed_targets = Cmd::new("rustup target list --installed").stdout(&root).unwrap_or_default();
        let bare_metal = |target: &&str| target.split('-').any(|part| part == "none" || part == "uefi");
        let nightly_works = Cmd::new("cargo +nightly --version").stdout(&root).is_some();
        let version = Cmd::new("rustc -vV").stdout(&root).unwrap_or_default();
        let host_target = version.lines().find_map(|line| line.strip_prefix("host: "));
        Ok(Self {
            target_dir,
            packages,
            bare_metal_targets: installed_targets.lines().filter(bare_metal).map(str::to_owned).collect(),
            host_target: host_target.unwrap_or("x86_64-unknown-linux-gnu").to_owned(),
            nextest: Cmd::new("cargo nextest --version").stdout(&root).is_some(),
            promtool: Cmd::new("promtool --version").stdout(&root).is_some(),
            deny: Cmd::new("cargo deny --version").stdout(&root).is_some(),
            nightly: nightly_works,
            miri: nightly_works && Cmd::new("cargo +nightly miri --version").stdout(&root).is_some(),
            // The build script runs the same query: hwloc 2, with the libraries that it needs.
            without_linked: Cmd::new("pkg-config --static --libs")
                .arg("hwloc < 3")
                .stdout(&root)
                .is_none()
                .then(|| format!("without {LINKED}: `apt-get install libhwloc-dev libudev-dev pkg-config`")),
            rust_version_installed: toolchains.lines().any(|line| line.starts_with(&rust_version)),
            rust_version,
            root,
        })
    }

    /// The features of a package that can be built here, without `default`.
    pub(crate) fn features<'a>(&self, package: &'a Package) -> impl Iterator<Item = &'a str> {
        let all = self.without_linked.is_none();
        package.features.iter().map(String::as_str).filter(move |feature| all || *feature != LINKED)
    }

    /// The option that enables all features that can be built here, of all packages or of those in `only`.
    pub(crate) fn all_features(&self, only: &[&str]) -> String {
        if self.without_linked.is_none() {
            return "--all-features".to_owned();
        }
        let chosen = |package: &&Package| only.is_empty() || only.contains(&package.name.as_str());
        let full = |package: &Package| -> Vec<String> {
            self.features(package).map(|feature| format!("{}/{feature}", package.name)).collect()
        };
        let features: Vec<String> = self.packages.iter().filter(chosen).flat_map(full).collect();
        format!("--features {}", features.join(","))
    }
}

fn package(value: &Value) -> Package {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let features = value["features"].as_object();
    let is_lib = |target: &Value| {
        let kinds = target["kind"].as_array().into_iter().flatten().filter_map(Value::as_str);
        kinds.into_iter().any(|kind| ["lib", "rlib", "cdylib", "staticlib"].contains(&kind))
    };
    Package {
        name: text(&value["name"]),
        features: features.map_or_else(Vec::new, |features| {
            features.keys().filter(|name| *name != "default").cloned().collect()
        }),
        has_lib: value["targets"].as_array().into_iter().flatten().any(is_lib),
        manifest: text(&value["manifest_path"]).into(),
    }
}
