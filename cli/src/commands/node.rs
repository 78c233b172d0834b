//! `snowskin node`: one process that lends memory to the store.

use std::sync::Arc;
use std::time::Duration;

use store_client::Node;

use crate::args::Global;
use crate::commands::available_memory;
use crate::commands::cluster::NodeReady;
use crate::commands::master::announce;
use crate::config::FlagsOfNode;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::http::NodeHttp;
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin node --memory 8GiB
  snowskin node --memory 64GiB --master 10.0.0.5:50051 --listen 10.0.0.7:0
  snowskin node --listen 0.0.0.0:7400 --advertise node-7.example
  snowskin node --http 10.0.0.7:9004                     /health, /ready, /metrics
  snowskin node --config /etc/snowskin.toml              see `snowskin config reference`";

/// Run a node: it lends its memory to the store
///
/// Runs in the foreground until Ctrl-C or SIGTERM, which stop it in order (exit code 0). Clients read and
/// write its memory over the fabric without asking it. When it stops, its objects are gone; when the master
/// restarts, it mounts its memory again, empty.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(flatten)]
    flags: FlagsOfNode,
    /// Say where it listens as one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let config = args.flags.settings().node.node.clone();
    let (name, bytes) = (config.name.clone(), config.capacity_bytes);
    let memory = ByteSize(bytes);
    if let Some(available) = available_memory()
        && bytes > available
    {
        return fail(
            Failure::failed(format!(
                "--memory {}: this machine has {} available",
                memory,
                ByteSize(available).approximate()
            ))
            .hint("lend less, or end something else first"),
        );
    }
    let http = match args.flags.settings().node.http_listen {
        Some(addr) => Some(NodeHttp::start(addr).map_err(|error| {
            Failure::failed(format!("--http {addr}: {error}"))
                .hint("choose another address, or stop what listens there")
        })?),
        None => None,
    };
    let node = {
        let _bar = Bar::spinner(format!("mounting {}", memory), global.quiet);
        Arc::new(Node::start(config).map_err(crate::commands::no_start)?)
    };
    if let Some(http) = &http {
        http.running(Arc::clone(&node));
    }
    let endpoint = node.endpoint().to_owned();
    let ready = NodeReady {
        ready: "node".to_owned(),
        name,
        endpoint,
        memory_bytes: bytes,
        http: http.as_ref().map(|http| http.addr().to_string()),
    };
    announce(args.json, &ready, || {
        format!("node {} ready at {}: lends {}\n", ready.name, ready.endpoint, memory)
    });
    let mut mounted = true;
    while sys::wait_for_interrupt(Some(Duration::from_secs(1))).is_none() {
        let now = node.status().segment.is_some();
        if now != mounted {
            tracing::warn!(
                "{}",
                if now { "mounted again" } else { "not mounted: the master is away or gave this node up" }
            );
        }
        mounted = now;
    }
    tracing::info!("stopping");
    if let Some(http) = &http {
        http.stopping();
    }
    // Unmounts. Should a question still hold it, that ends it.
    drop(node);
    Ok(Exit::Ok)
}
