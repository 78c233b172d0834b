//! A cluster of child processes on this machine, for the duration of one command.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store_core::EvictionPolicy;
use te_engine::Fabrics;

use crate::exit::Failure;
use crate::global::Global;
use crate::process::{self, Child};
use crate::progress::Bar;
use crate::{fail, sys};

/// Time for a child to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// The line that a master prints when it serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MasterReady {
    /// Always `master`.
    pub(crate) ready: String,
    /// Address for clients and nodes.
    pub(crate) rpc: String,
    /// Address of the status page and /metrics, if they are served.
    pub(crate) http: Option<String>,
}

/// The line that a node prints when its memory is mounted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeReady {
    /// Always `node`.
    pub(crate) ready: String,
    /// Name of the node in the cluster.
    pub(crate) name: String,
    /// Address of its engine's control port.
    pub(crate) endpoint: String,
    /// Memory that it lends, bytes.
    pub(crate) memory_bytes: u64,
    /// Address of /health, /ready and /metrics, if they are served.
    #[serde(default)]
    pub(crate) http: Option<String>,
    /// Path of the socket for local clients, if they are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) local: Option<PathBuf>,
    /// Address of the HTTP gateway, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<String>,
}

/// The cluster to start.
#[derive(Clone, Debug)]
pub(crate) struct ClusterConfig {
    /// Number of node processes.
    pub(crate) nodes: u16,
    /// Memory that each node lends, bytes.
    pub(crate) node_bytes: u64,
    /// The fabrics that nodes and clients use.
    pub(crate) fabric: Fabrics,
    /// Lease time of the master, milliseconds; `None`: the default.
    pub(crate) lease_ms: Option<u32>,
    /// Eviction policy of the master; `None`: the default.
    pub(crate) eviction: Option<EvictionPolicy>,
    /// Where the first node serves local clients; `None`: nowhere.
    pub(crate) local: Option<PathBuf>,
    /// The disk of each node, formatted; empty: no disks.
    pub(crate) disks: Vec<PathBuf>,
    /// Options that are passed on to the children.
    pub(crate) global: Global,
}

/// A running master with its nodes. Dropping it stops them.
#[derive(Debug)]
pub(crate) struct Cluster {
    master: Child,
    nodes: Vec<Child>,
    /// How each node is started.
    node_args: Vec<Vec<String>>,
    lost: Vec<bool>,
    address: String,
}

/// CPU time of a cluster and of this process, its client.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClusterCpu {
    pub(crate) client: Duration,
    pub(crate) master: Duration,
    pub(crate) nodes: Duration,
}

impl Cluster {
    /// Starts a master, then all nodes at the same time, and waits until they are ready.
    pub(crate) fn start(config: &ClusterConfig) -> anyhow::Result<Self> {
        let mut args = config.global.to_args();
        args.extend(["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"].map(str::to_owned));
        if let Some(ms) = config.lease_ms {
            args.extend(["--lease-ms".to_owned(), ms.to_string()]);
        }
        if let Some(policy) = config.eviction {
            args.extend(["--eviction".to_owned(), policy.to_string()]);
        }
        let mut master = Child::start("the master", &args)?;
        let address = master.ready::<MasterReady>(READY_TIMEOUT)?.rpc;
        let (mut nodes, mut node_args) = (Vec::new(), Vec::new());
        for index in 0..config.nodes {
            let mut args = config.global.to_args();
            args.extend(
                ["node", "--listen", "127.0.0.1:0", "--master", &address, "--json"].map(str::to_owned),
            );
            args.extend(["--name".to_owned(), format!("node-{index}")]);
            args.extend(["--memory".to_owned(), config.node_bytes.to_string()]);
            args.extend(["--fabric".to_owned(), config.fabric.to_string()]);
            if let (0, Some(path)) = (index, &config.local) {
                args.extend(["--local".to_owned(), path.display().to_string()]);
            }
            if let Some(path) = config.disks.get(usize::from(index)) {
                args.extend(["--disk".to_owned(), path.display().to_string()]);
            }
            nodes.push(Child::start(format!("node-{index}"), &args)?);
            node_args.push(args);
        }
        for node in &mut nodes {
            let ready = node.ready::<NodeReady>(READY_TIMEOUT)?;
            tracing::info!("{} lends {} B at {}", ready.name, ready.memory_bytes, ready.endpoint);
        }
        let lost = vec![false; nodes.len()];
        Ok(Self { master, nodes, node_args, lost, address })
    }

    /// Kills the first node and starts it again, without waiting for it.
    pub(crate) fn restart_first_node(&mut self) -> anyhow::Result<()> {
        if let (Some(node), Some(args)) = (self.nodes.first_mut(), self.node_args.first()) {
            node.kill();
            *node = Child::start("node-0", args)?;
        }
        Ok(())
    }

    /// Waits until the first node lends its memory.
    pub(crate) fn first_node_ready(&mut self) -> anyhow::Result<()> {
        let ready = self.nodes.first_mut().map(|node| node.ready::<NodeReady>(READY_TIMEOUT));
        ready.transpose().map(drop)
    }

    /// The address at which the master listens.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// CPU time used so far.
    pub(crate) fn cpu(&mut self) -> ClusterCpu {
        ClusterCpu {
            client: sys::own_cpu(),
            master: self.master.cpu(),
            nodes: self.nodes.iter_mut().map(Child::cpu).sum(),
        }
    }

    /// Number of nodes that ended without having been stopped.
    pub(crate) fn nodes_lost(&self) -> u16 {
        self.lost.iter().filter(|lost| **lost).count() as u16
    }

    /// Checks for children that have ended. Continues as long as a node is left.
    ///
    /// # Errors
    /// The master or the last node has ended.
    pub(crate) fn check_children(&mut self, bar: &Bar) -> anyhow::Result<()> {
        if let Some(how) = self.master.died() {
            return fail(
                Failure::failed(how)
                    .hint("no object can be found without a master; run again with -v to see its log"),
            );
        }
        for (node, lost) in self.nodes.iter_mut().zip(&mut self.lost) {
            if !*lost && let Some(how) = node.died() {
                *lost = true;
                bar.note(&format!("{how}\n  its blocks are lost; continuing with the other nodes"));
            }
        }
        if self.lost.iter().all(|lost| *lost) {
            return fail(Failure::failed("all nodes have ended").hint("run again with -v to see their logs"));
        }
        Ok(())
    }

    /// Stops all processes, nodes first, so that they can unmount from the master.
    pub(crate) fn stop(mut self) {
        process::stop_all(&mut self.nodes);
        self.master.stop();
    }
}

impl ClusterCpu {
    /// The CPU time used since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            client: self.client.saturating_sub(before.client),
            master: self.master.saturating_sub(before.master),
            nodes: self.nodes.saturating_sub(before.nodes),
        }
    }

    /// The sum over all processes.
    pub(crate) fn total(self) -> Duration {
        self.client + self.master + self.nodes
    }
}
