//! Files that are not disks, that are in use, or that have no room.

use std::path::Path;

use store_client::disk::{Caching, DiskError, DiskFile, FormatOptions, Sharing};

use crate::bench_disk::{MIB, Owner, PATIENCE, caching, directory, format, open};
use crate::common::{Process, say, wait_for_parent};

fn wanted(bytes: u64) -> FormatOptions {
    FormatOptions { bytes: Some(bytes), ..FormatOptions::default() }
}

/// Has a disk open.
pub(crate) fn be_holder(role: &[String]) {
    let owner = Owner::new(open(Path::new(&role[1])));
    say("open");
    wait_for_parent();
    assert!(owner.disk.close(PATIENCE));
}

/// Formats with a limit on the length of files.
pub(crate) fn be_limited(role: &[String]) {
    let path = Path::new(&role[1]);
    let error = DiskFile::prepare(path, FormatOptions { caching: caching(path), ..wanted(64 * MIB) });
    say(&error.err().map_or("no error".to_owned(), |error| error.to_string()));
    wait_for_parent();
}

#[test]
fn a_disk_is_open_once() {
    let directory = directory();
    let path = directory.path().join("disk");
    assert!(Owner::new(format(&path, 16 * MIB, 1 << 20)).disk.close(PATIENCE));
    let mut holder = Process::start("entry", &["holder", path.to_str().unwrap()]);
    let caching = caching(&path);
    for result in [
        DiskFile::open(&path, caching).err(),
        DiskFile::open_to_read(&path, caching, Sharing::Readers).err(),
        DiskFile::prepare(&path, FormatOptions { force: true, caching, ..wanted(16 * MIB) }).err(),
    ] {
        assert!(matches!(result, Some(DiskError::InUse(_))), "{result:?}");
    }
    let read = DiskFile::open_to_read(&path, caching, Sharing::Anyone).unwrap();
    assert!(read.is_in_use());
    drop(read);
    holder.stop();
    assert!(!DiskFile::open_to_read(&path, caching, Sharing::Anyone).unwrap().is_in_use());
    drop(open(&path));
}

#[test]
fn what_is_not_a_disk_is_not_touched() {
    let directory = directory();
    let path = directory.path().join("letters");
    let caching = caching(&path);
    std::fs::write(&path, "Dear reader,".repeat(1_000)).unwrap();
    let refused = DiskFile::prepare(&path, FormatOptions { caching, ..wanted(16 * MIB) });
    assert!(matches!(refused, Err(DiskError::Foreign(_))), "{refused:?}");
    assert!(matches!(DiskFile::open(&path, caching), Err(DiskError::NotADisk(_))));
    assert_eq!(std::fs::read(&path).unwrap(), "Dear reader,".repeat(1_000).as_bytes());
    let forced = FormatOptions { force: true, caching, ..wanted(16 * MIB) };
    assert!(DiskFile::prepare(&path, forced).is_ok());

    let missing = directory.path().join("missing");
    assert!(matches!(DiskFile::open(&missing, caching), Err(DiskError::Missing(_))));
    assert!(matches!(DiskFile::open(directory.path(), caching), Err(DiskError::NotAFile(_))));
    let on_directory = DiskFile::prepare(directory.path(), wanted(16 * MIB));
    assert!(matches!(on_directory, Err(DiskError::NotAFile(_))), "{on_directory:?}");
    assert!(matches!(DiskFile::open(Path::new("/dev/null"), caching), Err(DiskError::NotAFile(_))));
    let sizeless = DiskFile::prepare(&missing, FormatOptions::default());
    assert!(matches!(sizeless, Err(DiskError::NoSize(_))), "{sizeless:?}");
    for bytes in [0, 1, MIB, 8 * MIB] {
        let small = DiskFile::prepare(&missing, wanted(bytes));
        assert!(matches!(small, Err(DiskError::Geometry(_))), "{small:?}");
    }
    let huge = DiskFile::prepare(&missing, FormatOptions { caching, ..wanted(1 << 46) });
    assert!(matches!(huge, Err(DiskError::NoSpace { .. })), "{huge:?}");
    let beyond = DiskFile::prepare(&missing, wanted(u64::MAX));
    assert!(beyond.is_err());
    assert!(!missing.exists(), "what was made is removed again");
}

#[test]
fn a_file_that_was_truncated_or_is_of_another_version_says_so() {
    let directory = directory();
    let path = directory.path().join("disk");
    assert!(Owner::new(format(&path, 16 * MIB, 1 << 20)).disk.close(PATIENCE));
    let caching = caching(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(10 * MIB).unwrap();
    let short = DiskFile::open(&path, caching);
    assert!(matches!(short, Err(DiskError::Truncated { .. })), "{short:?}");
    file.set_len(2_048).unwrap();
    assert!(matches!(DiskFile::open(&path, caching), Err(DiskError::NotADisk(_))));

    let other = directory.path().join("other");
    assert!(Owner::new(format(&other, 16 * MIB, 1 << 20)).disk.close(PATIENCE));
    let file = std::fs::OpenOptions::new().write(true).open(&other).unwrap();
    for page in [0, 4_096] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[9], page + 8).unwrap();
    }
    let later = DiskFile::open(&other, caching);
    assert!(matches!(later, Err(DiskError::Version { version: 9, .. })), "{later:?}");
}

#[test]
fn without_room_for_all_of_it_nothing_is_left() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut limited = Process::start_limited("entry", &["limited", path.to_str().unwrap()], 32 * MIB);
    assert!(limited.said().contains("has no room for 67108864 bytes"), "{}", limited.said());
    limited.stop();
    assert!(!path.exists());
}

#[test]
fn a_file_system_without_direct_io_is_refused_unless_the_cache_is_asked_for() {
    // /proc has regular files and no direct I/O.
    let refused = DiskFile::open_to_read(Path::new("/proc/self/status"), Caching::Direct, Sharing::Anyone);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("direct I/O") || error.contains("cannot"), "{error}");
}
