//! Laws whose breach needs full sockets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::{REGION, REMOTE, drive, finish, kind, linger, read, write};
use te_core::{Completion, ErrorKind, Memory, Outcome, Token, Transport};
use te_nvmeof::Config;

const BYTES: usize = 8 << 20;
const LEN: u32 = 4 << 20;

fn tight(detached_bytes_max: u32) -> Config {
    Config {
        send_buffer_bytes: Some(32_768),
        receive_buffer_bytes: Some(65_536),
        detached_bytes_max,
        ..Config::default()
    }
}

/// L2: a cancelled WRITE of which a part waits in the outbox does not read its memory again, whether its rest
/// is copied or the connection is given up.
#[test]
fn a_cancelled_write_does_not_read_its_source_again() {
    for detached_bytes_max in [64 << 20, 0] {
        for polls in 1..12 {
            let (mut a, mut b) = common::pair(&tight(detached_bytes_max), BYTES);
            a.submit(&[write(1, 0, 0, 4_096)]);
            assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
            a.memory.set(0, &vec![0x22; BYTES]);
            a.submit(&[write(2, 0, 0, LEN)]);
            for _ in 0..polls {
                a.poll();
                b.poll();
            }
            a.transport.cancel(Token(2)).unwrap();
            a.poll();
            assert_eq!(kind(&a.ended(2).expect("a cancel ends in the next poll")), ErrorKind::Canceled);
            assert_eq!(a.transport.deregister(REGION), Ok(()), "nothing uses the memory any more");
            a.memory.set(0, &vec![0x33; BYTES]);
            linger(&mut [&mut a, &mut b], Duration::from_millis(60));
            let there = b.memory.get(4_096, LEN as usize - 4_096);
            let odd = there.iter().find(|byte| **byte != 0 && **byte != 0x22);
            assert_eq!(odd, None, "L2: bytes were read after the WRITE had ended");
        }
    }
}

/// L2: a cancelled READ whose data is in the middle of its arrival.
#[test]
fn a_cancelled_read_in_the_middle_of_its_data_writes_nothing() {
    for polls in 1..12 {
        let (mut a, mut b) = common::pair(&tight(0), BYTES);
        b.memory.paint(5);
        a.submit(&[read(1, 0, 0, 4_096)]);
        assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
        a.submit(&[read(2, 0, 0, LEN), read(3, 4 << 20, 4 << 20, LEN)]);
        for _ in 0..polls {
            a.poll();
            b.poll();
        }
        a.transport.cancel(Token(2)).unwrap();
        a.poll();
        a.memory.set(0, &vec![0xC3; LEN as usize]);
        let end = finish(&mut [&mut a, &mut b], 3);
        assert_eq!(end, Completion::applied(Token(3)), "its neighbour goes on");
        assert!(a.memory.get(0, LEN as usize).iter().all(|byte| *byte == 0xC3), "L2: it was written again");
        assert!(a.memory.get(4 << 20, LEN as usize) == common::pattern(5, 4 << 20, LEN as usize));
    }
}

/// The target withdraws a region in the middle of hosts' reads and writes.
#[test]
fn a_region_is_withdrawn_in_the_middle_of_data() {
    for detached_bytes_max in [64 << 20, 0] {
        let (mut a, mut b) = common::pair(&tight(detached_bytes_max), BYTES);
        a.submit(&[read(1, 0, 0, 4_096)]);
        assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
        a.submit(&[read(2, 0, 0, LEN), write(3, 4 << 20, 4 << 20, LEN)]);
        for _ in 0..8 {
            a.poll();
            b.poll();
        }
        assert!(b.transport.region_pins(REGION).unwrap().1 > 0, "it is in the middle");
        assert_eq!(b.transport.deregister(REGION).map_err(|error| error.kind), Err(ErrorKind::Busy));
        assert_eq!(b.transport.deregister(REGION), Ok(()));
        // The memory has another use from here on.
        b.memory.set(0, &vec![0x99; BYTES]);
        drive(&mut [&mut a, &mut b], |a| a.ended(2).is_some() && a.ended(3).is_some());
        assert!(b.memory.get(0, BYTES).iter().all(|byte| *byte == 0x99), "L2: a WRITE has landed");
        assert_ne!(a.ended(3).unwrap().outcome, Outcome::Applied);
        let refused = a.transport.submit(&[write(4, 0, 0, 4_096)]);
        if refused == Ok(1) {
            assert!(finish(&mut [&mut a, &mut b], 4).result.is_err());
        }
        assert!(a.transport.fence(Token(5), REMOTE).is_ok());
        assert!(finish(&mut [&mut a, &mut b], 5).result.is_ok());
    }
}

/// More data than a target queues at a time: commands that wait in its buffer are taken once there is room.
#[test]
fn more_reads_than_are_queued_at_once_all_end() {
    for queues in [1, 2] {
        let config = Config { queues, ..Config::default() };
        let (mut a, mut b) = common::pair(&config, 32 << 20);
        b.memory.paint(5);
        for round in 0..4_u64 {
            let slices: Vec<_> =
                (0..32).map(|at| read(round * 32 + at + 1, at << 20, at << 20, 1 << 20)).collect();
            a.submit(&slices);
            drive(&mut [&mut a, &mut b], |a| a.done.len() == slices.len());
            assert!(a.done.drain(..).all(|end| end.result.is_ok()));
        }
        assert!(a.memory.get(0, 32 << 20) == common::pattern(5, 0, 32 << 20));
    }
}
