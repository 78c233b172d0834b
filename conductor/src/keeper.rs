//! What happens from time to time, on a thread of its own: snapshots, engines that have to be asked what they
//! publish, and the comparison with another Conductor.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use crate::compare::compare;
use crate::discovery;
use crate::http::App;
use crate::io::Command;
use crate::registry::{self, Positions};
use crate::shared::Counts;
use crate::snapshot;

/// How often engines of the settings that did not answer are asked again.
const DISCOVERY_EVERY: Duration = Duration::from_secs(2);
/// Longest wait for the event thread to write the index.
const INDEX_TIME_MAX: Duration = Duration::from_secs(60);

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
