//! Rails of nodes and clients, from their `/metrics`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// Longest response to `/metrics`, bytes.
const METRICS_BYTES_MAX: u64 = 4 << 20;
/// Timeout of such a request.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct RailRow {
    pub(super) of: String,
    pub(super) rail: String,
    pub(super) bytes_total: f64,
    pub(super) gb_s: f64,
    pub(super) errors_total: f64,
    pub(super) state: &'static str,
}

/// Requests `/metrics` from this address, and returns its rails.
pub(super) fn ask(of: &str) -> anyhow::Result<Vec<RailRow>> {
    let (status, text) = crate::commands::health::get(of, "/metrics", METRICS_TIMEOUT, METRICS_BYTES_MAX)?;
    anyhow::ensure!(status == 200, "the response has status {status}");
    Ok(rails_in(of, &text))
}

/// The rails in a text of metrics.
fn rails_in(of: &str, text: &str) -> Vec<RailRow> {
    let mut rails: BTreeMap<String, RailRow> = BTreeMap::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix("snowskin_engine_rail_") else { continue };
        let Some((name, rest)) = rest.split_once('{') else { continue };
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let Ok(value) = value.trim().parse::<f64>() else { continue };
        let label = |name: &str| {
            let (_, rest) = labels.split_once(&format!("{name}=\""))?;
            Some(rest.split('"').next()?.to_owned())
        };
        let Some(rail) = label("rail") else { continue };
        let rail = match label("device").filter(|device| !device.is_empty()) {
            Some(device) => format!("{rail} {device}"),
            None => rail,
        };
        let row = rails.entry(rail.clone()).or_insert_with(|| RailRow {
            of: of.to_owned(),
            rail,
            bytes_total: 0.0,
            gb_s: 0.0,
            errors_total: 0.0,
            state: "",
        });
        match name {
            "bytes_total" => row.bytes_total += value,
            "errors_total" => row.errors_total += value,
            "paused" if value > 0.0 => row.state = "paused",
            "slow" if value > 0.0 && row.state.is_empty() => row.state = "slow",
            _ => {}
        }
    }
    rails.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rails_are_read_from_metrics_and_nothing_else_is() {
        let text = "# TYPE snowskin_engine_rail_bytes counter\n\
                    snowskin_engine_rail_bytes_total{rail=\"tcp\",device=\"\"} 4096\n\
                    snowskin_engine_rail_bytes_total{rail=\"rdma\",device=\"mlx5_0\"} 1e3\n\
                    snowskin_engine_rail_errors_total{rail=\"rdma\",device=\"mlx5_0\"} 2\n\
                    snowskin_engine_rail_paused{rail=\"rdma\",device=\"mlx5_0\"} 1\n\
                    snowskin_engine_rail_bytes_total{rail=\"x\"} nonsense\n\
                    snowskin_engine_rail_bytes_total{rail=\"broken\n\
                    snowskin_master_gets_total 5\n";
        let rails = rails_in("n:1", text);
        let seen: Vec<_> = rails
            .iter()
            .map(|rail| (rail.rail.as_str(), rail.bytes_total, rail.errors_total, rail.state))
            .collect();
        assert_eq!(seen, [("rdma mlx5_0", 1000.0, 2.0, "paused"), ("tcp", 4096.0, 0.0, "")]);
    }
}
