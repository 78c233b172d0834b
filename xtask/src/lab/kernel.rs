//! The guests' kernel: Debian's package, unpacked into a cache, and an initramfs that mounts the host's
//! files.
//!
//! The cache is `target/lab/VERSION-RECIPE/`, where RECIPE is a hash of what determines its contents. It is
//! built in a separate directory and renamed when it is complete, so an interrupted download never counts,
//! and several runs may build at the same time.

use super::initramfs::Archive;
use super::tools::which;
use crate::cmd::Cmd;
use anyhow::{Context as _, Result, bail, ensure};
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

/// Modules for access to the host's files: the first stage loads these and their dependencies.
const FIRST_MODULES: [&str; 3] = ["virtio_pci", "9pnet_virtio", "9p"];
const INIT: &str = include_str!("init.sh");
/// Parts of the package for devices that no guest has: two thirds of its size.
const PRUNED: [&str; 6] =
    ["sound", "drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/staging", "drivers/usb"];
/// Increased when the cache's contents change in a way that the hash does not cover.
const LAYOUT: u32 = 1;

/// A cached kernel.
pub(super) struct Kernel {
    /// The output of `uname -r`.
    pub(super) version: String,
    /// Path of the kernel image.
    pub(super) image: PathBuf,
    /// Path of the initramfs.
    pub(super) initramfs: PathBuf,
    /// The directory with `lib/modules/VERSION`.
    pub(super) modules: PathBuf,
}

/// The cached kernel, or a new one from `deb` or from Debian.
///
/// # Errors
/// Nothing is cached, and the package cannot be downloaded or unpacked.
pub(super) fn get(lab_dir: &Path, deb: Option<&Path>) -> Result<Kernel> {
    fs::create_dir_all(lab_dir).with_context(|| format!("cannot create {}", lab_dir.display()))?;
    let recipe = recipe();
    if deb.is_none()
        && let Some(cached) = cached(lab_dir, &recipe)
    {
        return Ok(cached);
    }
    let building = lab_dir.join(format!("building-{}", std::process::id()));
    let built = build(lab_dir, &building, &recipe, deb);
    // A directory that is left there is incomplete, or another run has completed it.
    let _ = fs::remove_dir_all(&building);
    built
}

/// The package that Debian's `linux-image-amd64` depends on now; `None` when apt does not know it.
pub(super) fn package_name() -> Option<String> {
    let depends = Cmd::new("apt-cache depends linux-image-amd64").stdout(Path::new("/"))?;
    let words = depends.split_whitespace().map(str::to_owned);
    words.skip(1).find(|word| word.starts_with("linux-image-") && word.ends_with("-amd64"))
}

fn recipe() -> String {
    let mut hasher = DefaultHasher::new();
    (INIT, FIRST_MODULES, PRUNED, LAYOUT).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The newest complete entry of this recipe.
fn cached(lab_dir: &Path, recipe: &str) -> Option<Kernel> {
    let entries = fs::read_dir(lab_dir).ok()?.flatten();
    let mut entries: Vec<(std::time::SystemTime, PathBuf)> = entries
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(recipe))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    entries.sort();
    open(&entries.pop()?.1).ok()
}

fn open(dir: &Path) -> Result<Kernel> {
    let mut versions = fs::read_dir(dir.join("lib/modules"))?.flatten();
    let version = versions.next().context("no modules")?.file_name().to_string_lossy().into_owned();
    let kernel = Kernel {
        image: dir.join("boot").join(format!("vmlinuz-{version}")),
        initramfs: dir.join("initramfs"),
        modules: dir.to_path_buf(),
        version,
    };
    ensure!(kernel.image.is_file() && kernel.initramfs.is_file(), "{} is incomplete", dir.display());
    Ok(kernel)
}

fn build(lab_dir: &Path, building: &Path, recipe: &str, deb: Option<&Path>) -> Result<Kernel> {
    let _ = fs::remove_dir_all(building);
    fs::create_dir_all(building).with_context(|| format!("cannot create {}", building.display()))?;
    let deb = match deb {
        Some(deb) => deb.to_path_buf(),
        None => download(building)?,
    };
    println!("lab: unpacking {}", deb.display());
    let root = building.join("root");
    Cmd::new("dpkg-deb -x").arg(text(&deb)).arg(text(&root)).run(building, None)?;
    let version =
        fs::read_dir(root.join("lib/modules")).context("the package has no modules")?.flatten().next();
    let version = version.context("the package has no modules")?.file_name().to_string_lossy().into_owned();
    let tree = root.join("lib/modules").join(&version);
    for part in PRUNED {
        // Not every kernel has each of them.
        let _ = fs::remove_dir_all(tree.join("kernel").join(part));
    }
    let _ = fs::remove_dir_all(root.join("usr/share"));
    let depmod = which("depmod").context("depmod is not installed (package kmod)")?;
    Cmd::default().arg(text(&depmod)).arg("-b").arg(text(&root)).arg(&version).run(building, None)?;
    let initramfs = initramfs(&root, &version)?;
    fs::write(root.join("initramfs"), initramfs).context("cannot write the initramfs")?;

    let finished = lab_dir.join(format!("{version}-{recipe}"));
    if finished.exists() && open(&finished).is_err() {
        let _ = fs::remove_dir_all(&finished);
    }
    match fs::rename(&root, &finished) {
        Ok(()) => {}
        // Another run was faster; its result is equivalent.
        Err(_) if open(&finished).is_ok() => {}
        Err(error) => return Err(error).with_context(|| format!("cannot create {}", finished.display())),
    }
    open(&finished)
}

fn download(dir: &Path) -> Result<PathBuf> {
    let package = package_name().context(
        "apt does not know `linux-image-amd64`: run `apt-get update`, or give a kernel package of Debian \
        with --kernel-deb FILE",
    )?;
    println!("lab: downloading {package}");
    Cmd::new("apt-get -qq download").arg(&package).run(dir, Some(300)).with_context(|| {
        format!("cannot download {package}: run `apt-get update`, or give a file with --kernel-deb FILE")
    })?;
    let mut files = fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    files
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get left no file")
}

fn initramfs(root: &Path, version: &str) -> Result<Vec<u8>> {
    let busybox = which("busybox").context("busybox is not installed (package busybox-static)")?;
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "modules"] {
        archive.dir(dir);
    }
    archive.console();
    archive.file(
        "bin/busybox",
        &fs::read(&busybox).with_context(|| format!("cannot read {}", busybox.display()))?,
    );
    archive.file("init", INIT.as_bytes());
    let mut order = Vec::new();
    for module in FIRST_MODULES {
        for path in dependencies(root, version, module)? {
            let name = path.file_name().context("a module without a name")?.to_string_lossy().into_owned();
            let (name, content) = match name.strip_suffix(".xz") {
                Some(plain) => (plain.to_owned(), unxz(&path)?),
                None => (name, fs::read(&path)?),
            };
            if !order.contains(&name) {
                archive.file(&format!("modules/{name}"), &content);
                order.push(name);
            }
        }
    }
    archive.file("modules/order", (order.join("\n") + "\n").as_bytes());
    Ok(archive.finish())
}

/// The files to load for a module, in order. With `-C /dev/null`, the host's configuration does not hide any
/// of them.
fn dependencies(root: &Path, version: &str, module: &str) -> Result<Vec<PathBuf>> {
    let modprobe = which("modprobe").context("modprobe is not installed (package kmod)")?;
    let shown = Cmd::default().arg(text(&modprobe)).arg("-C").arg("/dev/null").arg("-d").arg(text(root));
    let shown = shown.arg("-S").arg(version).arg("--show-depends").arg(module).stdout(root);
    let Some(shown) = shown else { bail!("the kernel package has no module {module}") };
    // Lines are `insmod PATH OPTIONS`, or `builtin NAME`.
    let paths = shown.lines().filter_map(|line| line.strip_prefix("insmod ")?.split_whitespace().next());
    Ok(paths.map(PathBuf::from).collect())
}

fn unxz(path: &Path) -> Result<Vec<u8>> {
    let output = Cmd::new("xz -dc").arg(text(path)).command(Path::new("/")).output();
    let output = output.context("xz is not installed (package xz-utils)")?;
    ensure!(output.status.success(), "xz cannot unpack {}", path.display());
    Ok(output.stdout)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_entry_does_not_count_as_cached() {
        let dir = tempfile::tempdir().expect("a directory");
        let recipe = recipe();
        let entry = dir.path().join(format!("6.1-{recipe}"));
        fs::create_dir_all(entry.join("lib/modules/6.1")).expect("writable");
        fs::create_dir_all(entry.join("boot")).expect("writable");
        fs::write(entry.join("boot/vmlinuz-6.1"), "kernel").expect("writable");
        assert!(cached(dir.path(), &recipe).is_none(), "the initramfs is missing");
        fs::write(entry.join("initramfs"), "archive").expect("writable");
        assert_eq!(cached(dir.path(), &recipe).expect("complete").version, "6.1");
        assert!(cached(dir.path(), "another recipe").is_none());
    }
}
