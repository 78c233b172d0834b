//! Tells clients that look for a master of Mooncake on Redis which one leads. A thread of its own does it, so
//! that a server that is slow or away holds nothing up. It is a hint: a master that does not lead refuses the
//! requests of clients that come to it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{io, thread};

use store_core::ha::Reign;
use te_metadata::{LeaderView, MetadataSource};
use tracing::{info, warn};

use crate::config::HaConfig;
use crate::error::{BindError, ConfigError};
use crate::log_limit::LogLimit;

/// How long the server may take.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How often the entry is renewed, and how long it lives: as long as that of a master of Mooncake.
const RENEW: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(5);

/// Opens what is published on, if anything is.
pub(super) fn open(of: &HaConfig) -> Result<Option<LeaderView>, BindError> {
    if of.publish.is_empty() {
        return Ok(None);
    }
    let need = "must be redis://[USER:PASSWORD@]HOST:PORT[/DB]";
    let wrong = || BindError::Config(ConfigError { field: "ha.publish", need });
    let source: MetadataSource = of.publish.parse().map_err(|_| wrong())?;
    LeaderView::open(&source, &of.cluster_id, TIMEOUT).map(Some).map_err(|_| wrong())
}

/// The thread. Dropping it ends the thread, after the request under way; the entry then lives for its time.
#[derive(Debug)]
pub(super) struct Publisher {
    leads: Sender<Option<Reign>>,
}

impl Publisher {
    /// Begins to publish `address`, when it leads.
    pub(super) fn start(view: LeaderView, address: String) -> io::Result<Self> {
        let (leads, told) = channel();
        thread::Builder::new()
            .name("snowskin-publish".into())
            .spawn(move || serve(&view, &address, &told))?;
        Ok(Self { leads })
    }

    /// This master leads, or does not any more.
    pub(super) fn leads(&self, reign: Option<Reign>) {
        // The thread has panicked if it is gone: nothing else depends on it.
        let _ = self.leads.send(reign);
    }
}

fn serve(view: &LeaderView, address: &str, told: &Receiver<Option<Reign>>) {
    let (mut leads, mut log, mut said) = (None, LogLimit::default(), None);
    loop {
        let next = match leads {
            Some(_) => told.recv_timeout(RENEW),
            None => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(next) => leads = next,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let Some(reign) = leads else { continue };
        let owner = format!("snowskin-{}-{}", reign.lineage, reign.term);
        match view.publish(address, version(reign), &owner, TTL) {
            Ok(true) if said != Some(reign) => {
                said = Some(reign);
                info!(at = view.server(), address, "the leader is published");
            }
            Ok(_) => {}
            Err(error) => {
                if let Some(suppressed) = log.may(Instant::now()) {
                    warn!(%error, suppressed, "the leader is not published");
                }
            }
        }
    }
}

/// Views are numbered upwards. A lineage is a number of seconds, and a double has 53 bits.
fn version(reign: Reign) -> u64 {
    (reign.lineage << 20) | (reign.term & 0xf_ffff)
}
