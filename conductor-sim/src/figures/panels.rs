//! How figures are drawn: which series share which axes.

use super::Figure;

/// A part of a figure: the series that share a vertical axis.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    /// The vertical axis.
    pub y: &'static str,
    /// The horizontal axis.
    pub x: &'static str,
    /// The top of the vertical axis, where values above it are of no interest.
    pub y_max: Option<f64>,
    /// The series that it shows, by their end; every series when empty.
    pub series: &'static [&'static str],
}

const fn panel(y: &'static str, x: &'static str, series: &'static [&'static str]) -> Panel {
    Panel { y, x, y_max: None, series }
}

const fn cut(panel: Panel, y_max: f64) -> Panel {
    Panel { y_max: Some(y_max), ..panel }
}

const SYSTEMS: &[&str] = &["Mooncake", "vLLM", "Caching", "Chunked Prefill"];
const GBITS: &str = "bandwidth per node, Gbit/s";
const TOKENS: &str = "tokens of the prompt";
const GROUPS: &str = "prefill nodes of 16";

const TBT: &[Panel] = &[panel("share of requests, %", "time between tokens at most, ms", SYSTEMS)];
const PLACEMENT: &[Panel] = &[
    panel("time to first token, s", "placement", &["TTFT s"]),
    panel("mean time to first token over that of global placement", "placement", &["ratio to global"]),
];
const PREFILL: &[Panel] = &[panel("prefill per request, s", "trace", SYSTEMS)];
const BANDWIDTH: &[Panel] = &[
    cut(panel("mean time to first token, s, cut at 8", GBITS, &["TTFT s", "by layer"]), 8.0),
    panel("theoretical transfer, s", GBITS, &["transfer s"]),
];
const LATENCY: &[Panel] = &[
    panel("prefill, s", TOKENS, &["cached"]),
    panel("transfer, load and 128 decode steps, s", TOKENS, &["transfer s", "load s", "steps s"]),
];
const SPLIT: &[Panel] = &[
    panel("mean time to first token, s", GROUPS, &["TTFT s"]),
    panel("mean time between tokens, ms", GROUPS, &["TBT ms"]),
    panel("effective requests, %", GROUPS, &["requests %"]),
];
const POLICIES: &[Panel] =
    &[cut(panel("mean time to first token, s, cut at 4", "trace, speed, bandwidth", &["mean TTFT s"]), 4.0)];
const CONGESTION: &[Panel] = &[cut(panel("mean time to first token, s, cut at 8", GBITS, &[]), 8.0)];
const ADMISSION: &[Panel] = &[panel("share of requests, %", "speed of the trace", &["in time"])];

impl Panel {
    /// Whether a series belongs to it.
    #[must_use]
    pub fn shows(&self, series: &str) -> bool {
        self.series.is_empty() || self.series.iter().any(|end| series.ends_with(end))
    }
}

impl Figure {
    /// Its parts.
    #[must_use]
    pub const fn panels(self) -> &'static [Panel] {
        match self {
            Self::TbtConversation => TBT,
            Self::Placement => PLACEMENT,
            Self::PrefillTime => PREFILL,
            Self::Bandwidth => BANDWIDTH,
            Self::Latency => LATENCY,
            Self::Split => SPLIT,
            Self::Policies => POLICIES,
            Self::Congestion => CONGESTION,
            Self::Admission => ADMISSION,
        }
    }
}
