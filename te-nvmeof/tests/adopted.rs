//! A namespace of a target that knows nothing of owners and clients: an owner adopts a range of it, clients
//! use the range directly, and the owner fences a client. The target here is ours, open to any host; it is
//! used like one of another vendor, without keys and incarnations.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{ALL, Node, REGION, REMOTE, drive, finish, kind, read, write};
use te_core::{Access, ErrorKind, ExpelMode, Memory, RegionId, RemoteRegionId, Transport};
use te_nvmeof::{Config, Namespace};

const BYTES: usize = 1 << 20;
const GRANULE: u64 = 4_096;
const ADOPTED: RegionId = RegionId::new(7, 1);

/// The box of disks, the owner of its range, and a client.
struct Cast {
    target: Node,
    owner: Node,
    client: Node,
    namespace: Namespace,
}

fn cast(config: &Config) -> Cast {
    let target = common::node(Config { open_to_hosts: true, ..config.clone() }, BYTES);
    let namespace = target.transport.namespace(REGION).unwrap();
    let (owner, client) = (common::node(config.clone(), BYTES), common::node(config.clone(), BYTES));
    Cast { target, owner, client, namespace }
}

fn adopt(cast: &mut Cast, range: core::ops::Range<u64>) -> Result<Vec<u8>, ErrorKind> {
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    cast.owner.transport.adopt(ADOPTED, &cast.namespace, range, access, 1).map_err(|error| error.kind)?;
    let mut blob = vec![0; 1_024];
    let mut end = Err(ErrorKind::Busy);
    drive(&mut [&mut cast.owner, &mut cast.target], |owner| {
        end = owner.transport.export(ADOPTED, &mut blob).map_err(|error| error.kind);
        end != Err(ErrorKind::Busy)
    });
    blob.truncate(end?);
    Ok(blob)
}

#[test]
fn a_client_uses_an_adopted_range_past_its_owner() {
    for config in common::configs() {
        let mut cast = cast(&config);
        let blob = adopt(&mut cast, 8 * GRANULE..64 * GRANULE).unwrap();
        cast.client.transport.attach(REMOTE, &blob).unwrap();
        cast.client.memory.paint(3);
        cast.client.submit(&[write(1, 0, GRANULE, 8 * GRANULE as u32)]);
        let end = finish(&mut [&mut cast.client, &mut cast.target], 1);
        assert_eq!(end.result, Ok(()), "{config:?}");
        // The superblock and one granule lie before.
        let there = cast.target.memory.get(10 * GRANULE, 8 * GRANULE as usize);
        assert!(there == common::pattern(3, 0, 8 * GRANULE as usize));
        cast.client.submit(&[read(2, 1 << 19, GRANULE, 8 * GRANULE as u32)]);
        assert!(finish(&mut [&mut cast.client, &mut cast.target], 2).result.is_ok());
        assert!(cast.client.memory.get(1 << 19, 8 * GRANULE as usize) == there);
        let end = write(3, 0, 55 * GRANULE, GRANULE as u32);
        let refused = cast.client.transport.submit(&[end]).map_err(|error| error.kind);
        assert_eq!(refused, Err(ErrorKind::OutOfRange), "the range has 55 granules");
    }
}

#[test]
fn a_namespace_that_is_not_the_one_of_the_export_is_stale() {
    let mut cast = cast(&Config::default());
    let blob = adopt(&mut cast, 0..16 * GRANULE).unwrap();
    cast.client.transport.attach(REMOTE, &blob).unwrap();
    // Another owner has formatted the range meanwhile.
    cast.target.memory.set(0, &[0; 64]);
    let before = cast.target.memory.get(0, BYTES);
    cast.client.memory.paint(9);
    cast.client.submit(&[write(1, 0, 0, GRANULE as u32)]);
    let end = finish(&mut [&mut cast.client, &mut cast.target], 1);
    assert_eq!(kind(&end), ErrorKind::Stale);
    assert!(cast.target.memory.get(0, BYTES) == before, "no byte was written");
}

#[test]
fn what_is_not_there_is_not_adopted() {
    let mut first = cast(&Config::default());
    first.namespace.nguid = [1; 16];
    assert_eq!(adopt(&mut first, 0..16 * GRANULE), Err(ErrorKind::Stale), "another identity");
    let mut second = cast(&Config::default());
    assert_eq!(adopt(&mut second, 0..(BYTES as u64 + GRANULE)), Err(ErrorKind::Stale), "beyond its end");
    let mut third = cast(&Config::default());
    third.namespace.nsid = 99;
    assert_eq!(adopt(&mut third, 0..16 * GRANULE), Err(ErrorKind::NotFound));
    let mut fourth = cast(&Config::default());
    for range in [0..GRANULE, 1..16 * GRANULE, 0..5_000, 16 * GRANULE..16 * GRANULE] {
        assert_eq!(adopt(&mut fourth, range), Err(ErrorKind::InvalidArgument));
    }
}

#[test]
fn an_owner_fences_a_client_by_preempt_and_abort() {
    let mut cast = cast(&Config::default());
    let blob = adopt(&mut cast, 0..64 * GRANULE).unwrap();
    let mut other = common::node(Config::default(), BYTES);
    for client in [&mut cast.client, &mut other] {
        client.transport.attach(REMOTE, &blob).unwrap();
        client.memory.paint(1);
        client.submit(&[write(1, 0, 0, GRANULE as u32)]);
        assert!(finish(&mut [client, &mut cast.target], 1).result.is_ok());
    }
    // A WRITE of many commands is on its way, and the client is not polled while it is fenced.
    let long = 40 * GRANULE as u32;
    cast.client.submit(&[write(2, 0, 0, long)]);
    cast.client.poll();
    cast.target.poll();
    let victim = cast.client.transport.identity();
    drive(&mut [&mut cast.owner, &mut cast.target], |owner| {
        owner.transport.expel(victim, ExpelMode::Force).unwrap()
    });
    cast.target.memory.set(GRANULE, &vec![0xEE; 63 * GRANULE as usize]);
    let end = finish(&mut [&mut cast.client, &mut cast.target], 2);
    assert!(end.result.is_err(), "its WRITE was aborted or refused");
    cast.client.submit(&[write(3, 0, 0, GRANULE as u32)]);
    let end = finish(&mut [&mut cast.client, &mut cast.target], 3);
    assert_eq!(kind(&end), ErrorKind::Expelled);
    assert!(cast.target.memory.get(GRANULE, 63 * GRANULE as usize).iter().all(|byte| *byte == 0xEE));
    // It does not come back by attaching once more.
    let again = RemoteRegionId::new(5, 1);
    cast.client.transport.attach(again, &blob).unwrap();
    let slice =
        te_core::Slice { remote: te_core::RemoteOffset::new(again, 0), ..write(4, 0, 0, GRANULE as u32) };
    cast.client.submit(&[slice]);
    let end = finish(&mut [&mut cast.client, &mut cast.target], 4);
    assert!(matches!(kind(&end), ErrorKind::Expelled | ErrorKind::AccessDenied), "{end:?}");
    // The others are not disturbed.
    other.submit(&[write(5, 0, 0, GRANULE as u32)]);
    assert!(finish(&mut [&mut other, &mut cast.target], 5).result.is_ok());
    assert_eq!(cast.owner.transport.expel(victim, ExpelMode::Force), Ok(true));
}

#[test]
fn a_host_without_a_key_gets_nothing_from_a_target_that_is_not_open() {
    let target = common::node(Config::default(), BYTES);
    let namespace = target.transport.namespace(REGION).unwrap();
    let mut cast = Cast { target, namespace, ..cast(&Config::default()) };
    assert_eq!(adopt(&mut cast, 0..16 * GRANULE), Err(ErrorKind::NotFound), "it does not even exist");
    let private = RegionId::new(3, 1);
    let memory = common::Block::new(BYTES);
    // SAFETY: the block outlives the transport of this test, and is not looked at.
    unsafe { cast.target.transport.register(private, memory.span(), Access::LOCAL) }.unwrap();
    let refused = cast.target.transport.namespace(private).map_err(|error| error.kind);
    assert_eq!(refused, Err(ErrorKind::AccessDenied));
    assert!(cast.target.transport.deregister(private).is_ok() && ALL.is_remote());
}

/// A client that never registered may register later: that it has no key proves nothing.
#[test]
fn a_client_without_a_registration_is_not_reported_as_fenced() {
    let mut cast = cast(&Config::default());
    let blob = adopt(&mut cast, 0..64 * GRANULE).unwrap();
    cast.client.transport.attach(REMOTE, &blob).unwrap();
    let victim = cast.client.transport.identity();
    let mut end = Ok(false);
    drive(&mut [&mut cast.owner, &mut cast.target], |owner| {
        end = owner.transport.expel(victim, ExpelMode::Force).map_err(|error| error.kind);
        end != Ok(false)
    });
    assert_eq!(end, Err(ErrorKind::Unsupported));
    cast.client.submit(&[write(1, 0, 0, GRANULE as u32)]);
    assert!(finish(&mut [&mut cast.client, &mut cast.target], 1).result.is_ok(), "it was never fenced");
    // Now it is registered, and can be fenced.
    drive(&mut [&mut cast.owner, &mut cast.target], |owner| {
        owner.transport.expel(victim, ExpelMode::Force).unwrap()
    });
    cast.client.submit(&[write(2, 0, 0, GRANULE as u32)]);
    assert_eq!(kind(&finish(&mut [&mut cast.client, &mut cast.target], 2)), ErrorKind::Expelled);
}

fn take_over(cast: &mut Cast, range: core::ops::Range<u64>) -> Result<Vec<u8>, ErrorKind> {
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let begun = cast.owner.transport.take_over(ADOPTED, &cast.namespace, range, access, 2);
    begun.map_err(|error| error.kind)?;
    let mut blob = vec![0; 1_024];
    let mut end = Err(ErrorKind::Busy);
    drive(&mut [&mut cast.owner, &mut cast.target], |owner| {
        end = owner.transport.export(ADOPTED, &mut blob).map_err(|error| error.kind);
        end != Err(ErrorKind::Busy)
    });
    blob.truncate(end?);
    Ok(blob)
}

/// The owner dies, and a client that is in the middle of a WRITE knows nothing of it.
#[test]
fn who_takes_a_range_over_fences_the_former_owner_and_its_clients_first() {
    let mut cast = cast(&Config::default());
    let old = adopt(&mut cast, 0..64 * GRANULE).unwrap();
    let mut idle = common::node(Config::default(), BYTES);
    for client in [&mut cast.client, &mut idle] {
        client.transport.attach(REMOTE, &old).unwrap();
        client.memory.paint(1);
        client.submit(&[write(1, 0, 0, GRANULE as u32)]);
        assert!(finish(&mut [client, &mut cast.target], 1).result.is_ok());
    }
    let heir = common::node(Config::default(), BYTES);
    let mut dead = std::mem::replace(&mut cast.owner, heir);
    // Without a word about the former owner, its reservation holds.
    assert_eq!(adopt(&mut cast, 0..64 * GRANULE), Err(ErrorKind::AccessDenied));
    cast.owner.transport.deregister(ADOPTED).unwrap();
    cast.client.submit(&[write(2, 0, 0, 40 * GRANULE as u32)]);
    cast.client.poll();
    cast.target.poll();
    let new = take_over(&mut cast, 0..64 * GRANULE).unwrap();
    cast.target.memory.set(GRANULE, &vec![0xEE; 63 * GRANULE as usize]);
    let end = finish(&mut [&mut cast.client, &mut cast.target], 2);
    assert!(end.result.is_err(), "its WRITE was aborted or refused");
    for client in [&mut cast.client, &mut idle] {
        client.submit(&[write(3, 0, 0, GRANULE as u32)]);
        assert_eq!(kind(&finish(&mut [client, &mut cast.target], 3)), ErrorKind::Expelled);
    }
    // Nor is the former owner able to mark the range anew, or to fence the new one.
    let identity = cast.owner.transport.identity();
    common::linger(&mut [&mut dead, &mut cast.target], std::time::Duration::from_millis(20));
    let _ = dead.transport.expel(identity, ExpelMode::Force);
    common::linger(&mut [&mut dead, &mut cast.target], std::time::Duration::from_millis(50));
    assert!(cast.target.memory.get(GRANULE, 63 * GRANULE as usize).iter().all(|byte| *byte == 0xEE));
    // A client that never was there before, with the old export and with the new one.
    let mut late = common::node(Config::default(), BYTES);
    late.transport.attach(REMOTE, &old).unwrap();
    late.submit(&[write(1, 0, 0, GRANULE as u32)]);
    assert_eq!(kind(&finish(&mut [&mut late, &mut cast.target], 1)), ErrorKind::Stale);
    late.transport.detach(REMOTE).unwrap();
    late.transport.attach(REMOTE, &new).unwrap();
    late.submit(&[write(2, 0, 0, GRANULE as u32)]);
    assert!(finish(&mut [&mut late, &mut cast.target], 2).result.is_ok());
}

/// A client that registers with the old export while the range is taken over, before the new superblock is
/// there, has found the old one.
#[test]
fn a_client_that_comes_while_a_range_is_taken_over_is_fenced_as_well() {
    let mut seen = [false; 2];
    for steps in 0..60 {
        let mut cast = cast(&Config::default());
        let old = adopt(&mut cast, 0..64 * GRANULE).unwrap();
        cast.owner = common::node(Config::default(), BYTES);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let (namespace, range) = (cast.namespace.clone(), 0..64 * GRANULE);
        cast.owner.transport.take_over(ADOPTED, &namespace, range, access, 2).unwrap();
        for _ in 0..steps {
            cast.owner.poll();
            cast.target.poll();
        }
        // From here on it takes part.
        cast.client.transport.attach(REMOTE, &old).unwrap();
        cast.client.submit(&[read(1, 0, 0, GRANULE as u32)]);
        let mut blob = vec![0; 1_024];
        let end = finish(&mut [&mut cast.client, &mut cast.target, &mut cast.owner], 1);
        seen[usize::from(end.result.is_ok())] = true;
        drive(&mut [&mut cast.owner, &mut cast.target, &mut cast.client], |owner| {
            owner.transport.export(ADOPTED, &mut blob).is_ok()
        });
        if cast.client.transport.submit(&[write(2, 0, 0, GRANULE as u32)]).is_ok() {
            let end = finish(&mut [&mut cast.client, &mut cast.target], 2);
            assert!(end.result.is_err(), "after {steps} steps");
        }
    }
    assert_eq!(seen, [true, true], "it came before the end, and after it");
}

/// A range that no owner has adopted: what is in it is the reader's business.
#[test]
fn a_reader_of_a_namespace_needs_no_owner_and_writes_nothing() {
    for config in common::configs() {
        let mut cast = cast(&config);
        cast.target.memory.paint(5);
        let (reader, namespace) = (&mut cast.client.transport, &mut cast.namespace);
        for range in [0..0, 1..2 * GRANULE, 0..GRANULE + 512] {
            let refused = reader.attach_namespace(REMOTE, namespace, range).map_err(|error| error.kind);
            assert_eq!(refused, Err(ErrorKind::InvalidArgument));
        }
        reader.attach_namespace(REMOTE, namespace, 4 * GRANULE..64 * GRANULE).unwrap();
        let before = cast.target.memory.get(0, BYTES);
        cast.client.submit(&[read(1, 0, GRANULE, 8 * GRANULE as u32)]);
        assert_eq!(finish(&mut [&mut cast.client, &mut cast.target], 1).result, Ok(()), "{config:?}");
        let found = cast.client.memory.get(0, 8 * GRANULE as usize);
        assert!(found == before[5 * GRANULE as usize..][..found.len()]);
        for (slice, error) in [
            (write(2, 0, 0, GRANULE as u32), ErrorKind::AccessDenied),
            (read(3, 0, 60 * GRANULE, GRANULE as u32), ErrorKind::OutOfRange),
        ] {
            let refused = cast.client.transport.submit(&[slice]).map_err(|error| error.kind);
            assert_eq!(refused, Err(error));
        }
        assert!(cast.target.memory.get(0, BYTES) == before, "not even a superblock");
    }
}

#[test]
fn a_reader_takes_any_identity_only_when_it_names_none() {
    let end_of = |nguid, end: u64| {
        let mut cast = cast(&Config::default());
        cast.namespace.nguid = nguid;
        cast.client.transport.attach_namespace(REMOTE, &cast.namespace, 0..end).unwrap();
        cast.client.submit(&[read(1, 0, 0, GRANULE as u32)]);
        finish(&mut [&mut cast.client, &mut cast.target], 1).result.map_err(|error| error.kind)
    };
    assert_eq!(end_of([0; 16], BYTES as u64), Ok(()));
    assert_eq!(end_of([1; 16], BYTES as u64), Err(ErrorKind::Stale));
    assert_eq!(end_of([0; 16], BYTES as u64 + GRANULE), Err(ErrorKind::Stale), "it is shorter");
}

/// Blocks of 512 bytes: no byte outside of the first granule changes, or has to be there.
#[test]
fn the_superblock_stays_within_its_granule() {
    let config = Config { granule_bytes: 512, ..Config::default() };
    let mut cast = cast(&config);
    cast.target.memory.set(0, &vec![0xEE; BYTES]);
    let end = BYTES as u64;
    let blob = adopt(&mut cast, end - 1_024..end).unwrap();
    let first = BYTES - 1_024;
    assert!(cast.target.memory.get(0, first).iter().all(|byte| *byte == 0xEE));
    assert!(cast.target.memory.get(end - 512, 512).iter().all(|byte| *byte == 0xEE));
    cast.client.transport.attach(REMOTE, &blob).unwrap();
    cast.client.submit(&[read(1, 0, 0, 512)]);
    assert_eq!(finish(&mut [&mut cast.client, &mut cast.target], 1).result, Ok(()));
    let blob = {
        cast.owner.transport.deregister(ADOPTED).unwrap();
        adopt(&mut cast, 0..4_096).unwrap()
    };
    assert!(cast.target.memory.get(512, first - 512).iter().all(|byte| *byte == 0xEE));
    assert!(!blob.is_empty());
}

/// Pieces of a slice are whole blocks, whatever the limit of a transfer is.
#[test]
fn pieces_are_whole_blocks() {
    let config = Config { granule_bytes: 8_192, transfer_bytes_max: 12_288, ..Config::default() };
    let mut b = common::node(Config { granule_bytes: 8_192, ..Config::default() }, BYTES);
    let mut a = common::node(config, BYTES);
    a.attach(&b);
    a.memory.paint(4);
    b.memory.set(0, &vec![0xEE; BYTES]);
    a.submit(&[write(1, 0, 8_192, 65_536)]);
    assert_eq!(finish(&mut [&mut a, &mut b], 1).result, Ok(()));
    assert!(b.memory.get(8_192, 65_536) == common::pattern(4, 0, 65_536));
    assert!(b.memory.get(8_192 + 65_536, 65_536).iter().all(|byte| *byte == 0xEE));
}
