//! Where facts are read from: `/proc`, `/sys`, `/dev` and `/etc` of this machine, or a copy of another
//! machine's in a directory.
//!
//! Every file may be missing, huge or malformed: each query has a result for that, and none blocks.

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::output::printable;

/// Longest file that is read, bytes. `/proc/net/tcp` of a busy server is the longest one.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Most characters of a line that are shown.
const LINE_CHARS_MAX: usize = 160;
/// Most entries of a directory that are read. `/proc` has one per process.
const ENTRIES_MAX: usize = 65_536;

/// A tree of the kernel's files. Paths are relative: `sys/class/net`.
#[derive(Clone, Debug)]
pub(super) struct Source {
    root: PathBuf,
    is_copy: bool,
}

impl Source {
    /// The machine on which this runs.
    pub(super) fn this_machine() -> Self {
        Self { root: PathBuf::from("/"), is_copy: false }
    }

    /// Files that were copied from a machine. Facts that need a running machine are left out.
    pub(super) fn copy_at(root: &Path) -> Self {
        Self { root: root.to_owned(), is_copy: true }
    }

    /// Whether this is a copy, with files only.
    pub(super) const fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// A path of this tree, for callers that read it themselves.
    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The whole file; invalid UTF-8 is replaced.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        self.bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The file, up to the size limit. Only regular files are read, because a pipe would wait for a writer.
    pub(super) fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let path = self.root.join(path);
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The first line, trimmed and printable, with blanks for tabs; `None` when it is empty.
    pub(super) fn line(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let line: String = text.lines().next()?.trim().chars().take(LINE_CHARS_MAX).collect();
        (!line.is_empty()).then(|| printable(&line.replace('\t', " ")))
    }

    /// The first line, parsed as a number or another type.
    pub(super) fn number<T: FromStr>(&self, path: &str) -> Option<T> {
        self.line(path)?.parse().ok()
    }

    /// The first line as a hexadecimal number, with or without `0x`.
    pub(super) fn hex(&self, path: &str) -> Option<u32> {
        let line = self.line(path)?;
        u32::from_str_radix(line.trim_start_matches("0x"), 16).ok()
    }

    /// Printable names in a directory, shorter ones first, so that 9 comes before 10.
    pub(super) fn entries(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(path)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .flatten()
            .take(ENTRIES_MAX)
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.chars().all(|c| !c.is_control()))
            .collect();
        names.sort_unstable_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
        names
    }

    /// The target of a symbolic link.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        fs::read_link(self.root.join(path)).ok()?.into_os_string().into_string().ok()
    }

    /// The last part of a symbolic link's target: sysfs names drivers and devices that way.
    pub(super) fn link_name(&self, path: &str) -> Option<String> {
        let link = self.link(path)?;
        link.rsplit('/').next().filter(|name| !name.is_empty()).map(printable)
    }

    /// Whether `path` exists.
    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Whether `path` can be opened for reading and writing, as a driver's device must be; otherwise why not.
    pub(super) fn open_device(&self, path: &str) -> Result<(), String> {
        use std::os::unix::fs::OpenOptionsExt as _;
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.root.join(path))
            .map(drop)
            .map_err(|error| error.kind().to_string())
    }
}

/// `0-3,8` → 0, 1, 2, 3, 8. Parts that are not numbers, and numbers larger than on any machine, are left out.
pub(super) fn number_list(text: &str) -> Vec<u32> {
    const NUMBERS_MAX: u32 = 65_536;
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>())
            && last < NUMBERS_MAX
        {
            numbers.extend(first..=last);
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers_are_read_as_the_kernel_writes_them() {
        assert_eq!(number_list("0-2,8\n"), [0, 1, 2, 8]);
        assert_eq!(number_list("5"), [5]);
        assert!(number_list("").is_empty());
        assert_eq!(number_list("x,3-1,0-4294967295,7"), [7]);
    }

    #[test]
    fn a_copy_answers_from_its_own_files_and_never_waits() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("sys/a10")).unwrap();
        fs::create_dir_all(dir.path().join("sys/a9")).unwrap();
        fs::write(dir.path().join("sys/f"), b"  \x1b[2J\xff\t12\nrest").unwrap();
        std::os::unix::fs::symlink("../../x/0000:01:00.0", dir.path().join("sys/link")).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(dir.path().join("sys/pipe")).status().unwrap();
        assert!(pipe.success());
        let source = Source::copy_at(dir.path());
        assert_eq!(source.line("sys/f").as_deref(), Some("\\u{1b}[2J\u{fffd} 12"));
        assert_eq!(source.number::<u32>("sys/f"), None);
        assert_eq!(source.text("sys/pipe"), None);
        assert_eq!(source.text("sys"), None);
        assert_eq!(source.link_name("sys/link").as_deref(), Some("0000:01:00.0"));
        assert_eq!(source.entries("sys"), ["f", "a9", "a10", "link", "pipe"]);
        assert!(source.open_device("sys/nothing").is_err());
    }
}
