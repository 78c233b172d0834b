//! `snowskin topology`: where memory, NICs and GPUs are, and which of them belong together.

mod dot;
mod json;
mod picture;

use std::path::PathBuf;

use te_core::topology::{Location, PriorityMatrix};
use te_host::topology::{Found, SYSFS, read_matrix, read_sysfs};
#[cfg(feature = "topology-hwloc")]
use te_host::topology::{HwlocSource, read_hwloc};

use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin topology
  snowskin topology --dot | dot -Tsvg > host.svg
  snowskin topology --json | jq .matrix > matrix.json   # edit it, then look at what it says
  snowskin topology --file matrix.json
  snowskin topology --sysfs /host/sys                   # from a container

JSON, one object:
  nodes      [{id, cpus, memory_bytes, distances}]      distances as ACPI's SLIT, 10 is local
  nics       [{name, kind, netdev, numa_node, pci, link, ports: [{number, state, mbit_per_s}]}]
  gpus       [{name, numa_node, pci, link}]
             pci is {address, root, bridges}, link is {lanes, lanes_max, mt_per_s, mt_per_s_max}; both may be null
  distances  [{location, nic, distance, penalty_percent}]
  matrix     {location: [[preferred NICs], [secondary NICs]]}
  warnings   [text]";

/// Show NUMA nodes, NICs and GPUs, and which NICs serve which memory
///
/// Reads sysfs. What it prints for this host is what an engine goes by when it has a rail for each of several NICs.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print a graph for Graphviz.
    #[arg(long, conflicts_with = "json")]
    dot: bool,
    /// Show this priority matrix instead of the one that follows from the distances.
    #[arg(long, value_name = "MATRIX.JSON")]
    file: Option<PathBuf>,
    /// Where sysfs is.
    #[arg(long, value_name = "DIR", default_value = SYSFS)]
    sysfs: PathBuf,
    /// Ask hwloc instead of sysfs: about this host, about the one of an XML file that lstopo wrote, or about one that a
    /// synthetic string such as "package:2 numa:1 core:4 pu:1" describes.
    #[cfg(feature = "topology-hwloc")]
    #[arg(long, value_name = "XML|SYNTHETIC", num_args = 0..=1, default_missing_value = "", conflicts_with = "sysfs")]
    hwloc: Option<String>,
}

/// What there is to show.
struct Shown {
    found: Found,
    matrix: PriorityMatrix,
    /// The matrix is from a file.
    is_written: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut found = find(args)?;
    let matrix = match &args.file {
        None => found.topology.matrix(),
        Some(path) => {
            let matrix = read_matrix(path).map_err(|error| {
                Failure::failed(error.to_string())
                    .hint("`snowskin topology --json | jq .matrix` prints one to begin with")
            })?;
            found.warnings.extend(strangers(&found, &matrix));
            matrix
        }
    };
    let shown = Shown { found, matrix, is_written: args.file.is_some() };
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

/// What a matrix names and the host does not have.
fn strangers(found: &Found, matrix: &PriorityMatrix) -> Vec<String> {
    let topology = &found.topology;
    let mut all: Vec<String> = Vec::new();
    for row in matrix.rows() {
        if row.location != Location::Host && !topology.locations().any(|location| location == row.location) {
            all.push(format!("the matrix has a row for {}, which this host does not have", row.location));
        }
        let nics = row.preferred.iter().chain(&row.secondary);
        for nic in nics.filter(|nic| topology.nic(nic).is_none()) {
            let warning = format!("the matrix names {nic}, a NIC that this host does not have");
            if !all.contains(&warning) {
                all.push(warning);
            }
        }
    }
    all
}
