//! Settings of clients and nodes.

mod disks;
mod exports;
mod extents;
mod storage;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
use store_core::chunks::CHUNK_BYTES;
use store_core::placement::NAMED_MAX;
use te_engine::Fabrics;

pub use disks::{DiskList, NodeDiskConfig, UnknownDisk};
pub use exports::{DiskExport, DiskExportList, UnknownExport};
pub use extents::NodeCxlConfig;
pub use storage::{NamespacePlace, Nguid, NodeStorageConfig, UnknownNamespace, UnknownNguid};

use crate::disk::check_bucket;
use crate::error::ConnectError;
use crate::rpc::{Identity, Masters, RpcConfig};
use crate::stage::StageConfig;

/// The bounce buffer has two halves. Each needs room for one checksum chunk, the smallest unit that a read of
/// a part reads.
const BOUNCE_BYTES_MIN: usize = 2 * CHUNK_BYTES as usize;
/// Each further request for space names the segments that have failed so far. A request can name
/// [`NAMED_MAX`] of them, so a put can ask for one more place than that.
const PLACES_MAX: usize = NAMED_MAX + 1;
/// The mover submits batches of up to this many requests. An engine with a lower limit would refuse every
/// batch, and each operation would end as a miss.
pub(crate) const REQUESTS_PER_BATCH_MIN: u32 = 128;

/// Settings of a [`Client`](crate::Client).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct ClientConfig {
    /// Where the master is, or the masters are. It is not part of this section of a settings file: one file
    /// has many sections and one store.
    #[serde(skip)]
    pub master: Masters,
    /// Timeouts of the connection to the master.
    pub rpc: RpcConfig,
    /// The tenant that this client acts for, and the secrets that prove it. Default: the default tenant,
    /// without a secret.
    #[serde(skip)]
    pub identity: Identity,
    /// The transfer engine that moves the bytes. Its `listen` must be an address that nodes can reach; port 0
    /// is fine. Its `requests_per_batch_max` must be at least 128.
    pub engine: te_engine::Config,
    /// Longest time that moving the bytes of one operation may take, milliseconds. The lease of a get or the
    /// window of a put may end it earlier. At least 1. Default 10,000.
    pub transfer_ms_max: u32,
    /// Size of the bounce buffer, bytes: registered memory through which `put` and `get` of plain memory
    /// pass. A longer value passes through it piece by piece. At least 131,072 (two halves of one
    /// checksum chunk each). Default 8 MiB.
    pub bounce_bytes: usize,
    /// Longest value for which `get` allocates memory, bytes. A longer value is an error. Default 1 GiB.
    pub value_bytes_max: u64,
    /// How long the client waits before it tries again to open a segment that it could not reach,
    /// milliseconds. Until then, reads go to other replicas and puts to other places. 0: it tries at each
    /// use. Default 500.
    pub unreachable_ms: u32,
    /// How long a get waits for objects that are on disks of nodes, milliseconds, from the moment that it
    /// asks for the first of them. What a disk has not delivered by then is a miss. At most 60,000; 0:
    /// nothing is read from disks. Default 1,000.
    pub disk_deadline_ms: u32,
    /// Where this client has the shared directory mounted that nodes write packs to, if not where they have
    /// it: packs are read from there. Likewise `s3://BUCKET/PREFIX` for the bucket. `none`: packs are read by
    /// their nodes, as other disks are. Default "": where the nodes have it.
    pub shared: String,
    /// Whether objects on disks that their nodes export as namespaces are read there, past the node (feature
    /// `nvmeof`). What cannot be read so is read through the node. Default true.
    pub exported_disks: bool,
    /// How often a call to the master that may safely be repeated is sent, the first time included. 1 to 255.
    /// Default 3.
    pub rpc_tries_max: u8,
    /// How many places a put may request from the master, one after the other, when the segments of the place
    /// before cannot be written. 1 to 9; 1: the put fails if the first place cannot be written. Default 3.
    pub places_max: u8,
    /// How long a put waits for a segment that accepts no byte before it requests another place,
    /// milliseconds. A long put waits longer, by the time that its bytes take at 25 MB/s. 1 to 600,000.
    /// Default 2,000.
    pub place_ms_max: u32,
    /// Gets and puts that take longer than this are logged with their operation number, milliseconds; 0: none
    /// is logged. Default 1,000.
    pub slow_operation_ms: u32,
}

/// Settings of a [`Node`](crate::Node).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct NodeConfig {
    /// Name of the node, unique in the cluster, 1 to 256 bytes. Its memory is listed under this name.
    pub name: String,
    /// Where the master is, or the masters are. It is not part of this section of a settings file: one file
    /// has many sections and one store.
    #[serde(skip)]
    pub master: Masters,
    /// Timeouts of the connection to the master.
    pub rpc: RpcConfig,
    /// The secrets that prove that this node may contribute memory. Default: no tenant and no secret.
    #[serde(skip)]
    pub identity: Identity,
    /// Memory that the node contributes, bytes. At least 1. Default 1 GiB.
    pub capacity_bytes: u64,
    /// Whether the node touches every page before it mounts its memory, so that no put waits for a page
    /// fault. This takes about one second per few GiB. Default true.
    pub populate: bool,
    /// The transfer engine that serves the memory: clients connect to `engine.listen`.
    pub engine: te_engine::Config,
    /// Time between two heartbeats, milliseconds; 0: one third of the silence that the master tolerates.
    /// Default 0.
    pub heartbeat_ms: u32,
    /// How long a node that starts waits for a master that does not answer, milliseconds; 4,294,967,295:
    /// without limit. Default 10,000.
    pub wait_master_ms: u32,
    /// How long a node that is stopped waits until its objects have been moved to other nodes, milliseconds;
    /// 0: its objects are not moved. Default 0.
    pub drain_on_stop_ms: u32,
    /// Limit on the rate at which this node copies objects from other nodes, when a segment is drained or an
    /// object gets another replica, bytes per second; 0: no limit. Default 0.
    pub copy_bytes_per_s_max: u64,
    /// Whether the node takes its name over from another node that holds it and is alive. For an operator who
    /// knows that the other node must not have the name. It also takes over extents of a CXL pool from a
    /// process of which it is not proved that it has ended, such as one of a host that has crashed. Default
    /// false: the node waits until a silent holder is given up, and does not start while the holder is alive.
    pub takeover: bool,
    /// Memory in a CXL pool that the node contributes, in place of memory that it allocates.
    pub cxl: NodeCxlConfig,
    /// Storage that the node contributes, in place of memory that it allocates.
    pub storage: NodeStorageConfig,
    /// Disks for objects that no longer fit into memory: files or block devices, as `PATH` or `PATH:SIZE`,
    /// separated by commas. A file with a size that does not exist is made and formatted; everything else was
    /// formatted before, by `snowskin disk format`. Default "".
    pub disks: DiskList,
    /// Disks among them that are also namespaces, or parts of namespaces, of a target of NVMe over TCP, as
    /// `PATH=nvme://ADDR:PORT/NQN/NSID`, with `+OFFSET` (bytes) for a part, separated by commas: clients with
    /// the feature `nvmeof` read objects there themselves, past the node. When the node starts, it compares
    /// the namespace with the disk. Default "".
    pub disk_exports: DiskExportList,
    /// Limit on the rate at which objects are written to each disk, directory of packs or bucket, bytes per
    /// second, averaged over about a second: flash wears out by writes. Objects that are evicted before they
    /// could be written are lost. 0: no limit. Default 0.
    pub disk_write_bytes_per_s_max: u64,
    /// Directories that all hosts mount, for objects that no longer fit into memory, as `DIR` or `DIR:SIZE`,
    /// separated by commas. The node writes packs to a directory of its own below each, which readers read
    /// themselves, with or without the node. With a size the node makes its directory if it has none there.
    /// `s3://BUCKET/PREFIX:SIZE` is a bucket of an S3-compatible store (feature `s3`), whose endpoint, region
    /// and credentials nodes and clients have in their environment (`AWS_ENDPOINT_URL` and others). Default
    /// "".
    pub shared: DiskList,
    /// The name of the cluster, below which the directories of its nodes are in a shared directory:
    /// `DIR/CLUSTER/UUID`. 1 to 128 bytes without `/`. Default "default".
    pub shared_cluster: String,
    /// How long no node has to write to a directory of packs before this node takes it over, milliseconds:
    /// its node is gone. 0: never. Default 5,000.
    pub shared_adopt_ms: u32,
    /// The service that reads objects from the disks for clients and other nodes. A node without disks has
    /// none. By default it listens where the engine does.
    pub stage: StageConfig,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self::new(Masters::default())
    }
}

/// A node without a name that contributes 1 GiB.
impl Default for NodeConfig {
    fn default() -> Self {
        Self::new("", Masters::default(), 1 << 30)
    }
}

impl ClientConfig {
    /// The defaults, for a client of this master.
    #[must_use]
    pub fn new(master: Masters) -> Self {
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
            disk_deadline_ms: 1_000,
            shared: String::new(),
            exported_disks: true,
            rpc_tries_max: 3,
            places_max: 3,
            place_ms_max: 2_000,
            slow_operation_ms: 1_000,
        }
    }

    /// Restricts the engine to these fabrics.
    #[must_use]
    pub fn fabrics(mut self, fabrics: Fabrics) -> Self {
        self.engine.fabrics = fabrics;
        self
    }

    /// The part of the settings that the state machines of gets and puts use.
    pub(crate) fn machines(&self) -> store_core::client::ClientConfig {
        store_core::client::ClientConfig {
            rpc_tries_max: self.rpc_tries_max,
            places_max: self.places_max,
            place_ms_max: self.place_ms_max,
        }
    }

    /// Checks everything that can be checked before anything is opened.
    ///
    /// # Errors
    /// [`ConnectError::Config`] with the field and the values that it may have.
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
        if self.disk_deadline_ms > 60_000 {
            return Err(ConnectError::Config { field: "disk_deadline_ms", need: "must be at most 60000" });
        }
        check_bucket(Path::new(&self.shared)).map_err(ConnectError::Disk)?;
        if self.engine.requests_per_batch_max < REQUESTS_PER_BATCH_MIN {
            let field = "engine.requests_per_batch_max";
            return Err(ConnectError::Config { field, need: "must be at least 128" });
        }
        Ok(())
    }
}

impl NodeConfig {
    /// Value of [`wait_master_ms`](Self::wait_master_ms) for a node that waits without limit.
    pub const FOR_EVER: u32 = u32::MAX;

    /// The defaults, for a node with this name that listens on loopback.
    #[must_use]
    pub fn new(name: &str, master: Masters, capacity_bytes: u64) -> Self {
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
            cxl: NodeCxlConfig::default(),
            storage: NodeStorageConfig::default(),
            disks: DiskList::default(),
            disk_exports: DiskExportList::default(),
            disk_write_bytes_per_s_max: 0,
            shared: DiskList::default(),
            shared_cluster: "default".to_owned(),
            shared_adopt_ms: 5_000,
            stage: StageConfig::default(),
        }
    }

    /// Restricts the engine to these fabrics.
    #[must_use]
    pub fn fabrics(mut self, fabrics: Fabrics) -> Self {
        self.engine.fabrics = fabrics;
        self
    }

    /// Checks everything that can be checked before anything is opened.
    ///
    /// # Errors
    /// [`ConnectError::Config`] with the field and the values that it may have.
    pub fn validate(&self) -> Result<(), ConnectError> {
        if self.name.is_empty() || self.name.len() > store_core::message::NAME_BYTES_MAX {
            return Err(ConnectError::Config { field: "name", need: "must have 1 to 256 bytes" });
        }
        if self.disks.0.iter().any(|disk| disk.path.as_os_str().is_empty()) {
            return Err(ConnectError::Config { field: "disks", need: "must have a path each" });
        }
        let is_disk = |path: &Path| self.disks.0.iter().any(|disk| disk.path == path);
        if !self.disk_exports.0.iter().all(|export| is_disk(&export.path)) {
            return Err(ConnectError::Config { field: "disk_exports", need: "must name disks of `disks`" });
        }
        if !self.disk_exports.0.is_empty() && !cfg!(feature = "nvmeof") {
            let need = "must be empty in a build without the feature `nvmeof`";
            return Err(ConnectError::Config { field: "disk_exports", need });
        }
        if self.shared.0.iter().any(|disk| disk.path.as_os_str().is_empty()) {
            return Err(ConnectError::Config { field: "shared", need: "must have a directory each" });
        }
        let cluster = &self.shared_cluster;
        if !(1..=128).contains(&cluster.len()) || cluster.contains('/') || cluster.starts_with('.') {
            let need = "must have 1 to 128 bytes, no `/`, and no dot at its beginning";
            return Err(ConnectError::Config { field: "shared_cluster", need });
        }
        for shared in &self.shared.0 {
            check_bucket(&shared.path.join(cluster)).map_err(ConnectError::Disk)?;
        }
        self.stage.validate().map_err(ConnectError::Stage)?;
        let NodeCxlConfig { first, count, .. } = self.cxl;
        if (count == 0) == self.cxl.is_set() || first.checked_add(count).is_none() {
            let need = "must be at least 1 when `cxl.pool` names a pool, and 0 otherwise; with `cxl.first`, it must be \
                        at most 4294967295";
            return Err(ConnectError::Config { field: "cxl.count", need });
        }
        self.storage.validate(self)?;
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

    /// What is wrong with a node and with a client that use this bucket.
    fn with_bucket(address: &str, cluster: &str) -> [Result<(), String>; 2] {
        let mut node = NodeConfig::new("a", SocketAddr::from(([127, 0, 0, 1], 1)).into(), 1 << 20);
        node.shared = DiskList(vec![NodeDiskConfig { path: address.into(), bytes: Some(1 << 30) }]);
        cluster.clone_into(&mut node.shared_cluster);
        let client = ClientConfig { shared: address.into(), ..ClientConfig::default() };
        [node.validate(), client.validate()].map(|result| result.map_err(|error| error.to_string()))
    }

    #[test]
    #[cfg(not(feature = "s3"))]
    fn a_bucket_without_the_feature_is_refused_with_its_name() {
        for refused in with_bucket("s3://kv-cache/p", "default") {
            assert!(refused.is_err_and(|error| error.contains("feature `s3`")));
        }
    }

    #[test]
    #[cfg(feature = "s3")]
    fn an_address_of_a_bucket_is_checked_and_what_is_wrong_is_not_repeated() {
        assert_eq!(with_bucket("s3://kv-cache/p", "default"), [Ok(()), Ok(())]);
        for refused in with_bucket("s3://key:hidden@kv-cache", "default") {
            assert!(refused.is_err_and(|error| error.contains("AWS_SECRET") && !error.contains("hidden")));
        }
        assert!(with_bucket("s3://kv-cache/p", "a b")[0].is_err());
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
