//! Where facts are read: this machine's `/proc`, `/sys`, `/dev` and `/etc`, or a copy of another machine's under a directory.
//!
//! Everything read here may be missing, huge, or garbage: each question has an answer for that, and none blocks.

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::output::printable;

/// Longest file that is read, bytes; `/proc/net/tcp` of a busy server is the longest one asked for.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Most characters of one line that are shown.
const LINE_CHARS_MAX: usize = 160;
/// Most entries of a directory that are looked at. Each process of the machine is one.
const ENTRIES_MAX: usize = 65_536;

/// A tree of the kernel's files. Paths are relative: `sys/class/net`.
#[derive(Clone, Debug)]
pub(super) struct Source {
    root: PathBuf,
    is_copy: bool,
}

impl Source {
    /// The machine this runs on.
    pub(super) fn this_machine() -> Self {
        Self { root: PathBuf::from("/"), is_copy: false }
    }

    /// Files that were copied from a machine. What only a running machine can tell is left out.
    pub(super) fn copy_at(root: &Path) -> Self {
        Self { root: root.to_owned(), is_copy: true }
    }

    /// Whether nothing but files can be asked.
    pub(super) const fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// A path of this tree, for a reader of its own.
    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The whole file; what is not UTF-8 is replaced.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        self.bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The whole file, up to the limit. Only regular files: a pipe would wait for a writer.
    pub(super) fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let path = self.root.join(path);
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The first line, trimmed and fit to be shown, with blanks for tabs; `None` when it is empty.
    pub(super) fn line(&self, path: &str) -> Option<String> {
        let text = self.text(path)?;
        let line: String = text.lines().next()?.trim().chars().take(LINE_CHARS_MAX).collect();
        (!line.is_empty()).then(|| printable(&line.replace('\t', " ")))
    }

    /// The first line as a number, or what else can be parsed.
    pub(super) fn number<T: FromStr>(&self, path: &str) -> Option<T> {
        self.line(path)?.parse().ok()
    }

    /// The first line as a hexadecimal number, with or without `0x`.
    pub(super) fn hex(&self, path: &str) -> Option<u32> {
        let line = self.line(path)?;
        u32::from_str_radix(line.trim_start_matches("0x"), 16).ok()
    }

    /// Names in a directory that can be shown, shorter first so that 9 comes before 10.
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

    /// What a symbolic link says.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        fs::read_link(self.root.join(path)).ok()?.into_os_string().into_string().ok()
    }

    /// The last part of what a symbolic link says: sysfs names drivers and devices so.
    pub(super) fn link_name(&self, path: &str) -> Option<String> {
        let link = self.link(path)?;
        link.rsplit('/').next().filter(|name| !name.is_empty()).map(printable)
    }

    /// Whether there is anything at `path`.
    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Whether `path` can be opened to read and write, as a driver's device must be; why not otherwise.
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

/// `0-3,8` → 0, 1, 2, 3, 8. Parts that are no numbers are left out, and so is what goes beyond any machine.
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
