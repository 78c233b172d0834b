//! [`MockEngines`]: mock engines on a thread of their own.

use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;

use tokio::sync::watch;

use super::{MockConfig, MockEngine};

/// Running mock engines. Dropping it stops them; requests under way get a short time to end.
#[derive(Debug)]
pub struct MockEngines {
    engines: std::sync::Arc<[MockEngine]>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl MockEngines {
    /// Starts engines, all on one thread.
    ///
    /// # Errors
    /// An address cannot be bound, or the system refuses a thread.
    pub fn start(configs: Vec<MockConfig>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, mut stopped) = watch::channel(false);
        let (started, starting) = mpsc::channel();
        let work = move || {
            runtime.block_on(async {
                let engines: io::Result<std::sync::Arc<[MockEngine]>> =
                    configs.into_iter().map(MockEngine::start).collect();
                let engines = match engines {
                    Ok(engines) => engines,
                    Err(error) => {
                        // The caller waits for it.
                        let _ = started.send(Err(error));
                        return;
                    }
                };
                let _ = started.send(Ok(std::sync::Arc::clone(&engines)));
                let _ = stopped.wait_for(|&stopped| stopped).await;
                for engine in &*engines {
                    engine.ask_to_stop();
                }
                for engine in &*engines {
                    engine.stopped().await;
                }
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("mock-engines".into()).spawn(work)?;
        let ended = |_| io::Error::other("the thread of the mock engines ended");
        let engines = starting.recv().map_err(ended)??;
        Ok(Self { engines, stop, thread: Some(thread) })
    }

    /// The engines, in the order of their settings.
    #[must_use]
    pub fn engines(&self) -> &[MockEngine] {
        &self.engines
    }
}

impl Drop for MockEngines {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the mock engines panicked");
        }
    }
}
