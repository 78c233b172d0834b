//! The ports for engines of Mooncake, and what is exported to them (python.md 6.6).

use std::net::IpAddr;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyString;
use te_mooncake::{Cidr, Config, ExportError, MetadataString, Mode, Service, StartError};

use super::shared::Handle;
use crate::errors::{Fault, Kind};
use crate::options::refused;

/// The settings of the ports; `None`: there are none.
///
/// # Errors
/// One of the two was given without the other, or is not what it has to be.
pub(super) fn config(
    py: Python<'_>,
    bind: Option<&str>,
    peers: Option<&Bound<'_, PyAny>>,
    engine: &te_engine::Config,
) -> PyResult<Option<Config>> {
    let (bind, peers) = match (bind, peers) {
        (None, None) => return Ok(None),
        (Some(bind), Some(peers)) => (bind, peers),
        _ => {
            let text = "mooncake_bind and mooncake_peers are given together: the ports have no authentication, so \
                        they need the address to listen on, and the networks whose hosts may connect";
            return Err(refused(py, text));
        }
    };
    let bind: IpAddr = bind
        .parse()
        .map_err(|_| refused(py, format!("mooncake_bind is an IP address such as 10.0.0.7, not {bind:?}")))?;
    let texts: Vec<String> = match peers.cast::<PyString>() {
        Ok(one) => vec![one.to_str()?.to_owned()],
        Err(_) => peers.extract()?,
    };
    let network =
        |text: &String| text.parse::<Cidr>().map_err(|error| refused(py, format!("mooncake_peers: {error}")));
    let peers = texts.iter().map(network).collect::<PyResult<Vec<_>>>()?;
    let advertise_host = engine.advertise_host.clone();
    let config = Config { mode: Mode::Target, bind: Some(bind), peers, advertise_host, ..Config::default() };
    config.validate().map_err(|error| Fault::from(error).into_err(py))?;
    Ok(Some(config))
}

/// Opens the ports. Blocks.
///
/// # Errors
/// A port cannot be opened.
pub(super) fn start(config: Config) -> Result<Service, Fault> {
    Ok(Service::start(config, &MetadataString::peer_to_peer())?)
}

/// Memory that engines of Mooncake reach until this is dropped. Dropping it waits until none uses it.
pub(super) struct Export {
    service: Handle<Service>,
    addr: u64,
}

impl Export {
    /// The service exports the memory at `addr`.
    pub(super) const fn new(service: Handle<Service>, addr: u64) -> Self {
        Self { service, addr }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Err(error) = self.service.withdraw(self.addr) {
            log::warn!("memory was withdrawn from Mooncake peers: {error}");
        }
    }
}

/// The service of an engine.
///
/// # Errors
/// The engine has none.
pub(super) fn handle(service: Option<&Arc<Service>>) -> Result<Handle<Service>, Fault> {
    service.map(|service| Handle::new(Arc::clone(service))).ok_or_else(|| {
        Fault::argument(
            "this engine has no ports for Mooncake peers: start it with mooncake_bind and mooncake_peers",
        )
    })
}

impl From<StartError> for Fault {
    fn from(error: StartError) -> Self {
        let message = format!("mooncake: {error}");
        match error {
            StartError::Config { .. } | StartError::Setting(_) => Self::argument(message),
            StartError::Listen { .. } => Self::new(Kind::Other, "listen_failed", message),
            _ => Self::new(Kind::Other, "system", message),
        }
    }
}

impl From<ExportError> for Fault {
    fn from(error: ExportError) -> Self {
        let message = error.to_string();
        match error {
            ExportError::Overlap { .. } => Self::new(Kind::InvalidArgument, "overlap", message),
            ExportError::Full { .. } => Self::new(Kind::NoSpace, "too_many_regions", message),
            ExportError::Forked => Self::forked(),
            _ => Self::argument(message),
        }
    }
}
