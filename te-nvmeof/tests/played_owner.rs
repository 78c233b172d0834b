//! Owners and clients of a range of a played target, which answers reservations as targets of other vendors
//! do.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::cell::RefCell;
use std::rc::Rc;

use common::played::{BLOCK, Played};
use common::{Node, REMOTE, read, write};
use te_core::{Access, ErrorKind, ExpelMode, Memory, RegionId, Transport};
use te_nvmeof::Config;
use te_nvmeof::command::{Status, io};

const BYTES: usize = 1 << 20;
const ADOPTED: RegionId = RegionId::new(7, 1);
const ACCESS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The keys that a played target has registered, and the actions that it has carried out or refused.
#[derive(Default)]
struct Keys {
    registered: Vec<u64>,
    actions: Vec<&'static str>,
}

/// Reservations as the target of the Linux kernel has them: a key is replaced only where there is one.
fn reserving(played: &mut Played) -> Rc<RefCell<Keys>> {
    let keys = Rc::new(RefCell::new(Keys::default()));
    let of = Rc::clone(&keys);
    played.reserve = Some(Box::new(move |opcode, dword, data| {
        let key = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
        let mut of = of.borrow_mut();
        let (current, second) = (key(0), key(8));
        let (action, fine) = match (opcode, dword & 7) {
            (io::RESERVATION_REGISTER, 0) => {
                if !of.registered.contains(&second) {
                    of.registered.push(second);
                }
                ("register", true)
            }
            (io::RESERVATION_REGISTER, _) => ("replace", of.registered.contains(&second)),
            (_, 0) => ("acquire", of.registered.contains(&current)),
            _ => {
                let fine = of.registered.contains(&current) && of.registered.contains(&second);
                of.registered.retain(|key| !fine || *key != second);
                ("preempt", fine)
            }
        };
        of.actions.push(action);
        Some(if fine { Status::SUCCESS } else { Status::RESERVATION_CONFLICT })
    }));
    keys
}

fn adopted(played: &mut Played, owner: &mut Node) -> Result<Vec<u8>, ErrorKind> {
    let whole = 0..32 * u64::from(BLOCK);
    owner.transport.adopt(ADOPTED, &played.namespace(), whole, ACCESS, 1).unwrap();
    let mut blob = vec![0; 1_024];
    let mut end = Err(ErrorKind::Busy);
    played.drive(owner, "the range is adopted", |_, owner| {
        end = owner.transport.export(ADOPTED, &mut blob).map_err(|error| error.kind);
        end != Err(ErrorKind::Busy)
    });
    blob.truncate(end?);
    Ok(blob)
}

fn expelled(played: &mut Played, owner: &mut Node, victim: u64) -> Result<bool, ErrorKind> {
    let mut end = Ok(false);
    played.drive(owner, "the client is fenced, or not", |_, owner| {
        end = owner.transport.expel(victim, ExpelMode::Force).map_err(|error| error.kind);
        end != Ok(false)
    });
    end
}

/// The kernel's target answers with a path-related status while a namespace is disabled. The association
/// stays.
#[test]
fn a_namespace_that_was_disabled_during_its_check_is_used_once_it_is_back() {
    for status in [Status::INTERNAL_PATH, Status::INVALID_NAMESPACE] {
        let mut played = Played::new();
        let mut owner = common::node(Config::default(), BYTES);
        let blob = adopted(&mut played, &mut owner).unwrap();
        let mut client = common::node(Config::default(), BYTES);
        client.transport.attach(REMOTE, &blob).unwrap();
        played.without_namespace = Some(status);
        for token in 1..4 {
            client.submit(&[read(token, 0, 0, BLOCK)]);
            played.drive(&mut client, "a slice fails", |_, client| client.ended(token).is_some());
            assert!(client.ended(token).unwrap().result.is_err());
        }
        played.without_namespace = None;
        client.submit(&[read(9, 0, 0, BLOCK)]);
        played.drive(&mut client, "a slice is carried out", |_, client| client.ended(9).is_some());
        assert_eq!(client.ended(9).unwrap().result, Ok(()), "{status:?}");
        let stats = client.transport.stats();
        assert_eq!((stats.associations, stats.associations_lost), (1, 0), "{status:?}");
    }
}

#[test]
fn a_target_that_replaces_no_key_that_is_not_there_is_used() {
    let mut played = Played::new();
    let keys = reserving(&mut played);
    let mut owner = common::node(Config::default(), BYTES);
    let blob = adopted(&mut played, &mut owner).unwrap();
    assert_eq!(keys.borrow().actions, ["register", "acquire"]);
    let mut client = common::node(Config::default(), BYTES);
    client.transport.attach(REMOTE, &blob).unwrap();
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the WRITE", |_, client| client.ended(1).is_some());
    assert_eq!(client.ended(1).unwrap().result, Ok(()));
    assert_eq!(keys.borrow().registered, [owner.transport.identity(), client.transport.identity()]);
}

/// The key of a former life of the same host is replaced.
#[test]
fn a_key_of_before_is_replaced() {
    let mut played = Played::new();
    let actions = Rc::new(RefCell::new(Vec::new()));
    let of = Rc::clone(&actions);
    played.reserve = Some(Box::new(move |opcode, dword, _| {
        of.borrow_mut().push((opcode, dword));
        let refused = (opcode, dword & 7) == (io::RESERVATION_REGISTER, 0);
        Some(if refused { Status::RESERVATION_CONFLICT } else { Status::SUCCESS })
    }));
    let mut owner = common::node(Config::default(), BYTES);
    let blob = adopted(&mut played, &mut owner).unwrap();
    let mut client = common::node(Config::default(), BYTES);
    client.transport.attach(REMOTE, &blob).unwrap();
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the WRITE", |_, client| client.ended(1).is_some());
    assert_eq!(client.ended(1).unwrap().result, Ok(()));
    let register = io::RESERVATION_REGISTER;
    let expected =
        [(register, 0), (register, 10), (io::RESERVATION_ACQUIRE, 4 << 8), (register, 0), (register, 10)];
    assert_eq!(*actions.borrow(), expected);
}

/// The target has restarted and has forgotten all keys: a conflict then is about the owner.
#[test]
fn an_owner_that_the_target_has_forgotten_registers_before_it_preempts() {
    let mut played = Played::new();
    let keys = reserving(&mut played);
    let mut owner = common::node(Config::default(), BYTES);
    adopted(&mut played, &mut owner).unwrap();
    let (own, victim) = (owner.transport.identity(), 77);
    *keys.borrow_mut() = Keys { registered: vec![victim], actions: Vec::new() };
    assert_eq!(expelled(&mut played, &mut owner, victim), Ok(true));
    assert_eq!(keys.borrow().actions, ["preempt", "register", "acquire", "preempt"]);
    assert_eq!(keys.borrow().registered, [own], "the client has no key any more");
    assert_eq!(expelled(&mut played, &mut owner, 78), Err(ErrorKind::Unsupported), "never registered");
}

/// The check of a region finds its I/O queue full: it goes on once there is room.
#[test]
fn a_full_queue_delays_a_check() {
    let mut played = Played::new();
    let config = Config { queues: 1, queue_depth: 4, ..Config::default() };
    let mut owner = common::node(config.clone(), BYTES);
    let blob = adopted(&mut played, &mut owner).unwrap();
    let mut client = common::node(config, BYTES);
    let first = te_core::RemoteRegionId::new(5, 1);
    client.transport.attach(first, &blob).unwrap();
    let of = |slice| te_core::Slice { remote: te_core::RemoteOffset::new(first, 0), ..slice };
    client.submit(&[of(read(1, 0, 0, BLOCK))]);
    played.drive(&mut client, "the first READ", |_, client| client.ended(1).is_some());
    // The queue of the adopted range's subsystem is full of another region of it.
    let second = te_core::RemoteRegionId::new(6, 1);
    client.transport.attach(second, &blob).unwrap();
    played.holds = true;
    for token in 10..14 {
        client.submit(&[of(read(token, 0, 0, BLOCK))]);
    }
    played.drive(&mut client, "the READs arrive", |played, _| played.held.len() == 4);
    let late = te_core::Slice { remote: te_core::RemoteOffset::new(second, 0), ..read(20, 0, 0, BLOCK) };
    client.submit(&[late]);
    for _ in 0..50 {
        client.poll();
        played.poll();
        // timing: a check that fails has time to do so
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(client.ended(20).is_none(), "{:?}", client.ended(20));
    played.holds = false;
    for held in std::mem::take(&mut played.held) {
        played.send_data(held.connection, held.cid(), 0, &[0; BLOCK as usize], te_nvmeof::pdu::FLAG_LAST);
        played.respond(held.connection, held.cid(), Status::SUCCESS, 0);
    }
    played.drive(&mut client, "the READ", |_, client| client.ended(20).is_some());
    assert_eq!(client.ended(20).unwrap().result, Ok(()));
}

/// A report of a reservation with this generation and these hosts, whose keys are their identities.
fn report(generation: u32, hosts: &[u64]) -> Vec<u8> {
    let mut report = vec![0; 4_096];
    report[..4].copy_from_slice(&generation.to_le_bytes());
    report[5] = hosts.len() as u8;
    for (entry, host) in report[64..].chunks_exact_mut(64).zip(hosts) {
        entry[8..16].copy_from_slice(&host.to_le_bytes());
        entry[16..24].copy_from_slice(&host.to_le_bytes());
        entry[24..32].copy_from_slice(b"snowskin");
    }
    report
}

/// The response to Register is lost with its association. Where Register was not carried out, it is sent
/// again; where it was, it is not; and where the client may have been fenced since, the client stays away.
#[test]
fn a_lost_registration_is_looked_up() {
    // Hosts that are registered afterwards, the generation afterwards, and what comes of it.
    for (is_there, generation, registers, end) in
        [(false, 4, 2, Ok(())), (true, 5, 1, Ok(())), (false, 6, 1, Err(ErrorKind::Expelled))]
    {
        let mut played = Played::new();
        let keys = reserving(&mut played);
        let mut owner = common::node(Config::default(), BYTES);
        let blob = adopted(&mut played, &mut owner).unwrap();
        let inner = played.reserve.take();
        let answers = Rc::new(RefCell::new(false));
        let (of, log) = (Rc::clone(&answers), Rc::clone(&keys));
        let mut inner = inner.unwrap();
        played.reserve = Some(Box::new(move |opcode, dword, data| {
            if *of.borrow() {
                return inner(opcode, dword, data);
            }
            log.borrow_mut().actions.push("register");
            None
        }));
        keys.borrow_mut().actions.clear();
        let mut client = common::node(Config::default(), BYTES);
        let own = client.transport.identity();
        played.report = report(4, &[]);
        client.transport.attach(REMOTE, &blob).unwrap();
        client.submit(&[write(1, 0, 0, BLOCK)]);
        played.drive(&mut client, "Register arrives", |_, _| !keys.borrow().actions.is_empty());
        *answers.borrow_mut() = true;
        let hosts = [1, own];
        played.report = report(generation, if is_there { &hosts } else { &[] });
        played.cut();
        played.drive(&mut client, "the WRITE ends", |_, client| client.ended(1).is_some());
        let result = client.ended(1).unwrap().result.map_err(|error| error.kind);
        assert_eq!((result, keys.borrow().actions.len()), (end, registers), "generation {generation}");
    }
}

/// The answer to a check of a region that was detached meanwhile says nothing about its successor.
#[test]
fn an_answer_to_a_former_region_is_not_taken_for_its_successor() {
    let mut played = Played::new();
    let mut owner = common::node(Config::default(), BYTES);
    let blob = adopted(&mut played, &mut owner).unwrap();
    let mut client = common::node(Config::default(), BYTES);
    client.transport.attach(REMOTE, &blob).unwrap();
    played.holds = true;
    client.submit(&[read(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the READ of the superblock", |played, _| !played.held.is_empty());
    client.transport.cancel(te_core::Token(1)).unwrap();
    client.poll();
    client.transport.detach(REMOTE).unwrap();
    // Another range, whose owner has another epoch: its superblock is not there.
    owner.transport.deregister(ADOPTED).unwrap();
    played.holds = false;
    owner.transport.adopt(ADOPTED, &played.namespace(), 0..32 * u64::from(BLOCK), ACCESS, 2).unwrap();
    let mut other = vec![0; 1_024];
    let mut len = 0;
    let former = played.memory[..BLOCK as usize].to_vec();
    let held = std::mem::take(&mut played.held);
    played.drive(&mut owner, "the range is adopted", |_, owner| {
        len = owner.transport.export(ADOPTED, &mut other).unwrap_or(0);
        len > 0
    });
    let successor = te_core::RemoteRegionId::new(REMOTE.index, REMOTE.generation + 1);
    client.transport.attach(successor, &other[..len]).unwrap();
    let slice = te_core::Slice { remote: te_core::RemoteOffset::new(successor, 0), ..read(2, 0, 0, BLOCK) };
    client.submit(&[slice]);
    // The target answers the former check before it sees the next one.
    for _ in 0..3 {
        client.poll();
    }
    let superblock = &held[0];
    played.send_data(superblock.connection, superblock.cid(), 0, &former, te_nvmeof::pdu::FLAG_LAST);
    played.respond(superblock.connection, superblock.cid(), Status::SUCCESS, 0);
    played.drive(&mut client, "the READ", |_, client| client.ended(2).is_some());
    assert_eq!(client.ended(2).unwrap().result, Ok(()), "the former superblock is not the successor's");
}

/// The WRITE of a superblock was lost with its association: it may land until the controller is gone, and no
/// other superblock is written before.
#[test]
fn a_lost_superblock_is_in_doubt() {
    let mut played = Played::new();
    (played.identity.resets_max, played.identity.instance) = (4, 1);
    let mut owner = common::node(Config::default(), BYTES);
    let whole = 0..32 * u64::from(BLOCK);
    owner.transport.adopt(ADOPTED, &played.namespace(), whole, ACCESS, 1).unwrap();
    played.holds = true;
    played.drive(&mut owner, "the superblock arrives", |played, _| !played.held.is_empty());
    played.cut();
    played.drive(&mut owner, "the next superblock arrives", |played, _| !played.held.is_empty());
    assert_eq!(played.resets, [(1, 1_001)]);
    let held = played.held[0].clone();
    played.respond(held.connection, held.cid(), Status::SUCCESS, 0);
    let mut blob = vec![0; 1_024];
    played.drive(&mut owner, "the range is adopted", |_, owner| {
        owner.transport.export(ADOPTED, &mut blob).is_ok()
    });
}

/// A preempt finds its queue full: it is sent once there is room.
#[test]
fn a_full_queue_delays_a_preempt() {
    let mut played = Played::new();
    let keys = reserving(&mut played);
    let config = Config { queues: 1, queue_depth: 4, ..Config::default() };
    let mut owner = common::node(config, BYTES);
    let blob = adopted(&mut played, &mut owner).unwrap();
    keys.borrow_mut().registered.push(77);
    owner.transport.attach(REMOTE, &blob).unwrap();
    owner.submit(&[read(1, 0, 0, BLOCK)]);
    played.drive(&mut owner, "the first READ", |_, owner| owner.ended(1).is_some());
    played.holds = true;
    let reads: Vec<_> = (10..14).map(|token| read(token, 0, 0, BLOCK)).collect();
    owner.submit(&reads);
    played.drive(&mut owner, "the READs arrive", |played, _| played.held.len() == 4);
    assert_eq!(owner.transport.expel(77, ExpelMode::Force), Ok(false));
    for _ in 0..20 {
        owner.poll();
        played.poll();
    }
    assert!(!keys.borrow().actions.contains(&"preempt"));
    for held in std::mem::take(&mut played.held) {
        played.send_data(held.connection, held.cid(), 0, &[0; BLOCK as usize], te_nvmeof::pdu::FLAG_LAST);
        played.respond(held.connection, held.cid(), Status::SUCCESS, 0);
    }
    assert_eq!(expelled(&mut played, &mut owner, 77), Ok(true));
}
