//! A cluster of processes on this machine, for the length of one command.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store_core::EvictionPolicy;
use te_engine::Fabrics;

use crate::args::Global;
use crate::exit::Failure;
use crate::process::{self, Child};
use crate::progress::Bar;
use crate::{fail, sys};

/// How long a child may take until it serves.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// What the master says when it serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MasterReady {
    /// `master`.
    pub(crate) ready: String,
    /// Where clients and nodes connect.
    pub(crate) rpc: String,
    /// Where people look, if anywhere.
    pub(crate) http: Option<String>,
}

/// What a node says when its memory is mounted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeReady {
    /// `node`.
    pub(crate) ready: String,
    /// Its name in the cluster.
    pub(crate) name: String,
    /// Where its memory is reached.
    pub(crate) endpoint: String,
    /// What it lends, bytes.
    pub(crate) memory_bytes: u64,
    /// Where people look, if anywhere.
    #[serde(default)]
    pub(crate) http: Option<String>,
    /// Where light clients of this machine connect, if anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) local: Option<PathBuf>,
    /// Where it speaks HTTP, if anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<String>,
}

/// What to start.
#[derive(Clone, Debug)]
pub(crate) struct ClusterConfig {
    /// Node processes.
    pub(crate) nodes: u16,
    /// What each lends, bytes.
    pub(crate) node_bytes: u64,
    /// How their memory is reached.
    pub(crate) fabric: Fabrics,
    /// How long readers are protected, if not as by default.
    pub(crate) lease_ms: Option<u32>,
    /// How the object to evict is chosen, if not as by default.
    pub(crate) eviction: Option<EvictionPolicy>,
    /// Where the first node serves light clients, if anywhere.
    pub(crate) local: Option<PathBuf>,
    /// Passed on to children.
    pub(crate) global: Global,
}

/// A master and its nodes. They stop when it is dropped.
#[derive(Debug)]
pub(crate) struct Cluster {
    master: Child,
    nodes: Vec<Child>,
    lost: Vec<bool>,
    address: String,
}

/// CPU time of a cluster and of us, its client.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClusterCpu {
    pub(crate) client: Duration,
    pub(crate) master: Duration,
    pub(crate) nodes: Duration,
}

impl Cluster {
    /// Starts a master, then all nodes at once, and waits until they serve.
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
        let mut nodes = Vec::new();
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
            nodes.push(Child::start(format!("node-{index}"), &args)?);
        }
        for node in &mut nodes {
            let ready = node.ready::<NodeReady>(READY_TIMEOUT)?;
            tracing::info!("{} lends {} B at {}", ready.name, ready.memory_bytes, ready.endpoint);
        }
        let lost = vec![false; nodes.len()];
        Ok(Self { master, nodes, lost, address })
    }

    /// Where its master listens.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// CPU time so far.
    pub(crate) fn cpu(&mut self) -> ClusterCpu {
        ClusterCpu {
            client: sys::own_cpu(),
            master: self.master.cpu(),
            nodes: self.nodes.iter_mut().map(Child::cpu).sum(),
        }
    }

    /// Nodes that died before they were asked to.
    pub(crate) fn nodes_lost(&self) -> u16 {
        self.lost.iter().filter(|lost| **lost).count() as u16
    }

    /// Notices the dead. Goes on while a node is left.
    ///
    /// # Errors
    /// When the master or the last node is gone.
    pub(crate) fn look_after(&mut self, bar: &Bar) -> anyhow::Result<()> {
        if let Some(how) = self.master.died() {
            return fail(
                Failure::failed(how)
                    .hint("without a master nothing can be found; run again with -v to see its log"),
            );
        }
        for (node, lost) in self.nodes.iter_mut().zip(&mut self.lost) {
            if !*lost && let Some(how) = node.died() {
                *lost = true;
                bar.note(&format!("{how}\n  its blocks are lost; going on with the other nodes"));
            }
        }
        if self.lost.iter().all(|lost| *lost) {
            return fail(Failure::failed("all nodes died").hint("run again with -v to see their logs"));
        }
        Ok(())
    }

    /// Stops all, nodes first: they say goodbye to the master.
    pub(crate) fn stop(mut self) {
        process::stop_all(&mut self.nodes);
        self.master.stop();
    }
}

impl ClusterCpu {
    /// What was used since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            client: self.client.saturating_sub(before.client),
            master: self.master.saturating_sub(before.master),
            nodes: self.nodes.saturating_sub(before.nodes),
        }
    }

    /// All together.
    pub(crate) fn total(self) -> Duration {
        self.client + self.master + self.nodes
    }
}
