//! [`Affinity`]: which NICs are near which memory.

use std::fmt;
use std::path::Path;
use std::string::String;
use std::vec::Vec;

use te_core::Location;
use te_core::topology::{PriorityMatrix, Topology};
use te_host::topology::{MatrixFileError, SYSFS, read_matrix, read_sysfs};

use crate::config::TopologySource;

/// What an engine knows of its host's topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Affinity {
    /// Nothing is known: all NICs count as equally near.
    #[default]
    Unknown,
    /// The topology that was read from the host.
    Found(Topology),
    /// The priority matrix of a configured file.
    Written(PriorityMatrix),
}

impl Affinity {
    /// Reads the affinity from the configured source. If the host cannot be read, it is `Unknown`, with a
    /// warning in the log: transfers work without it.
    ///
    /// # Errors
    /// If the configured file does not hold a valid priority matrix.
    pub fn open(source: &TopologySource) -> Result<Self, MatrixFileError> {
        match source {
            TopologySource::Off => Ok(Self::Unknown),
            TopologySource::File(path) => read_matrix(path).map(Self::Written),
            TopologySource::Auto => match read_sysfs(Path::new(SYSFS)) {
                Ok(found) => {
                    for warning in &found.warnings {
                        log::info!("topology: {warning}");
                    }
                    Ok(Self::Found(found.topology))
                }
                Err(error) => {
                    log::warn!("topology: {error}: all NICs count as equally near");
                    Ok(Self::Unknown)
                }
            },
        }
    }

    /// Whether the choice among rails over `devices` can depend on the NUMA node of memory: at least two of
    /// them are NICs, and the host has several nodes, or a configured matrix has a row for a node.
    pub(crate) fn depends_on_node(&self, devices: &[String]) -> bool {
        let of_nodes = match self {
            Self::Unknown => false,
            Self::Found(topology) => topology.nodes().len() > 1,
            Self::Written(matrix) => {
                matrix.rows().iter().any(|row| matches!(row.location, Location::Numa(_)))
            }
        };
        of_nodes && devices.iter().filter(|device| !device.is_empty()).count() > 1
    }

    /// The penalty of each rail for memory at `location`, percent, by the device of the rail: `NIC` or
    /// `NIC:port`. A rail whose device is empty or is not a NIC of this host has 100. `None`: all rails have
    /// the same penalty.
    #[must_use]
    pub fn penalties(&self, location: Location, devices: &[String]) -> Option<Vec<u32>> {
        if matches!(self, Self::Found(_)) && location == Location::Host {
            return None;
        }
        let percent = |device: &String| {
            let nic = device.split_once(':').map_or(device.as_str(), |(nic, _)| nic);
            if nic.is_empty() {
                return 100;
            }
            match self {
                Self::Unknown => 100,
                Self::Written(matrix) => matrix.penalty_percent(location, nic),
                Self::Found(topology) => {
                    topology.nic(nic).map_or(100, |nic| topology.distance(location, nic).penalty_percent())
                }
            }
        };
        let penalties: Vec<u32> = devices.iter().map(percent).collect();
        let first = penalties.first()?;
        penalties.iter().any(|percent| percent != first).then_some(penalties)
    }
}

/// Prints `unknown`, `2 NUMA nodes, 8 GPUs, 9 NICs`, or `a matrix of 10 locations`.
impl fmt::Display for Affinity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown"),
            Self::Found(topology) => write!(
                f,
                "{} NUMA nodes, {} GPUs, {} NICs",
                topology.nodes().len(),
                topology.gpus().len(),
                topology.nics().len()
            ),
            Self::Written(matrix) => write!(f, "a matrix of {} locations", matrix.rows().len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use te_core::topology::{MatrixRow, NumaNode};

    use super::*;

    fn of_nodes(count: u16) -> Affinity {
        let distances = |id| (0..count).map(|other| if other == id { 10 } else { 20 }).collect();
        let nodes = (0..count).map(|id| NumaNode { id, distances: distances(id), ..NumaNode::default() });
        Affinity::Found(Topology::new(nodes.collect(), vec![], vec![]).unwrap())
    }

    fn written(location: Location) -> Affinity {
        let row = MatrixRow { location, preferred: vec!["mlx5_0".into()], secondary: vec![] };
        Affinity::Written(PriorityMatrix::new(vec![row]).unwrap())
    }

    #[test]
    fn the_node_of_memory_matters_only_with_several_nodes_and_nics() {
        let two_nics = ["", "mlx5_0:1", "mlx5_1:1"].map(String::from);
        let one_nic = ["", "mlx5_0:1", ""].map(String::from);
        for (affinity, matters) in [
            (Affinity::Unknown, false),
            (of_nodes(1), false),
            (of_nodes(2), true),
            (written(Location::Numa(0)), true),
            (written(Location::Host), false),
        ] {
            assert_eq!(affinity.depends_on_node(&two_nics), matters, "{affinity}");
            assert!(!affinity.depends_on_node(&one_nic), "{affinity}");
        }
    }
}
