//! Clients of the library that use it as nobody should, and as somebody will.

use super::{Result, Turn, value_of};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, alarm};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use store_client::{Client, ClientConfig, ErrorCode, Fabrics, Placement, PutOptions, Store as _};

/// Keys that those who fork read, and how often each of the two reads.
const KEYS: u64 = 64;
const READS: u64 = 30;
const VALUE_BYTES: usize = 8 << 10;
const ROUND: Duration = Duration::from_millis(500);
/// A child that lives longer hangs.
const CHILD_MAX: Duration = Duration::from_secs(20);
/// How a child says what it has seen.
const CHILD_FINE: i32 = 0;
const CHILD_READ_WRONG: i32 = 1;
const WRITER_BYTES: usize = 128 << 10;
const WRITER_PAUSE: Duration = Duration::from_millis(20);

/// A client, over sockets or over whatever there is; tried again until there is a master that takes it. None when it is over.
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

/// Forks in the middle of its work and goes on in both: neither may ever read another key's bytes.
pub(crate) fn fork(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    while turn.goes_on() {
        let Some(mut client) = client(turn, master)? else { break };
        for number in 0..KEYS {
            // What is there is there; what finds no room is a miss later.
            let _ = client.put(&key(number), &value_of(&key(number), VALUE_BYTES), &PutOptions::DEFAULT);
        }
        let seeds = [turn.random(), turn.random()];
        match sys::fork()? {
            ForkResult::Child => {
                // It must not outlive its parent's patience, whatever it hangs in.
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

/// How many values were right, and how many wrong. A miss and an error are neither.
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

/// Puts that cannot succeed: everywhere excluded, or longer than any segment. Each has to end with a reason.
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
        // More than can be named cannot be excluded.
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

/// Writes without end, and is stopped by others for longer than its master waits. What it reads is its own bytes or nothing.
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
                // It may have been cut off for good: a new one begins anew.
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

/// What the standard library does not offer, because nobody should want it.
mod sys {
    #![allow(unsafe_code, reason = "to fork is what is tried here")]

    use nix::unistd::ForkResult;

    pub(super) fn fork() -> nix::Result<ForkResult> {
        // SAFETY: POSIX promises a child of a process with several threads async-signal-safe functions alone. What is tried here is
        // what it does all the same, on glibc, whose allocator survives a fork; it ends with `exit` below and never returns.
        unsafe { nix::unistd::fork() }
    }

    /// At once: nothing of the parent's is flushed, dropped or called.
    pub(super) fn exit(code: i32) -> ! {
        // SAFETY: it takes no pointer and does not return.
        unsafe { libc::_exit(code) }
    }
}
