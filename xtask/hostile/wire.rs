//! Attacks that only need a socket.

use super::misuse::client;
use super::raw::Raw;
use super::{Result, Turn};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use store_client::{PutOptions, Store as _};
use store_core::Key;
use store_core::message::{
    Exists, ExplainEviction, Find, FindQuery, Greeting, Hello, List, ListQuery, Operation as _,
};

/// Number of connections that flood, requests in flight per connection, and the pause after each burst.
const FLOODERS: usize = 4;
const BURST: usize = 100;
const FLOOD_PAUSE: Duration = Duration::from_millis(100);
/// An expensive pattern for its length: two alternatives that each try a bounded repetition at every
/// character.
const PATTERN: &str = "(a[ab]{20}c|b[ab]{20}d)";
/// Long keys of two letters, on which the pattern runs; put again from time to time, because they are
/// evicted.
const LONG_KEYS: u64 = 64;
const LONG_KEY_BYTES: usize = 1_000;
const LONG_KEYS_EVERY: Duration = Duration::from_secs(30);
/// Silent connections per address, and how long they are kept.
const SILENT_MAX: usize = 300;
const SILENT_FOR: Duration = Duration::from_secs(15);
/// Pause between two connections that send garbage.
const GARBAGE_PAUSE: Duration = Duration::from_millis(30);
const GARBAGE_BYTES_MAX: u64 = 8 << 10;

/// Floods the master with requests that are cheap to send and expensive to answer: regular expressions, lists
/// without results, full batches, explanations.
pub(crate) fn flood(turn: &mut Turn, master: SocketAddr) -> Result<()> {
    let Some(mut client) = client(turn, master)? else { return Ok(()) };
    let mut put_at = Instant::now();
    let mut connections: Vec<Raw> = Vec::new();
    while turn.goes_on() {
        if Instant::now() >= put_at {
            put_at = Instant::now() + LONG_KEYS_EVERY;
            for _ in 0..LONG_KEYS {
                let key: Vec<u8> = (0..LONG_KEY_BYTES).map(|_| b'a' + turn.below(2) as u8).collect();
                // A put without space does not end the flood.
                let _ = client.put(&key, b"x", &PutOptions::DEFAULT);
            }
        }
        while connections.len() < FLOODERS {
            match Raw::dial(master) {
                Ok(raw) => connections.push(raw),
                Err(_) => {
                    turn.count("flood_refused", 1);
                    break;
                }
            }
        }
        let kind = turn.below(4);
        let burst = burst(kind, turn.random());
        connections.retain_mut(|raw| raw.send(&burst).is_ok());
        connections.retain_mut(|raw| {
            let answered = (0..BURST).take_while(|_| turn.goes_on() && raw.receive().is_ok()).count();
            turn.count("flood_answers", answered as u64);
            answered == BURST
        });
        turn.pause(FLOOD_PAUSE);
    }
    Ok(())
}

fn burst(kind: u64, random: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let keys: Vec<Vec<u8>> = (0..1024_u64).map(|n| format!("missing/{random:x}/{n}").into_bytes()).collect();
    for id in 0..BURST as u64 {
        // The encoded requests are within every limit; a frame that could not be encoded is not sent.
        let _ = match kind {
            0 => Find::encode_request(
                &mut out,
                id,
                &FindQuery { pattern: PATTERN, cursor: 0, limit: 100 },
                none(),
            ),
            1 => {
                let query = ListQuery { prefix: Key(b"no such key"), cursor: 0, limit: 4096 };
                List::encode_request(&mut out, id, &query, none())
            }
            2 => Exists::encode_request(&mut out, id, &(), keys.iter().map(|key| Key(key))),
            _ => ExplainEviction::encode_request(&mut out, id, &4096, none()),
        };
    }
    out
}

fn none<T>() -> std::iter::Empty<T> {
    std::iter::empty()
}

/// Connects to every address and sends nothing, or nearly nothing.
pub(crate) fn silent(turn: &mut Turn, master: SocketAddr, others: &[SocketAddr]) -> Result<()> {
    while turn.goes_on() {
        let mut held = Vec::new();
        for address in others.iter().chain([&master]) {
            for _ in 0..SILENT_MAX {
                // There is nothing to hold at an address that does not listen or refuses further connections.
                let Ok(stream) = TcpStream::connect_timeout(address, Duration::from_secs(1)) else { break };
                held.push(stream);
            }
        }
        turn.count("silent_connections", held.len() as u64);
        turn.pause(SILENT_FOR);
    }
    Ok(())
}

/// Sends random bytes, half frames, and frames with wrong lengths.
pub(crate) fn garbage(turn: &mut Turn, master: SocketAddr, others: &[SocketAddr]) -> Result<()> {
    let mut hello = Vec::new();
    Hello::encode_request(&mut hello, 1, &Greeting::default(), none())
        .map_err(|error| format!("{error:?}"))?;
    let mut half: Vec<TcpStream> = Vec::new();
    while turn.goes_on() {
        let at = turn.below(others.len() as u64 + 1) as usize;
        let address = others.get(at).copied().unwrap_or(master);
        let bytes: Vec<u8> = match turn.below(4) {
            0 => (0..turn.below(GARBAGE_BYTES_MAX)).map(|_| turn.below(256) as u8).collect(),
            1 => hello[..hello.len() / 2].to_vec(),
            2 => {
                let mut long = hello.clone();
                let length = turn.random().to_le_bytes();
                long[20..24].copy_from_slice(&length[..4]);
                long
            }
            _ => {
                let mut flipped = hello.clone();
                let at = turn.below(flipped.len() as u64) as usize;
                flipped[at] ^= 1 << turn.below(8);
                flipped
            }
        };
        if let Ok(stream) = bring(address, &bytes) {
            // Some connections stay open with half a frame; the oldest are closed.
            half.push(stream);
            if half.len() > 64 {
                half.remove(0);
            }
        }
        turn.count("garbage_sent", 1);
        turn.pause(GARBAGE_PAUSE);
    }
    Ok(())
}

fn bring(address: SocketAddr, bytes: &[u8]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_write_timeout(Some(Duration::from_secs(1)))?;
    stream.set_read_timeout(Some(Duration::from_millis(1)))?;
    stream.write_all(bytes)?;
    // The answer does not matter.
    let _ = stream.read(&mut [0; 256]);
    Ok(stream)
}
