//! The target's side: starts programs for an initiator, one per connection, and kills a program at the
//! initiator's request or when the connection ends. The agent outlives the programs that it starts, so a test
//! can kill a peer and start it again.
//!
//! The first line of a connection is JSON: `{"token": …, "argv": […]}`; the program `self` is this one. After
//! that, lines from the initiator are `<TEXT` (to the program's stdin) and `k` (SIGKILL), and lines to the
//! initiator are `>TEXT` (the program's stdout), `=CODE` (the exit status, or minus the signal that killed
//! the program) and `!TEXT` (the program could not be started). A caller that knows the token can run any
//! program: run agents only on a trusted network.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// Longest request, bytes.
pub(crate) const LINE_BYTES_MAX: u64 = 64 << 10;

/// The first line of a connection: the program to start.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// `HW_TESTS_TOKEN`, the same on both sides.
    pub(crate) token: String,
    /// The program and its arguments.
    pub(crate) argv: Vec<String>,
}

/// `HW_TESTS_TOKEN` of this process's environment.
///
/// # Errors
/// When it is unset or empty.
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
            if let Err(error) = serve_connection(stream, &token) {
                eprintln!("agent: {error:#}");
            }
        });
    }
    Ok(())
}

fn serve_connection(stream: TcpStream, token: &str) -> Result<()> {
    let mut requests = BufReader::new(stream.try_clone()?);
    let mut answers = stream;
    answers.set_nodelay(true)?;
    let mut first = String::new();
    requests.by_ref().take(LINE_BYTES_MAX).read_line(&mut first)?;
    if first.is_empty() {
        // The caller only checked whether the agent listens.
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
            // The program may have ended already.
            let _ = child.lock().unwrap_or_else(PoisonError::into_inner).kill();
        }
    };
    std::thread::spawn(move || {
        for line in requests.lines().map_while(Result::ok) {
            match line.split_at_checked(1) {
                Some(("<", text)) => {
                    if let Some(stdin) = &mut stdin {
                        // The write fails only once the program has closed its stdin; its end is reported
                        // below.
                        let _ = writeln!(stdin, "{text}");
                    }
                }
                _ => kill(),
            }
        }
        kill();
    });
    for line in BufReader::new(stdout.context("the program's stdout is not a pipe")?).split(b'\n') {
        let line = line?;
        // One segment: in several, each line would wait for an acknowledgement.
        let line = format!(">{}\n", String::from_utf8_lossy(&line));
        if answers.write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    // The program has closed its stdout: it has ended or is about to. The lock is not held between the
    // checks, so that the other thread can still kill it.
    let status = loop {
        if let Some(status) = child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()? {
            break status;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let code = status.code().unwrap_or_else(|| -status.signal().unwrap_or(0));
    // The initiator may have closed the connection.
    let _ = writeln!(answers, "={code}");
    // This was the last answer. The thread that reads requests ends with the connection.
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

/// Starts an agent on a thread of this process; returns its port.
#[cfg(test)]
pub(crate) fn start_for_tests(token: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || accept(&listener, token));
    port
}
