//! Conversations with several turns: what a demonstration or a benchmark sends to a proxy, and what it sees.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::HeaderMap;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::tokens::{VOCABULARY, tokenize};
use crate::proxy::{Message, Pool};

/// Longest wait for an answer to begin.
const HEAD_TIME_MAX: Duration = Duration::from_secs(120);

/// A workload.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The model.
    pub model: String,
    /// Conversations at a time. When one ends, another begins.
    pub conversations: u32,
    /// Turns per conversation.
    pub turns: u32,
    /// Different beginnings, which conversations share.
    pub systems: u32,
    /// Tokens of such a beginning.
    pub system_tokens: u32,
    /// Tokens that each turn adds before its answer.
    pub user_tokens: u32,
    /// Tokens of each answer.
    pub output_tokens: u32,
    /// Pause between an answer and the next turn.
    pub think: Duration,
    /// All tokens follow from it.
    pub seed: u64,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            model: "mock".to_owned(),
            conversations: 16,
            turns: 6,
            systems: 4,
            system_tokens: 2_048,
            user_tokens: 512,
            output_tokens: 64,
            think: Duration::from_millis(20),
            seed: 1,
        }
    }
}

/// What clients saw.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Time to the first token of each request that was answered.
    pub first_tokens: Vec<Duration>,
    /// Requests that were answered to their end.
    pub done: u64,
    /// Requests that were refused (429, 503).
    pub refused: u64,
    /// Requests that failed otherwise.
    pub failed: u64,
    /// Why the last one failed.
    pub last_failure: Option<String>,
    /// Tokens that came.
    pub tokens: u64,
}

impl Workload {
    /// Sends requests to a proxy or an engine until `ended` is true; those under way are finished.
    pub async fn run(&self, addr: SocketAddr, ended: Arc<AtomicBool>) -> Seen {
        let Ok(pool) = Pool::new(&addr.to_string()) else { return Seen::default() };
        let (pool, workload) = (Arc::new(pool), Arc::new(self.clone()));
        let mut clients = JoinSet::new();
        for client in 0..self.conversations {
            let (pool, workload, ended) = (Arc::clone(&pool), Arc::clone(&workload), Arc::clone(&ended));
            clients.spawn(async move { workload.converse(&pool, client, &ended).await });
        }
        let mut all = Seen::default();
        while let Some(client) = clients.join_next().await {
            let Ok(seen) = client else { continue };
            all.first_tokens.extend(seen.first_tokens);
            all.done += seen.done;
            all.refused += seen.refused;
            all.failed += seen.failed;
            all.tokens += seen.tokens;
            all.last_failure = seen.last_failure.or(all.last_failure);
        }
        all
    }

    /// One conversation after the other.
    async fn converse(&self, pool: &Pool, client: u32, ended: &AtomicBool) -> Seen {
        let mut seen = Seen::default();
        let mut random = Random(self.seed ^ u64::from(client) << 32);
        while !ended.load(Ordering::Relaxed) {
            let system = random.next() % u64::from(self.systems.max(1));
            let mut prompt = Random(self.seed.wrapping_add(system) << 1 | 1).tokens(self.system_tokens);
            for _ in 0..self.turns.max(1) {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                prompt.extend(random.tokens(self.user_tokens));
                match self.turn(pool, &prompt, &mut seen).await {
                    Ok(answer) => prompt.extend(tokenize(&answer)),
                    Err(why) => {
                        seen.last_failure = Some(why);
                        break;
                    }
                }
                tokio::time::sleep(self.think).await;
            }
        }
        seen
    }

    async fn turn(&self, pool: &Pool, prompt: &[u32], seen: &mut Seen) -> Result<String, String> {
        let body = serde_json::json!({
            "model": self.model, "prompt": prompt, "max_tokens": self.output_tokens, "stream": true,
        });
        let body = Bytes::from(body.to_string());
        let answered = ask(pool, "/v1/completions", &body).await.inspect_err(|_| seen.failed += 1)?;
        if matches!(answered.status, 429 | 503) {
            seen.refused += 1;
            return Err(format!("{}: {}", answered.status, answered.text));
        }
        let Some(first) = answered.first_token.filter(|_| answered.is_done) else {
            seen.failed += 1;
            return Err(format!("{}: {}", answered.status, answered.text));
        };
        seen.first_tokens.push(first);
        seen.done += 1;
        seen.tokens += answered.tokens;
        Ok(answered.text)
    }
}

/// An answer as a client sees it.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    /// The HTTP status.
    pub status: u16,
    /// Time until the first token.
    pub first_token: Option<Duration>,
    /// The text; of an error, the whole answer.
    pub text: String,
    /// Chunks with text.
    pub tokens: u64,
    /// The stream came to its end.
    pub is_done: bool,
}

/// Sends one request with a stream as its answer, and reads it to its end.
///
/// # Errors
/// The connection failed.
pub async fn ask(pool: &Pool, path: &str, body: &Bytes) -> Result<Answered, String> {
    let headers = HeaderMap::new();
    let begun = Instant::now();
    let message = Message { path, body: Some(body), headers: &headers };
    let mut exchange = pool.send(message, HEAD_TIME_MAX).await.map_err(|error| error.to_string())?;
    let mut answered = Answered { status: exchange.status().as_u16(), ..Answered::default() };
    let mut rest = Vec::new();
    while let Some(bytes) = exchange.next().await {
        rest.extend_from_slice(&bytes.map_err(|error| error.to_string())?);
        if answered.status != 200 {
            continue;
        }
        let Some(end) = rest.windows(2).rposition(|pair| pair == b"\n\n") else { continue };
        let after = rest.split_off(end + 2);
        let events = std::mem::replace(&mut rest, after);
        for event in String::from_utf8_lossy(&events).split_terminator("\n\n") {
            let Some(data) = event.strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                answered.is_done = true;
                continue;
            }
            let Ok(chunk) = serde_json::from_str::<serde_json::Value>(data) else { continue };
            let text = chunk.pointer("/choices/0/text").or(chunk.pointer("/choices/0/delta/content"));
            if let Some(text) = text.and_then(serde_json::Value::as_str).filter(|text| !text.is_empty()) {
                answered.first_token.get_or_insert_with(|| begun.elapsed());
                answered.text.push_str(text);
                answered.tokens += 1;
            }
        }
    }
    if answered.status != 200 {
        answered.text = String::from_utf8_lossy(&rest).into_owned();
    }
    exchange.finish(pool);
    Ok(answered)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Ids of words.
    fn tokens(&mut self, many: u32) -> Vec<u32> {
        (0..many).map(|_| 256 + (self.next() % u64::from(VOCABULARY - 256)) as u32).collect()
    }
}
