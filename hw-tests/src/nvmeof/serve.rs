//! `helper nvmeof serve`: our target in a process of its own.

use crate::helper::print_line;
use anyhow::{Context as _, Result, bail};
use std::io::BufRead as _;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;
use te_core::testkit::pattern;
use te_core::{Memory as _, Transport as _};
use te_fabric::testkit::{ALL, Node, REGION, hex};
use te_nvmeof::{Config, NvmeofTransport};

/// The pause after a poll that did nothing.
const PAUSE: Duration = Duration::from_micros(200);

/// Serves `bytes` of memory as a namespace at `address`, to any host, until it is killed. It prints
/// `ready NQN EXPORT PID`, and answers `fill SEED OFFSET LEN` with `ok`, `check SEED OFFSET LEN` with `ok` or
/// `differs OFFSET`, and `stats` with its counters.
///
/// # Errors
/// When it cannot listen, or with a malformed command.
pub(crate) fn serve(address: &str, bytes: usize) -> Result<()> {
    let config = Config { bind: address.parse()?, open_to_hosts: true, ..Config::default() };
    let transport = NvmeofTransport::new(config).with_context(|| format!("no target at {address}"))?;
    let mut node = Node::with(transport, bytes, ALL);
    let mut blob = vec![0; 1_024];
    let len = node.transport.export(REGION, &mut blob)?;
    let (nqn, export, pid) = (node.transport.nqn(), hex(&blob[..len]), std::process::id());
    print_line(&format!("ready {nqn} {export} {pid}"))?;
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
        // Without a caller that sends commands, it serves until it is killed.
        std::thread::park();
    });
    loop {
        match lines.try_recv() {
            Ok(line) => print_line(&answer(&node, &line)?)?,
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Ok(()),
        }
        let before = node.transport.activity();
        node.poll();
        if node.transport.activity() == before {
            std::thread::sleep(PAUSE);
        }
    }
}

fn answer(node: &Node<NvmeofTransport>, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    if let ["stats"] = words[..] {
        return Ok(format!("{:?}", node.transport.stats()));
    }
    let [command, seed, offset, len] = words[..] else { bail!("`{line}` is not a command") };
    let (seed, offset, len): (u64, u64, usize) = (seed.parse()?, offset.parse()?, len.parse()?);
    let expected = pattern(seed, len);
    match command {
        "fill" => {
            node.memory.set(offset, &expected);
            Ok("ok".to_owned())
        }
        "check" => {
            let found = node.memory.get(offset, len);
            Ok(match found.iter().zip(&expected).position(|(a, b)| a != b) {
                None => "ok".to_owned(),
                Some(at) => format!("differs {}", offset + at as u64),
            })
        }
        _ => bail!("`{line}` is not a command"),
    }
}
