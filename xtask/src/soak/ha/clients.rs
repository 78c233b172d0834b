//! The process of the clients, `store-client/examples/soak_ha`: it gets orders by lines, and answers by
//! lines.

use anyhow::{Context as _, Result, bail};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer may take: an audit reads everything, and misses several times.
const ANSWER_MAX: Duration = Duration::from_secs(120);
const END_MAX: Duration = Duration::from_secs(20);

/// The numbers in an answer, by name.
pub(super) type Numbers = BTreeMap<String, u64>;

pub(super) struct Clients {
    child: Child,
    stdin: Option<ChildStdin>,
    answers: Receiver<String>,
    heard: Arc<Mutex<Heard>>,
}

/// What it says of itself.
#[derive(Default)]
struct Heard {
    counts: Numbers,
    complaints: Vec<String>,
}

impl Clients {
    /// Starts the process in the process group `group`, and waits until it is connected.
    pub(super) fn start(binary: &Path, words: &[String], group: i32) -> Result<Self> {
        let mut child = Command::new(binary)
            .args(words)
            .process_group(group)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("no stdout")?;
        let heard = Arc::new(Mutex::new(Heard::default()));
        let (sender, answers) = channel();
        let hears = Arc::clone(&heard);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::result::Result::ok) {
                match hears.lock().unwrap_or_else(PoisonError::into_inner).hear(&line) {
                    true => {}
                    false if sender.send(line).is_ok() => {}
                    false => return,
                }
            }
        });
        let mut clients = Self { child, stdin, answers, heard };
        clients.answer("ready").context("the clients did not connect")?;
        Ok(clients)
    }

    /// An order without an answer.
    pub(super) fn tell(&mut self, order: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("the clients have ended")?;
        writeln!(stdin, "{order}").context("the clients have ended")
    }

    /// An order, and the line that answers it.
    pub(super) fn ask(&mut self, order: &str, answer: &str) -> Result<String> {
        self.tell(order)?;
        self.answer(answer)
    }

    /// As [`Self::ask`], for an answer that consists of numbers.
    pub(super) fn numbers(&mut self, order: &str, answer: &str) -> Result<Numbers> {
        Ok(numbers(&self.ask(order, answer)?))
    }

    fn answer(&mut self, first: &str) -> Result<String> {
        match self.answers.recv_timeout(ANSWER_MAX) {
            Ok(line) if line.split(' ').next() == Some(first) => Ok(line),
            Ok(line) => bail!("the clients answered `{line}` instead of `{first} …`"),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the clients did not answer within {} s: `{first} …`", ANSWER_MAX.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the clients ended by themselves"),
        }
    }

    /// Its counters, at most a second old.
    pub(super) fn counts(&self) -> Numbers {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).counts.clone()
    }

    pub(super) fn complaints(&self) -> Vec<String> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).complaints.clone()
    }

    /// Ends it in order, so that its last counters are heard.
    pub(super) fn end(&mut self) -> Result<()> {
        drop(self.stdin.take());
        let ended = self.answer("ended");
        let deadline = Instant::now() + END_MAX;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.kill();
        ended.map(drop)
    }

    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Heard {
    /// Whether the line is no answer.
    fn hear(&mut self, line: &str) -> bool {
        match line.split_once(' ') {
            Some(("counts", _)) => self.counts = numbers(line),
            Some(("complaint", text)) => {
                eprintln!("soak: {text}");
                self.complaints.push(text.to_owned());
            }
            Some(("note", text)) => eprintln!("soak: {text}"),
            _ => return false,
        }
        true
    }
}

/// The words of the form `name=number`.
fn numbers(line: &str) -> Numbers {
    let words = line.split(' ').filter_map(|word| word.split_once('='));
    words.filter_map(|(name, number)| Some((name.to_owned(), number.parse().ok()?))).collect()
}

/// The list `name=1,2,3` in an answer.
pub(super) fn list(line: &str, name: &str) -> Vec<u64> {
    let word = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    word.map(|list| list.split(',').filter_map(|number| number.parse().ok()).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_parsed() {
        assert_eq!(list("gaps put=1,20 get=3", "put"), [1, 20]);
        assert_eq!(list("gaps put=1,20 get=3", "get"), [3]);
        assert!(list("gaps put=1", "get").is_empty());
        let numbers = numbers("audited read=5 lost=0 x=y");
        assert_eq!((numbers.get("read"), numbers.get("lost"), numbers.get("x")), (Some(&5), Some(&0), None));
    }

    #[test]
    fn counters_and_complaints_are_no_answers() {
        let mut heard = Heard::default();
        assert!(heard.hear("counts puts=3"));
        assert!(heard.hear("complaint lost: object 7"));
        assert!(!heard.hear("ready") && !heard.hear("audited read=1"));
        assert_eq!(heard.complaints, ["lost: object 7"]);
        assert_eq!(heard.counts.get("puts"), Some(&3));
    }
}
