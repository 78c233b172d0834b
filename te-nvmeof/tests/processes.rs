//! Two processes: the target is this test binary, started once more; it is killed, stopped and continued.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Node, Process, REMOTE, bytes_of, drive, eventually, finish, hex, kind, read, write};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use te_core::{Memory, Outcome, Slice, Token, Transport};
use te_nvmeof::Config;

const TARGET: &str = "SNOWSKIN_TEST_TARGET";
const BYTES: usize = 8 << 20;

/// Serves until it is killed, when the environment says that this process is the target; otherwise it tests
/// nothing.
#[test]
fn target_process() {
    if std::env::var_os(TARGET).is_none() {
        return;
    }
    let mut node = common::node(Config::default(), BYTES);
    println!("\nexport {}", hex(&node.export()));
    std::io::stdout().flush().unwrap();
    loop {
        node.poll();
        std::thread::yield_now();
    }
}

/// A target in a process of its own, and an initiator here that has attached its memory.
fn start(config: Config) -> (Process, Node) {
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
    let mut node = common::node(config, BYTES);
    node.transport.attach(REMOTE, &blob).unwrap();
    (process, node)
}

fn signal(process: &Process, signal: Signal) {
    kill(Pid::from_raw(process.0.id() as i32), signal).unwrap();
}

/// Whether all threads of the process are stopped: the signal is sent before that.
fn is_stopped(process: &Process) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.0.id())).unwrap();
    tasks.flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    })
}

#[test]
fn what_is_written_in_another_process_is_read_back() {
    for config in common::configs() {
        let (_process, mut a) = start(config.clone());
        a.memory.paint(7);
        let slices: Vec<Slice> = (0..64).map(|i| write(i, i * 65_536, (63 - i) * 65_536, 65_536)).collect();
        a.submit(&slices);
        drive(&mut [&mut a], |a| a.done.len() == slices.len());
        assert!(a.done.iter().all(|end| end.result.is_ok()), "{config:?}");
        let painted = a.memory.get(0, 4 << 20);
        a.memory.set(0, &vec![0; 4 << 20]);
        a.done.clear();
        let slices: Vec<Slice> =
            (0..64).map(|i| read(100 + i, i * 65_536, (63 - i) * 65_536, 65_536)).collect();
        a.submit(&slices);
        drive(&mut [&mut a], |a| a.done.len() == slices.len());
        assert!(a.memory.get(0, 4 << 20) == painted, "{config:?}");
    }
}

#[test]
fn every_slice_ends_once_when_the_target_is_killed() {
    let (mut process, mut a) = start(Config::default());
    a.submit(&[read(5_000, 0, 0, 4_096)]);
    assert!(finish(&mut [&mut a], 5_000).result.is_ok());
    let slices: Vec<Slice> = (0..1_000_u64)
        .map(|i| {
            let at = i % 128 * 65_536;
            if i % 2 == 0 { write(i, at, at, 65_536) } else { read(i, at, at, 65_536) }
        })
        .collect();
    let mut submitted = a.transport.submit(&slices).unwrap();
    drive(&mut [&mut a], |a| a.done.len() > 20);
    process.0.kill().unwrap();
    drive(&mut [&mut a], |a| {
        // Slices after the death may be refused at once.
        if submitted < slices.len() {
            submitted += a.transport.submit(&slices[submitted..]).unwrap_or(0);
        }
        a.done.len() > submitted
    });
    let mut failed = 0;
    for slice in &slices[..submitted] {
        let end = a.ended(slice.token.0).expect("it has ended");
        if end.result.is_err() {
            failed += 1;
            assert!(kind(&end).is_retryable_elsewhere(), "{end:?}");
        }
    }
    assert!(failed > 0, "the target died in the middle");
    // Nothing proves that a WRITE of it does not land: a fence ends with an error.
    if a.done.iter().any(|end| end.outcome == Outcome::Unknown) {
        a.transport.fence(Token(9_000), REMOTE).unwrap();
        let end = finish(&mut [&mut a], 9_000);
        assert!(end.result.is_err(), "a dead target has proved nothing");
    }
}

/// SIGSTOP in the middle of WRITEs, a loss of the connection, SIGCONT: the fence ends `Applied` only after
/// the target runs again and has reset the old controller.
#[test]
fn a_stopped_target_proves_nothing_until_it_runs_again() {
    let config = Config { peer_silence_ms_max: 300, connect_ms_max: 300, ..Config::default() };
    let (process, mut a) = start(config);
    a.memory.set(0, &vec![0x77; BYTES]);
    a.submit(&[write(1, 0, 0, 4_096)]);
    assert!(finish(&mut [&mut a], 1).result.is_ok());
    signal(&process, Signal::SIGSTOP);
    eventually("the target has stopped", || is_stopped(&process));
    a.submit(&[write(2, 0, 0, 16_384), write(3, 0, 1 << 20, 4 << 20)]);
    drive(&mut [&mut a], |a| a.ended(2).is_some() && a.ended(3).is_some());
    assert_eq!(a.ended(2).unwrap().outcome, Outcome::Unknown);
    a.transport.fence(Token(4), REMOTE).unwrap();
    let end = finish(&mut [&mut a], 4);
    assert!(end.result.is_err(), "L5: a fence was proved by a target that does not run");
    signal(&process, Signal::SIGCONT);
    let mut token = 10;
    eventually("a fence is proved", || {
        token += 1;
        a.transport.fence(Token(token), REMOTE).unwrap();
        finish(&mut [&mut a], token).result.is_ok()
    });
    // From here on the range has other bytes, and none of the old ones shows.
    a.memory.set(0, &vec![0x99; BYTES]);
    for at in 0..4 {
        a.submit(&[write(1_000 + at, 0, at << 21, 2 << 20)]);
        assert!(finish(&mut [&mut a], 1_000 + at).result.is_ok());
    }
    for at in 0..4 {
        a.memory.set(0, &vec![0; BYTES]);
        common::linger(&mut [&mut a], Duration::from_millis(30));
        a.submit(&[read(2_000 + at, 0, at << 21, 2 << 20)]);
        assert!(finish(&mut [&mut a], 2_000 + at).result.is_ok());
        assert!(a.memory.get(0, 2 << 20).iter().all(|byte| *byte == 0x99), "L5: old bytes have landed");
    }
}
