//! `snowskin bench target`: memory that `bench transfer` reads and writes.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use te_engine::{Config, Fabrics, Registration, TransferEngine};

use super::memory::{Buffer, GpuArgs, Place};
use super::pool::PoolArgs;
use crate::commands::FabricParser;
use crate::commands::master::{announce, wait_for_signal};
use crate::commands::metadata::MetadataArg;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin bench target --listen 10.0.0.7:7400                         on one machine,
  snowskin bench transfer --target 10.0.0.7:7400 --fabric tcp          on the other
  snowskin bench target --place cuda:0 --fabric tcp                    with memory of a GPU
  snowskin bench target --listen 10.0.0.7:7400 --fabric nvmeof         serves its memory as a namespace
  snowskin bench target --listen 10.0.0.7:7400 --fabric cxl --pool /dev/dax0.0";

/// Run the other end of `bench transfer` on another machine
///
/// Exports memory and waits until Ctrl-C. Any process that reaches it may read and write that memory, which
/// holds nothing else. On the same machine, `bench transfer` starts a target by itself.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Address of its control port; port 0 picks a free port.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Host name or address that peers use, when --listen is a wildcard such as 0.0.0.0.
    #[arg(long, value_name = "HOST")]
    advertise: Option<String>,
    #[command(flatten)]
    metadata: MetadataArg,
    /// Name under which it is registered there while it runs.
    #[arg(long, value_name = "NAME")]
    segment: Option<String>,
    /// Size of the exported memory.
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    memory: ByteSize,
    /// Where the exported memory is: host, cuda:N or hip:N.
    #[arg(long, default_value_t, value_name = "PLACE")]
    place: Place,
    #[command(flatten)]
    gpu: GpuArgs,
    #[command(flatten)]
    pool: PoolArgs,
    /// Fabrics over which the memory is exported.
    #[arg(long, default_value_t, value_parser = FabricParser, value_name = "FABRIC")]
    fabric: Fabrics,
    /// RDMA devices or ports to use: mlx5_0, mlx5_0:1. Default: every active port.
    #[arg(long, value_name = "DEVICE,…", value_delimiter = ',')]
    device: Vec<String>,
    /// How long it polls before it sleeps, microseconds.
    #[arg(long, default_value_t = 50, value_name = "µs")]
    spin_us: u32,
    /// Verify payloads end to end (TCP).
    #[arg(long)]
    checksum: bool,
    /// TCP congestion control, by the kernel's name. Default: cubic within a host, else the kernel's default.
    #[arg(long, value_name = "NAME")]
    congestion: Option<String>,
    /// Print the address as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// The line that it prints when it serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TargetReady {
    /// Always `target`.
    pub(super) ready: String,
    /// Address of its control port.
    pub(super) endpoint: String,
    /// Size of the exported memory, bytes.
    pub(super) memory_bytes: u64,
}

pub(super) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    let mut config =
        Config { listen: args.listen, advertise_host: args.advertise.clone(), ..Config::default() };
    config.fabrics = args.fabric;
    config.spin_us = args.spin_us;
    #[cfg(feature = "tcp")]
    {
        config.tcp.checksum = args.checksum;
        config.tcp.congestion.clone_from(&args.congestion);
    }
    #[cfg(feature = "rdma")]
    config.rdma.devices.clone_from(&args.device);
    args.gpu.apply(&mut config);
    args.pool.apply(&mut config);
    config.metadata = args.metadata.config_of(args.segment.as_deref())?;
    let wait = Duration::from_millis(config.metadata.timeout_ms.into()) * 2;
    let engine = TransferEngine::start(config)?;
    if let Registration::Failed(error) = engine.wait_registered(wait) {
        return fail(Failure::failed(format!("--segment: {error}")));
    }
    let buffer = Buffer::served(&engine, args.place, &args.gpu, usize::try_from(args.memory.bytes())?)?;
    let endpoint = engine.name().to_owned();
    let ready = TargetReady { ready: "target".to_owned(), endpoint, memory_bytes: args.memory.bytes() };
    announce(args.json, &ready, || {
        format!("target ready at {}: exports {} of {}\n", ready.endpoint, args.memory, args.place)
    });
    wait_for_signal();
    engine.unregister(buffer.id())?;
    buffer.release();
    Ok(Exit::Ok)
}
