//! `/snapshot` and `/dump`: everything that is known, for another Conductor, for a later start, and for
//! Dynamo's tools.
//!
//! Both take the event thread's time and much memory, so they are answered one at a time, and like requests
//! that change something: with the admin secret, or from this host.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use conductor_core::knowledge::{PublisherId, Said};
use conductor_core::{BlockKey, EngineHash, Tier};
use serde::Deserialize;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

use super::{App, From, Refused, json};
use crate::io::Command;
use crate::snapshot;

/// Longest wait for the event thread.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
/// Blocks of publishers that a dump has at most: each takes about 100 bytes of the answer.
const DUMPED_BLOCKS_MAX: usize = 8 << 20;

static TURN: Semaphore = Semaphore::const_new(1);

fn turn() -> Result<SemaphorePermit<'static>, Refused> {
    TURN.try_acquire().map_err(|_| Refused::Busy("another snapshot or dump is being made: come again"))
}

/// Options in the query string.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Options {
    /// Only what this publisher said, by its number in `/digest`.
    publisher: Option<u32>,
}

/// What the file of a snapshot has, or what one publisher said, as bytes.
pub(super) async fn snapshot(
    State(app): State<App>,
    from: From,
    headers: HeaderMap,
    Query(options): Query<Options>,
) -> Result<Response, Refused> {
    app.authorize(&headers, from.0).await?;
    let _turn = turn()?;
    let bytes = match options.publisher {
        Some(publisher) => {
            let said = said(&app, PublisherId(publisher)).await?;
            let what = || {
                Refused::Missing(format!("there is no engine with the number {publisher} that said anything"))
            };
            let mut bytes = Vec::new();
            said.ok_or_else(what)?.write(&mut bytes);
            bytes
        }
        None => {
            let (send, receive) = oneshot::channel();
            app.commander.send(Command::Snapshot(send));
            let index = answered(receive).await?;
            let mut bytes =
                snapshot::head(&app.shared).map_err(|_| Refused::Busy("the names cannot be written"))?;
            bytes.extend(index);
            bytes
        }
    };
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response())
}

async fn answered<T>(receive: oneshot::Receiver<T>) -> Result<T, Refused> {
    match tokio::time::timeout(ANSWER_TIME_MAX, receive).await {
        Ok(Ok(answer)) => Ok(answer),
        _ => Err(Refused::Busy("the event thread does not respond: check the log, or restart the Conductor")),
    }
}

async fn said(app: &App, publisher: PublisherId) -> Result<Option<Said>, Refused> {
    let (send, receive) = oneshot::channel();
    app.commander.send(Command::Said(publisher, send));
    answered(receive).await
}

/// Every block of every engine, in the shape of Dynamo's indexer (`services/indexer/server.rs` of
/// `dynamo-kv-router` 1.6.1): by `MODEL:TENANT`, events that would store them.
pub(super) async fn dump(
    State(app): State<App>,
    from: From,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    app.authorize(&headers, from.0).await?;
    let _turn = turn()?;
    let ids: Vec<PublisherId> = app.shared.directory().publishers.keys().copied().collect();
    let mut contexts: std::collections::BTreeMap<(String, u32), (String, u64)> = Default::default();
    let mut blocks = 0;
    for id in ids {
        let Some(said) = said(&app, id).await? else { continue };
        blocks += said.steps();
        if blocks > DUMPED_BLOCKS_MAX {
            return Err(Refused::Busy("there is more than a dump may have: use /snapshot"));
        }
        let registration = said.registration();
        let name = format!("{}:{}", registration.model, registration.tenant);
        let (events, event_id) = contexts.entry((name, registration.block_tokens)).or_default();
        // An instance that is no number has the number of its publisher.
        let worker = registration.instance.parse().unwrap_or_else(|_| u64::from(id.0));
        write_events(&said, worker, event_id, events);
    }
    let mut text = String::from("{");
    let mut names: HashMap<&str, u32> = HashMap::new();
    for ((name, block_tokens), (events, _)) in &contexts {
        // Dynamo has one size of blocks per model; others get it in their name.
        let seen = names.entry(name).or_default();
        let name = if *seen == 0 { name.clone() } else { format!("{name}:{block_tokens}") };
        *seen += 1;
        let name = serde_json::to_string(&name).map_err(|_| Refused::Busy("a name cannot be written"))?;
        let comma = if text.len() > 1 { "," } else { "" };
        let _ = write!(text, "{comma}{name}:{{\"block_size\":{block_tokens},\"events\":[{events}]}}");
    }
    text.push('}');
    Ok(json(text))
}

const fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Gpu => "device",
        Tier::Cpu => "host_pinned",
        Tier::Disk => "disk",
        Tier::Store => "external",
    }
}

/// Appends an event for each piece of a chain that does not fork.
fn write_events(said: &Said, worker: u64, event_id: &mut u64, out: &mut String) {
    let hashes: HashMap<BlockKey, EngineHash> = said.pairs().map(|(hash, key)| (key, hash)).collect();
    let hash_of = |key: BlockKey| hashes.get(&key).map_or(key.0, |hash| hash.0);
    for (dp_rank, tier, blocks) in said.owners() {
        let mut pieces: Vec<(Option<BlockKey>, Vec<BlockKey>)> = Vec::new();
        // The pieces that end with a block.
        let mut ends: HashMap<BlockKey, usize> = HashMap::new();
        let mut before = None;
        for block in blocks {
            if before.replace(block.key) == Some(block.key) {
                continue;
            }
            let at = block.parent.and_then(|parent| ends.remove(&parent)).unwrap_or_else(|| {
                pieces.push((block.parent, Vec::new()));
                pieces.len() - 1
            });
            pieces[at].1.push(block.key);
            ends.insert(block.key, at);
        }
        for (parent, keys) in pieces {
            if !out.is_empty() {
                out.push(',');
            }
            let parent = parent.map_or_else(|| "null".to_owned(), |parent| hash_of(parent).to_string());
            let _ = write!(
                out,
                "{{\"worker_id\":{worker},\"storage_tier\":\"{}\",\"event\":{{\"event_id\":{event_id},\"data\":\
                 {{\"stored\":{{\"parent_hash\":{parent},\"start_position\":null,\"blocks\":[",
                tier_name(tier)
            );
            *event_id += 1;
            for (at, key) in keys.iter().enumerate() {
                let comma = if at > 0 { "," } else { "" };
                let (hash, key) = (hash_of(*key), key.0);
                let _ = write!(
                    out,
                    "{comma}{{\"block_hash\":{hash},\"tokens_hash\":{key},\"mm_extra_info\":null}}"
                );
            }
            let _ = write!(out, "]}}}},\"dp_rank\":{dp_rank}}}}}");
        }
    }
}
