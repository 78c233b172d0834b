//! What mock engines publish is what they hold, in the forms of the releases that they speak for.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use conductor::mock::{Flavor, MockConfig, Role};
use conductor_core::events::{Batch, Decoder, Dialect, Event, decode_load};
use conductor_core::hash::{Root, keys};
use conductor_core::zmtp::{Connection, Event as Said, Kind, Limits};
use conductor_core::{BlockKey, EngineHash, Tier};
use serde_json::json;
use te_core::Instant;

use crate::common::{post, quick, start};

/// A socket of a reader: messages in order.
struct Socket {
    stream: TcpStream,
    connection: Connection,
}

impl Socket {
    fn open(addr: SocketAddr, kind: Kind) -> Self {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut socket =
            Self { stream, connection: Connection::new(kind, Limits::default(), &[], Instant::ZERO) };
        if kind == Kind::Sub {
            socket.connection.subscribe(b"");
        }
        while !socket.connection.is_open() {
            socket.turn();
        }
        socket.flush();
        socket
    }

    fn flush(&mut self) {
        while !self.connection.output().is_empty() {
            let written = self.stream.write(self.connection.output()).unwrap();
            self.connection.wrote(written);
        }
    }

    /// Writes what is to be written, reads, and returns the messages that came.
    fn turn(&mut self) -> Vec<Vec<Vec<u8>>> {
        self.flush();
        let mut bytes = [0; 4_096];
        let len = self.stream.read(&mut bytes).unwrap();
        assert!(len > 0, "the engine closed the connection");
        self.connection.receive(Instant::ZERO, &bytes[..len]);
        let mut messages = Vec::new();
        while let Some(said) = self.connection.next().unwrap() {
            if let Said::Message(message) = said {
                messages.push(message.iter().map(<[u8]>::to_vec).collect());
            }
        }
        messages
    }

    fn until(&mut self, done: impl Fn(&[Vec<Vec<u8>>]) -> bool) -> Vec<Vec<Vec<u8>>> {
        let mut all = Vec::new();
        while !done(&all) {
            all.extend(self.turn());
        }
        all
    }
}

fn number(message: &[Vec<u8>]) -> u64 {
    let [.., number, _payload] = message else { panic!("{message:?}") };
    u64::from_be_bytes(number[..].try_into().unwrap())
}

/// What a reader of the payloads knows: the blocks of each tier, by the Conductor's keys.
fn believed<'a>(
    dialect: Dialect,
    payloads: impl Iterator<Item = &'a Vec<u8>>,
) -> BTreeMap<Tier, BTreeSet<BlockKey>> {
    let (mut decoder, mut batch) = (Decoder::new(dialect), Batch::new());
    let (mut learnt, mut held) = (BTreeMap::<EngineHash, BlockKey>::new(), BTreeMap::<_, BTreeSet<_>>::new());
    for payload in payloads {
        assert_eq!(decoder.decode(payload, &mut batch).unwrap().skipped.total(), 0);
        for event in batch.events() {
            match event {
                Event::Stored(stored) => {
                    let root = Root::of(0, None, stored.salt);
                    let parent = stored.parent.map(|parent| learnt[&parent]);
                    let mut chain = match parent {
                        Some(parent) => conductor_core::hash::Chain::after(0, parent),
                        None => conductor_core::hash::Chain::new(&root),
                    };
                    let blocks = stored.tokens.chunks_exact(stored.block_tokens as usize);
                    for (hash, tokens) in stored.hashes.iter().zip(blocks) {
                        let key = chain.push(tokens);
                        learnt.insert(*hash, key);
                        held.entry(stored.tier).or_default().insert(key);
                    }
                }
                Event::Removed(removed) => {
                    for hash in removed.hashes {
                        assert!(held.entry(removed.tier).or_default().remove(&learnt[hash]));
                    }
                }
                Event::Cleared(_) => held.clear(),
            }
        }
    }
    held
}

async fn complete(addr: SocketAddr, prompt: &[u32], salt: Option<&str>) {
    let mut body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    assert_eq!(post(addr, "/v1/completions", body.to_string()).await.0.as_u16(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn events_of_every_flavor_say_what_is_held_and_are_replayed_when_they_are_lost() {
    for (flavor, dialect, replay_parts) in [
        (Flavor::Vllm, Dialect::Vllm, 4),
        (Flavor::VllmArrays, Dialect::Vllm, 3),
        (Flavor::Sglang, Dialect::Sglang, 4),
    ] {
        let engine = start(MockConfig { gpu_blocks: 8, cpu_blocks: 4, ..quick(Role::Both, flavor) });
        let mut events = tokio::task::block_in_place(|| Socket::open(engine.events().unwrap(), Kind::Sub));
        // The subscription has to arrive before the first event.
        tokio::time::sleep(Duration::from_millis(50)).await; // timing: PUB does not say who has subscribed
        let prompt = |from: u32| (from..from + 64).collect::<Vec<u32>>();
        complete(engine.http(), &prompt(300), None).await;
        engine.lose_events(1);
        complete(engine.http(), &prompt(500), Some("salt")).await;
        complete(engine.http(), &prompt(700), None).await;
        let live = tokio::task::block_in_place(|| {
            events.until(|all| all.iter().any(|message| number(message) >= 2))
        });
        let numbers: Vec<u64> = live.iter().map(|message| number(message)).collect();
        assert_eq!(numbers[..2], [0, 2], "{flavor:?}");
        let replayed = tokio::task::block_in_place(|| {
            let mut replays = Socket::open(engine.replay().unwrap(), Kind::Dealer);
            replays.connection.send(&[b"", &0_u64.to_be_bytes()]);
            replays.until(|all| all.last().is_some_and(|message| number(message) == u64::MAX))
        });
        assert!(replayed.iter().all(|message| message.len() == replay_parts), "{flavor:?}");
        let (end, replayed) = replayed.split_last().unwrap();
        assert!(end.last().unwrap().is_empty());
        assert_eq!(number(&replayed[1]), 1);
        let held = believed(dialect, replayed.iter().map(|message| message.last().unwrap()));
        let mut expected = [Vec::new(), Vec::new(), Vec::new()];
        for (at, (from, salt)) in [(300, None), (500, Some("salt")), (700, None)].into_iter().enumerate() {
            keys(&prompt(from), 16, &Root::of(0, None, salt), &mut expected[at]);
        }
        let on = |tier: Tier| held.get(&tier).cloned().unwrap_or_default();
        let all = |chains: &[&Vec<BlockKey>]| chains.iter().flat_map(|chain| chain.iter().copied()).collect();
        assert_eq!(on(Tier::Gpu), all(&[&expected[1], &expected[2]]), "{flavor:?}");
        assert_eq!(on(Tier::Cpu), all(&[&expected[0]]), "{flavor:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_load_is_published_with_the_work_that_was_done() {
    let load = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let engine = start(MockConfig { load, speed: 1_000.0, ..quick(Role::Both, Flavor::Sglang) });
    complete(engine.http(), &(300..332).collect::<Vec<u32>>(), None).await;
    let stat = tokio::task::block_in_place(|| {
        let mut loads = Socket::open(engine.load().unwrap(), Kind::Sub);
        let messages = loads.until(|all| !all.is_empty());
        assert_eq!(messages[0][0], b"load");
        decode_load(&messages[0][2]).unwrap()
    });
    assert_eq!((stat.prefilled_tokens, stat.running_requests, stat.used_tokens), (32, 0, 32));
    assert!(stat.prefill_busy_us > 0);
}
