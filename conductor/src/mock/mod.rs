//! A mock engine: an engine to the outside, with a cost model in place of a GPU.
//!
//! ```text
//!   /v1/completions ──▶ tokens ──▶ batch (prefill, continuous batching; time from the cost model) ──▶ SSE
//!                                    │
//!                                    ▼
//!                                  cache: blocks on GPU, CPU, disk ──▶ events over ZMTP, replays, loads
//! ```

mod batch;
mod cache;
mod config;
mod hashes;
mod http;
mod publish;
mod thread;
mod tokens;
mod workload;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::proxy::{ConnectionLimits, Pool, serve};
use batch::Batch;
use conductor_core::events::LoadStat;
pub use config::{Flavor, MockConfig, Role};
use publish::Publisher;
pub use thread::MockEngines;
pub use tokens::{Generator, VOCABULARY, detokenize, template, tokenize};
pub use workload::{Answered, Seen, Workload, ask};

/// How far the clock of a machine that is too slow for `speed` may lag behind before it gives up that time.
const LAG_MAX: Duration = Duration::from_millis(200);
/// How often the load is published, and blocks that were not fetched are looked for.
const TIDY_EVERY: Duration = Duration::from_millis(250);
/// The topic of loads.
const LOAD_TOPIC: &str = "load";
/// Most other engines whose connections are kept.
const PEERS_MAX: usize = 1_024;

/// A running mock engine. Its tasks are on the runtime that it was started on; dropping it kills it.
#[derive(Debug)]
pub struct MockEngine {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    ended: watch::Receiver<bool>,
    server: JoinHandle<()>,
}

/// What the tasks of an engine share.
#[derive(Debug)]
struct Shared {
    config: MockConfig,
    /// Its name among engines. A new one after each start.
    id: String,
    http: SocketAddr,
    events: Option<SocketAddr>,
    replay: Option<SocketAddr>,
    load: Option<SocketAddr>,
    batch: Mutex<Batch>,
    published: Arc<Publisher>,
    loads: Arc<Publisher>,
    /// There is something to compute.
    wake: Notify,
    held_changed: Notify,
    /// Held blocks and when they are released.
    holding: Mutex<VecDeque<(Instant, u64)>>,
    peers: Mutex<HashMap<String, Arc<Pool>>>,
    numbers: AtomicU64,
    dead: watch::Sender<bool>,
}

impl MockEngine {
    /// Listens and serves, on the current runtime.
    ///
    /// # Errors
    /// An address cannot be bound.
    ///
    /// # Panics
    /// There is no runtime.
    pub fn start(config: MockConfig) -> io::Result<Self> {
        let listener = TcpListener::bind(config.listen)?;
        let http = listener.local_addr()?;
        let bind = |addr: Option<SocketAddr>| addr.map(TcpListener::bind).transpose();
        let (events, replays, loads) = (bind(config.events)?, bind(config.replay)?, bind(config.load)?);
        let address =
            |listener: &Option<TcpListener>| listener.as_ref().map(TcpListener::local_addr).transpose();
        let (stop, stopped) = watch::channel(false);
        let shared = Arc::new(Shared {
            id: format!("mock-{}-{}", http.port(), STARTS.fetch_add(1, Ordering::Relaxed)),
            http,
            events: address(&events)?,
            replay: address(&replays)?,
            load: address(&loads)?,
            published: Arc::new(Publisher::new(&config.topic, config.flavor, config.replay_batches)),
            loads: Arc::new(Publisher::new(LOAD_TOPIC, config.flavor, 0)),
            batch: Mutex::new(Batch::new(&config)),
            wake: Notify::new(),
            held_changed: Notify::new(),
            holding: Mutex::default(),
            peers: Mutex::default(),
            numbers: AtomicU64::new(1),
            dead: watch::Sender::new(false),
            config,
        });
        let handler = Arc::clone(&shared);
        let answers = serve(listener, ConnectionLimits::default(), stopped, move |request, _| {
            http::answer(Arc::clone(&handler), request)
        });
        let (published, replayed) = (Arc::clone(&shared.published), Arc::clone(&shared.published));
        let events = listening(events, |listener| published.serve(listener));
        let replays = listening(replays, |listener| replayed.serve_replays(listener));
        let published = Arc::clone(&shared.loads);
        let loads = listening(loads, |listener| published.serve(listener));
        let (clock, tidy, lives) = (Arc::clone(&shared), Arc::clone(&shared), Arc::clone(&shared));
        let (end, ended) = watch::channel(false);
        let server = tokio::spawn(async move {
            let mut dead = lives.dead.subscribe();
            tokio::select! {
                _ = dead.wait_for(|&dead| dead) => {}
                _ = answers => {}
                () = clock.compute() => {}
                () = tidy.tidy() => {}
                () = events => {}
                () = replays => {}
                () = loads => {}
            }
            end.send_replace(true);
        });
        Ok(Self { shared, stop, ended, server })
    }

    /// The address of its HTTP server.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.shared.http
    }

    /// The address of its events, if it publishes any.
    #[must_use]
    pub fn events(&self) -> Option<SocketAddr> {
        self.shared.events
    }

    /// The address of its replays, if it has any.
    #[must_use]
    pub fn replay(&self) -> Option<SocketAddr> {
        self.shared.replay
    }

    /// The address at which it publishes its load, if it does.
    #[must_use]
    pub fn load(&self) -> Option<SocketAddr> {
        self.shared.load
    }

    /// Its settings.
    #[must_use]
    pub fn config(&self) -> &MockConfig {
        &self.shared.config
    }

    /// Prompt tokens that were computed, and that were reused, since its start.
    #[must_use]
    pub fn prompt_tokens(&self) -> (u64, u64) {
        let load = self.shared.with_batch(|batch| batch.load());
        (load.prefilled_total, load.reused_total)
    }

    /// Tokens that were generated since its start.
    #[must_use]
    pub fn output_tokens(&self) -> u64 {
        self.shared.with_batch(|batch| batch.load()).generated_total
    }

    /// Requests that were accepted since its start, and those that run or wait now.
    #[must_use]
    pub fn requests(&self) -> (u64, u32) {
        let load = self.shared.with_batch(|batch| batch.load());
        (load.requests_total, load.running + load.waiting)
    }

    /// Loses the next batches of events on their way: a reader finds a gap, and they can be replayed.
    pub fn lose_events(&self, batches: u64) {
        self.shared.published.lose(batches);
    }

    /// Dies at once: every connection is closed, without a word to clients or subscribers.
    pub fn kill(&self) {
        self.shared.dead.send_replace(true);
    }

    /// Whether it died, by [`kill`](Self::kill) or by `fail_after_tokens`.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        *self.shared.dead.borrow()
    }

    /// Stops: requests under way may end.
    pub async fn stop(self) {
        self.ask_to_stop();
        self.stopped().await;
    }

    fn ask_to_stop(&self) {
        self.stop.send_replace(true);
    }

    /// Waits until it has stopped, or died.
    async fn stopped(&self) {
        let _ = self.ended.clone().wait_for(|&ended| ended).await;
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// What a listener does; nothing without one.
fn listening<F: Future<Output = io::Result<()>>>(
    listener: Option<TcpListener>,
    work: impl FnOnce(TcpListener) -> F,
) -> impl Future<Output = ()> {
    let work = listener.map(work);
    async {
        match work {
            None => std::future::pending().await,
            Some(work) => {
                if let Err(error) = work.await {
                    tracing::warn!(%error, "a mock engine cannot publish any more");
                }
            }
        }
    }
}

/// Starts of engines in this process.
static STARTS: AtomicU64 = AtomicU64::new(0);

impl Shared {
    fn with_batch<T>(&self, work: impl FnOnce(&mut Batch) -> T) -> T {
        work(&mut lock(&self.batch))
    }

    /// A number that was not given before.
    fn number(&self) -> u64 {
        self.numbers(1)
    }

    /// The first of so many such numbers.
    fn numbers(&self, many: u64) -> u64 {
        self.numbers.fetch_add(many, Ordering::Relaxed)
    }

    /// Waits for a time of the simulated engine.
    async fn spend(&self, time: Duration) {
        if self.config.speed > 0.0 {
            tokio::time::sleep(time.div_f64(self.config.speed)).await;
        }
    }

    fn peer(&self, address: &str) -> Option<Arc<Pool>> {
        let mut peers = lock(&self.peers);
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        if let Some(pool) = peers.get(address) {
            return Some(Arc::clone(pool));
        }
        let pool = Arc::new(Pool::new(address).ok()?);
        peers.insert(address.to_owned(), Arc::clone(&pool));
        Some(pool)
    }

    /// Computes step by step.
    async fn compute(self: Arc<Self>) {
        // When the last step ended, of steps without a pause between them.
        let mut clock = None;
        loop {
            let planned = self.with_batch(Batch::plan);
            self.publish();
            let Some(time) = planned else {
                clock = None;
                self.wake.notified().await;
                continue;
            };
            if self.config.speed > 0.0 {
                let now = Instant::now();
                let begun = clock.unwrap_or(now).max(now.checked_sub(LAG_MAX).unwrap_or(now));
                let end = begun + time.div_f64(self.config.speed);
                clock = Some(end);
                if end > now {
                    tokio::time::sleep_until(end).await;
                }
            }
            let (generated, held) = self.with_batch(|batch| {
                let held = batch.finish();
                (batch.load().generated_total, held)
            });
            if !held.is_empty() {
                let until = Instant::now() + self.config.hold_time_max;
                lock(&self.holding).extend(held.into_iter().map(|number| (until, number)));
                self.held_changed.notify_waiters();
            }
            self.publish();
            if self.config.fail_after_tokens.is_some_and(|most| generated >= most) {
                self.dead.send_replace(true);
            }
            // The tokens go out before the next step.
            tokio::task::yield_now().await;
        }
    }

    /// Publishes what changed in the cache.
    fn publish(&self) {
        let changes = self.with_batch(Batch::take_events);
        if self.events.is_some() {
            self.published.publish(&changes, self.config.block_tokens);
        }
    }

    /// Publishes the load. Times are those that a client measures: the engine's clock may go faster.
    fn publish_load(&self) {
        let load = self.with_batch(|batch| batch.load());
        let speed = if self.config.speed > 0.0 { self.config.speed } else { f64::INFINITY };
        let message = self.loads.publish_load(&LoadStat {
            running_requests: load.running.into(),
            waiting_requests: load.waiting.into(),
            used_tokens: load.tokens,
            capacity_tokens: load.tokens_max,
            dp_rank: Some(0),
            waiting_uncached_tokens: load.waiting_uncached,
            total_tokens: load.context,
            running_requests_max: self.config.running_max.into(),
            prefilled_tokens: load.prefilled_total,
            prefill_busy_us: (load.prefill_busy_s * 1e6 / speed) as u64,
        });
        if self.config.load_beside_events {
            self.published.beside(message);
        }
    }

    /// Publishes the load, and releases blocks that were not fetched in time.
    async fn tidy(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TIDY_EVERY).await;
            if self.load.is_some() || self.config.load_beside_events {
                self.publish_load();
            }
            let now = Instant::now();
            loop {
                let mut holding = lock(&self.holding);
                match holding.front() {
                    Some(&(until, number)) if until <= now => {
                        holding.pop_front();
                        drop(holding);
                        self.with_batch(|batch| batch.release_held(number));
                    }
                    _ => break,
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
