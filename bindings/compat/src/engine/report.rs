//! What a session reports about its host and its rails.

use std::fmt::Write as _;

use serde_json::json;
use te_core::topology::{MatrixRow, PriorityMatrix};
use te_host::topology::{SYSFS, matrix_to_json, read_sysfs};

use super::Session;

/// The load of one rail.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RailLoad {
    /// Device and port, or the name of the fabric if it has one rail.
    pub name: String,
    /// Bytes in flight.
    pub inflight_bytes: u64,
    /// Recent throughput, smoothed, bits per second.
    pub bits_per_s: f64,
}

impl Session {
    /// The loads of all rails.
    #[must_use]
    pub fn rail_loads(&self) -> Vec<RailLoad> {
        let rails = self.engine().stats().rails;
        let load = |rail: te_engine::RailStats| RailLoad {
            name: if rail.device.is_empty() { rail.name.to_owned() } else { rail.device },
            inflight_bytes: rail.inflight_bytes,
            bits_per_s: rail.ewma_gb_s * 8e9,
        };
        rails.into_iter().map(load).collect()
    }

    /// The rails and the open segments, as text or as one JSON object.
    #[must_use]
    pub fn links(&self, as_json: bool) -> String {
        let (segments, rails) = (self.open_names(), self.engine().stats().rails);
        if as_json {
            let rails: Vec<_> = rails
                .iter()
                .map(|rail| {
                    json!({
                        "fabric": rail.name, "device": rail.device, "bytes": rail.bytes, "errors": rail.errors,
                        "inflight_bytes": rail.inflight_bytes, "paused": rail.paused,
                    })
                })
                .collect();
            return json!({ "name": self.name(), "rails": rails, "segments": segments }).to_string();
        }
        let mut text = format!("{}\n", self.name());
        for rail in rails {
            let state = if rail.paused { "paused" } else { "up" };
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "  rail {} {}: {state}, {} bytes moved, {} bytes in flight, {} errors",
                rail.name, rail.device, rail.bytes, rail.inflight_bytes, rail.errors
            );
        }
        for segment in segments {
            let _ = writeln!(text, "  segment {segment}");
        }
        text
    }
}

/// The priority matrix of this host as JSON: for each location, the preferred and the other RDMA devices.
/// With `devices`, no others are listed. `{}` if the host cannot be read.
#[must_use]
pub fn topology_json(devices: &[String]) -> String {
    match read_sysfs(std::path::Path::new(SYSFS)) {
        Ok(found) => matrix_to_json(&only(&found.topology.matrix(), devices)),
        Err(error) => {
            log::warn!("the topology of this host is unknown: {error}");
            "{}".into()
        }
    }
}

fn only(matrix: &PriorityMatrix, devices: &[String]) -> PriorityMatrix {
    let keep = |names: &[String]| {
        let wanted = names.iter().filter(|name| devices.is_empty() || devices.contains(name));
        wanted.cloned().collect()
    };
    let rows = matrix.rows().iter().map(|row| MatrixRow {
        location: row.location,
        preferred: keep(&row.preferred),
        secondary: keep(&row.secondary),
    });
    // Rows of a valid matrix with fewer names are valid.
    PriorityMatrix::new(rows.collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use te_core::Location;

    use super::*;

    #[test]
    fn the_topology_of_this_host_is_json() {
        let parsed: serde_json::Value = serde_json::from_str(&topology_json(&[])).unwrap();
        assert!(parsed.is_object(), "{parsed}");
    }

    #[test]
    fn only_the_wanted_devices_are_listed() {
        let row = MatrixRow {
            location: Location::Numa(0),
            preferred: vec!["mlx5_0".into(), "mlx5_1".into()],
            secondary: vec!["mlx5_2".into()],
        };
        let matrix = PriorityMatrix::new(vec![row]).unwrap();
        let kept = only(&matrix, &["mlx5_1".into()]);
        assert_eq!(kept.rows()[0].preferred, ["mlx5_1"]);
        assert!(kept.rows()[0].secondary.is_empty());
        assert_eq!(only(&matrix, &[]), matrix);
    }
}
