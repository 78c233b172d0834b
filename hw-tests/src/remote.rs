//! The initiator's side of an [agent](crate::agent): programs on the peer, used like child processes.

use crate::agent::{Start, token};
use crate::facts::Facts;
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a peer's agent may take to listen: the peer may still be booting.
const AGENT_READY: Duration = Duration::from_secs(60);
/// How long a program may take for one answer.
const ANSWER: Duration = Duration::from_secs(60);
/// Time limit of one attempt to connect to the agent.
const DIAL: Duration = Duration::from_secs(5);

/// A second machine with an agent.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    address: String,
    /// The addresses of the connection to the agent: this end, and the agent's.
    ends: (IpAddr, IpAddr),
    token: String,
}

/// A program on the peer. Dropping the value kills the program.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    stream: TcpStream,
    output: mpsc::Receiver<Output>,
}

/// A line of the agent.
#[derive(Debug)]
enum Output {
    /// A line of the program's stdout.
    Line(String),
    /// The exit status, or minus the signal that killed the program.
    Exit(i32),
    /// The error of the start.
    NotStarted(String),
}

impl Peer {
    /// Waits until the agent at `address` answers.
    ///
    /// # Errors
    /// When the agent does not answer within a minute.
    pub(crate) fn connect(address: &str) -> Result<Self> {
        let unknown = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let mut peer = Self { address: address.to_owned(), ends: (unknown, unknown), token: token()? };
        let give_up = Instant::now() + AGENT_READY;
        loop {
            match peer.run(&["true"]) {
                Ok(_) => {
                    peer.ends = peer
                        .dial()
                        .and_then(|stream| Ok((stream.local_addr()?.ip(), stream.peer_addr()?.ip())))?;
                    return Ok(peer);
                }
                Err(error) if Instant::now() > give_up => {
                    return Err(error)
                        .with_context(|| format!("the peer's agent at {address} does not answer"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// The addresses of this machine and of the peer on the management network.
    pub(crate) fn management(&self) -> (IpAddr, IpAddr) {
        self.ends
    }

    /// Starts a program; `self` is this one.
    ///
    /// # Errors
    /// When the agent cannot be reached. That a program cannot be started is reported by the methods of the
    /// returned process.
    pub(crate) fn start(&self, argv: &[&str]) -> Result<Process> {
        let address = self.address.to_socket_addrs()?.next().context("HW_TESTS_PEER names no address")?;
        let mut stream =
            TcpStream::connect_timeout(&address, DIAL).context("the peer's agent cannot be reached")?;
        stream.set_nodelay(true)?;
        let start =
            Start { token: self.token.clone(), argv: argv.iter().map(|word| (*word).to_owned()).collect() };
        writeln!(stream, "{}", serde_json::to_string(&start)?)?;
        let (sender, output) = mpsc::channel();
        let lines = BufReader::new(stream.try_clone()?).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let item = match line.split_at_checked(1) {
                    Some((">", text)) => Output::Line(text.to_owned()),
                    Some(("=", code)) => Output::Exit(code.parse().unwrap_or(-1)),
                    Some(("!", why)) => Output::NotStarted(why.to_owned()),
                    _ => continue,
                };
                // The process has been dropped.
                if sender.send(item).is_err() {
                    return;
                }
            }
        });
        Ok(Process { name: argv.join(" "), stream, output })
    }

    /// Runs a program to its end; returns its stdout.
    ///
    /// # Errors
    /// When the program cannot be started, fails, or takes longer than a minute.
    pub(crate) fn run(&self, argv: &[&str]) -> Result<String> {
        self.start(argv)?.finish(ANSWER)
    }

    /// The devices of the peer.
    ///
    /// # Errors
    /// When the peer does not answer, or with a malformed answer.
    pub(crate) fn facts(&self) -> Result<Facts> {
        let text = self.run(&["self", "facts"])?;
        serde_json::from_str(&text)
            .context("the peer's list of devices is malformed: is its program of the same release?")
    }

    fn dial(&self) -> Result<TcpStream> {
        let address = self.address.to_socket_addrs()?.next().context("HW_TESTS_PEER names no address")?;
        TcpStream::connect_timeout(&address, DIAL).context("the peer's agent cannot be reached")
    }
}

impl Process {
    /// Sends a line to the program's stdin.
    ///
    /// # Errors
    /// When the connection to the agent is broken.
    pub(crate) fn send(&mut self, line: &str) -> Result<()> {
        // One segment: in several, each line would wait for an acknowledgement.
        self.stream
            .write_all(format!("<{line}\n").as_bytes())
            .with_context(|| format!("`{}` on the peer is gone", self.name))
    }

    /// The next line of the program's stdout.
    ///
    /// # Errors
    /// When the program ends, or prints no line within a minute.
    pub(crate) fn receive(&mut self) -> Result<String> {
        match self.next(Instant::now() + ANSWER)? {
            Output::Line(line) => Ok(line),
            Output::Exit(code) => bail!("`{}` on the peer ended with {code}", self.name),
            Output::NotStarted(why) => bail!("`{}` on the peer: {why}", self.name),
        }
    }

    /// Sends a line and returns the next line of the program's stdout.
    ///
    /// # Errors
    /// As [`send`](Self::send) and [`receive`](Self::receive).
    pub(crate) fn request(&mut self, line: &str) -> Result<String> {
        self.send(line)?;
        self.receive()
    }

    /// SIGKILL; waits until it is gone.
    ///
    /// # Errors
    /// When the agent does not report its end.
    pub(crate) fn kill(mut self) -> Result<()> {
        writeln!(self.stream, "k").context("the peer's agent is gone")?;
        let give_up = Instant::now() + ANSWER;
        while let Output::Line(_) = self.next(give_up)? {}
        Ok(())
    }

    /// Waits for the end of the program; returns its stdout.
    ///
    /// # Errors
    /// When the program fails, or does not end within `timeout`.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<String> {
        let give_up = Instant::now() + timeout;
        let mut text = String::new();
        loop {
            match self.next(give_up)? {
                Output::Line(line) => text += &(line + "\n"),
                Output::Exit(code) => {
                    ensure!(code == 0, "`{}` on the peer ended with {code}:\n{text}", self.name);
                    return Ok(text);
                }
                Output::NotStarted(why) => bail!("`{}` on the peer: {why}", self.name),
            }
        }
    }

    fn next(&mut self, give_up: Instant) -> Result<Output> {
        match self.output.recv_timeout(give_up.saturating_duration_since(Instant::now())) {
            Ok(output) => Ok(output),
            Err(RecvTimeoutError::Timeout) => bail!("`{}` on the peer did not answer in time", self.name),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the connection to `{}` on the peer broke", self.name)
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The agent kills the program when the connection ends. The reader thread holds a clone of the
        // socket.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod unit {
    use super::*;
    use crate::agent;

    /// An agent in this process. Its token is an argument, because tests do not change the environment.
    fn peer(port: u16) -> Peer {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Peer { address: format!("127.0.0.1:{port}"), ends: (here, here), token: "secret".into() }
    }

    fn start_agent() -> Peer {
        let port = agent::start_for_tests("secret");
        peer(port)
    }

    #[test]
    fn a_program_runs_on_the_peer_and_its_exit_code_counts() {
        let peer = start_agent();
        assert_eq!(peer.run(&["echo", "two words"]).expect("it runs"), "two words\n");
        let error = peer.run(&["sh", "-c", "echo why; exit 3"]).expect_err("it fails").to_string();
        assert!(error.contains("ended with 3") && error.contains("why"), "{error}");
        assert!(peer.run(&["no-such-program-here"]).is_err());
    }

    #[test]
    fn a_program_answers_is_killed_and_started_again() {
        let peer = start_agent();
        let mut cat = peer.start(&["cat"]).expect("it starts");
        assert_eq!(cat.request("hello").expect("it echoes"), "hello");
        cat.kill().expect("it dies");
        let mut cat = peer.start(&["cat"]).expect("it starts again");
        assert_eq!(cat.request("again").expect("it echoes"), "again");
    }

    #[test]
    fn a_program_dies_with_its_connection() {
        let peer = start_agent();
        let mut shell = peer.start(&["sh", "-c", "echo $$; exec sleep 60"]).expect("it starts");
        let pid = shell.receive().expect("it prints its process id");
        let dir = std::path::PathBuf::from(format!("/proc/{pid}"));
        assert!(dir.exists());
        drop(shell);
        while dir.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_caller_with_a_wrong_token_starts_no_program() {
        let mut peer = start_agent();
        peer.token = "guess".into();
        let error = peer.run(&["true"]).expect_err("refused").to_string();
        assert!(error.contains("wrong token"), "{error}");
    }
}
