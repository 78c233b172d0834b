//! How the engines of these tests are started.

use crate::facts::Rail;
use crate::sys::Breakable;
use anyhow::{Context as _, Result, bail};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use te_engine::{Config, Fabrics, TransferEngine};
use te_rdma::RdmaTransport;
use te_rdma::sys::Device;

/// What puts every queue pair of an engine's rails into error.
#[derive(Clone, Debug, Default)]
pub(crate) struct Button(Arc<AtomicU32>);

impl Button {
    /// It happens at each rail's next poll.
    pub(crate) fn press(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// An engine over `tcp`, `rdma`, or both: `rdma+tcp`.
///
/// # Errors
/// When there is no such fabric, or it does not start.
pub(crate) fn start(fabric: &str, listen: &str) -> Result<TransferEngine> {
    Ok(TransferEngine::start(config(fabric, listen)?)?)
}

/// An engine over these rails, which break when the button is pressed.
///
/// # Errors
/// When a rail does not open.
pub(crate) fn start_breakable(rails: &[Rail], listen: &str, button: &Button) -> Result<TransferEngine> {
    let listen: SocketAddr = listen.parse().with_context(|| format!("`{listen}` is not ADDRESS:PORT"))?;
    let mut breakable = Vec::new();
    for rail in rails {
        let port = u8::try_from(rail.port).context("a port's number")?;
        let verbs = Device::open(&rail.device, port)?;
        let config = te_rdma::Config { bind: SocketAddr::new(listen.ip(), 0), ..te_rdma::Config::default() };
        let transport = Box::new(RdmaTransport::new(Breakable::new(verbs, Arc::clone(&button.0)), config)?);
        breakable.push(te_engine::Rail { device: format!("{}:{port}", rail.device), transport });
    }
    // An engine wants a fabric of its own; shared memory does not leave the host.
    let config = Config { listen, fabrics: Fabrics::SHM, ..Config::default() };
    Ok(TransferEngine::start_with_rails(config, breakable)?)
}

fn config(fabric: &str, listen: &str) -> Result<Config> {
    let fabrics = match fabric {
        "tcp" => Fabrics::TCP,
        "rdma" => Fabrics::RDMA,
        "rdma+tcp" => Fabrics { rdma: true, ..Fabrics::TCP },
        _ => bail!("no fabric `{fabric}`"),
    };
    let listen = listen.parse().with_context(|| format!("`{listen}` is not ADDRESS:PORT"))?;
    Ok(Config { listen, fabrics, ..Config::default() })
}
