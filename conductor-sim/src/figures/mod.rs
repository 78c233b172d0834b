//! The paper's figures, and what the simulation gives for them.

mod panels;
mod policies;
mod systems;

use std::fmt;
use std::str::FromStr;

use conductor_core::scheduler::PolicyKind;
use serde::Serialize;

pub use panels::Panel;

use crate::calibration::Calibration;
use crate::paper;
use crate::trace::Trace;

/// The traces that the figures are made of.
#[derive(Clone, Debug, Default)]
pub struct Traces {
    /// The conversation trace.
    pub conversation: Trace,
    /// The synthetic trace.
    pub synthetic: Trace,
}

/// A figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Figure {
    /// Figure 1: times between tokens, conversation.
    TbtConversation,
    /// Figure 5: times to first token by placement.
    Placement,
    /// Figure 8: GPU time of prefill.
    PrefillTime,
    /// Figure 13: the network's bandwidth.
    Bandwidth,
    /// Figure 14: the parts of a request's latency.
    Latency,
    /// Figure 15: the split into prefill and decode nodes.
    Split,
    /// Policies of placement, which the paper does not compare.
    Policies,
    /// Transfers that know of each other, and such that do not.
    Congestion,
    /// Requests that are refused at the door.
    Admission,
}

/// Whether the paper's number was used to set the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// It was: agreement shows that the model can describe it.
    Calibrated,
    /// It was not.
    Predicted,
}

/// A place on a figure's horizontal axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum At {
    /// A number.
    Number(f64),
    /// A group of bars.
    Name(String),
}

/// One point of a figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The figure's name.
    pub figure: &'static str,
    /// The curve, or the colour of a bar.
    pub series: String,
    /// The place on the horizontal axis.
    pub x: At,
    /// What the paper measured, if it did.
    pub paper: Option<f64>,
    /// What the simulation gives.
    pub ours: f64,
    /// Whether the paper's number was used to set the simulation.
    pub kind: Kind,
}

impl Figure {
    /// Every figure, in the paper's order.
    pub const ALL: [Self; 9] = [
        Self::TbtConversation,
        Self::Placement,
        Self::PrefillTime,
        Self::Bandwidth,
        Self::Latency,
        Self::Split,
        Self::Policies,
        Self::Congestion,
        Self::Admission,
    ];

    /// The name: the paper's number, where there is one.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TbtConversation => "1",
            Self::Placement => "5",
            Self::PrefillTime => "8",
            Self::Bandwidth => "13",
            Self::Latency => "14",
            Self::Split => "15",
            Self::Policies => "policies",
            Self::Congestion => "congestion",
            Self::Admission => "admission",
        }
    }

    /// What it shows.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::TbtConversation => "Share of requests by time between tokens, conversation trace",
            Self::Placement => "Time to first token by placement, conversation trace",
            Self::PrefillTime => "GPU time of prefill per request",
            Self::Bandwidth => "Time to first token by bandwidth per node, synthetic trace",
            Self::Latency => "Prefill time by length of the prompt",
            Self::Split => {
                "Time to first token and between tokens by number of prefill nodes, synthetic trace"
            }
            Self::Policies => "Mean time to first token by policy",
            Self::Congestion => "Mean time to first token with and without booked transfers, synthetic trace",
            Self::Admission => "Requests served within 30 s to the first token, by speed of the trace",
        }
    }

    /// Whether it is made of the conversation trace.
    #[must_use]
    pub const fn needs_conversation(self) -> bool {
        !matches!(self, Self::Bandwidth | Self::Latency | Self::Split | Self::Congestion)
    }

    /// Whether it is made of the synthetic trace.
    #[must_use]
    pub const fn needs_synthetic(self) -> bool {
        !matches!(self, Self::TbtConversation | Self::Placement | Self::Latency)
    }

    /// Simulates it. Requests are placed by `policy` where the figure does not compare policies.
    #[must_use]
    pub fn points(
        self,
        traces: &Traces,
        calibration: &Calibration,
        policy: PolicyKind,
        seed: u64,
    ) -> Vec<Point> {
        let study = Study { figure: self, traces, calibration, policy, seed };
        match self {
            Self::TbtConversation => study.tbt_conversation(),
            Self::Placement => study.placement(),
            Self::PrefillTime => study.prefill_time(),
            Self::Bandwidth => study.bandwidth(),
            Self::Latency => study.latency(),
            Self::Split => study.split(),
            Self::Policies => study.policies(),
            Self::Congestion => study.congestion(),
            Self::Admission => study.admission(),
        }
    }
}

impl Kind {
    /// The name, as in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Calibrated => "calibrated",
            Self::Predicted => "predicted",
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Figure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|figure| figure.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|figure| figure.name()).collect();
            format!("no figure `{text}`; choose one of {}", names.join(", "))
        })
    }
}

impl From<f64> for At {
    fn from(x: f64) -> Self {
        Self::Number(x)
    }
}

impl From<&str> for At {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(x) => write!(f, "{x}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// A figure in the making.
struct Study<'a> {
    figure: Figure,
    traces: &'a Traces,
    calibration: &'a Calibration,
    policy: PolicyKind,
    seed: u64,
}

impl Study<'_> {
    fn point(&self, series: &str, x: impl Into<At>, paper: Option<f64>, ours: f64, kind: Kind) -> Point {
        let (figure, series) = (self.figure.name(), series.to_owned());
        Point { figure, series, x: x.into(), paper, ours: rounded(ours), kind }
    }

    fn predicted(&self, series: &str, x: impl Into<At>, paper: impl Into<Option<f64>>, ours: f64) -> Point {
        self.point(series, x, paper.into(), ours, Kind::Predicted)
    }

    fn latency(&self) -> Vec<Point> {
        let Calibration { cost, nic_bytes_per_s, load_s_per_token, .. } = *self.calibration;
        let mut points = Vec::new();
        let mut add = |series: &str, tokens: u32, paper, ours| {
            points.push(self.point(series, f64::from(tokens), Some(paper), ours, Kind::Calibrated));
        };
        for column in paper::FIGURE_14 {
            let series =
                if column.reused == 0 { "prefill s, nothing cached" } else { "prefill s, 95 % cached" };
            let ours = cost.prefill.time(column.tokens, column.reused).as_secs_f64();
            add(series, column.tokens, column.prefill, ours);
        }
        for column in paper::FIGURE_14.iter().filter(|column| column.reused == 0) {
            let tokens = f64::from(column.tokens);
            let bytes = tokens * cost.kv_bytes_per_token as f64;
            add("transfer s", column.tokens, column.transfer, bytes / nic_bytes_per_s);
            add("load s", column.tokens, column.load, tokens * load_s_per_token);
            let step = cost.decode.seconds(1.0, tokens + 64.0);
            add("128 decode steps s", column.tokens, column.decode_128, step * 128.0);
        }
        points
    }
}

/// Four decimals: what is printed, and more than is known.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
