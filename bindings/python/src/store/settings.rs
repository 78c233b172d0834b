//! What `connect` is told, checked before anything is opened.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use store_client::local::{self, LocalConfig};
use store_client::{
    Client, ClientConfig, Fabrics, Identity, LocalClient, Masters, Node, NodeConfig, RpcConfig, RpcConnection,
};
use te_core::Secret;

use super::backend::Backend;
use super::core::Core;
use crate::errors::Fault;
use crate::options::{limit_ms, refused, size};
use crate::pool::Pool;

/// A `snowskin.Config`, field by field.
#[derive(FromPyObject)]
pub(crate) struct Arguments<'py> {
    master: Option<String>,
    memory: Option<Bound<'py, PyAny>>,
    rails: Bound<'py, PyAny>,
    local: Option<PathBuf>,
    tenant: String,
    secret: Option<Bound<'py, PyAny>>,
    cluster_secret: Option<Bound<'py, PyAny>>,
    admin_secret: Option<Bound<'py, PyAny>>,
    listen: String,
    advertise: Option<String>,
    node_name: Option<String>,
    pool: Bound<'py, PyAny>,
    connect_timeout: f64,
    call_timeout: f64,
    transfer_timeout: f64,
    gpu_library: Option<PathBuf>,
}

/// What to open.
#[derive(Debug)]
pub(crate) struct Settings {
    client: ClientConfig,
    node: Option<NodeConfig>,
    local: Option<LocalConfig>,
    /// Whether the master's address was given.
    has_master: bool,
    pool_bytes: u64,
}

impl Settings {
    /// Checks the arguments.
    ///
    /// # Errors
    /// `TypeError`, or an invalid argument with the values that are allowed.
    pub(crate) fn new(py: Python<'_>, given: &Arguments<'_>) -> PyResult<Self> {
        let refuse = |fault: Fault| fault.into_err(py);
        let has_master = given.master.is_some();
        let master: Masters = match &given.master {
            Some(text) => text.parse().map_err(|error| refused(py, format!("master: {error}")))?,
            None => Masters::default(),
        };
        let identity = identity(py, given)?;
        let mut client = ClientConfig::new(master.clone());
        client.identity = identity.clone();
        client.rpc = rpc(py, given)?;
        client.transfer_ms_max = limit_ms(py, "transfer_timeout", given.transfer_timeout)?;
        engine(&mut client.engine, given)?;
        // A fixed port is that of the node; the client takes any.
        let listen = client.engine.listen;
        client.engine.listen.set_port(0);
        client.validate().map_err(|error| refuse(error.into()))?;
        client.engine.validate().map_err(|error| refuse(error.into()))?;
        let node = match &given.memory {
            None => None,
            Some(memory) => Some(node(given, &client, memory, listen)?),
        };
        if node.is_some() && given.local.is_some() {
            let text = "memory and local exclude each other: the node on this machine lends its own memory";
            return Err(refused(py, text));
        }
        let local = given.local.as_ref().map(|path| {
            let named = path.as_os_str() != "auto";
            let mut config =
                LocalConfig::new(if named { path.clone() } else { local::default_path(&master) });
            config.tenant.clone_from(&given.tenant);
            config.connect_ms_max = client.rpc.connect_ms_max;
            config
        });
        let pool_bytes = size("pool", &given.pool)?;
        if pool_bytes < 2 << 20 {
            return Err(refused(py, format!("pool is at least 2MiB, not {pool_bytes} bytes")));
        }
        Ok(Self { client, node, local, has_master, pool_bytes })
    }

    /// The master's address, or the path of the node's socket.
    pub(crate) fn place(&self) -> String {
        match &self.local {
            Some(local) => format!("unix:{}", local.path.display()),
            None => self.client.master.to_string(),
        }
    }

    /// Connects. Blocks.
    ///
    /// # Errors
    /// No master, no node, no permission, no memory.
    pub(crate) fn open(self) -> Result<Arc<Core>, Fault> {
        let Self { client, node, local, has_master, pool_bytes } = self;
        let pool = Pool::new(pool_bytes);
        if let Some(mut local) = local {
            local.arena_bytes = local.arena_bytes.min(pool_bytes);
            let connected = LocalClient::connect(local).map_err(store_client::StoreError::from)?;
            let master = match has_master {
                true => {
                    let rpc = RpcConnection::connect_as(client.master, client.rpc, client.identity);
                    Some(rpc.map_err(store_client::StoreError::from)?)
                }
                false => None,
            };
            return Core::start(Backend::local(connected, master), pool, None);
        }
        // The node first: a client whose only segment is its own finds it.
        let node = node.map(Node::start).transpose()?;
        let connected = Client::connect(client.clone())?;
        Core::start(Backend::engine(connected, client, Arc::clone(&pool)), pool, node)
    }
}

fn identity(py: Python<'_>, given: &Arguments<'_>) -> PyResult<Identity> {
    let mut identity = Identity::default();
    if given.tenant.is_empty() || given.tenant.len() > 64 {
        return Err(refused(py, format!("tenant has 1 to 64 bytes, not {}", given.tenant.len())));
    }
    identity.tenant.clone_from(&given.tenant);
    identity.secret = secret("secret", given.secret.as_ref())?;
    identity.cluster = secret("cluster_secret", given.cluster_secret.as_ref())?;
    identity.admin = secret("admin_secret", given.admin_secret.as_ref())?;
    Ok(identity)
}

/// A secret from `str` or `bytes`. No message contains any of it.
pub(crate) fn secret(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Secret> {
    let Some(value) = value else { return Ok(Secret::default()) };
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Secret::new(text.to_str()?.as_bytes()));
    }
    match value.cast::<PyBytes>() {
        Ok(bytes) => Ok(Secret::new(bytes.as_bytes())),
        Err(_) => Err(PyTypeError::new_err(format!("{name} is str or bytes"))),
    }
}

fn rpc(py: Python<'_>, given: &Arguments<'_>) -> PyResult<RpcConfig> {
    let mut rpc = RpcConfig::default();
    rpc.connect_ms_max = limit_ms(py, "connect_timeout", given.connect_timeout)?;
    rpc.call_ms_max = limit_ms(py, "call_timeout", given.call_timeout)?;
    Ok(rpc)
}

fn engine(config: &mut te_engine::Config, given: &Arguments<'_>) -> PyResult<()> {
    config.fabrics = rails(&given.rails)?;
    config.listen = address("listen", &given.listen, given.rails.py())?;
    config.advertise_host.clone_from(&given.advertise);
    // One of the two is used: that of the memory.
    config.gpu.cuda_library.clone_from(&given.gpu_library);
    config.gpu.hip_library.clone_from(&given.gpu_library);
    Ok(())
}

/// Rails: `"auto"`, names with commas, or a sequence of names.
pub(crate) fn rails(value: &Bound<'_, PyAny>) -> PyResult<Fabrics> {
    let text = match value.cast::<PyString>() {
        Ok(text) => text.to_str()?.to_owned(),
        Err(_) => value
            .extract::<Vec<String>>()
            .map_err(|_| {
                PyTypeError::new_err("rails is a str such as \"auto\" or \"shm,tcp\", or a list of names")
            })?
            .join(","),
    };
    text.parse().map_err(|error| refused(value.py(), format!("rails: {error}")))
}

/// `host:port` with an IP address.
pub(crate) fn address(name: &str, text: &str, py: Python<'_>) -> PyResult<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    match text.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketAddr::new(ip, 0)),
        Err(_) => {
            let text = format!("{name} is IP:PORT such as \"127.0.0.1:0\" or \"[::1]:0\", not {text:?}");
            Err(refused(py, text))
        }
    }
}

/// Distinguishes the nodes of this process.
static NODES: AtomicU32 = AtomicU32::new(0);

fn node(
    given: &Arguments<'_>,
    client: &ClientConfig,
    memory: &Bound<'_, PyAny>,
    listen: SocketAddr,
) -> PyResult<NodeConfig> {
    let name = match &given.node_name {
        Some(name) => name.clone(),
        None => {
            let host = memory.py().import("socket")?.call_method0("gethostname")?;
            let number = NODES.fetch_add(1, Ordering::Relaxed);
            format!("{host}-{}-{number}", std::process::id())
        }
    };
    let mut node = NodeConfig::new(&name, client.master.clone(), size("memory", memory)?);
    // A node acts for no tenant.
    node.identity.cluster = client.identity.cluster.clone();
    node.identity.admin = client.identity.admin.clone();
    node.rpc = client.rpc;
    node.engine = client.engine.clone();
    node.engine.listen = listen;
    node.wait_master_ms = client.rpc.connect_ms_max;
    node.validate().map_err(|error| Fault::from(error).into_err(memory.py()))?;
    Ok(node)
}

/// Checks a `snowskin.Config` without opening anything.
#[pyfunction]
pub(crate) fn check_config(config: &Bound<'_, PyAny>) -> PyResult<()> {
    Settings::new(config.py(), &config.extract()?).map(drop)
}
