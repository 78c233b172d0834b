//! The target's side: starts programs for an initiator, one for each connection, and kills them when it is told to or the
//! connection ends. It outlives what it starts, so a test can kill a peer and start it again.
//!
//! The first line of a connection is JSON: `{"token": …, "argv": […]}`; `self` as the program is this one. After that, lines from
//! the initiator are `<TEXT` (to the program's stdin) and `k` (SIGKILL), and lines to it `>TEXT` (the program's stdout),
//! `=CODE` (it ended; minus the signal when one killed it) and `!TEXT` (it could not be started). Whoever knows the token can run
//! anything: use it on a network that you trust.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// Longest request, bytes.
pub(crate) const LINE_BYTES_MAX: u64 = 64 << 10;

/// What an initiator asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// `HW_TESTS_TOKEN`, the same on both sides.
    pub(crate) token: String,
    /// The program and its arguments.
    pub(crate) argv: Vec<String>,
}

/// The token of this process's environment.
///
/// # Errors
/// When there is none.
pub(crate) fn token() -> Result<String> {
    let token = std::env::var("HW_TESTS_TOKEN").ok().filter(|token| !token.is_empty());
    token.context("set HW_TESTS_TOKEN to the same secret for the agent and the tests")
}

/// Serves until the process is killed.
///
/// # Errors
/// When it cannot listen.
pub(crate) fn serve(address: &str) -> Result<()> {
    let token = token()?;
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("agent: listening on {}", listener.local_addr()?);
    accept(&listener, &token)
}

fn accept(listener: &TcpListener, token: &str) -> Result<()> {
    for stream in listener.incoming() {
        let (stream, token) = (stream?, token.to_owned());
        std::thread::spawn(move || {
            if let Err(error) = attend(stream, &token) {
                eprintln!("agent: {error:#}");
            }
        });
    }
    Ok(())
}

fn attend(stream: TcpStream, token: &str) -> Result<()> {
    let mut requests = BufReader::new(stream.try_clone()?);
    let mut answers = stream;
    let mut first = String::new();
    requests.by_ref().take(LINE_BYTES_MAX).read_line(&mut first)?;
    if first.is_empty() {
        // Somebody wanted to know whether we listen.
        return Ok(());
    }
    let start: Start = serde_json::from_str(&first).context("a request that is not JSON")?;
    if start.token != token {
        writeln!(answers, "!wrong token")?;
        bail!("a caller with a wrong token");
    }
    let mut child = match spawn(&start.argv) {
        Ok(child) => child,
        Err(error) => {
            writeln!(answers, "!{error:#}")?;
            return Err(error);
        }
    };
    let (mut stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let child = Arc::new(Mutex::new(child));
    let kill = {
        let child = Arc::clone(&child);
        move || {
            // It may have ended by itself.
            let _ = child.lock().unwrap_or_else(PoisonError::into_inner).kill();
        }
    };
    std::thread::spawn(move || {
        for line in requests.lines().map_while(Result::ok) {
            match line.split_at_checked(1) {
                Some(("<", text)) => {
                    if let Some(stdin) = &mut stdin {
                        // A program that does not listen any more has ended.
                        let _ = writeln!(stdin, "{text}");
                    }
                }
                _ => kill(),
            }
        }
        kill();
    });
    for line in BufReader::new(stdout.context("its stdout is ours")?).split(b'\n') {
        let line = line?;
        if writeln!(answers, ">{}", String::from_utf8_lossy(&line)).is_err() {
            break;
        }
    }
    // Its stdout is closed: it has ended, or is about to; the lock is not held while it does.
    let status = loop {
        if let Some(status) = child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()? {
            break status;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let code = status.code().unwrap_or_else(|| -status.signal().unwrap_or(0));
    // The initiator may have gone.
    let _ = writeln!(answers, "={code}");
    // Ours is the last answer; the thread above ends with the connection.
    let _ = answers.shutdown(std::net::Shutdown::Both);
    Ok(())
}

fn spawn(argv: &[String]) -> Result<Child> {
    let (program, args) = argv.split_first().context("no program")?;
    let mut command = match program.as_str() {
        "self" => Command::new(std::env::current_exe()?),
        program => Command::new(program),
    };
    let command = command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().with_context(|| format!("cannot start {program}"))
}

/// An agent on a thread of this process; gives its port.
#[cfg(test)]
pub(crate) fn start_for_tests(token: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || accept(&listener, token));
    port
}
