//! From the arguments of `setup` to clients and a node.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use store_client::{AsyncClient, ClientConfig, ConnectError, Node, NodeConfig};

use super::StoreConfig;
use super::dummy::Pool;
use super::mounts::Mounts;
use super::names::Names;
use super::sessions::Sessions;
use crate::clients::{Clients, ClientsError};
use crate::codes::{self, StoreCode, store as code};
use crate::engine::{listen_ip, ports_of, split_host};
use crate::env::Env;

/// The arguments of `setup`, with the defaults of its dictionary form.
pub type SetupOptions = StoreConfig;

/// Memory through which plain memory of callers passes, per client, bytes.
const BOUNCE_BYTES: usize = 8 << 20;
/// Longest object that a get of bytes takes when the local buffer has no limit, bytes.
const VALUE_BYTES_MAX: u64 = 1 << 40;
/// How often a name is chosen anew because another node has it.
const NAME_TRIES_MAX: usize = 20;
/// How long an answer of the master may take, milliseconds.
const CALL_MS_MAX: u32 = 4_000;

/// A store that is set up.
pub(super) struct Inner {
    pub(super) clients: Clients,
    pub(super) names: Names,
    pub(super) sessions: Sessions,
    /// `None`: the memory is that of the node on this machine.
    pub(super) mounts: Option<Mounts>,
    pub(super) pool: Option<Pool>,
    name: String,
    local_buffer: u64,
    /// Keeps the port in the name from being chosen by another process on this host.
    _port: Option<TcpListener>,
    node: Mutex<Option<Node>>,
    async_client: OnceLock<Option<AsyncClient>>,
}

impl Inner {
    /// Connects, and contributes memory.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for settings, `INTERNAL_ERROR` if the master cannot be reached.
    pub(super) fn start(options: &SetupOptions, env: &Env) -> Result<Self, StoreCode> {
        let refuse = |error: &dyn std::fmt::Display| {
            log::error!("setup: {error}");
            code::INVALID_PARAMS
        };
        options.validate().map_err(|error| refuse(&error))?;
        for (is_set, what) in [
            (options.enable_ssd_offload, "enable_ssd_offload: this store keeps objects in memory alone"),
            (options.enable_client_http_server, "enable_client_http_server: clients serve no HTTP"),
        ] {
            if is_set {
                log::warn!("setup: {what}; the setting has no effect");
            }
        }
        let client = client_config(options, env).map_err(|error| refuse(&error))?;
        let clients = Clients::connect(client.clone()).map_err(|error| not_started(&error))?;
        let (name, port, node) = contribute(options, env, &client)?;
        log::info!("store {name}: {} bytes contributed", options.global_segment_size);
        Ok(Self {
            clients,
            names: Names::default(),
            sessions: Sessions::default(),
            mounts: Some(Mounts::new(options, env, client)),
            pool: None,
            name,
            local_buffer: options.local_buffer_size,
            _port: port,
            node: Mutex::new(node),
            async_client: OnceLock::new(),
        })
    }

    /// Connects to the node on this machine, for which `name` is an address.
    pub(super) fn of_node(clients: Clients, name: String, local_buffer: u64, pool: Pool) -> Self {
        Self {
            clients,
            names: Names::default(),
            sessions: Sessions::default(),
            mounts: None,
            pool: Some(pool),
            name,
            local_buffer,
            _port: None,
            node: Mutex::new(None),
            async_client: OnceLock::new(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn local_buffer(&self) -> u64 {
        self.local_buffer
    }

    /// Whether `len` bytes are more than the caller's local buffer takes. A store without one puts memory of
    /// the caller alone, as in Mooncake. With the node on this machine, 0 stands for no limit.
    pub(super) fn is_beyond_local_buffer(&self, len: u64) -> bool {
        len > self.local_buffer && (self.local_buffer > 0 || self.pool.is_none())
    }

    pub(super) fn health(&self) -> i32 {
        let asked = self.clients.lend().is_ok_and(|mut worker| worker.client.answers());
        if asked { 0 } else { 2 }
    }

    pub(super) fn async_client(&self) -> Option<AsyncClient> {
        let start = || {
            let client =
                self.clients.another().map_err(|error| log::warn!("an asynchronous client: {error}")).ok()?;
            AsyncClient::start(client?).ok()
        };
        self.async_client.get_or_init(start).clone()
    }

    /// # Safety
    /// As [`Store::register`](super::Store::register).
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub(super) unsafe fn register(&self, addr: u64, len: u64) -> Result<(), StoreCode> {
        // SAFETY: the caller's promise; the clients are closed before the store is gone.
        unsafe { self.clients.add_buffer(addr, len) }.map_err(|error| of_clients_error(&error))
    }

    pub(super) fn unregister(&self, addr: u64) -> Result<(), StoreCode> {
        let removed = self.clients.remove_buffer(addr, || self.sessions.refresh(self));
        removed.map_err(|error| of_clients_error(&error))
    }

    /// Ends calls, connections and node, and waits at most `limit`.
    pub(super) fn close(self: Arc<Self>, limit: Duration) {
        let (done, ended) = mpsc::sync_channel(1);
        let closing = self.clone();
        let close = move || {
            closing.clients.close(limit);
            closing.sessions.close();
            if let Some(mounts) = &closing.mounts {
                mounts.close();
            }
            if let Some(Some(client)) = closing.async_client.get() {
                client.clone().stop();
            }
            let node = closing.node.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(node) = node {
                node.stop();
            }
            // The caller may have stopped waiting.
            let _ = done.send(());
        };
        match std::thread::Builder::new().name("snowskin-close".into()).spawn(close) {
            Ok(_) => {
                if ended.recv_timeout(limit).is_err() {
                    log::warn!(
                        "store {}: not closed within {} ms; it ends by itself",
                        self.name,
                        limit.as_millis()
                    );
                }
            }
            Err(error) => {
                log::error!("store {}: not closed: the system refused a thread: {error}", self.name)
            }
        }
    }
}

/// Mooncake's number for the lack of a client, and for a buffer that was not registered.
pub(super) fn of_clients_error(error: &ClientsError) -> StoreCode {
    log::warn!("the store: {error}");
    match error {
        ClientsError::Connect(error) => of_connect_error(error),
        ClientsError::Local(_) => code::RPC_FAIL,
        _ => code::INVALID_PARAMS,
    }
}

/// Mooncake's number for a client or node that did not start.
fn of_connect_error(error: &ConnectError) -> StoreCode {
    match error {
        ConnectError::Config { .. } => code::INVALID_PARAMS,
        ConnectError::Rpc(error) if error.is_transient() => code::RPC_FAIL,
        ConnectError::Rpc(error) => codes::of_code(error.code()),
        ConnectError::Forked => code::UNAVAILABLE_IN_CURRENT_STATUS,
        _ => code::INTERNAL_ERROR,
    }
}

pub(super) fn not_started(error: &ConnectError) -> StoreCode {
    log::error!("setup: {error}");
    match of_connect_error(error) {
        // What Mooncake's setup returns for a master that cannot be reached.
        code::RPC_FAIL => code::INTERNAL_ERROR,
        code => code,
    }
}

fn client_config(options: &SetupOptions, env: &Env) -> Result<ClientConfig, store_client::RpcError> {
    let mut config = ClientConfig::new(options.master_server_addr.parse()?);
    config.engine = engine_config(options, env);
    config.engine.control.timeout_ms = 1_000;
    config.rpc.call_ms_max = CALL_MS_MAX;
    config.bounce_bytes = BOUNCE_BYTES;
    config.value_bytes_max = match options.local_buffer_size {
        0 => VALUE_BYTES_MAX,
        limit => limit,
    };
    config.identity.tenant.clone_from(&options.tenant_id);
    Ok(config)
}

fn engine_config(options: &SetupOptions, env: &Env) -> te_engine::Config {
    let (host, _) = split_host(&options.local_hostname);
    let mut config = te_engine::Config {
        listen: SocketAddr::new(listen_ip(host, env), 0),
        advertise_host: Some(host.to_owned()),
        ..te_engine::Config::default()
    };
    if let Some(fabrics) = env.fabrics {
        config.fabrics = fabrics;
    }
    // Callers name devices beside any protocol, and only this one has any. A device that is not there is an
    // error then, as in Mooncake.
    #[cfg(feature = "rdma")]
    if options.protocol == "rdma" && env.may_use_rdma() {
        let mut devices = options.devices();
        if devices.is_empty() {
            devices.clone_from(&env.devices);
        }
        config.rdma.devices = devices;
    }
    if let Some(path) = &env.topology {
        config.topology = te_engine::TopologySource::File(path.clone());
    }
    config
}

/// The name of this process, the socket that keeps its port, and the node if it contributes memory.
///
/// A host name without a port gets one, which no other process on this host uses; a name that another node
/// of the cluster has (`localhost`, on two machines) is then chosen anew. So is one that the caller chose
/// with its port: Mooncake lets nodes share a name, and here names of segments have one owner.
fn contribute(
    options: &SetupOptions,
    env: &Env,
    client: &ClientConfig,
) -> Result<(String, Option<TcpListener>, Option<Node>), StoreCode> {
    let (host, port) = split_host(&options.local_hostname);
    let named =
        |port: u16| if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    if let Some(port) = port {
        match node(options, env, client, &named(port)) {
            Ok(node) => return Ok((named(port), None, node)),
            Err(error @ ConnectError::Held { .. }) => log::warn!("setup: {error}; another port is chosen"),
            Err(error) => return Err(not_started(&error)),
        }
    }
    let mut last = code::INTERNAL_ERROR;
    let ip = listen_ip(host, env);
    let free = ports_of(env.store_ports)
        .into_iter()
        .filter_map(|port| Some((port, TcpListener::bind((ip, port)).ok()?)));
    for (port, held) in free.take(NAME_TRIES_MAX) {
        match node(options, env, client, &named(port)) {
            Ok(node) => return Ok((named(port), Some(held), node)),
            Err(error @ ConnectError::Held { .. }) => last = not_started(&error),
            Err(error) => return Err(not_started(&error)),
        }
    }
    log::error!("setup: no free port from {} to {}", env.store_ports.min, env.store_ports.max);
    Err(last)
}

pub(super) fn node(
    options: &SetupOptions,
    env: &Env,
    client: &ClientConfig,
    name: &str,
) -> Result<Option<Node>, ConnectError> {
    if options.global_segment_size == 0 {
        return Ok(None);
    }
    let mut config = NodeConfig::new(name, client.master.clone(), options.global_segment_size);
    config.rpc = client.rpc;
    config.identity.cluster = client.identity.cluster.clone();
    config.engine = engine_config(options, env);
    // Callers contribute more memory than they use, and expect `setup` to return at once.
    config.populate = false;
    Node::start(config).map(Some)
}
