//! Files of a directory of packs, step by step: what a former owner can still do, and what counts afterwards.

use std::collections::BTreeSet;
use std::ffi::OsString;

use store_core::disk::format::{BatchHeader, Extent, Footer, Lists, Marks, Stream};

use super::*;
use crate::disk::driver::{Destination, DriverError, IoWork, Part};

const EXTENT: u32 = 1 << 20;

struct Store {
    root: tempfile::TempDir,
    packs: PackDirectory,
}

impl Store {
    /// A directory with a superblock that reserves 65 sequences, and lists a slot as bad.
    fn new(bad: Option<u32>) -> Self {
        let root = tempfile::tempdir().unwrap();
        let packs = PackDirectory::create(root.path(), 64 << 20, Some(EXTENT), "a").unwrap();
        let superblock = Superblock {
            disk: *packs.uuid(),
            geometry: packs.geometry(),
            serial: 1,
            sequences_end: 65,
            floor: 0,
            written_bytes: 0,
            object_bytes: 0,
            marks: Marks::default(),
            bad: bad.into_iter().collect(),
        };
        write(&packs, u64::from(PAGE_BYTES), superblock.encode()).unwrap();
        Self { root, packs }
    }

    /// Opens the directory as on a file system that carries no locks.
    fn open(&self) -> PackDirectory {
        fs::remove_file(self.packs.path().join("lock")).unwrap();
        PackDirectory::open(self.packs.path()).unwrap()
    }

    fn names(&self) -> BTreeSet<OsString> {
        let is_of_extent = |name: &OsString| names::parse(name.to_str().unwrap()).is_some();
        let entries = fs::read_dir(self.packs.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).filter(is_of_extent).collect()
    }

    fn extent(&self, slot: u32, sequence: u64) -> Extent {
        Extent { disk: *self.packs.uuid(), lineage: 1, slot, sequence, stream: Stream::Trial }
    }

    fn header(&self, slot: u32, sequence: u64) -> Vec<u8> {
        BatchHeader::encode(&self.extent(slot, sequence), 0, 0, &Marks::default(), &Lists::new())
    }

    fn begin(&self, packs: &PackDirectory, slot: u32, sequence: u64) -> Result<u32, DriverError> {
        write(packs, packs.geometry().extent_at(slot), self.header(slot, sequence))
    }

    fn close(&self, packs: &PackDirectory, slot: u32, sequence: u64) -> Result<u32, DriverError> {
        let extent = self.extent(slot, sequence);
        let footer = Footer::encode(&extent, PAGE_BYTES, &Marks::default(), &Lists::new());
        write(packs, packs.geometry().extent_at(slot + 1) - footer.len() as u64, footer)
    }
}

fn carry_out(packs: &PackDirectory, offset: u64, work: IoWork) -> Completion {
    let io = Io { op: 1, offset, work };
    packs.accept(&io);
    packs.carry_out(io)
}

fn write(packs: &PackDirectory, offset: u64, bytes: Vec<u8>) -> Result<u32, DriverError> {
    carry_out(packs, offset, IoWork::Write(vec![Part::Bytes(bytes.into(), 0)])).result
}

fn wipe(packs: &PackDirectory, slot: u32) -> Result<u32, DriverError> {
    let work = IoWork::Write(vec![Part::Zeros(PAGE_BYTES)]);
    carry_out(packs, packs.geometry().extent_at(slot), work).result
}

fn read(packs: &PackDirectory, offset: u64, bytes: u32) -> Vec<u8> {
    let buffer = AlignedBuffer::new(bytes as usize);
    let done = carry_out(packs, offset, IoWork::Read(Destination::Buffer(buffer)));
    assert_eq!(done.result, Ok(bytes));
    done.data.unwrap().to_vec()
}

fn set<const N: usize>(names: [&str; N]) -> BTreeSet<OsString> {
    names.into_iter().map(OsString::from).collect()
}

#[test]
fn an_extent_is_open_then_a_pack_then_dead_and_goes_when_its_slot_is_used_again() {
    let store = Store::new(None);
    let (packs, at) = (&store.packs, store.packs.geometry().extent_at(3));
    store.begin(packs, 3, 7).unwrap();
    assert_eq!(store.names(), set(["0000000000000007.open"]));
    assert_eq!(read(packs, at, 2 * PAGE_BYTES)[..4_096], store.header(3, 7));
    store.close(packs, 3, 7).unwrap();
    assert_eq!(store.names(), set(["0000000000000007.pack"]));
    let bytes = fs::metadata(PackNames::pack(packs.path(), 7)).unwrap().len();
    assert_eq!(bytes, 2 * u64::from(PAGE_BYTES), "without a hole");
    // The core finds all of it where a disk would have it.
    let end = packs.geometry().extent_at(4);
    let tail = read(packs, end - u64::from(PAGE_BYTES), PAGE_BYTES);
    assert!(Footer::decode(&tail, packs.uuid(), &packs.geometry(), 3).is_some());
    assert_eq!(read(packs, at, PAGE_BYTES), store.header(3, 7));
    assert!(read(packs, at + u64::from(PAGE_BYTES), PAGE_BYTES).iter().all(|byte| *byte == 0));
    assert!(write(packs, at + u64::from(PAGE_BYTES), vec![1; 512]).is_err(), "a pack does not change");
    wipe(packs, 3).unwrap();
    assert_eq!(store.names(), set(["0000000000000007.dead"]));
    assert_eq!(read(packs, at, PAGE_BYTES), store.header(3, 7), "readers have leases");
    store.begin(packs, 3, 9).unwrap();
    assert_eq!(store.names(), set(["0000000000000009.open"]));
}

#[test]
fn a_former_owner_changes_nothing_any_more() {
    let store = Store::new(None);
    let first = &store.packs;
    store.begin(first, 0, 1).unwrap();
    store.begin(first, 1, 2).unwrap();
    store.close(first, 1, 2).unwrap();
    let mut second = store.open();
    second.take("b").unwrap();
    assert_eq!(PackDirectory::owner_of(first.path()), "b");
    let (names, superblock) = (store.names(), fs::read(first.path().join(SUPERBLOCK)).unwrap());
    assert!(store.begin(first, 2, 3).is_err(), "a new file");
    assert!(store.close(first, 0, 1).is_err(), "a new name");
    assert!(wipe(first, 1).is_err(), "an old name");
    assert!(write(first, 0, vec![9; 4_096]).is_err(), "the superblock");
    // What it had open is not what is there now.
    let at = first.geometry().extent_at(0) + u64::from(PAGE_BYTES);
    write(first, at, vec![9; 4_096]).unwrap();
    assert_eq!((store.names(), fs::read(first.path().join(SUPERBLOCK)).unwrap()), (names, superblock));
    assert!(read(&second, at, PAGE_BYTES).iter().all(|byte| *byte != 9));

    // A file that the first had begun to make comes late: no owner has used its sequence, or ever will.
    fs::write(PackNames::open(first.path(), 3), store.header(2, 3)).unwrap();
    drop(second);
    let mut third = store.open();
    third.take("c").unwrap();
    assert_eq!(store.names(), set(["0000000000000001.open", "0000000000000002.pack"]));
}

#[test]
fn slots_in_which_a_write_failed_are_used_again_without_their_content() {
    let store = Store::new(Some(5));
    store.begin(&store.packs, 5, 4).unwrap();
    store.begin(&store.packs, 6, 8).unwrap();
    let mut next = store.open();
    next.take("a").unwrap();
    let (superblock, valid) = next.superblocks().unwrap();
    assert!(superblock.bad.is_empty() && superblock.sequences_end == 65, "{superblock:?}");
    assert_eq!(valid, 2);
    assert_eq!(store.names(), set(["0000000000000008.open"]));
    assert!(PackDirectory::list(store.root.path()).len() == 1 && next.room().is_there());
}

/// A name that no owner has made says nothing about what the owners have used.
#[test]
fn a_foreign_file_with_the_last_of_all_names_makes_nothing_void_and_hides_nothing() {
    let store = Store::new(None);
    let first = &store.packs;
    store.begin(first, 0, 1).unwrap();
    store.close(first, 0, 1).unwrap();
    fs::write(PackNames::pack(first.path(), u64::MAX), vec![7; 10_000]).unwrap();
    let mut second = store.open();
    second.take("b").unwrap();
    assert_eq!(second.refused().len(), 1);
    // Sequences that were reserved and not used are void, as without that file.
    let owner = Owner::read(first.path()).unwrap();
    assert_eq!((owner.void.len(), owner.void.first()), (1, Some(&(2..65))));
    fs::write(PackNames::open(first.path(), 3), store.header(2, 3)).unwrap();
    drop(second);
    let mut third = store.open();
    third.take("c").unwrap();
    assert_eq!(store.names(), set(["0000000000000001.pack", "18446744073709551615.pack"]));
}
