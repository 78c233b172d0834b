//! Objects of a directory in a bucket, step by step, in a store in memory: what a former owner can still do,
//! what survives a crash, and what counts afterwards.

use std::collections::BTreeSet;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use store_core::disk::format::{Extent, Footer, Lists, Marks, Stream};

use super::*;
use crate::disk::driver::{Destination, DriverError, IoWork, Part};
use crate::disk::survey::Damage;
use crate::disk::sys::AlignedBuffer;

const EXTENT: u32 = 1 << 20;
const CLUSTER: &str = "s3://kv-cache/p/default";

struct Store {
    objects: Arc<dyn ObjectStore>,
    packs: PackBucket,
}

impl Store {
    /// A directory with a superblock that reserves 65 sequences, and lists a slot as bad.
    fn new(bad: Option<u32>) -> Self {
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let cluster = BucketDirectory::of(Arc::clone(&objects), Path::new(CLUSTER)).unwrap();
        let packs = PackBucket::create_in(&cluster, 64 << 20, Some(EXTENT), "a").unwrap();
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
        sync(&packs).unwrap();
        Self { objects, packs }
    }

    fn directory(&self) -> BucketDirectory {
        BucketDirectory::of(Arc::clone(&self.objects), self.packs.path()).unwrap()
    }

    fn open(&self) -> PackBucket {
        PackBucket::open_in(self.directory()).unwrap()
    }

    fn take(&self, node: &str) -> PackBucket {
        let mut packs = self.open();
        packs.take(node).unwrap();
        packs
    }

    /// Names of objects of extents; of a part, without its token.
    fn names(&self) -> BTreeSet<String> {
        let objects = self.directory().list().unwrap().objects;
        let short = |name: String| match Name::parse(&name)? {
            Name::Part(part) => Some(name.replace(&part.token, "T")),
            _ => Some(name),
        };
        objects.into_iter().filter_map(|(name, _)| short(name)).collect()
    }

    fn extent(&self, slot: u32, sequence: u64) -> Extent {
        Extent { disk: *self.packs.uuid(), lineage: 1, slot, sequence, stream: Stream::Trial }
    }

    fn header(&self, slot: u32, sequence: u64) -> Vec<u8> {
        BatchHeader::encode(&self.extent(slot, sequence), 0, 0, &Marks::default(), &Lists::new())
    }

    fn begin(&self, packs: &PackBucket, slot: u32, sequence: u64) -> Result<u32, DriverError> {
        write(packs, packs.geometry().extent_at(slot), self.header(slot, sequence))
    }

    fn close(&self, packs: &PackBucket, slot: u32, sequence: u64) -> Result<u32, DriverError> {
        let extent = self.extent(slot, sequence);
        let footer = Footer::encode(&extent, PAGE_BYTES, &Marks::default(), &Lists::new());
        write(packs, packs.geometry().extent_at(slot + 1) - footer.len() as u64, footer)
    }
}

fn carry_out(packs: &PackBucket, offset: u64, work: IoWork) -> Completion {
    let io = Io { op: 1, offset, work };
    packs.accept(&io);
    packs.carry_out(io)
}

fn write(packs: &PackBucket, offset: u64, bytes: Vec<u8>) -> Result<u32, DriverError> {
    carry_out(packs, offset, IoWork::Write(vec![Part::Bytes(bytes.into(), 0)])).result
}

fn sync(packs: &PackBucket) -> Result<u32, DriverError> {
    carry_out(packs, 0, IoWork::Sync).result
}

fn wipe(packs: &PackBucket, slot: u32) -> Result<u32, DriverError> {
    let work = IoWork::Write(vec![Part::Zeros(PAGE_BYTES)]);
    carry_out(packs, packs.geometry().extent_at(slot), work).result
}

fn read(packs: &PackBucket, offset: u64, bytes: u32) -> Vec<u8> {
    let buffer = AlignedBuffer::new(bytes as usize);
    let done = carry_out(packs, offset, IoWork::Read(Destination::Buffer(buffer)));
    assert_eq!(done.result, Ok(bytes));
    done.data.unwrap().to_vec()
}

fn set<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.into_iter().map(str::to_owned).collect()
}

const PAGE: u64 = PAGE_BYTES as u64;

#[test]
fn an_extent_is_in_parts_then_a_pack_then_dead_and_goes_when_its_slot_is_used_again() {
    let store = Store::new(None);
    let (packs, at) = (&store.packs, store.packs.geometry().extent_at(3));
    store.begin(packs, 3, 7).unwrap();
    assert_eq!(store.names(), set([]), "nothing is promised before a sync");
    sync(packs).unwrap();
    assert_eq!(store.names(), set(["0000000000000007.000000-0000000000-T.part"]));
    sync(packs).unwrap();
    assert_eq!(store.names().len(), 1, "nothing was written since");
    assert_eq!(read(packs, at, 2 * PAGE_BYTES)[..4_096], store.header(3, 7));
    store.close(packs, 3, 7).unwrap();
    assert_eq!(store.names(), set(["0000000000000007.pack"]));
    assert!(packs.slots.spool.has_room(), "its memory is free");
    let bytes =
        store.directory().list().unwrap().objects.iter().find(|(name, _)| name.ends_with("pack")).unwrap().1;
    assert_eq!(bytes, 2 * PAGE, "without a hole");
    // The core finds all of it where a disk would have it.
    let end = packs.geometry().extent_at(4);
    let tail = read(packs, end - PAGE, PAGE_BYTES);
    assert!(Footer::decode(&tail, packs.uuid(), &packs.geometry(), 3).is_some());
    assert_eq!(read(packs, at, PAGE_BYTES), store.header(3, 7));
    assert!(read(packs, at + PAGE, PAGE_BYTES).iter().all(|byte| *byte == 0));
    assert!(write(packs, at + PAGE, vec![1; 512]).is_err(), "a pack does not change");
    wipe(packs, 3).unwrap();
    assert_eq!(store.names(), set(["0000000000000007.dead", "0000000000000007.pack"]));
    assert_eq!(read(packs, at, PAGE_BYTES), store.header(3, 7), "readers have leases");
    assert!(store.open().slots.geometry == packs.geometry());
    store.begin(packs, 3, 9).unwrap();
    sync(packs).unwrap();
    assert_eq!(store.names(), set(["0000000000000009.000000-0000000000-T.part"]));
}

#[test]
fn what_was_synced_of_an_open_extent_survives_its_owner_and_what_is_dead_does_not() {
    let store = Store::new(None);
    let (first, at) = (&store.packs, store.packs.geometry().extent_at(0));
    store.begin(first, 0, 1).unwrap();
    write(first, at + PAGE, vec![1; 4_096]).unwrap();
    sync(first).unwrap();
    // Batches may be written in another order than they lie.
    write(first, at + 3 * PAGE, vec![3; 4_096]).unwrap();
    sync(first).unwrap();
    write(first, at + 2 * PAGE, vec![2; 4_096]).unwrap();
    write(first, at + 3 * PAGE, vec![4; 4_096]).unwrap();
    sync(first).unwrap();
    write(first, at + 4 * PAGE, vec![5; 4_096]).unwrap();
    store.begin(first, 1, 2).unwrap();
    store.close(first, 1, 2).unwrap();
    wipe(first, 1).unwrap();

    let second = store.take("b");
    assert_eq!(store.names(), set(["0000000000000001.000000-0000000000-T.part"]), "in one part of its own");
    assert_eq!(read_owner(&store.directory()).unwrap().0.before, [""; 0]);
    let bytes = read(&second, at, 5 * PAGE_BYTES);
    assert_eq!(bytes[..4_096], store.header(0, 1));
    let of = |page: usize| bytes[page * 4_096];
    assert_eq!([of(1), of(2), of(3), of(4)], [1, 2, 4, 0]);
    // It can be closed now.
    store.close(&second, 0, 1).unwrap();
    assert_eq!(store.names(), set(["0000000000000001.pack"]));
    // The taker ended in the middle: what it had not put anew counts still.
    store.begin(&second, 2, 70).unwrap();
    sync(&second).unwrap();
    let mut third = store.open();
    let (mut owner, version) = third.owner.clone();
    owner.before.push(std::mem::replace(&mut owner.token, "c".repeat(32)));
    store.directory().put(OWNER, owner.text().into_bytes(), &Put::Over(version)).unwrap();
    assert!(matches!(third.take("d"), Err(DiskError::Owned { .. })), "another one was faster");
    let fourth = store.take("e");
    assert_eq!(read(&fourth, first.geometry().extent_at(2), PAGE_BYTES), store.header(2, 70));
}

#[test]
fn a_former_owner_changes_nothing_any_more() {
    let mut store = Store::new(None);
    let first = &store.packs;
    store.begin(first, 0, 1).unwrap();
    store.begin(first, 1, 2).unwrap();
    store.close(first, 1, 2).unwrap();
    sync(first).unwrap();
    let second = store.take("b");
    assert_eq!(read_owner(&store.directory()).unwrap().0.node, "b");
    let names = store.names();
    let superblock = store.directory().read_all(SUPERBLOCK, 9_000).unwrap();
    store.begin(first, 2, 3).unwrap();
    assert!(sync(first).is_err(), "a part");
    assert!(store.close(first, 0, 1).is_err(), "a pack");
    assert!(wipe(first, 1).is_err(), "a mark");
    write(first, 0, vec![9; 4_096]).unwrap();
    assert!(sync(first).is_err(), "the superblock");
    assert_eq!(store.names(), names);
    assert_eq!(store.directory().read_all(SUPERBLOCK, 9_000).unwrap(), superblock);

    // Requests that were under way come late, with a token that was right when it was read. The superblock
    // has another version:
    let token = first.slots.token.clone().unwrap();
    store.packs.slots.token.clone_from(&second.slots.token);
    assert_eq!(store.packs.slots.put_superblock(), Err(BucketFault::Lost));
    assert_eq!(store.directory().read_all(SUPERBLOCK, 9_000).unwrap(), superblock);
    // a part of an open extent is not one of the owner's;
    let part = PartName { sequence: 1, serial: 9, from: PAGE_BYTES, token };
    store.directory().put(&part.text(), vec![9; 4_096], &Put::Always).unwrap();
    // the pack of an open extent is replaced, because its owner closes it before it announces anything;
    store.directory().put(&pack_name(1), vec![9; 4_096], &Put::New).unwrap();
    store.close(&second, 0, 1).unwrap();
    let pack = store.directory().read(&pack_name(1), 0..PAGE).unwrap();
    assert_eq!(pack.as_ref(), store.header(0, 1));
    // and no owner has used the sequence of a new one, or ever will.
    store.directory().put(&pack_name(3), store.header(2, 3), &Put::New).unwrap();
    drop(second);
    let third = store.take("c");
    assert_eq!(store.names(), set(["0000000000000001.pack", "0000000000000002.pack"]));
    assert!(third.refused().is_empty());
}

#[test]
fn what_is_no_pack_is_refused_by_name_and_left_and_what_was_cut_is_kept_as_far_as_it_goes() {
    let store = Store::new(None);
    let first = &store.packs;
    for (slot, sequence) in [(0, 1), (1, 2)] {
        store.begin(first, slot, sequence).unwrap();
        write(first, first.geometry().extent_at(slot) + PAGE, vec![7; 4_096]).unwrap();
        store.close(first, slot, sequence).unwrap();
    }
    let directory = store.directory();
    let (whole, _) = directory.read_all(&pack_name(1), 1 << 20).unwrap();
    directory.put(&pack_name(2), store.header(1, 2), &Put::Always).unwrap();
    directory.put(&pack_name(64), vec![7; 10_000], &Put::New).unwrap();
    directory.put(&pack_name(63), whole, &Put::New).unwrap();
    directory.put("notes.txt", b"mine".to_vec(), &Put::New).unwrap();
    // The first owner has used all of its sequences, as far as it is known.
    let second = store.take("b");
    assert_eq!(read(&second, first.geometry().extent_at(1), PAGE_BYTES), store.header(1, 2));
    let why: Vec<_> = second.refused().iter().map(|refused| refused.why).collect();
    assert_eq!(why, [PackFault::Renamed, PackFault::Foreign]);
    assert!(second.refused()[1].to_string().contains("0000000000000064.pack: not used"));
    assert!(directory.read_all("notes.txt", 9).is_ok());
    store.close(&second, 1, 2).unwrap();
    let third = store.take("c");
    assert_eq!(third.refused().len(), 2);
    assert!(store.names().contains("0000000000000064.pack"));
}

#[test]
fn slots_in_which_a_write_failed_are_used_again_without_their_content() {
    let store = Store::new(Some(5));
    store.begin(&store.packs, 5, 4).unwrap();
    store.begin(&store.packs, 6, 8).unwrap();
    sync(&store.packs).unwrap();
    let next = store.take("a");
    let pages = next.slots.superblock.lock().unwrap().bytes.clone();
    let (superblock, valid) = newest_superblock(&pages[..2 * PAGE as usize], next.path()).unwrap();
    assert!(superblock.bad.is_empty() && superblock.sequences_end == 65, "{superblock:?}");
    assert_eq!(valid, 2);
    assert_eq!(store.names(), set(["0000000000000008.000000-0000000000-T.part"]));
}

#[test]
fn a_pack_that_is_gone_is_told_from_one_that_cannot_be_read_now() {
    let store = Store::new(None);
    let packs = &store.packs;
    store.begin(packs, 0, 1).unwrap();
    store.close(packs, 0, 1).unwrap();
    let gone = packs.gone();
    assert!(!gone.has(1));
    store.directory().delete(&pack_name(1)).unwrap();
    let buffer = IoWork::Read(Destination::Buffer(AlignedBuffer::new(512)));
    assert!(carry_out(packs, packs.geometry().extent_at(0), buffer).result.is_err());
    assert!(gone.has(1) && !gone.has(2));
}

fn opened(store: &Store) -> PackBucketReader {
    PackBucketReader::open_in(store.directory(), &mut |_, _| ControlFlow::Continue(())).unwrap()
}

#[test]
fn a_tool_changes_nothing_and_forgives_what_the_owner_gives_up_meanwhile_and_nothing_else() {
    let store = Store::new(None);
    let (packs, directory) = (&store.packs, store.directory());
    for (slot, sequence) in [(0, 1), (1, 2), (2, 3)] {
        store.begin(packs, slot, sequence).unwrap();
        store.close(packs, slot, sequence).unwrap();
    }
    store.begin(packs, 3, 4).unwrap();
    sync(packs).unwrap();
    // What a former owner has put does not count, and is left.
    let late = PartName { sequence: 4, serial: 9, from: 0, token: "f".repeat(32) };
    directory.put(&late.text(), vec![9; 4_096], &Put::Always).unwrap();
    wipe(packs, 2).unwrap();
    let before = directory.list().unwrap().objects;
    let reader = opened(&store);
    let survey = crate::disk::inspect(&reader).unwrap();
    assert_eq!((survey.closed, survey.open, survey.damage.as_slice()), (2, 1, &[][..]));
    assert!(!reader.settle(&mut Vec::new()).unwrap());
    assert_eq!(directory.list().unwrap().objects, before);

    // Two packs are damaged; of these, one is given up while the tool reads.
    for sequence in [1, 2] {
        let name = pack_name(sequence);
        let (mut bytes, _) = directory.read_all(&name, 1 << 20).unwrap();
        bytes[20] ^= 1;
        directory.put(&name, bytes, &Put::Always).unwrap();
    }
    let verified = || crate::disk::verify(&reader, |_| ControlFlow::Continue(())).unwrap().survey.damage;
    let header = |slot| Damage::Header { slot, offset: 0 };
    assert_eq!(verified(), [header(0), header(1)]);
    wipe(packs, 0).unwrap();
    directory.delete(&pack_name(1)).unwrap();
    let mut damage = verified();
    assert!(matches!(damage[0], Damage::Unreadable { .. }), "{damage:?}");
    assert!(reader.settle(&mut damage).unwrap());
    assert_eq!(damage, [header(1)]);
    // The open extent is closed meanwhile, and so are those that follow.
    store.close(packs, 3, 4).unwrap();
    let mut damage = vec![Damage::Missing { slot: 3, synced_to: 9 }, Damage::Superblock];
    assert!(reader.settle(&mut damage).unwrap());
    assert_eq!(damage, [Damage::Superblock]);
}

#[test]
fn a_tool_can_be_ended_while_it_opens_a_directory_and_finds_directories_by_their_names() {
    let store = Store::new(None);
    store.begin(&store.packs, 0, 1).unwrap();
    store.close(&store.packs, 0, 1).unwrap();
    let ended = PackBucketReader::open_in(store.directory(), &mut |_, _| ControlFlow::Break(()));
    assert!(matches!(ended, Err(DiskError::Bucket { fault: BucketFault::Closed, .. })), "{ended:?}");
    let path = store.packs.path();
    assert_eq!(PackBucketReader::find(path).unwrap(), [path], "without a request");
}

#[test]
fn many_are_done_at_a_time_in_order_and_the_first_fault_ends_them() {
    let all: Vec<u64> = (0..100).collect();
    let doubled = each(&all, |it| Ok(2 * it), |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(doubled, (0..200).step_by(2).collect::<Vec<u64>>());
    let fault = |it: &u64| if *it == 50 { Err(BucketFault::Slow) } else { Ok(*it) };
    assert_eq!(each(&all, fault, |_| ControlFlow::Continue(())), Err(BucketFault::Slow));
    let ended = each(
        &all,
        |it| Ok(*it),
        |done| if done < 10 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) },
    );
    assert_eq!(ended, Err(BucketFault::Closed));
    assert_eq!(each(&[], |it: &u64| Ok(*it), |_| ControlFlow::Continue(())), Ok(vec![]));
}
