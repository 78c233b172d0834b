//! Two Conductors with the same engines: each compares what it knows with what the other one knows, and mends
//! its own side.
//!
//! ```text
//!   GET /digest    per stream: where it begins and ends      the other one's begins earlier ──▶ fetch
//!                  per owner:  blocks, sum                   differs, and begins alike      ──▶ read anew
//!   GET /snapshot?publisher=N ──▶ checked ──▶ event thread: adopted at its position, or refused
//! ```
//!
//! A stream that begins later lacks what was said before: the Conductor started late, or a message could not
//! be read. What is fetched counts only from where the publisher's own messages show that it is of the
//! present run, and is followed by the messages behind it ([`conductor_core::stream::Stream::adopt`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, header};
use conductor_core::knowledge::{PublisherId, Said};
use conductor_core::stream::{Adoption, State};
use serde::Deserialize;
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use crate::discovery;
use crate::http::App;
use crate::http::state::{OwnerRow, StreamRow, owner_rows, stream_rows};
use crate::io::Command;
use crate::registry;
use crate::shared::Counts;

/// Longest list of digests from another Conductor, bytes.
const DIGESTS_BYTES_MAX: usize = 64 << 20;
/// Longest answer with what a publisher said, bytes: some 29 million blocks.
const SAID_BYTES_MAX: usize = 1 << 30;
/// Comparisons in a row in which an owner differs before it counts: events take some time to both.
const DIFFERENCES_MAX: u32 = 3;
/// Most doublings of the comparisons until the same is tried again.
const DOUBLINGS_MAX: u32 = 6;
/// Times that what was fetched is offered again, while the message that it ends with has not arrived here.
const OFFERS_MAX: u32 = 40;
const OFFERS_EVERY: Duration = Duration::from_millis(25);

#[derive(Deserialize)]
struct Digests {
    digests: Vec<OwnerRow>,
    streams: Vec<StreamRow>,
}

/// What tells an owner from others, whatever its blocks.
type Owner = (String, String, u32, String, u32, String, u32);

fn owner(row: &OwnerRow) -> Owner {
    (
        row.tenant_id.clone(),
        row.model_name.clone(),
        row.block_size,
        row.instance_id.clone(),
        row.dp_rank,
        row.medium.clone(),
        row.group,
    )
}

/// What is remembered from one comparison to the next.
#[derive(Default)]
struct Memory {
    /// Owners that differ, for how many comparisons without a change, and how.
    differing: HashMap<Owner, (u32, OwnerRow, OwnerRow)>,
    /// Owners that were read anew, and how often.
    read: HashMap<Owner, u32>,
    /// Publishers of which nothing could be adopted: how often, and comparisons until the next attempt.
    refused: HashMap<PublisherId, (u32, u32)>,
}

/// Compares what is known with another Conductor, without end.
pub(crate) async fn compare(app: &App) {
    if app.shared.config.peer.is_empty() {
        return std::future::pending().await;
    }
    let mut memory = Memory::default();
    loop {
        tokio::time::sleep(Duration::from_millis(app.shared.config.peer_ms.into())).await;
        round(app, &mut memory).await;
    }
}

async fn round(app: &App, memory: &mut Memory) {
    let (peer, counts) = (&app.shared.config.peer, &app.shared.counts);
    let asked = discovery::ask(peer, "/digest", None, &HeaderMap::new(), DIGESTS_BYTES_MAX).await;
    let theirs = match asked.map(|answer| serde_json::from_slice::<Digests>(&answer)) {
        Ok(Ok(digests)) => digests,
        Ok(Err(error)) => {
            Counts::add(&counts.peer_failures, 1);
            return warn!(%error, peer, "the other Conductor's digests cannot be read");
        }
        Err(error) => {
            Counts::add(&counts.peer_failures, 1);
            return debug!(%error, "the other Conductor does not answer");
        }
    };
    let Ok(ours) = stream_rows(app).await else { return };
    Counts::add(&counts.peer_rounds, 1);
    for theirs in &theirs.streams {
        let Some(ours) = ours.iter().find(|ours| ours.is_of_same_publisher(theirs)) else { continue };
        if knows_more(theirs, ours) {
            fetch(app, memory, ours, theirs).await;
        }
    }
    // The one whose stream begins later fetches.
    let begin_apart = |row: &OwnerRow| {
        let of = |stream: &&StreamRow| stream.has(row);
        let begin = |rows: &[StreamRow]| rows.iter().find(of).and_then(|stream| stream.begin);
        begin(&ours) != begin(&theirs.streams)
    };
    let others: HashMap<Owner, OwnerRow> =
        theirs.digests.iter().map(|row| (owner(row), row.clone())).collect();
    let mut still = HashMap::new();
    for row in owner_rows(app) {
        let name = owner(&row);
        let Some(other) = others.get(&name).filter(|other| **other != row) else { continue };
        // A difference that moves is that of events on their way.
        let stays = memory.differing.get(&name).filter(|(_, a, b)| *a == row && b == other);
        let rounds = stays.map_or(1, |(rounds, ..)| rounds + 1);
        if rounds == DIFFERENCES_MAX {
            counts.peer_differences.fetch_add(1, Ordering::Relaxed);
        }
        // One of both reads anew at a time: first the one with more, since too much is worse than too little.
        let first = if (row.blocks, &row.sum) > (other.blocks, &other.sum) { 0 } else { 1 };
        let times = memory.read.entry(name.clone()).or_default();
        if rounds == DIFFERENCES_MAX << (first + *times).min(DOUBLINGS_MAX) && !begin_apart(&row) {
            *times += 1;
            warn!(
                instance = row.instance_id,
                dp_rank = row.dp_rank,
                medium = row.medium,
                ours = row.blocks,
                theirs = other.blocks,
                "two Conductors differ: the publisher is read anew"
            );
            let OwnerRow { tenant_id, instance_id, dp_rank, .. } = &row;
            registry::read_anew(&app.shared, &app.commander, tenant_id, instance_id, *dp_rank);
        }
        still.insert(name, (rounds, row, other.clone()));
    }
    memory.read.retain(|owner, _| still.contains_key(owner));
    memory.differing = still;
}

/// Whether the other Conductor follows a publisher from an earlier message on, and it can be shown here that
/// it is the same run.
fn knows_more(theirs: &StreamRow, ours: &StreamRow) -> bool {
    let Some((begin, end)) = theirs.begin.zip(theirs.next_seq) else { return false };
    // Without replays, a message that both have is the only link.
    let linked = if ours.replays { true } else { ours.begin.is_some_and(|begin| end > begin) };
    let is_live = ours.state == State::Live.name();
    is_live && linked && ours.begin.is_none_or(|ours| begin < ours)
}

/// Fetches what the other Conductor knows of a publisher, and adopts it.
async fn fetch(app: &App, memory: &mut Memory, ours: &StreamRow, theirs: &StreamRow) {
    let id = PublisherId(ours.publisher);
    if let Some((_, wait)) = memory.refused.get_mut(&id).filter(|(_, wait)| *wait > 0) {
        *wait -= 1;
        return;
    }
    let counts = &app.shared.counts;
    match adopt(app, id, theirs.publisher).await {
        Ok(blocks) => {
            memory.refused.remove(&id);
            Counts::add(&counts.peer_adoptions, 1);
            info!(
                instance = ours.instance_id,
                dp_rank = ours.dp_rank,
                blocks,
                "the other Conductor knew more"
            );
        }
        Err(why) => {
            let (times, wait) = memory.refused.entry(id).or_default();
            *times = (*times + 1).min(DOUBLINGS_MAX);
            *wait = 1 << *times;
            Counts::add(&counts.peer_refusals, 1);
            info!(
                instance = ours.instance_id,
                dp_rank = ours.dp_rank,
                why,
                "what the other Conductor knows is not taken over"
            );
        }
    }
}

/// Returns the hashes and blocks that were recorded, or why none.
async fn adopt(app: &App, id: PublisherId, theirs: u32) -> Result<usize, String> {
    const STOPPING: &str = "the event thread does not answer";
    let (send, prepared) = oneshot::channel();
    app.commander.send(Command::Prepare(id, send));
    if !prepared.await.map_err(|_| STOPPING)? {
        return Err("its stream is not live here".to_owned());
    }
    let (peer, secret) = (&app.shared.config.peer, &app.shared.config.admin_secret);
    let mut headers = HeaderMap::new();
    if secret.is_set() {
        let bearer = [b"Bearer ", secret.bytes()].concat();
        let bearer = HeaderValue::from_bytes(&bearer).map_err(|_| "the admin secret is not one for HTTP")?;
        headers.insert(header::AUTHORIZATION, bearer);
    }
    let path = format!("/snapshot?publisher={theirs}");
    let asked = discovery::ask(peer, &path, None, &headers, SAID_BYTES_MAX).await;
    let bytes = asked.map_err(|error| error.to_string())?;
    let said = Said::read(&bytes).map_err(|error| error.to_string())?;
    drop(bytes);
    let said = Arc::new(said);
    for _ in 0..OFFERS_MAX {
        let (send, offered) = oneshot::channel();
        app.commander.send(Command::Adopt(id, Arc::clone(&said), send));
        match offered.await.map_err(|_| STOPPING)? {
            Adoption::Adopted => return Ok(said.steps()),
            Adoption::Refused => {
                return Err("it is of another run, is too old, or is more than the limits allow".to_owned());
            }
            Adoption::Later => tokio::time::sleep(OFFERS_EVERY).await,
        }
    }
    Err("the message that it ends with does not arrive here".to_owned())
}
