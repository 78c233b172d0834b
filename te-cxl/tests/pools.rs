//! Making, opening and inspecting pools, and what is refused.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::{MIB, PoolFile};
use te_cxl::Coherence::Flush;
use te_cxl::pool::format::Superblock;
use te_cxl::{FormatOptions, Pool, PoolError};

/// A memory file, by the path that this process has for it.
fn file(bytes: u64) -> (File, PathBuf) {
    let fd = nix::sys::memfd::memfd_create("pool", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(bytes).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)).into();
    (file, path)
}

fn said(error: PoolError) -> String {
    error.to_string()
}

#[test]
fn a_pool_that_was_made_can_be_inspected_and_opened() {
    let (_file, path) = file(64 * MIB);
    let options = FormatOptions { extent_bytes: 4 * MIB, peers: 3, ..FormatOptions::default() };
    let block = Pool::format(&path, options).unwrap();
    assert_eq!((block.extents, block.peers, block.size), (15, 3, 64 * MIB));
    let found = Pool::inspect(&path).unwrap();
    assert_eq!(found.superblock, block);
    assert_eq!((found.owners.len(), found.peers), (15, vec![None; 3]));
    assert!(found.owners.iter().all(|owner| owner.is_some_and(|owner| !owner.owned)));
    let pool = Pool::open(&path, Flush, Some(block.uuid)).unwrap();
    assert_eq!(*pool.superblock(), block);
    assert!(pool.is_writable() && pool.bad_granules().is_empty());
    assert!(!Pool::open_to_read(&path, Flush, None).unwrap().is_writable());
}

#[test]
fn an_inspection_shows_owners_and_peers() {
    let file = PoolFile::new(16 * MIB, 4);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.fd));
    let (pool, transport) = file.transport(Flush, 2, 0x77);
    pool.claim(file.claim(1, 2, 0x99)).unwrap();
    let found = Pool::inspect(Path::new(&path)).unwrap();
    let owners: Vec<u32> =
        found.owners.iter().flatten().filter(|owner| owner.owned).map(|owner| owner.extent).collect();
    assert_eq!(owners, [1, 2]);
    assert!(found.owners.iter().flatten().all(|owner| !owner.owned || owner.incarnation == 0x99));
    let peers: Vec<u32> =
        found.peers.iter().flatten().filter(|peer| peer.present).map(|peer| peer.slot).collect();
    assert_eq!(peers, [2]);
    assert_eq!(found.peers[2].unwrap().identity, 0x77);
    drop(transport);
    assert!(!Pool::inspect(Path::new(&path)).unwrap().peers[2].unwrap().present);
}

#[test]
fn a_pool_is_not_overwritten_unless_that_is_forced() {
    let (_file, path) = file(16 * MIB);
    let first = Pool::format(&path, FormatOptions::default()).unwrap();
    let refused = Pool::format(&path, FormatOptions::default()).unwrap_err();
    assert!(matches!(refused, PoolError::Formatted { uuid } if uuid == first.uuid));
    assert!(said(refused).contains("name another device, or force it"));
    let forced = FormatOptions { force: true, ..FormatOptions::default() };
    assert_ne!(Pool::format(&path, forced).unwrap().uuid, first.uuid);
}

#[test]
fn what_is_not_a_pool_is_refused_with_the_reason() {
    let (pool, path) = file(16 * MIB);
    let open = || said(Pool::open(&path, Flush, None).unwrap_err());
    let inspect = || said(Pool::inspect(&path).unwrap_err());
    for error in [open(), inspect()] {
        assert!(error.contains("there is no pool: make one"), "{error}");
    }
    let block = Pool::format(&path, FormatOptions::default()).unwrap();
    let good = block.write();
    // Another version, a wrong checksum, values that no pool has.
    pool.write_all_at(&[2], 8).unwrap();
    assert!(open().contains("layout 2") && inspect().contains("layout 2"));
    pool.write_all_at(&good, 0).unwrap();
    pool.write_all_at(&[good[33] ^ 1], 33).unwrap();
    assert!(open().contains("checksum of the superblock is wrong"));
    let absurd = Superblock { extents: 3, ..block };
    pool.write_all_at(&absurd.write(), 0).unwrap();
    assert!(open().contains("values that no pool has"));
    pool.write_all_at(&good, 0).unwrap();
    let foreign = Pool::open(&path, Flush, Some([9; 16])).unwrap_err();
    assert!(matches!(foreign, PoolError::Foreign { .. }));
    assert!(said(foreign).contains("not 09090909-0909-0909-0909-090909090909"));
    assert!(Pool::open(&path, Flush, Some(block.uuid)).is_ok());
    // A file that was cut since.
    pool.set_len(16 * MIB - 1).unwrap();
    assert!(open().contains("16777215 bytes, and 16777216 are needed"));
    for bytes in [100, 0] {
        pool.set_len(bytes).unwrap();
        assert!(open().contains("4096 are needed"));
    }
}

#[test]
fn a_pool_needs_room_and_settings_in_range() {
    for bytes in [0, 1, 4096, 2 * MIB, 4 * MIB - 1] {
        let (_file, path) = file(bytes);
        let error = Pool::format(&path, FormatOptions::default()).unwrap_err();
        assert!(matches!(error, PoolError::TooSmall { needed: 4_194_304, .. }), "{bytes}: {error:?}");
    }
    let (_file, path) = file(16 * MIB);
    for (extent_bytes, peers, why) in [
        (2 * MIB, 0, "peers is 0"),
        (2 * MIB, 1025, "from 1 to 1024"),
        (MIB, 1, "a multiple of 2097152"),
        (0, 1, "extent_bytes is 0"),
        (u64::MAX, 1, "extent_bytes is"),
        (32 * MIB, 1, "are needed"),
    ] {
        let error = Pool::format(&path, FormatOptions { extent_bytes, peers, force: false }).unwrap_err();
        assert!(said(error).contains(why), "{why}");
    }
    assert!(matches!(Pool::inspect(&path), Err(PoolError::NotAPool)), "nothing was written");
}

#[test]
fn what_cannot_be_mapped_is_refused() {
    for path in ["/dev/null", "/dev/zero", "/tmp"] {
        let error = Pool::inspect(Path::new(path)).unwrap_err();
        assert!(matches!(error, PoolError::NotMappable), "{path}: {error:?}");
        assert!(said(error).contains("neither a DAX device nor a file"));
    }
    let missing = Pool::open(Path::new("/nonexistent/dax0.0"), Flush, None).unwrap_err();
    assert!(said(missing).contains("could not open the pool"));
}

#[test]
fn a_record_that_is_damaged_is_shown_as_none_and_the_extent_can_be_claimed_again() {
    let (pool, path) = file(16 * MIB);
    Pool::format(&path, FormatOptions::default()).unwrap();
    pool.write_all_at(&[0xFF; 64], 4096).unwrap();
    let found = Pool::inspect(&path).unwrap();
    assert!(found.owners[0].is_none() && found.owners[1].is_some());
    let mapped = Pool::open(&path, Flush, None).unwrap();
    let claim = te_cxl::Claim { first: 0, count: 1, incarnation: 1, epoch: 1, key: [0; 16] };
    mapped.claim(claim).unwrap();
    assert!(Pool::inspect(&path).unwrap().owners[0].unwrap().owned);
    assert!(!format!("{claim:?}").contains("key"), "the key is not printed");
}
