//! Starts the engines of these tests.

use crate::facts::Rail;
use crate::sys::Breakable;
use anyhow::{Context as _, Result};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use te_engine::{Config, FabricContext, FabricEntry, Fabrics, Tier, TransferEngine};
use te_rdma::RdmaTransport;
use te_rdma::sys::Device;

/// Puts every queue pair of an engine's rails into the error state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Button(Arc<AtomicU32>);

impl Button {
    /// Each rail obeys at its next poll.
    pub(crate) fn press(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// An engine over `tcp`, `rdma`, or both: `rdma+tcp`.
///
/// # Errors
/// When a fabric does not exist, or does not start.
pub(crate) fn start(fabric: &str, listen: &str) -> Result<TransferEngine> {
    Ok(TransferEngine::start(config(fabric, listen)?)?)
}

/// An engine over these rails, whose queue pairs break when the button is pressed.
///
/// # Errors
/// When a rail does not open.
pub(crate) fn start_breakable(rails: &[Rail], listen: &str, button: &Button) -> Result<TransferEngine> {
    let listen: SocketAddr = listen.parse().with_context(|| format!("`{listen}` is not ADDRESS:PORT"))?;
    let open = |context: &FabricContext<'_>| {
        let open_one = |rail: &Rail| {
            let port = u8::try_from(rail.port)?;
            let verbs = Device::open(&rail.device, port)?;
            let bind = SocketAddr::new(context.control.ip(), 0);
            let config = te_rdma::Config { bind, ..te_rdma::Config::default() };
            let transport = RdmaTransport::new(Breakable::new(verbs, Arc::clone(&button.0)), config)?;
            let device = format!("{}:{port}", rail.device);
            Ok(te_engine::Rail { device, transport: Box::new(transport) })
        };
        rails.iter().map(open_one).collect()
    };
    let about = "RDMA whose queue pairs break on request";
    let breakable = FabricEntry::new("breakable", Tier::Rdma, about, &open);
    let config = Config { listen, fabrics: Fabrics::NONE, ..Config::default() };
    Ok(TransferEngine::start_with_fabrics(config, &[breakable])?)
}

fn config(fabric: &str, listen: &str) -> Result<Config> {
    let fabrics = fabric.replace('+', ",").parse::<Fabrics>()?;
    let listen = listen.parse().with_context(|| format!("`{listen}` is not ADDRESS:PORT"))?;
    Ok(Config { listen, fabrics, ..Config::default() })
}
