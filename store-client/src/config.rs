//! What clients and nodes can be told.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use store_core::chunks::CHUNK_BYTES;
use store_core::placement::NAMED_MAX;
use te_engine::Fabrics;

use crate::error::ConnectError;
use crate::rpc::{Address, Identity, RpcConfig};

/// Two halves, each with room for one block, the least that a read of a part reads.
const BOUNCE_BYTES_MIN: usize = 2 * CHUNK_BYTES as usize;
/// A put names the segments that have failed, and can name so many less one.
const PLACES_MAX: usize = NAMED_MAX + 1;
/// What is moved goes in batches of so many pieces; an engine that took fewer would refuse them, one by one, as misses.
pub(crate) const REQUESTS_PER_BATCH_MIN: u32 = 128;

/// What a [`Client`](crate::Client) can be told.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClientConfig {
    /// Where the master is. No part of a settings file's section: one file has many sections and one master.
    #[serde(skip)]
    pub master: Address,
    /// Times of the connection to it.
    pub rpc: RpcConfig,
    /// Which tenant this is, and what proves it. Default the default tenant.
    #[serde(skip)]
    pub identity: Identity,
    /// The engine that moves the bytes. Its `listen` must be an address that nodes could reach; port 0 will do.
    /// Its `requests_per_batch_max` must be at least 128.
    pub engine: te_engine::Config,
    /// How long moving the bytes of one operation may take, milliseconds. The lease or the put's window may end it
    /// earlier. Default 10,000.
    pub transfer_ms_max: u32,
    /// Memory through which `put` and `get` of plain bytes pass, bytes; a larger value passes in pieces. At least 128 KiB. Default 8 MiB.
    pub bounce_bytes: usize,
    /// Longest value that `get` makes room for, bytes. Default 1 GiB.
    pub value_bytes_max: u64,
    /// A node that could not be reached is left alone for this long, milliseconds. Default 500.
    pub unreachable_ms: u32,
    /// Tries of a call that may be repeated. At least 1. Default 3.
    pub rpc_tries_max: u8,
    /// Places that a put asks the master for, one after the other, when the segments of the one before cannot be written to. 1 to 9;
    /// 1: the first must do. Default 3.
    pub places_max: u8,
    /// How long a segment may take no byte of a put before the put asks for another place, milliseconds; a put of many bytes waits
    /// as much longer as they take at 25 MB/s. 1 to 600,000. Default 2,000.
    pub place_ms_max: u32,
    /// Gets and puts that take longer are logged, with their number, milliseconds; 0: none. Default 1,000.
    pub slow_operation_ms: u32,
}

/// What a [`Node`](crate::Node) can be told.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// Its name, unique in the cluster. Its memory appears under it.
    pub name: String,
    /// Where the master is. No part of a settings file's section: one file has many sections and one master.
    #[serde(skip)]
    pub master: Address,
    /// Times of the connection to it.
    pub rpc: RpcConfig,
    /// What proves that it may contribute memory. Default nobody's, with no secret.
    #[serde(skip)]
    pub identity: Identity,
    /// Memory to contribute, bytes.
    pub capacity_bytes: u64,
    /// Touches every page before it is mounted, so that no put pays for it. Takes about a second for each few GiB.
    /// Default true.
    pub populate: bool,
    /// The engine that serves it: `engine.listen` is where clients connect.
    pub engine: te_engine::Config,
    /// How often the node says that it lives, milliseconds; 0: a third of what the master tolerates. Default 0.
    pub heartbeat_ms: u32,
    /// How long a node that starts waits for a master that is away, milliseconds; 4,294,967,295: for ever. Default 10,000.
    pub wait_master_ms: u32,
    /// How long a node that is stopped waits for its objects to be moved to other nodes, milliseconds; 0: it does not have them
    /// moved. Default 0.
    pub drain_on_stop_ms: u32,
    /// How fast it may copy objects from other nodes when a segment is drained or an object gets another replica, bytes per
    /// second; 0: as fast as the fabric carries. Default 0.
    pub copy_bytes_per_s_max: u64,
    /// Takes the name from another node that has it and lives: for the operator who knows that the other must not have it.
    /// Default false: the node waits for one that is silent to be given up, and refuses to start when the other lives.
    pub takeover: bool,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self::new(Address::default())
    }
}

/// Without a name; one gibibyte.
impl Default for NodeConfig {
    fn default() -> Self {
        Self::new("", Address::default(), 1 << 30)
    }
}

impl ClientConfig {
    /// The defaults, for the master there.
    #[must_use]
    pub fn new(master: Address) -> Self {
        let mut engine = te_engine::Config::default();
        engine.control.timeout_ms = 1_000;
        Self {
            master,
            rpc: RpcConfig::default(),
            identity: Identity::default(),
            engine,
            transfer_ms_max: 10_000,
            bounce_bytes: 8 << 20,
            value_bytes_max: 1 << 30,
            unreachable_ms: 500,
            rpc_tries_max: 3,
            places_max: 3,
            place_ms_max: 2_000,
            slow_operation_ms: 1_000,
        }
    }

    /// The same, over these fabrics only.
    #[must_use]
    pub fn fabrics(mut self, fabrics: Fabrics) -> Self {
        self.engine.fabrics = fabrics;
        self
    }

    /// What the state machines of gets and puts are told.
    pub(crate) fn machines(&self) -> store_core::client::ClientConfig {
        store_core::client::ClientConfig {
            rpc_tries_max: self.rpc_tries_max,
            places_max: self.places_max,
            place_ms_max: self.place_ms_max,
        }
    }

    /// Checks what can be checked before anything is opened.
    ///
    /// # Errors
    /// Names the field and what it may be.
    pub fn validate(&self) -> Result<(), ConnectError> {
        if self.bounce_bytes < BOUNCE_BYTES_MIN {
            return Err(ConnectError::Config { field: "bounce_bytes", need: "must be at least 131072" });
        }
        if self.transfer_ms_max == 0 {
            return Err(ConnectError::Config { field: "transfer_ms_max", need: "must be at least 1" });
        }
        if self.rpc_tries_max == 0 {
            return Err(ConnectError::Config { field: "rpc_tries_max", need: "must be at least 1" });
        }
        if !(1..=PLACES_MAX).contains(&usize::from(self.places_max)) {
            return Err(ConnectError::Config { field: "places_max", need: "must be 1 to 9" });
        }
        if !(1..=600_000).contains(&self.place_ms_max) {
            return Err(ConnectError::Config { field: "place_ms_max", need: "must be 1 to 600000" });
        }
        if self.engine.requests_per_batch_max < REQUESTS_PER_BATCH_MIN {
            let field = "engine.requests_per_batch_max";
            return Err(ConnectError::Config { field, need: "must be at least 128" });
        }
        Ok(())
    }
}

impl NodeConfig {
    /// [`wait_master_ms`](Self::wait_master_ms) of a node that never gives up.
    pub const FOR_EVER: u32 = u32::MAX;

    /// The defaults, for a node of this name that listens on loopback.
    #[must_use]
    pub fn new(name: &str, master: Address, capacity_bytes: u64) -> Self {
        let listen = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        Self {
            name: name.to_owned(),
            master,
            rpc: RpcConfig::default(),
            identity: Identity { tenant: String::new(), ..Identity::default() },
            capacity_bytes,
            populate: true,
            engine: te_engine::Config { listen, ..te_engine::Config::default() },
            heartbeat_ms: 0,
            wait_master_ms: 10_000,
            drain_on_stop_ms: 0,
            copy_bytes_per_s_max: 0,
            takeover: false,
        }
    }

    /// The same, over these fabrics only.
    #[must_use]
    pub fn fabrics(mut self, fabrics: Fabrics) -> Self {
        self.engine.fabrics = fabrics;
        self
    }

    /// Checks what can be checked before anything is opened.
    ///
    /// # Errors
    /// Names the field and what it may be.
    pub fn validate(&self) -> Result<(), ConnectError> {
        if self.name.is_empty() || self.name.len() > store_core::message::NAME_BYTES_MAX {
            return Err(ConnectError::Config { field: "name", need: "must have 1 to 256 bytes" });
        }
        if self.capacity_bytes == 0 || usize::try_from(self.capacity_bytes).is_err() {
            return Err(ConnectError::Config { field: "capacity_bytes", need: "must be at least 1" });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_whose_batches_are_too_small_for_a_client_is_refused() {
        let mut config = ClientConfig::default();
        assert!(config.validate().is_ok());
        config.engine.requests_per_batch_max = REQUESTS_PER_BATCH_MIN;
        assert!(config.validate().is_ok());
        config.engine.requests_per_batch_max -= 1;
        let refused = config.validate().map_err(|error| error.to_string());
        assert!(refused.is_err_and(|error| error.contains("engine.requests_per_batch_max")));
    }

    #[test]
    fn tries_and_places_out_of_their_limits_are_refused_by_name() {
        let of = |tries, places, ms| ClientConfig {
            rpc_tries_max: tries,
            places_max: places,
            place_ms_max: ms,
            ..ClientConfig::default()
        };
        for good in [of(1, 1, 1), of(u8::MAX, 9, 600_000)] {
            assert!(good.validate().is_ok(), "{good:?}");
        }
        let bad = [
            (of(0, 3, 2_000), "rpc_tries_max"),
            (of(3, 0, 2_000), "places_max"),
            (of(3, 10, 2_000), "places_max"),
            (of(3, 3, 0), "place_ms_max"),
            (of(3, 3, 600_001), "place_ms_max"),
        ];
        for (config, field) in bad {
            let refused = config.validate().map_err(|error| error.to_string());
            assert!(refused.is_err_and(|error| error.contains(field)), "{field}");
        }
    }

    #[test]
    fn what_a_client_has_by_default_is_what_its_state_machines_have() {
        let (config, core) = (ClientConfig::default(), store_core::client::ClientConfig::default());
        assert_eq!(config.machines(), core);
    }
}
