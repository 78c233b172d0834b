//! Which NICs are near which memory, however the engine came to know it.

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
    /// Nothing: all NICs are alike.
    #[default]
    Unknown,
    /// What was found.
    Found(Topology),
    /// What somebody wrote down.
    Written(PriorityMatrix),
}

impl Affinity {
    /// Looks it up where the configuration says. A host that cannot be read counts as unknown, with a warning in the log:
    /// transfers do not depend on it.
    ///
    /// # Errors
    /// When a file was named and holds no priority matrix.
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
                    log::warn!("topology: {error}");
                    Ok(Self::Unknown)
                }
            },
        }
    }

    /// Whether the node that memory is on can change which of the rails over `devices` it takes: two of them are NICs, and
    /// there are several nodes, or somebody wrote down what is to become of one.
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

    /// What each rail costs for memory at `location`, in percent, by the device that it runs over: a NIC, or `NIC:port`. A
    /// rail of which that is empty, or no NIC of this host, costs 100. `None`: nothing is known that would tell one rail from
    /// another.
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

/// `unknown`, `2 NUMA nodes, 8 GPUs, 9 NICs`, `a matrix of 10 locations`.
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
    fn the_kernel_is_asked_for_a_node_only_where_nodes_and_nics_differ() {
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
