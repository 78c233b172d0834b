//! Fixtures of sysfs: one text file per host, which is expanded into a directory with its links.
//!
//! ```text
//!   [devices/pci0000:16/0000:16:01.0/0000:19:00.0]     a directory of the root
//!   class = 0x020700                                   a file in it
//!   infiniband/mlx5_0/ports/1/state = 4: ACTIVE        deeper down
//! ```
//!
//! The links of sysfs are made for what is there: `bus/pci/devices/ADDRESS` to each directory named like a
//! PCI address, `class/net/NAME` and `class/infiniband/NAME` to each `…/net/NAME` and `…/infiniband/NAME`,
//! and from those a `device` link back, except for virtual devices.
#![allow(dead_code, reason = "each test file uses its part")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A host to be read. Tests may change its files first.
pub(crate) struct Sysfs(tempfile::TempDir);

impl Sysfs {
    /// The fixture of that name.
    pub(crate) fn named(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../te-host/tests/fixtures/sysfs");
        let path = dir.join(name).with_extension("txt");
        Self::of(&fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// A host described by `text`.
    pub(crate) fn of(text: &str) -> Self {
        let this = Self(tempfile::tempdir().expect("a directory"));
        let mut section = PathBuf::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(path) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                section = path.into();
                fs::create_dir_all(this.path().join(&section)).expect("created");
                this.link(&section);
            } else {
                let (path, value) = line.split_once('=').expect("path = value");
                this.put(section.join(path.trim()), value.trim());
            }
        }
        this
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file, its directories and their links.
    pub(crate) fn put(&self, path: impl AsRef<Path>, value: &str) {
        let path = path.as_ref();
        let dir = path.parent().expect("a directory");
        fs::create_dir_all(self.path().join(dir)).expect("created");
        self.link(dir);
        fs::write(self.path().join(path), format!("{value}\n")).expect("written");
    }

    /// Makes a link to `target`, as it is given.
    pub(crate) fn put_link(&self, path: &str, target: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("created");
        symlink(target, path).expect("linked");
    }

    /// Makes the links for `dir` and for the directories above it.
    fn link(&self, dir: &Path) {
        for dir in dir.ancestors() {
            let Some(name) = dir.file_name().and_then(|name| name.to_str()) else { continue };
            let parent = dir.parent().and_then(Path::file_name).and_then(|name| name.to_str());
            if name.parse::<te_core::topology::PciAddress>().is_ok() {
                self.link_to(Path::new("bus/pci/devices").join(name), dir);
            } else if dir.starts_with("class") {
                // A real directory in place of a link.
            } else if let Some(class @ ("net" | "infiniband")) = parent {
                self.link_to(Path::new("class").join(class).join(name), dir);
                if !dir.starts_with("devices/virtual") {
                    self.link_to(dir.join("device"), dir.ancestors().nth(2).expect("a device"));
                }
            }
        }
    }

    fn link_to(&self, from: PathBuf, to: &Path) {
        let at = self.path().join(&from);
        if at.is_symlink() {
            return;
        }
        fs::create_dir_all(at.parent().expect("a directory")).expect("created");
        let up = "../".repeat(from.components().count() - 1);
        symlink(Path::new(&up).join(to), at).expect("linked");
    }
}
