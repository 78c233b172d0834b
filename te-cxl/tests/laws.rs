//! What a pool confirms or refuses: exports, owners, epochs, rights and peers. Every refusal comes before a
//! byte moves.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::os::unix::fs::FileExt;
use std::time::Duration;

use common::{Ends, KEY, MIB, PoolFile, REGION, REMOTE, export, leaked, peek, poke, register, run, slice};
use te_core::{
    Access, Completion, ErrorKind, ExpelMode, Instant, Memory, Op, Outcome, RegionId, RegionOffset,
    RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};
use te_cxl::Coherence::{self, Flush, Hardware};
use te_cxl::pool::format::{Expelled, OwnerRecord, Row, Use, write_expelled};
use te_cxl::{Claim, Config, CxlTransport, Export, Mount, Pool, PoolError, Seat};

const OTHER: RemoteRegionId = RemoteRegionId::new(1, 1);
const WRITTEN: u8 = 0x11;

fn forged(blob: &[u8], forge: impl Fn(&mut Export)) -> Vec<u8> {
    let mut export = Export::parse(blob).unwrap();
    forge(&mut export);
    let mut out = vec![0; Export::BYTES];
    export.write(&mut out).unwrap();
    out
}

/// Checks that neither end's bytes have changed.
fn untouched(ends: &Ends) {
    assert_eq!(peek(ends.there, 0, 3 * MIB as usize), vec![0; 3 * MIB as usize], "the region");
    assert_eq!(peek(ends.here, 0, 3 * MIB as usize), vec![WRITTEN; 3 * MIB as usize], "the private buffer");
}

fn attach_kind(ends: &mut Ends, blob: &[u8]) -> Option<ErrorKind> {
    let attached = ends.peer.attach(OTHER, blob).err().map(|error| error.kind);
    if attached.is_none() {
        ends.peer.detach(OTHER).unwrap();
    }
    attached
}

#[test]
fn what_the_pool_does_not_confirm_is_not_attached() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        let blob = export(&ends.owner, REGION);
        assert_eq!(attach_kind(&mut ends, &blob), None);
        let mut refused = |forge: &dyn Fn(&mut Export)| attach_kind(&mut ends, &forged(&blob, forge));
        assert_eq!(refused(&|export| export.uuid[15] ^= 1), Some(ErrorKind::Unreachable), "foreign pool");
        assert_eq!(refused(&|export| export.key[0] ^= 1), Some(ErrorKind::AccessDenied), "forged key");
        assert_eq!(refused(&|export| export.epoch -= 1), Some(ErrorKind::Stale), "old epoch");
        assert_eq!(refused(&|export| export.epoch += 1), Some(ErrorKind::Stale), "an epoch that was not yet");
        assert_eq!(refused(&|export| export.incarnation ^= 1), Some(ErrorKind::Stale), "other owner");
        assert_eq!(refused(&|export| export.number ^= 1), Some(ErrorKind::Stale), "other region");
        assert_eq!(refused(&|export| export.row += 1), Some(ErrorKind::Stale), "other row");
        assert_eq!(
            refused(&|export| export.base += 64),
            Some(ErrorKind::InvalidArgument),
            "beyond its extents"
        );
        let shorter = |export: &mut Export| {
            export.base += 64;
            export.len -= 64;
        };
        assert_eq!(refused(&shorter), Some(ErrorKind::AccessDenied), "other range");
        assert_eq!(refused(&|export| export.len += MIB), Some(ErrorKind::InvalidArgument), "longer");
        let longer = |export: &mut Export| {
            export.len += 2 * MIB;
            export.count += 1;
        };
        assert_eq!(refused(&longer), Some(ErrorKind::Stale), "into an extent without an owner");
        assert_eq!(refused(&|export| export.rights = Access::REMOTE_READ), Some(ErrorKind::AccessDenied));
        assert_eq!(refused(&|export| export.first = 99), Some(ErrorKind::InvalidArgument), "no such extent");
        let other = if coherence == Flush { Hardware } else { Flush };
        assert_eq!(refused(&|export| export.coherence = other), Some(ErrorKind::Unreachable));
        untouched(&ends);
    }
}

#[test]
fn a_range_outside_of_the_region_is_refused_before_a_byte_moves() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        let len = ends.there.len() as u64;
        for op in [Op::Read, Op::Write] {
            for offset in [len, len - 64, len + 64, u64::MAX - 63, 1 << 63] {
                let beyond = Slice { remote: RemoteOffset::new(REMOTE, offset), ..slice(1, op, 0, 128) };
                assert_eq!(ends.peer.submit(&[beyond]).unwrap_err().kind, ErrorKind::OutOfRange, "{offset}");
            }
            let kinds = [(0, ErrorKind::InvalidArgument), ((2 << 20) + 64, ErrorKind::InvalidArgument)];
            for (bytes, kind) in kinds {
                assert_eq!(ends.peer.submit(&[slice(1, op, 0, bytes)]).unwrap_err().kind, kind);
            }
        }
        untouched(&ends);
    }
}

#[test]
fn extents_that_another_owner_was_given_are_out_of_reach() {
    for (coherence, incarnation, kind) in [
        (Flush, 8, ErrorKind::PeerRestarted),
        (Hardware, 8, ErrorKind::PeerRestarted),
        (Flush, 7, ErrorKind::Stale),
    ] {
        let mut ends = Ends::new(coherence);
        let old = export(&ends.owner, REGION);
        // The master gives the second extent alone to another process.
        let (pool, _next) = ends.file.transport(coherence, 2, 0x3333);
        pool.claim(ends.file.claim(1, 1, incarnation)).unwrap();
        for op in [Op::Read, Op::Write] {
            for offset in [2 * MIB, 2 * MIB - 64] {
                let end = run(&mut ends.peer, slice(1, op, offset, 128));
                assert_eq!((end.result.unwrap_err().kind, end.outcome), (kind, Outcome::NotApplied));
            }
        }
        untouched(&ends);
        assert_eq!(attach_kind(&mut ends, &old), Some(kind), "the whole region is not the owner's any more");
        // The first extent still is.
        assert_eq!(run(&mut ends.peer, slice(2, Op::Write, 0, 64)).result, Ok(()));
    }
}

#[test]
fn slices_of_one_poll_are_checked_for_each_extent_that_they_touch() {
    let mut ends = Ends::new(Flush);
    let (pool, _next) = ends.file.transport(Flush, 2, 0x3333);
    pool.claim(ends.file.claim(1, 1, 8)).unwrap();
    let slices = [slice(1, Op::Write, 0, 64), slice(2, Op::Write, 2 * MIB, 64), slice(3, Op::Write, 64, 64)];
    assert_eq!(ends.peer.submit(&slices), Ok(3));
    let mut out = [Completion::applied(Token(0)); 4];
    assert_eq!(ends.peer.poll(Instant::ZERO, &mut out), 3);
    let results = [0, 1, 2].map(|at| out[at].result.map_err(|error| error.kind));
    assert_eq!(results, [Ok(()), Err(ErrorKind::PeerRestarted), Ok(())]);
    assert_eq!(peek(ends.there, 2 * MIB, 64), [0; 64]);
    assert_eq!(peek(ends.there, 0, 128), [WRITTEN; 128]);
}

#[test]
fn an_extent_is_claimed_by_the_latest_epoch_alone() {
    let file = PoolFile::new(16 * MIB, 4);
    let (first, second) = (file.open(Flush), file.open(Flush));
    let claim = |epoch, incarnation| Claim { first: 0, count: 2, incarnation, epoch, key: KEY };
    first.claim(claim(5, 1)).unwrap();
    // The same claim again, also by a mapping that does not know it.
    first.claim(claim(5, 1)).unwrap();
    file.open(Flush).claim(claim(5, 1)).unwrap();
    for (epoch, incarnation) in [(5, 2), (4, 1), (4, 2), (0, 1)] {
        let refused = second.claim(claim(epoch, incarnation));
        assert!(matches!(refused, Err(PoolError::Stale { found: 5, .. })), "{refused:?}");
    }
    let other_key = Claim { key: [1; 16], ..claim(5, 1) };
    assert!(matches!(second.claim(other_key), Err(PoolError::Stale { .. })));
    second.claim(claim(6, 2)).unwrap();
    assert!(matches!(file.open(Flush).claim(claim(5, 1)), Err(PoolError::Stale { found: 6, .. })));
    for (first, count) in [(0, 0), (0, 99), (7, 1), (u32::MAX, 1), (0, u32::MAX)] {
        let refused = second.claim(Claim { first, count, ..claim(9, 2) });
        assert!(matches!(refused, Err(PoolError::NoSuch { .. })), "{first}+{count}: {refused:?}");
    }
    second.release(0, 2, 6).unwrap();
    assert!(matches!(second.release(0, 2, 6), Err(PoolError::NotClaimed { .. })));
    assert!(matches!(first.claim(claim(6, 3)), Err(PoolError::Stale { .. })), "an epoch is given once");
    first.claim(claim(7, 3)).unwrap();
}

#[test]
fn a_released_extent_is_out_of_reach() {
    let mut ends = Ends::new(Flush);
    let blob = export(&ends.owner, REGION);
    let epoch = Export::parse(&blob).unwrap().epoch;
    ends.owner_pool.release(0, 2, epoch).unwrap();
    assert_eq!(run(&mut ends.peer, slice(1, Op::Write, 0, 64)).result.unwrap_err().kind, ErrorKind::Stale);
    assert_eq!(attach_kind(&mut ends, &blob), Some(ErrorKind::Stale));
    untouched(&ends);
    // What is registered now cannot be exported.
    let id = RegionId::new(3, 1);
    register(&mut ends.owner, id, ends.there, Access::all());
    assert_eq!(ends.owner.export(id, &mut [0; 256]).unwrap_err().kind, ErrorKind::Unsupported);
    ends.owner.deregister(id).unwrap();
}

#[test]
fn an_owner_that_has_lost_its_extents_does_not_write_their_pages() {
    let mut ends = Ends::new(Flush);
    let old_epoch = Export::parse(&export(&ends.owner, REGION)).unwrap().epoch;
    let (pool, mut next) = ends.file.transport(Flush, 2, 0x3333);
    let there = pool.claim(ends.file.claim(0, 2, 8)).unwrap();
    register(&mut next, REGION, there, Access::all());
    ends.peer.attach(OTHER, &export(&next, REGION)).unwrap();
    let write = |offset| Slice { remote: RemoteOffset::new(OTHER, offset), ..slice(1, Op::Write, 0, 64) };
    // The next owner's region has the same row. What the old owner does there has no effect.
    assert_eq!(ends.owner.expel(ends.peer.identity(), ExpelMode::Force), Ok(true));
    assert_eq!(run(&mut ends.peer, write(0)).result, Ok(()));
    assert_eq!(ends.owner.deregister(REGION), Ok(()));
    assert_eq!(run(&mut ends.peer, write(64)).result, Ok(()));
    let released = ends.owner_pool.release(0, 2, old_epoch);
    assert!(matches!(released, Err(PoolError::Stale { .. })), "{released:?}");
    assert_eq!(run(&mut ends.peer, write(128)).result, Ok(()));
}

#[test]
fn transports_of_one_process_share_its_extents() {
    let mut ends = Ends::new(Flush);
    let mount = Mount { pool: ends.owner_pool.clone(), seat: None };
    let mut second = CxlTransport::new(Config::default(), vec![mount]).unwrap();
    let part = ends.there.part(MIB, 4096).unwrap();
    register(&mut second, REGION, part, Access::all());
    ends.peer.attach(OTHER, &export(&second, REGION)).unwrap();
    let beside = |token| Slice { remote: RemoteOffset::new(OTHER, 0), ..slice(token, Op::Write, 0, 64) };
    assert_eq!(run(&mut ends.peer, beside(1)).result, Ok(()));
    assert_eq!(run(&mut ends.peer, slice(2, Op::Write, 0, 64)).result, Ok(()));
    // Each expels another peer; both hold for the regions of both.
    let identity = ends.peer.identity();
    assert_eq!(ends.owner.expel(999, ExpelMode::Force), Ok(true));
    assert_eq!(second.expel(identity, ExpelMode::Force), Ok(true));
    for slice in [beside(3), slice(4, Op::Write, 0, 64)] {
        assert_eq!(run(&mut ends.peer, slice).result.unwrap_err().kind, ErrorKind::Expelled);
    }
    let (_, mut other) = ends.file.transport(Flush, 6, 999);
    for blob in [export(&second, REGION), export(&ends.owner, REGION)] {
        assert_eq!(other.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Expelled);
    }
    assert_eq!(second.deregister(REGION), Ok(()));
    assert_eq!(run(&mut ends.peer, beside(5)).result.unwrap_err().kind, ErrorKind::Stale);
}

/// Another transport over the pool of the owner.
fn beside(ends: &Ends) -> CxlTransport {
    let mount = Mount { pool: ends.owner_pool.clone(), seat: None };
    CxlTransport::new(Config::default(), vec![mount]).unwrap()
}

/// Where a line of an extent's page is, and where the line is in which a peer says what it uses.
fn extent_line(extent: u64, line: u64) -> u64 {
    4096 * (1 + extent) + 64 * line
}

fn use_line(ends: &Ends, slot: u64) -> u64 {
    4096 * (1 + u64::from(ends.owner_pool.superblock().extents) + slot) + 64
}

/// Writes a line as another host would.
fn write_line(ends: &Ends, at: u64, line: [u8; 64]) {
    std::fs::File::from(ends.file.fd.try_clone().unwrap()).write_all_at(&line, at).unwrap();
}

#[test]
fn an_expulsion_does_not_offer_again_what_was_revoked() {
    let mut ends = Ends::new(Flush);
    let mut second = beside(&ends);
    let none = CxlTransport::new(Config::default(), Vec::new()).unwrap();
    drop(std::mem::replace(&mut ends.owner, none));
    let refused = |ends: &mut Ends| run(&mut ends.peer, slice(1, Op::Write, 0, 64)).result.unwrap_err().kind;
    assert_eq!(refused(&mut ends), ErrorKind::Stale);
    assert_eq!(second.expel(999, ExpelMode::Force), Ok(true));
    assert_eq!(refused(&mut ends), ErrorKind::Stale, "the owner of the region is gone");
    // What it has forgotten takes no room: each of these has the same row.
    for round in 0..100 {
        let mut third = beside(&ends);
        register(&mut third, RegionId::new(0, round), ends.there, Access::all());
    }
    untouched(&ends);
}

#[test]
fn an_expulsion_does_not_offer_again_what_is_being_revoked() {
    let mut ends = Ends::new(Flush);
    let mut second = beside(&ends);
    let blob = export(&ends.owner, REGION);
    let number = Export::parse(&blob).unwrap().number;
    // A peer is in the middle of a copy.
    let at = use_line(&ends, 5);
    write_line(&ends, at, Use { number, first: 0, count: 2 }.write());
    assert_eq!(ends.owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    assert_eq!(second.expel(999, ExpelMode::Force), Ok(false), "that peer may be the one");
    assert_eq!(attach_kind(&mut ends, &blob), Some(ErrorKind::Stale));
    // Its row is not used for another region meanwhile.
    register(&mut second, REGION, ends.there, Access::all());
    assert_eq!(Export::parse(&export(&second, REGION)).unwrap().row, 1);
    write_line(&ends, at, Use::NONE);
    assert_eq!(ends.owner.deregister(REGION), Ok(()));
    second.deregister(REGION).unwrap();
    untouched(&ends);
}

#[test]
fn a_slice_is_refused_when_the_page_with_the_row_has_another_owner() {
    let mut ends = Ends::new(Flush);
    assert_eq!(run(&mut ends.peer, slice(1, Op::Write, 2 * MIB, 64)).result, Ok(()));
    // The next owner has written its record into the page of the first extent, and not yet the rows.
    let mine = Pool::inspect(&path_of(&ends)).unwrap().owners[0].unwrap();
    let next = OwnerRecord { incarnation: 8, epoch: mine.epoch + 1, ..mine };
    write_line(&ends, extent_line(0, 0), next.write());
    // The slices touch the second extent alone.
    for op in [Op::Read, Op::Write] {
        let end = run(&mut ends.peer, slice(2, op, 2 * MIB, 64));
        assert_eq!(end.result.unwrap_err().kind, ErrorKind::PeerRestarted, "{op:?}");
    }
}

#[test]
fn lines_that_were_written_in_another_epoch_confirm_nothing() {
    let mut ends = Ends::new(Flush);
    assert_eq!(ends.owner.expel(999, ExpelMode::Force), Ok(true));
    let Export { rights, number, base, len, epoch, row, .. } =
        Export::parse(&export(&ends.owner, REGION)).unwrap();
    let (row_at, list_at) = (extent_line(0, 1 + u64::from(row)), extent_line(0, 48));
    let ours = Row { granted: true, rights, number, base, len, expelled: 1, epoch };
    let list = Expelled { identities: [999, 0, 0, 0, 0, 0, 0], epoch: epoch as u32 };
    let mut result = |row: Row, list: Expelled| {
        write_line(&ends, list_at, write_expelled(list));
        write_line(&ends, row_at, row.write());
        run(&mut ends.peer, slice(1, Op::Write, 0, 64)).result.map_err(|error| error.kind)
    };
    assert_eq!(result(ours, list), Ok(()));
    for other in [epoch - 1, epoch + 1] {
        assert_eq!(result(Row { epoch: other, ..ours }, list), Err(ErrorKind::Stale), "{other}: the row");
        let list = Expelled { epoch: other as u32, ..list };
        assert_eq!(result(ours, list), Err(ErrorKind::Stale), "{other}: the list");
    }
    assert_eq!(result(ours, list), Ok(()));
}

#[test]
fn a_claim_that_is_repeated_is_compared_with_the_records() {
    for mode in [Flush, Hardware] {
        let file = PoolFile::new(16 * MIB, 4);
        let pool = file.open(mode);
        let claim = file.claim(0, 2, 7);
        pool.claim(claim).unwrap();
        pool.claim(claim).unwrap();
        file.open(mode).claim(file.claim(1, 1, 8)).unwrap();
        let refused = pool.claim(claim);
        assert!(matches!(refused, Err(PoolError::Stale { number: 1, found: 2, given: 1 })), "{refused:?}");
    }
}

fn path_of(ends: &Ends) -> std::path::PathBuf {
    format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ends.file.fd)).into()
}

#[test]
fn an_extent_that_was_given_away_is_not_exported_again() {
    let mut ends = Ends::new(Flush);
    ends.file.open(Flush).claim(ends.file.claim(0, 2, 8)).unwrap();
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: it is refused, and the pool stays mapped in any case.
    let again = unsafe { ends.owner.register(RegionId::new(4, 1), ends.there, Access::all()) };
    assert_eq!(again.unwrap_err().kind, ErrorKind::Stale);
}

#[test]
fn a_peer_page_belongs_to_the_latest_epoch_alone() {
    let file = PoolFile::new(16 * MIB, 4);
    let open = |slot, epoch| {
        let mount = Mount { pool: file.open(Flush), seat: Some(Seat { slot, epoch }) };
        CxlTransport::new(Config::default(), vec![mount]).map_err(|error| error.to_string())
    };
    let _first = open(0, 2).unwrap();
    for (slot, epoch, why) in [(0, 2, "epoch 2"), (0, 1, "epoch 2"), (4, 9, "there is no peer 4")] {
        let error = open(slot, epoch).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let _second = open(0, 3).unwrap();
    let mount = Mount { pool: file.open(Hardware), seat: None };
    let error = CxlTransport::new(Config::default(), vec![mount]).unwrap_err();
    assert!(error.to_string().contains("coherence"), "{error}");
}

#[test]
fn without_a_page_a_transport_exports_and_does_not_attach() {
    let mut ends = Ends::new(Flush);
    let blob = export(&ends.owner, REGION);
    let mount = Mount { pool: ends.file.open(Flush), seat: None };
    let mut alone = CxlTransport::new(Config::default(), vec![mount]).unwrap();
    assert_eq!(alone.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
    let mut none = CxlTransport::new(Config::default(), Vec::new()).unwrap();
    assert_eq!(none.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
    // Memory outside of a pool is private.
    let span = leaked(4096, 0);
    register(&mut ends.owner, RegionId::new(5, 1), span, Access::all());
    let error = ends.owner.export(RegionId::new(5, 1), &mut [0; 256]).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
}

#[test]
fn a_pool_that_is_mapped_to_read_cannot_be_written() {
    for coherence in [Flush, Hardware] {
        let ends = Ends::new(coherence);
        poke(ends.there, 0, &[5; 4096]);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ends.file.fd));
        let pool = te_cxl::Pool::open_to_read(std::path::Path::new(&path), coherence, None).unwrap();
        let seat = Some(Seat { slot: 3, epoch: ends.file.epoch() });
        let config = Config { coherence, ..Config::default() };
        let mut reader = CxlTransport::new(config, vec![Mount { pool, seat }]).unwrap();
        register(&mut reader, REGION, ends.here, Access::LOCAL);
        reader.attach(REMOTE, &export(&ends.owner, REGION)).unwrap();
        assert_eq!(run(&mut reader, slice(1, Op::Read, 0, 4096)).result, Ok(()));
        assert_eq!(peek(ends.here, 0, 4096), [5; 4096]);
        let error = reader.submit(&[slice(2, Op::Write, 0, 4096)]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::AccessDenied);
    }
}

#[test]
fn only_so_many_regions_begin_in_one_extent() {
    let file = PoolFile::new(16 * MIB, 2);
    let (pool, mut owner) = file.transport(Flush, 0, 1);
    let span = pool.claim(file.claim(0, 2, 1)).unwrap();
    let part = |at: u64| span.part(at * 4096, 4096).unwrap();
    for index in 0..47 {
        register(&mut owner, RegionId::new(index, 1), part(u64::from(index)), Access::all());
    }
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: it is refused, and the pool stays mapped in any case.
    let full = unsafe { owner.register(RegionId::new(47, 1), part(47), Access::all()) };
    assert_eq!(full.unwrap_err().kind, ErrorKind::Full);
    // There is room in the next extent, and for private memory, and for who has given a region back.
    register(&mut owner, RegionId::new(48, 1), part(512), Access::all());
    register(&mut owner, RegionId::new(49, 1), part(49), Access::LOCAL);
    owner.deregister(RegionId::new(3, 1)).unwrap();
    register(&mut owner, RegionId::new(3, 2), part(3), Access::all());
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: as above.
    let off = unsafe {
        let span = te_core::MemSpan::new(span.as_ptr().wrapping_add(3 << 20 | 32), 64);
        owner.register(RegionId::new(50, 1), span, Access::all())
    };
    assert_eq!(off.unwrap_err().kind, ErrorKind::InvalidArgument, "half a line");
}

#[test]
fn an_owner_expels_as_many_identities_as_hold_a_page_and_fit() {
    let file = PoolFile::new(16 * MIB, 128);
    let (pool, mut owner) = file.transport(Flush, 0, 1000);
    let there = pool.claim(file.claim(0, 1, 1)).unwrap();
    register(&mut owner, REGION, there, Access::all());
    // Identities without a page make room for those that have one.
    (2000..2500).for_each(|identity| assert_eq!(owner.expel(identity, ExpelMode::Force), Ok(true)));
    let shared = file.open(Flush);
    let mut peers: Vec<CxlTransport> = Vec::new();
    for slot in 1..=113 {
        let mount = Mount { pool: shared.clone(), seat: Some(Seat { slot, epoch: file.epoch() }) };
        let config = Config { identity: u64::from(slot), ..Config::default() };
        peers.push(CxlTransport::new(config, vec![mount]).unwrap());
    }
    for identity in 1..=112 {
        assert_eq!(owner.expel(identity, ExpelMode::Force), Ok(true), "{identity}");
    }
    assert_eq!(owner.expel(113, ExpelMode::Force).unwrap_err().kind, ErrorKind::Full);
    let blob = export(&owner, REGION);
    for (at, peer) in peers.iter_mut().enumerate() {
        let attached = peer.attach(REMOTE, &blob).map_err(|error| error.kind);
        assert_eq!(attached, if at < 112 { Err(ErrorKind::Expelled) } else { Ok(()) }, "{at}");
    }
}

#[test]
fn each_identity_that_was_expelled_is_refused() {
    let mut ends = Ends::new(Flush);
    for identity in 1..=112 {
        assert_eq!(ends.owner.expel(identity, ExpelMode::Force), Ok(true), "{identity}");
        assert_eq!(ends.owner.expel(identity, ExpelMode::Force), Ok(true), "again");
    }
    assert_eq!(
        run(&mut ends.peer, slice(1, Op::Write, 0, 64)).result,
        Ok(()),
        "another one is not disturbed"
    );
    let blob = export(&ends.owner, REGION);
    for identity in [1, 7, 8, 112] {
        let (_, mut peer) = ends.file.transport(Flush, 4, identity);
        assert_eq!(peer.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Expelled, "{identity}");
    }
    let (_, mut peer) = ends.file.transport(Flush, 4, 113);
    peer.attach(REMOTE, &blob).unwrap();
    // Regions that are registered later refuse them, too.
    let id = RegionId::new(9, 1);
    let part = ends.there.part(0, 4096).unwrap();
    register(&mut ends.owner, id, part, Access::all());
    let blob = export(&ends.owner, id);
    let (_, mut peer) = ends.file.transport(Flush, 4, 50);
    assert_eq!(peer.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Expelled);
}

#[test]
fn a_peer_that_shows_no_sign_of_life_does_not_count_as_connected() {
    let mut ends = Ends::new(Flush);
    let at = |ms| Instant::ZERO + Duration::from_millis(ms);
    let peer = ends.peer.identity();
    let poll = |transport: &mut CxlTransport, ms| assert_eq!(transport.poll(at(ms), &mut []), 0);
    poll(&mut ends.owner, 0);
    assert!(ends.owner.is_connected(peer) && !ends.owner.is_connected(peer + 1));
    assert_eq!(ends.peer.poll_at(), Some(Instant::ZERO), "it has a sign of life to give");
    // While it is polled, it stays connected.
    for ms in (0..20_000).step_by(1000) {
        poll(&mut ends.peer, ms);
        poll(&mut ends.owner, ms);
        assert!(ends.owner.is_connected(peer), "{ms} ms");
    }
    assert_eq!(ends.peer.poll_at(), Some(at(19_100)));
    for (ms, connected) in [(19_500, true), (23_999, true), (24_000, false)] {
        poll(&mut ends.owner, ms);
        assert_eq!(ends.owner.is_connected(peer), connected, "{ms} ms");
    }
    let spared = ends.owner.expel(peer, ExpelMode::SpareConnected);
    assert_eq!(spared, Ok(true));
    assert_eq!(run(&mut ends.peer, slice(1, Op::Write, 0, 64)).result.unwrap_err().kind, ErrorKind::Expelled);
    untouched(&ends);
}

#[test]
fn a_peer_that_has_gone_in_order_is_not_connected() {
    let mut ends = Ends::new(Hardware);
    let (_, peer) = ends.file.transport(Hardware, 5, 0x5555);
    assert!(ends.owner.is_connected(0x5555));
    drop(peer);
    assert!(!ends.owner.is_connected(0x5555));
    assert_eq!(ends.owner.expel(0x5555, ExpelMode::SpareConnected), Ok(true));
}

#[test]
fn memory_of_the_pool_can_be_the_local_side() {
    // The lines of a local side in a pool do not stay dirty in this host's cache: that cannot be seen on one
    // host, but the bytes can.
    let mut ends = Ends::new(Flush);
    let span = ends.peer_pool.claim(ends.file.claim(3, 1, 9)).unwrap();
    let id = RegionId::new(6, 1);
    register(&mut ends.peer, id, span, Access::LOCAL);
    poke(span, 0, &[0x77; 4096]);
    let local = |op, offset| Slice { local: RegionOffset::new(id, offset), ..slice(1, op, 0, 4096) };
    assert_eq!(run(&mut ends.peer, local(Op::Write, 0)).result, Ok(()));
    assert_eq!(run(&mut ends.peer, local(Op::Read, 8192)).result, Ok(()));
    assert_eq!(peek(span, 8192, 4096), [0x77; 4096]);
}

#[test]
fn a_local_side_in_a_pool_has_whole_lines_where_caches_are_not_coherent() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        let span = ends.peer_pool.claim(ends.file.claim(3, 1, 9)).unwrap();
        let (id, off) = (RegionId::new(6, 1), RegionId::new(7, 1));
        register(&mut ends.peer, id, span, Access::LOCAL);
        register(&mut ends.peer, off, span.part(32, 8192).unwrap(), Access::LOCAL);
        for (op, region, offset, is_whole) in [
            (Op::Read, id, 1, false),
            (Op::Read, id, 4096 + 32, false),
            (Op::Write, id, 8, false),
            (Op::Read, off, 0, false),
            (Op::Read, off, 32, true),
            (Op::Read, id, 64, true),
        ] {
            let local = Slice { local: RegionOffset::new(region, offset), ..slice(1, op, 0, 4096) };
            if is_whole || coherence == Hardware {
                assert_eq!(run(&mut ends.peer, local).result, Ok(()), "{op:?} {offset}");
            } else {
                assert_eq!(ends.peer.submit(&[local]).unwrap_err().kind, ErrorKind::InvalidArgument);
            }
        }
    }
}

#[test]
fn a_checksum_is_reported_when_it_is_wanted() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        ends.peer.set_checksums(true);
        for op in [Op::Write, Op::Read] {
            let end = run(&mut ends.peer, slice(1, op, 0, 100_032));
            assert_eq!(end.crc32c.unwrap().get(), crc32c::crc32c(&vec![WRITTEN; 100_032]));
        }
        ends.peer.set_checksums(false);
        assert_eq!(run(&mut ends.peer, slice(1, Op::Read, 0, 64)).crc32c, None);
    }
}

#[test]
fn settings_outside_of_their_ranges_are_refused_by_name() {
    let refused = |config: Config| CxlTransport::new(config, Vec::new()).unwrap_err().to_string();
    let error = refused(Config { inflight_max: 0, ..Config::default() });
    assert!(error.contains("inflight_max is 0"), "{error}");
    let error = refused(Config { peer_silence_ms_max: 199, ..Config::default() });
    assert!(error.contains("peer_silence_ms_max is 199"), "{error}");
    let default = Coherence::default();
    assert_eq!((default, default.granule_bytes(), Hardware.granule_bytes()), (Flush, 64, 1));
}

#[test]
fn a_page_that_another_process_has_written_after_it_was_asked_for_is_not_taken() {
    let ends = Ends::new(Flush);
    let blob = export(&ends.owner, REGION);
    let pool = ends.file.open(Flush);
    let mut late =
        CxlTransport::new(Config::default(), vec![Mount { pool: pool.clone(), seat: None }]).unwrap();
    let epoch = ends.file.epoch();
    // A master that has lost its state gave the page to another process, in a lower epoch.
    let (_, other) = ends.file.transport(Flush, 3, 0x77);
    let seat = Seat { slot: 3, epoch: epoch + 10 };
    pool.take_seat_found(seat, None);
    assert_eq!(late.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
    let found = pool.peers().unwrap()[3];
    assert_eq!(found.map(|record| (record.identity, record.present)), Some((0x77, true)));
    // Nor one that was forgotten.
    pool.take_seat(Seat { slot: 4, ..seat });
    pool.forget_seat();
    assert_eq!(late.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
    // It was found as it is now; the peer's signs of life do not matter.
    drop(other);
    pool.take_seat_found(seat, found);
    late.attach(REMOTE, &blob).unwrap();
}

#[test]
fn a_peer_whose_page_another_process_has_written_moves_no_byte_any_more() {
    for coherence in [Flush, Hardware] {
        let mut ends = Ends::new(coherence);
        assert_eq!(run(&mut ends.peer, slice(1, Op::Write, 0, 64)).result, Ok(()));
        let (_pool, _other) = ends.file.transport(coherence, 1, 0x77);
        poke(ends.there, 0, &[5; 64]);
        ends.peer.submit(&[slice(2, Op::Write, 0, 64)]).unwrap();
        let mut out = [Completion::applied(Token(0)); 4];
        assert_eq!(ends.peer.poll(Instant::from_millis(1_000), &mut out), 1);
        assert_eq!(out[0].result.unwrap_err().kind, ErrorKind::Unreachable);
        assert_eq!((out[0].outcome, peek(ends.there, 0, 64)), (Outcome::NotApplied, vec![5; 64]));
        assert_eq!(ends.peer_pool.peers().unwrap()[1].unwrap().identity, 0x77);
        // With a page that is given to it now it goes on.
        ends.peer_pool.take_seat(Seat { slot: 2, epoch: ends.file.epoch() });
        ends.peer.attach(OTHER, &export(&ends.owner, REGION)).unwrap();
        assert_eq!(run(&mut ends.peer, slice(3, Op::Write, 0, 64)).result, Ok(()));
    }
}

#[test]
fn a_sole_writer_of_its_lines_writes_parts_of_them_and_changes_no_other_byte() {
    let mut ends = Ends::new(Flush);
    let pool = ends.file.open(Flush);
    let seat = Some(Seat { slot: 2, epoch: ends.file.epoch() });
    let config = Config { sole_writer: true, identity: 0x3333, ..Config::default() };
    let mut peer = CxlTransport::new(config, vec![Mount { pool: pool.clone(), seat }]).unwrap();
    assert_eq!(peer.capabilities().granule_bytes, 1);
    let bytes: Vec<u8> = (0..400_u32).map(|at| at as u8 | 1).collect();
    let here = leaked(400, 0);
    poke(here, 0, &bytes);
    register(&mut peer, REGION, here, Access::LOCAL);
    peer.attach(REMOTE, &export(&ends.owner, REGION)).unwrap();
    for (at, len) in [(0, 1), (63, 2), (64, 64), (65, 62), (10, 54), (1, 399), (100, 28), (128, 200)] {
        let mut expected = vec![0xAA; 512];
        poke(ends.there, 0, &expected);
        let moved = |op| Slice {
            token: Token(1),
            local: RegionOffset::new(REGION, 0),
            remote: RemoteOffset::new(REMOTE, at),
            len: len as u32,
            op,
        };
        assert_eq!(run(&mut peer, moved(Op::Write)), Completion::applied(Token(1)));
        expected[at as usize..at as usize + len].copy_from_slice(&bytes[..len]);
        assert_eq!(peek(ends.there, 0, 512), expected, "{len} bytes at {at}");
        poke(here, 0, &vec![0; 400]);
        assert_eq!(run(&mut peer, moved(Op::Read)), Completion::applied(Token(1)));
        assert_eq!(peek(here, 0, len), &bytes[..len]);
        poke(here, 0, &bytes);
    }
    // Its own memory in a pool is still made of whole lines.
    let ours = pool.claim(ends.file.claim(2, 1, 9)).unwrap();
    let own = RegionId::new(1, 1);
    register(&mut peer, own, ours, Access::LOCAL);
    for (offset, len) in [(0, 63), (1, 64)] {
        let local = RegionOffset::new(own, offset);
        let slice = Slice { local, ..slice(1, Op::Read, 0, len) };
        assert_eq!(peer.submit(&[slice]).unwrap_err().kind, ErrorKind::InvalidArgument);
    }
    // What a process writes into its extents by itself.
    for (at, len) in [(0, 1), (63, 2), (7, 9_000)] {
        let bytes: Vec<u8> = (0..len as u32).map(|at| (at % 253) as u8).collect();
        pool.write(ours, at, &bytes).unwrap();
        let mut found = vec![0; len];
        pool.read(ours, at, &mut found).unwrap();
        assert!(found == bytes && peek(ours, at, len) == bytes, "{len} bytes at {at}");
    }
    assert!(matches!(pool.write(ours, 2 * MIB - 1, &[0; 2]), Err(PoolError::Outside)));
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&ends.file.fd));
    let to_read = Pool::open_to_read(std::path::Path::new(&path), Flush, None).unwrap();
    let theirs = to_read.claim(ends.file.claim(3, 1, 9)).unwrap();
    let refused = to_read.write(theirs, 0, &[0]);
    assert!(matches!(refused, Err(PoolError::Memory(error)) if error.kind == ErrorKind::AccessDenied));
    assert!(matches!(pool.read(ours, 2 * MIB, &mut [0]), Err(PoolError::Outside)));
    peer.deregister(own).unwrap();
    peer.deregister(REGION).unwrap();
    ends.peer.detach(REMOTE).unwrap();
}
