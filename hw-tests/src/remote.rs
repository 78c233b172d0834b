//! The initiator's side of an [agent](crate::agent): programs on the peer, as if they were children of ours.

use crate::agent::{Start, token};
use crate::facts::Facts;
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a peer's agent may take to listen: the peer may still be booting.
const AGENT_READY: Duration = Duration::from_secs(60);
/// How long a program that answers questions may take for one.
const ANSWER: Duration = Duration::from_secs(60);
/// One attempt to reach the agent.
const DIAL: Duration = Duration::from_secs(5);

/// A second machine with an agent.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    address: String,
    /// Our end's address on the way there, and the agent's.
    ends: (IpAddr, IpAddr),
    token: String,
}

/// A program on the peer. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    stream: TcpStream,
    said: mpsc::Receiver<Said>,
}

#[derive(Debug)]
enum Said {
    Line(String),
    Exit(i32),
    NotStarted(String),
}

impl Peer {
    /// Waits until the agent at `address` answers.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) fn connect(address: &str) -> Result<Self> {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let mut peer = Self { address: address.to_owned(), ends: (nowhere, nowhere), token: token()? };
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

    /// Our address on the management network, and the peer's.
    pub(crate) fn management(&self) -> (IpAddr, IpAddr) {
        self.ends
    }

    /// Starts a program; `self` is this one.
    ///
    /// # Errors
    /// When the agent cannot be reached. A program that cannot be started shows when it is waited for.
    pub(crate) fn start(&self, argv: &[&str]) -> Result<Process> {
        let address = self.address.to_socket_addrs()?.next().context("HW_TESTS_PEER names no address")?;
        let mut stream =
            TcpStream::connect_timeout(&address, DIAL).context("the peer's agent cannot be reached")?;
        let start =
            Start { token: self.token.clone(), argv: argv.iter().map(|word| (*word).to_owned()).collect() };
        writeln!(stream, "{}", serde_json::to_string(&start)?)?;
        let (sender, said) = mpsc::channel();
        let lines = BufReader::new(stream.try_clone()?).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let heard = match line.split_at_checked(1) {
                    Some((">", text)) => Said::Line(text.to_owned()),
                    Some(("=", code)) => Said::Exit(code.parse().unwrap_or(-1)),
                    Some(("!", why)) => Said::NotStarted(why.to_owned()),
                    _ => continue,
                };
                // Nobody asks any more.
                if sender.send(heard).is_err() {
                    return;
                }
            }
        });
        Ok(Process { name: argv.join(" "), stream, said })
    }

    /// Runs a program to its end; gives what it wrote.
    ///
    /// # Errors
    /// When it cannot be started, fails, or takes longer than a minute.
    pub(crate) fn run(&self, argv: &[&str]) -> Result<String> {
        self.start(argv)?.finish(ANSWER)
    }

    /// What the peer has.
    ///
    /// # Errors
    /// When it does not say.
    pub(crate) fn facts(&self) -> Result<Facts> {
        let text = self.run(&["self", "facts"])?;
        serde_json::from_str(&text).context("the peer's facts are not understood: is it the same release?")
    }

    fn dial(&self) -> Result<TcpStream> {
        let address = self.address.to_socket_addrs()?.next().context("HW_TESTS_PEER names no address")?;
        TcpStream::connect_timeout(&address, DIAL).context("the peer's agent cannot be reached")
    }
}

impl Process {
    /// Sends a line to its stdin.
    ///
    /// # Errors
    /// When the connection is gone.
    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.stream, "<{line}").with_context(|| format!("`{}` on the peer is gone", self.name))
    }

    /// Its next line.
    ///
    /// # Errors
    /// When it ends instead, or says nothing in time.
    pub(crate) fn hear(&mut self) -> Result<String> {
        match self.next(Instant::now() + ANSWER)? {
            Said::Line(line) => Ok(line),
            Said::Exit(code) => bail!("`{}` on the peer ended with {code}", self.name),
            Said::NotStarted(why) => bail!("`{}` on the peer: {why}", self.name),
        }
    }

    /// A line there, a line back.
    ///
    /// # Errors
    /// As [`tell`](Self::tell) and [`hear`](Self::hear).
    pub(crate) fn ask(&mut self, line: &str) -> Result<String> {
        self.tell(line)?;
        self.hear()
    }

    /// SIGKILL; waits until it is gone.
    ///
    /// # Errors
    /// When the agent does not report its end.
    pub(crate) fn kill(mut self) -> Result<()> {
        writeln!(self.stream, "k").context("the peer's agent is gone")?;
        let give_up = Instant::now() + ANSWER;
        while let Said::Line(_) = self.next(give_up)? {}
        Ok(())
    }

    /// Waits for its end; gives what it wrote.
    ///
    /// # Errors
    /// When it fails, or does not end in time.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<String> {
        let give_up = Instant::now() + timeout;
        let mut text = String::new();
        loop {
            match self.next(give_up)? {
                Said::Line(line) => text += &(line + "\n"),
                Said::Exit(code) => {
                    ensure!(code == 0, "`{}` on the peer ended with {code}:\n{text}", self.name);
                    return Ok(text);
                }
                Said::NotStarted(why) => bail!("`{}` on the peer: {why}", self.name),
            }
        }
    }

    fn next(&mut self, give_up: Instant) -> Result<Said> {
        match self.said.recv_timeout(give_up.saturating_duration_since(Instant::now())) {
            Ok(said) => Ok(said),
            Err(RecvTimeoutError::Timeout) => bail!("`{}` on the peer says nothing", self.name),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the connection to `{}` on the peer broke", self.name)
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The agent kills the program when the connection ends. The reader thread holds a clone of the socket.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod unit {
    use super::*;
    use crate::agent;

    /// An agent in this process. The token is given by hand: tests do not change the environment.
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
    fn a_program_is_asked_killed_and_started_again() {
        let peer = start_agent();
        let mut cat = peer.start(&["cat"]).expect("it starts");
        assert_eq!(cat.ask("hello").expect("it echoes"), "hello");
        cat.kill().expect("it dies");
        let mut cat = peer.start(&["cat"]).expect("it starts again");
        assert_eq!(cat.ask("again").expect("it echoes"), "again");
    }

    #[test]
    fn a_program_dies_with_its_connection() {
        let peer = start_agent();
        let mut shell = peer.start(&["sh", "-c", "echo $$; exec sleep 60"]).expect("it starts");
        let pid = shell.hear().expect("it tells its number");
        let dir = std::path::PathBuf::from(format!("/proc/{pid}"));
        assert!(dir.exists());
        drop(shell);
        while dir.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn whoever_does_not_know_the_token_starts_nothing() {
        let mut peer = start_agent();
        peer.token = "guess".into();
        let error = peer.run(&["true"]).expect_err("refused").to_string();
        assert!(error.contains("wrong token"), "{error}");
    }
}
