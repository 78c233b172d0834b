//! Serves many requests with a few clients of the store: threads with one client each, and a short queue.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use store_client::{Client, ClientConfig, ClientMetrics, ConnectError};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce(&mut Client) + Send>;

/// Clients of the store, each on its own thread. When the last clone is dropped, they finish the queued jobs
/// and end.
#[derive(Clone)]
pub(super) struct Pool {
    jobs: SyncSender<Job>,
    metrics: Arc<[ClientMetrics]>,
}

/// The threads of a pool, to wait for their end.
pub(super) struct Threads(Vec<JoinHandle<()>>);

/// The queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy;

impl Pool {
    /// Connects `clients` clients and starts their threads; up to `queue` jobs wait.
    ///
    /// # Errors
    /// A client does not connect, or its thread cannot be started.
    pub(super) fn start(
        config: &ClientConfig,
        clients: u16,
        queue: usize,
    ) -> Result<(Self, Threads), ConnectError> {
        let (jobs, queued) = sync_channel::<Job>(queue);
        let queued = Arc::new(Mutex::new(queued));
        let (mut threads, mut metrics) = (Vec::new(), Vec::new());
        for index in 0..clients {
            let mut client = Client::connect(config.clone())?;
            metrics.push(client.metrics_handle());
            let queued = Arc::clone(&queued);
            let thread = thread::Builder::new()
                .name(format!("snowskin-http{index}"))
                .spawn(move || work(client, &queued))
                .map_err(ConnectError::System)?;
            threads.push(thread);
        }
        Ok((Self { jobs, metrics: metrics.into() }, Threads(threads)))
    }

    /// Metrics of the clients.
    pub(super) fn metrics(&self) -> &[ClientMetrics] {
        &self.metrics
    }

    /// Runs a job with one of the clients. A job that was queued runs even if its request is abandoned.
    ///
    /// # Errors
    /// `Busy`.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Client) -> T + Send + 'static,
    ) -> Result<T, Busy> {
        let (reply, answer) = oneshot::channel();
        let job = move |client: &mut Client| {
            // Sending fails if the request was abandoned.
            let _ = reply.send(ask(client));
        };
        match self.jobs.try_send(Box::new(job)) {
            Ok(()) => answer.await.map_err(|_| Busy),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Err(Busy),
        }
    }
}

impl Threads {
    /// Waits until every clone of the pool is dropped and all jobs are done.
    pub(super) fn join(self) {
        for thread in self.0 {
            if thread.join().is_err() {
                tracing::error!("a client of the gateway panicked");
            }
        }
    }
}

fn work(mut client: Client, queued: &Mutex<Receiver<Job>>) {
    loop {
        // The lock is held while waiting: the other threads wait for the lock instead of for a job, which is
        // equivalent.
        let job = queued.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job(&mut client),
            Err(_) => return,
        }
    }
}
