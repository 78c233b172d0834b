//! The rules of a wheel: its size, its tag, what it contains and what it needs.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::python::Python;

/// Writes one line per file of the wheel: its length, the newest version of the C library that it asks for
/// (its minor number, 0 for none), and its name.
const LIST: &str = r"
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for entry in wheel.infolist():
        data = wheel.read(entry)
        wanted = max(map(int, re.findall(rb'GLIBC_2\.(\d+)', data)), default=0) if data[:4] == b'\x7fELF' else 0
        print(entry.file_size, wanted, entry.filename)
";

/// What has to be in the wheel.
const CONTENTS: [&str; 6] = [
    "snowskin/__init__.py",
    "snowskin/_native.pyi",
    "snowskin/aio.py",
    "snowskin/py.typed",
    "snowskin/tensor.py",
    "/scripts/snowskin",
];

struct Entry {
    glibc_minor: u32,
    name: String,
}

/// Checks a wheel.
///
/// # Errors
/// The rule that is broken.
pub(super) fn check(python: &Python, root: &Path, wheel: &Path, bytes_max: u64) -> Result<()> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bytes = fs::metadata(wheel)?.len();
    ensure!(bytes <= bytes_max, "{name} has {bytes} bytes, more than {bytes_max}");
    let list = python.cmd().arg("-c").arg(LIST).arg(wheel.display().to_string());
    let entries = entries(&list.stdout(root).context("the wheel cannot be read")?);
    check_names(&name, &entries)?;
    let policy = glibc_of_tag(&name)
        .with_context(|| format!("{name} has no manylinux tag: it would need libraries of this system"))?;
    for entry in &entries {
        let Entry { glibc_minor, name: file } = entry;
        ensure!(
            *glibc_minor <= policy,
            "{file} needs glibc 2.{glibc_minor}, and the wheel's tag says 2.{policy}"
        );
    }
    println!("    {name}: {:.1} MB, glibc 2.{policy} or later", bytes as f64 / 1e6);
    Ok(())
}

fn entries(list: &str) -> Vec<Entry> {
    let entry = |line: &str| {
        let mut words = line.splitn(3, ' ');
        let (_, glibc, name) = (words.next()?, words.next()?, words.next()?);
        Some(Entry { glibc_minor: glibc.parse().ok()?, name: name.to_owned() })
    };
    list.lines().filter_map(entry).collect()
}

fn check_names(wheel: &str, entries: &[Entry]) -> Result<()> {
    let has = |end: &str| entries.iter().any(|entry| entry.name.ends_with(end));
    for wanted in CONTENTS {
        ensure!(has(wanted), "{wheel} lacks {wanted}");
    }
    ensure!(has(".so"), "{wheel} lacks the native module");
    // What auditwheel vendors, it puts there.
    let vendored = entries.iter().find(|entry| entry.name.contains(".libs/"));
    ensure!(
        vendored.is_none(),
        "{wheel} contains a library of this system: {}",
        vendored.map_or("", |entry| &entry.name)
    );
    Ok(())
}

/// The minor version of the C library that the tag of a wheel promises.
fn glibc_of_tag(wheel: &str) -> Option<u32> {
    let tags = wheel.strip_suffix(".whl")?.rsplit('-').next()?;
    let minor = |tag: &str| -> Option<u32> {
        if tag.starts_with("manylinux2014") {
            return Some(17);
        }
        tag.strip_prefix("manylinux_2_")?.split('_').next()?.parse().ok()
    };
    tags.split('.').filter_map(minor).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_c_library_of_a_tag_counts() {
        let of = |tag: &str| glibc_of_tag(&format!("snowskin-0.1.0-cp311-abi3-{tag}.whl"));
        assert_eq!(of("manylinux_2_34_x86_64"), Some(34));
        assert_eq!(of("manylinux_2_17_x86_64.manylinux2014_x86_64"), Some(17));
        assert_eq!(of("linux_x86_64"), None);
    }

    #[test]
    fn a_wheel_that_lacks_something_or_has_too_much_is_found() {
        let entry = |name: &str| Entry { glibc_minor: 0, name: name.to_owned() };
        let mut all: Vec<Entry> = CONTENTS.iter().map(|name| entry(name)).collect();
        all.push(entry("snowskin/_native.abi3.so"));
        assert!(check_names("w", &all).is_ok());
        all.push(entry("snowskin.libs/libssl.so"));
        assert!(check_names("w", &all).is_err_and(|error| error.to_string().contains("libssl")));
        let some = [entry("snowskin/__init__.py")];
        assert!(check_names("w", &some).is_err_and(|error| error.to_string().contains("lacks")));
    }

    #[test]
    fn a_list_is_read_line_by_line() {
        let entries = entries("12 0 a/b.py\nx\n7 34 c d.so\n");
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[1].glibc_minor, entries[1].name.as_str()), (34, "c d.so"));
    }
}
