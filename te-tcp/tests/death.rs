//! `kill -9` of a target in the middle of a thousand slices. The target is this test binary, started once
//! more.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use common::{Process, REMOTE, bytes_of, drive, finish, hex, kind, pair, read, write};
use te_core::{ErrorKind, Outcome, RemoteOffset, RemoteRegionId, Slice};
use te_tcp::Config;

const TARGET: &str = "SNOWSKIN_TEST_TARGET";
const BYTES: usize = 8 << 20;

/// Serves until it is killed, when the environment says that this process is the target; otherwise it tests
/// nothing.
#[test]
fn target_process() {
    if std::env::var_os(TARGET).is_none() {
        return;
    }
    let mut node = common::node(common::config(), BYTES);
    println!("\nexport {}", hex(&node.export()));
    std::io::stdout().flush().unwrap();
    loop {
        node.poll();
        std::thread::yield_now();
    }
}

fn start_target() -> (Process, Vec<u8>) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["target_process", "--exact", "--nocapture"])
        .env(TARGET, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut process = Process(child);
    let lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
    let line =
        lines.map_while(Result::ok).find(|line| line.starts_with("export ")).expect("the target's export");
    let blob = bytes_of(&line["export ".len()..]);
    (process, blob)
}

#[test]
fn every_slice_ends_once_when_the_target_is_killed() {
    for connections in [1, 4] {
        // Another peer, which must not be affected.
        let config = Config { connections, ..common::config() };
        let (mut a, mut witness) = pair(&config, BYTES);
        let (mut process, blob) = start_target();
        let victim = RemoteRegionId::new(1, 1);
        te_core::Memory::attach(&mut a.transport, victim, &blob).unwrap();
        a.submit(&[Slice { remote: RemoteOffset::new(victim, 0), ..read(5_000, 0, 0, 8) }]);
        assert!(finish(&mut [&mut a], 5_000).result.is_ok());

        let slices: Vec<_> = (0..1_000_u64)
            .map(|i| {
                let (at, len) = ((i % 128) << 16, 65_536);
                let slice = if i % 2 == 0 { read(i, at, at, len) } else { write(i, at, at, len) };
                Slice { remote: RemoteOffset::new(victim, at), ..slice }
            })
            .collect();
        a.submit(&slices);
        drive(&mut [&mut a], |node| node.done.len() > 50);
        process.0.kill().unwrap();
        process.0.wait().unwrap();
        a.submit(&[Slice { remote: RemoteOffset::new(REMOTE, 0), ..write(6_000, 0, 0, 8) }]);
        drive(&mut [&mut a, &mut witness], |node| node.done.len() == 1_002);
        assert!(a.ended(6_000).unwrap().result.is_ok(), "the other peer");
        let (mut applied, mut not_applied, mut unknown) = (0, 0, 0);
        for slice in &slices {
            let end = a.ended(slice.token.0).expect("L1");
            match end.outcome {
                Outcome::Applied => applied += 1,
                Outcome::NotApplied => not_applied += 1,
                Outcome::Unknown => unknown += 1,
            }
            if end.result.is_err() {
                assert_eq!(kind(&end), ErrorKind::PeerDead);
                assert!(slice.op == te_core::Op::Write || end.outcome == Outcome::NotApplied);
            }
        }
        println!(
            "{connections} connections: {applied} applied, {not_applied} not applied, {unknown} unknown"
        );
        assert!(applied >= 50 && not_applied > 0);
        assert_eq!(a.transport.slices_in_flight(), 0);
        te_core::Memory::detach(&mut a.transport, victim).unwrap();
    }
}
