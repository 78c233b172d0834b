//! From many requests to a few clients of the store: threads with a client each, and a short queue before them.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use store_client::{Client, ClientConfig, ClientMetrics, ConnectError};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce(&mut Client) + Send>;

/// Clients of the store, on threads of their own. When the last clone is gone, they finish what is queued and end.
#[derive(Clone)]
pub(super) struct Pool {
    jobs: SyncSender<Job>,
    metrics: Arc<[ClientMetrics]>,
}

/// To wait for a pool's end with.
pub(super) struct Threads(Vec<JoinHandle<()>>);

/// More is asked than the pool can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Busy;

impl Pool {
    /// Connects `clients` clients and starts their threads; `queue` jobs can wait.
    ///
    /// # Errors
    /// One of them does not connect, or has no thread.
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

    /// What its clients have seen.
    pub(super) fn metrics(&self) -> &[ClientMetrics] {
        &self.metrics
    }

    /// Does something with a client. It is done, or being done, even when nobody waits for the answer any more.
    ///
    /// # Errors
    /// `Busy`.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Client) -> T + Send + 'static,
    ) -> Result<T, Busy> {
        let (reply, answer) = oneshot::channel();
        let job = move |client: &mut Client| {
            // Whoever asked may have left.
            let _ = reply.send(ask(client));
        };
        match self.jobs.try_send(Box::new(job)) {
            Ok(()) => answer.await.map_err(|_| Busy),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Err(Busy),
        }
    }
}

impl Threads {
    /// Waits until every clone of the pool is gone and all jobs are done.
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
        // Held while waiting: the others wait for the lock instead, which comes to the same.
        let job = queued.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job(&mut client),
            Err(_) => return,
        }
    }
}
