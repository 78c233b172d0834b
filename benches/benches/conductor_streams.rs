//! From the bytes of a publisher to the index, in one thread and without a socket: ZMTP, stream, decoder,
//! block keys, learnt hashes, index. Elements are blocks; the floors are 2 million blocks per second with 64
//! blocks per message, and 1 million with 4.
#![allow(missing_docs, reason = "criterion's macros make public items")]
#![allow(clippy::unwrap_used, reason = "a bench that fails reports the line")]

use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Dialect, Event, Extra, Source, Stored};
use conductor_core::knowledge::{Knowledge, PublisherId, Registration, Role, Settings};
use conductor_core::stream::{self, Stream};
use conductor_core::zmtp::{self, Connection, Kind, Limits};
use conductor_core::{EngineHash, Tier};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use te_core::Instant;
use te_core::testkit::Rng;

const BLOCK_TOKENS: u32 = 16;
const BLOCKS: usize = 64 << 10;
/// Blocks of a prompt; the first message of a prompt has no parent.
const PROMPT_BLOCKS: usize = 512;
/// Bytes that a read returns.
const READ_BYTES: usize = 64 << 10;
const NOW: Instant = Instant::ZERO;

/// What a publisher sends, from its greeting on.
fn bytes(blocks_per_message: usize) -> Vec<u8> {
    let mut rng = Rng::new(1);
    let mut publisher = Connection::new(Kind::Pub, Limits::default(), b"", NOW);
    let mut out = publisher.output().to_vec();
    publisher.wrote(out.len());
    let mut parent = None;
    for message in 0..BLOCKS / blocks_per_message {
        let hashes: Vec<EngineHash> = (0..blocks_per_message).map(|_| EngineHash(rng.next())).collect();
        let tokens: Vec<u32> =
            (0..blocks_per_message * BLOCK_TOKENS as usize).map(|_| rng.below(150_000) as u32).collect();
        if (message * blocks_per_message).is_multiple_of(PROMPT_BLOCKS) {
            parent = None;
        }
        let stored = Event::Stored(Stored {
            hashes: &hashes,
            parent,
            tokens: &tokens,
            block_tokens: BLOCK_TOKENS,
            lora: None,
            salt: None,
            extra: Extra::default(),
            tier: Tier::Gpu,
            group: None,
            source: Source::default(),
        });
        parent = hashes.last().copied();
        let mut payload = Vec::new();
        encode(Layout::VllmMaps, message as f64, Some(0), &[stored], &mut payload);
        zmtp::put_message(&mut out, &[b"", &(message as u64).to_be_bytes(), &payload]);
    }
    out
}

struct Consumer {
    knowledge: Knowledge,
    publisher: PublisherId,
    stream: Stream,
    connection: Connection,
}

impl Consumer {
    fn new() -> Self {
        let mut knowledge = Knowledge::new(Settings::default());
        let registration = Registration {
            instance: "engine".into(),
            tenant: "default".into(),
            model: "model".into(),
            block_tokens: BLOCK_TOKENS,
            lora: None,
            salt: None,
            dp_rank: 0,
            dialect: Dialect::Vllm,
            role: Role::Engine,
        };
        let publisher = knowledge.register(registration).unwrap();
        let settings = stream::Settings { replay: false, ..stream::Settings::default() };
        let mut stream = Stream::new(settings, None);
        stream.connected(NOW, &mut knowledge.feed(publisher));
        let mut connection = Connection::new(Kind::Sub, Limits::default(), b"", NOW);
        connection.subscribe(b"");
        Self { knowledge, publisher, stream, connection }
    }

    /// Reads everything, as a server does; returns the blocks that are in the index.
    fn read(&mut self, bytes: &[u8]) -> usize {
        for read in bytes.chunks(READ_BYTES) {
            self.connection.space()[..read.len()].copy_from_slice(read);
            self.connection.filled(NOW, read.len());
            while let Some(event) = self.connection.next().unwrap() {
                let zmtp::Event::Message(message) = event else { continue };
                let seq = message.part(1).unwrap().first_chunk().unwrap();
                let payload = message.part(2).unwrap();
                let mut feed = self.knowledge.feed(self.publisher);
                self.stream.live(NOW, u64::from_be_bytes(*seq), payload, &mut feed);
            }
        }
        self.knowledge.counters(self.publisher).unwrap().stored as usize
    }
}

fn streams(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("conductor_streams");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    for blocks_per_message in [64, 4] {
        let bytes = bytes(blocks_per_message);
        group.bench_function(format!("{blocks_per_message} blocks per message"), |bencher| {
            bencher.iter_batched_ref(
                Consumer::new,
                |consumer| assert_eq!(consumer.read(&bytes), BLOCKS),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, streams);
criterion_main!(benches);
