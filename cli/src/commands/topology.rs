//! `snowskin topology`: shows where memory, NICs and GPUs are, and how near they are to each other.

#[cfg(any(feature = "cuda", feature = "hip"))]
mod copies;
mod dot;
mod json;
mod picture;

use std::path::PathBuf;

use te_core::topology::{Location, PriorityMatrix};
use te_host::topology::{Found, SYSFS, read_matrix, read_sysfs};
#[cfg(feature = "topology-hwloc")]
use te_host::topology::{HwlocSource, read_hwloc};

use crate::dax::Dax;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::nvme::Controller;
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin topology
  snowskin topology --dot | dot -Tsvg > host.svg
  snowskin topology --json | jq .matrix > matrix.json   # edit it, then show it
  snowskin topology --file matrix.json
  snowskin topology --gpu                               # measures copies of this host's GPUs
  snowskin topology --sysfs /host/sys                   # from a container

JSON, one object:
  nodes      [{id, cpus, memory_bytes, distances}]      distances as ACPI's SLIT, 10 is local
  nics       [{name, kind, netdev, numa_node, pci, link, ports: [{number, state, mbit_per_s}]}]
  gpus       [{name, numa_node, pci, link}]
  copies     [{gpu, to_device_gb_s, to_host_gb_s, paths, error}]   with --gpu: GB/s of copies between a GPU and
             host memory, the path of a copy for each size and number of copies, and why a GPU was not measured
  dax        [{name, bytes, numa_node, mode}]            CXL memory; mode is devdax, system-ram or unused
  nvme       [{name, transport, address, nqn, state, namespaces: [{name, nsid, bytes, block_bytes}]}]
             controllers that the kernel's initiator reaches over a network; not those of this host's PCIe
             pci is {address, root, bridges}, link is {lanes, lanes_max, mt_per_s, mt_per_s_max}; both may be null
  distances  [{location, nic, distance, penalty_percent}]
  matrix     {location: [[preferred NICs], [secondary NICs]]}
  warnings   [text]";

/// Show NUMA nodes, NICs, GPUs, CXL memory and NVMe over Fabrics, and which NICs serve which memory
///
/// Reads sysfs. The engine uses the same information when it has several NICs to choose from.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print a graph for Graphviz.
    #[arg(long, conflicts_with = "json")]
    dot: bool,
    /// Show this priority matrix instead of the one that is derived from the distances.
    #[arg(long, value_name = "MATRIX.JSON")]
    file: Option<PathBuf>,
    /// Also measure how fast the GPUs of this host copy to and from host memory. Takes a second per GPU.
    #[cfg(any(feature = "cuda", feature = "hip"))]
    #[arg(long, conflicts_with = "dot")]
    gpu: bool,
    /// Directory of sysfs.
    #[arg(long, value_name = "DIR", default_value = SYSFS)]
    sysfs: PathBuf,
    /// Use hwloc instead of sysfs: for this host, for the host of an XML file written by lstopo, or for one
    /// described by a synthetic string such as "package:2 numa:1 core:4 pu:1".
    #[cfg(feature = "topology-hwloc")]
    #[arg(long, value_name = "XML|SYNTHETIC", num_args = 0..=1, default_missing_value = "", conflicts_with = "sysfs")]
    hwloc: Option<String>,
}

/// The topology to show.
struct Shown {
    found: Found,
    matrix: PriorityMatrix,
    /// Whether the matrix was read from a file.
    is_written: bool,
    /// CXL memory.
    dax: Vec<Dax>,
    /// What the kernel reaches by NVMe over Fabrics.
    nvme: Vec<Controller>,
    /// What was measured of each GPU, or why it was not; `None` where it was not asked for.
    copies: Option<Vec<(String, Result<Copies, String>)>>,
}

/// How fast a GPU copies.
struct Copies {
    /// From host memory to the device's.
    to_device_gb_s: f64,
    /// From the device's memory to the host's.
    to_host_gb_s: f64,
    /// The path of a copy, by direction, size and number.
    paths: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut found = find(args)?;
    let matrix = match &args.file {
        None => found.topology.matrix(),
        Some(path) => {
            let matrix = read_matrix(path).map_err(|error| {
                Failure::failed(error.to_string())
                    .hint("`snowskin topology --json | jq .matrix` prints one to start from")
            })?;
            found.warnings.extend(unknown_names(&found, &matrix));
            matrix
        }
    };
    let shown = Shown {
        found,
        matrix,
        is_written: args.file.is_some(),
        dax: Dax::list(&args.sysfs),
        nvme: Controller::list(&args.sysfs),
        #[cfg(any(feature = "cuda", feature = "hip"))]
        copies: args.gpu.then(copies::measure),
        #[cfg(not(any(feature = "cuda", feature = "hip")))]
        copies: None,
    };
    if args.json {
        output::print_json(&json::value(&shown)?)?;
    } else if args.dot {
        output::print(&dot::graph(&shown))?;
    } else {
        output::print(&picture::text(&shown))?;
    }
    Ok(Exit::Ok)
}

fn find(args: &Args) -> Result<Found, Failure> {
    #[cfg(feature = "topology-hwloc")]
    if let Some(text) = &args.hwloc {
        return read_hwloc(&HwlocSource::from_text(text)).map_err(|error| Failure::failed(error.to_string()));
    }
    read_sysfs(&args.sysfs).map_err(|error| Failure::failed(error.to_string()))
}

/// Names in a matrix that do not exist on the host.
fn unknown_names(found: &Found, matrix: &PriorityMatrix) -> Vec<String> {
    let topology = &found.topology;
    let mut all: Vec<String> = Vec::new();
    for row in matrix.rows() {
        if row.location != Location::Host && !topology.locations().any(|location| location == row.location) {
            all.push(format!("the matrix has a row for {}, which does not exist on this host", row.location));
        }
        let nics = row.preferred.iter().chain(&row.secondary);
        for nic in nics.filter(|nic| topology.nic(nic).is_none()) {
            let warning = format!("the matrix names NIC {nic}, which does not exist on this host");
            if !all.contains(&warning) {
                all.push(warning);
            }
        }
    }
    all
}
