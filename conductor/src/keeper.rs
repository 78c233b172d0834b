//! What happens from time to time, on a thread of its own: snapshots, engines that have to be asked what they
//! publish, and the comparison with another Conductor.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::http::HeaderMap;
use serde::Deserialize;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use crate::discovery;
use crate::http::App;
use crate::http::state::{OwnerRow, owner_rows};
use crate::io::Command;
use crate::registry::{self, Positions};
use crate::shared::Counts;
use crate::snapshot;

/// How often engines of the settings that did not answer are asked again.
const DISCOVERY_EVERY: Duration = Duration::from_secs(2);
/// Longest wait for the event thread to write the index.
const INDEX_TIME_MAX: Duration = Duration::from_secs(60);
/// Longest list of digests from another Conductor, bytes.
const DIGESTS_BYTES_MAX: usize = 64 << 20;
/// Comparisons in a row in which an owner differs before it counts: events take some time to both.
const DIFFERENCES_MAX: u32 = 3;

/// The thread. Dropping it stops it, after a last snapshot.
#[derive(Debug)]
pub(crate) struct Keeper {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub(crate) fn start(app: App) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let thread = thread::Builder::new().name("snowskin-keeper".into()).spawn(move || {
            runtime.block_on(async {
                let until = |mut stopped: watch::Receiver<bool>| async move {
                    let _ = stopped.wait_for(|stop| *stop).await;
                };
                tokio::select! {
                    () = until(stopped.clone()) => {}
                    () = async { tokio::join!(snapshots(&app), discover(&app), compare(&app)); } => {}
                }
                save(&app).await;
            });
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn snapshots(app: &App) {
    if app.shared.config.snapshot.is_none() {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(Duration::from_secs(app.shared.config.snapshot_s.into())).await;
        save(app).await;
    }
}

/// Writes a snapshot, if the settings name a file.
async fn save(app: &App) {
    let Some(path) = &app.shared.config.snapshot else { return };
    let began = Instant::now();
    let (send, receive) = oneshot::channel();
    app.commander.send(Command::Snapshot(send));
    let counts = &app.shared.counts;
    let Ok(Ok(index)) = timeout(INDEX_TIME_MAX, receive).await else {
        Counts::add(&counts.snapshot_failures, 1);
        warn!("the event thread did not write the index: no snapshot");
        return;
    };
    match snapshot::write(path, &app.shared, &index) {
        Ok(()) => {
            Counts::add(&counts.snapshots, 1);
            debug!(path = %path.display(), bytes = index.len(), took = ?began.elapsed(), "snapshot");
        }
        Err(error) => {
            Counts::add(&counts.snapshot_failures, 1);
            warn!(path = %path.display(), %error, "the snapshot cannot be written");
        }
    }
}

/// Asks engines of the settings what was left to them, until all have answered.
async fn discover(app: &App) {
    let all = app.shared.config.engines.iter();
    let mut left: Vec<_> = all.filter(|engine| engine.block_tokens == 0 || engine.dp_ranks == 0).collect();
    while !left.is_empty() {
        let mut again = Vec::new();
        for engine in left {
            match discovery::complete(engine.clone()).await {
                Err(error) => {
                    info!(engine = engine.instance, %error, "an engine does not say what it publishes");
                    again.push(engine);
                }
                Ok(complete) => {
                    let registered =
                        registry::register(&app.shared, &app.commander, &complete, &Positions::default());
                    if let Err(error) = registered {
                        warn!(engine = engine.instance, %error, "an engine of the settings is refused");
                    }
                }
            }
        }
        left = again;
        tokio::time::sleep(DISCOVERY_EVERY).await;
    }
    std::future::pending().await
}

#[derive(Deserialize)]
struct Digests {
    digests: Vec<OwnerRow>,
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

/// Compares what every owner has with another Conductor. An owner that differs for several rounds is told
/// anew by its publisher: here its stream begins from the start.
async fn compare(app: &App) {
    let peer = &app.shared.config.peer;
    if peer.is_empty() {
        return std::future::pending().await;
    }
    let mut differing: HashMap<Owner, (u32, OwnerRow, OwnerRow)> = HashMap::new();
    loop {
        tokio::time::sleep(Duration::from_millis(app.shared.config.peer_ms.into())).await;
        let counts = &app.shared.counts;
        let asked = discovery::ask(peer, "/digest", None, &HeaderMap::new(), DIGESTS_BYTES_MAX).await;
        let theirs = match asked.map(|answer| serde_json::from_slice::<Digests>(&answer)) {
            Ok(Ok(digests)) => digests.digests,
            Ok(Err(error)) => {
                Counts::add(&counts.peer_failures, 1);
                warn!(%error, peer, "the other Conductor's digests cannot be read");
                continue;
            }
            Err(error) => {
                Counts::add(&counts.peer_failures, 1);
                debug!(%error, "the other Conductor does not answer");
                continue;
            }
        };
        Counts::add(&counts.peer_rounds, 1);
        let theirs: HashMap<Owner, OwnerRow> = theirs.into_iter().map(|row| (owner(&row), row)).collect();
        let mut still = HashMap::new();
        for ours in owner_rows(app) {
            let name = owner(&ours);
            let Some(other) = theirs.get(&name).filter(|other| **other != ours) else { continue };
            // A difference that moves is that of events on their way.
            let stays = differing.get(&name).filter(|(_, a, b)| *a == ours && b == other);
            let rounds = stays.map_or(1, |(rounds, ..)| rounds + 1);
            if rounds == DIFFERENCES_MAX {
                counts.peer_differences.fetch_add(1, Ordering::Relaxed);
                warn!(
                    instance = ours.instance_id,
                    dp_rank = ours.dp_rank,
                    medium = ours.medium,
                    ours = ours.blocks,
                    theirs = other.blocks,
                    "two Conductors differ: the publisher is read anew"
                );
                registry::read_anew(
                    &app.shared,
                    &app.commander,
                    &ours.tenant_id,
                    &ours.instance_id,
                    ours.dp_rank,
                );
            }
            still.insert(name, (rounds, ours, other.clone()));
        }
        differing = still;
    }
}
