//! Clients that misuse the library in ways that occur in practice.

use super::{Result, Turn, value_of};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, alarm};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use store_client::{Client, ClientConfig, ErrorCode, Fabrics, Placement, PutOptions, Store as _};

/// Keys that the two processes of a fork read, and how often each of them reads.
const KEYS: u64 = 64;
const READS: u64 = 30;
const VALUE_BYTES: usize = 8 << 10;
const ROUND: Duration = Duration::from_millis(500);
/// A child that runs longer than this hangs.
const CHILD_MAX: Duration = Duration::from_secs(20);
/// Exit codes with which a child reports what it has read.
const CHILD_FINE: i32 = 0;
const CHILD_READ_WRONG: i32 = 1;
const WRITER_BYTES: usize = 128 << 10;
const WRITER_PAUSE: Duration = Duration::from_millis(20);

/// Connects a client, over sockets or over any fabric; retries until a master accepts it. `None` when the
/// process is to end.
pub(crate) fn client(turn: &mut Turn, master: SocketAddr) -> Result<Option<Client>> {
    let mut config = ClientConfig::new(master.to_string().parse()?);
    config.rpc.call_ms_max = 1_000;
    if turn.below(2) == 0 {
        config = config.fabrics(Fabrics::TCP);
    }
    while turn.goes_on() {
        match Client::connect(config.clone()) {
            Ok(client) => return Ok(Some(client)),
            Err(_) => turn.count("clients_refused", 1),
        }
        turn.pause(ROUND);
    }
    Ok(None)
}

fn key(number: u64) -> Vec<u8> {
    format!("fork/{number}").into_bytes()
}

/// Forks while a client is in use and uses it in both processes: neither may ever read another key's bytes.
pub(crate) fn fork(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    while turn.goes_on() {
        let Some(mut client) = client(turn, master)? else { break };
        for number in 0..KEYS {
            // Errors are ignored: an object that does not fit is a miss later.
            let _ = client.put(&key(number), &value_of(&key(number), VALUE_BYTES), &PutOptions::DEFAULT);
        }
        let seeds = [turn.random(), turn.random()];
        match sys::fork()? {
            ForkResult::Child => {
                // The child must end in any case, wherever it hangs.
                alarm::set(CHILD_MAX.as_secs() as u32);
                let wrong = read_some(&mut client, seeds[0]).1;
                sys::exit(if wrong == 0 { CHILD_FINE } else { CHILD_READ_WRONG });
            }
            ForkResult::Parent { child } => {
                let (right, wrong) = read_some(&mut client, seeds[1]);
                turn.count("forks", 1);
                turn.count("fork_reads", right);
                if wrong > 0 {
                    turn.wrong(&format!("fork: the parent read {wrong} values of other keys"));
                }
                judge_child(turn, child)?;
            }
        }
        turn.pause(ROUND);
    }
    Ok(())
}

/// Number of right values, and of wrong ones. Misses and errors count as neither.
fn read_some(client: &mut Client, seed: u64) -> (u64, u64) {
    let (mut right, mut wrong) = (0, 0);
    for read in 0..READS {
        let key = key(super::mix(seed ^ read) % KEYS);
        match client.get(&key) {
            Ok(Some(value)) if value == value_of(&key, VALUE_BYTES) => right += 1,
            Ok(Some(_)) => wrong += 1,
            Ok(None) | Err(_) => {}
        }
    }
    (right, wrong)
}

fn judge_child(turn: &mut Turn, child: Pid) -> Result<()> {
    let deadline = Instant::now() + CHILD_MAX * 2;
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::Exited(_, CHILD_FINE) => return Ok(()),
            WaitStatus::Exited(_, code) => {
                turn.wrong(&format!("fork: the child ended with {code}: 1 is another key's value"))
            }
            WaitStatus::Signaled(_, Signal::SIGALRM, _) => turn.wrong("fork: the child hung"),
            WaitStatus::Signaled(_, signal, _) => turn.wrong(&format!("fork: the child died of {signal}")),
            _ if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            _ => turn.wrong("fork: the child cannot be waited for"),
        }
        return Ok(());
    }
}

/// Puts that cannot succeed: all segments are excluded, or the object is longer than any segment. Each has to
/// fail with a reason.
pub(crate) fn wishes(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    turn.rounds(ROUND, "wish_connections_lost", |turn| wish(turn, master));
    Ok(())
}

fn wish(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    let Some(mut client) = client(turn, master)? else { return Ok(()) };
    let segments = client.master().segments()?;
    let longest = segments.iter().map(|segment| segment.len).max().unwrap_or(0);
    let mut nowhere = Placement::ANY;
    for segment in &segments {
        // A put can exclude only a limited number of segments.
        if nowhere.excluded.push(segment.segment).is_err() {
            return Err("more segments than a put can exclude".into());
        }
    }
    let excluded = PutOptions { placement: nowhere, ..PutOptions::DEFAULT };
    for (value, options) in [(vec![7; 100], excluded), (vec![7; longest as usize + 1], PutOptions::DEFAULT)] {
        let key = format!("wish/{:x}", turn.random()).into_bytes();
        match client.put(&key, &value, &options) {
            Ok(_) => turn.wrong("wish: a put that cannot succeed did"),
            Err(error) if is_a_reason(error.code()) => turn.count("wishes_refused", 1),
            Err(error) => turn
                .count(if error.code() == ErrorCode::RpcFail { "wishes_unheard" } else { "wishes_odd" }, 1),
        }
    }
    Ok(())
}

fn is_a_reason(code: ErrorCode) -> bool {
    code.is_no_room() || code == ErrorCode::InvalidParams
}

/// Writes without end, and is stopped by the soak for longer than its master waits. It must read its own
/// bytes or nothing.
pub(crate) fn writer(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    let Some(mut writer) = client(turn, master)? else { return Ok(()) };
    while turn.goes_on() {
        let key = format!("writer/{:x}", turn.below(1 << 16)).into_bytes();
        let value = value_of(&key, WRITER_BYTES);
        match writer.put(&key, &value, &PutOptions::DEFAULT) {
            Ok(_) => turn.count("writer_puts", 1),
            Err(error) if error.code() == ErrorCode::ObjectAlreadyExists => turn.count("writer_puts", 1),
            Err(error) if error.code().is_no_room() => turn.count("writer_no_room", 1),
            Err(_) => {
                turn.count("writer_errors", 1);
                // It may have been cut off permanently: a new client starts over.
                let Some(new) = client(turn, master)? else { break };
                writer = new;
            }
        }
        if let Ok(Some(read)) = writer.get(&key)
            && read != value
        {
            turn.wrong(&format!("writer: other bytes of {}", key.escape_ascii()));
        }
        turn.pause(WRITER_PAUSE);
    }
    Ok(())
}

/// A system call that the standard library does not offer, because it is unsafe in programs with threads.
mod sys {
    #![allow(unsafe_code, reason = "forking is what this role tests")]

    use nix::unistd::ForkResult;

    pub(super) fn fork() -> nix::Result<ForkResult> {
        // SAFETY: POSIX guarantees only async-signal-safe functions in the child of a process with several
        // threads. This role tests what happens otherwise, on glibc, whose allocator survives a fork; the
        // child ends with `exit` below and never returns.
        unsafe { nix::unistd::fork() }
    }

    /// Ends the process at once: nothing of the parent's is flushed, dropped or called.
    pub(super) fn exit(code: i32) -> ! {
        // SAFETY: it takes no pointer and does not return.
        unsafe { libc::_exit(code) }
    }
}
