//! What is counted of requests that go through the gateway, of engines that are discovered, and of copies in
//! the store.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// The label of a count.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    pub(crate) outcome: &'static str,
}

/// All of it. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) gateway: GatewayTraffic,
    pub(crate) kubernetes: KubernetesTraffic,
}

/// How a request of a gateway ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Its answer came to its end.
    Done,
    /// The engine answered 429 or 5xx.
    Failed,
    /// The stream ended before the answer did.
    Left,
    /// The gateway sent it to another endpoint.
    Elsewhere,
    /// Refused: an objective would have been missed (429).
    Overloaded,
    /// Refused: no engine, or a limit (5xx).
    Unavailable,
    /// Refused: the request is wrong (4xx).
    Wrong,
    /// The gateway did not keep to the protocol.
    Protocol,
}

impl Outcome {
    const ALL: [Self; 8] = [
        Self::Done,
        Self::Failed,
        Self::Left,
        Self::Elsewhere,
        Self::Overloaded,
        Self::Unavailable,
        Self::Wrong,
        Self::Protocol,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Left => "left",
            Self::Elsewhere => "elsewhere",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "unavailable",
            Self::Wrong => "wrong",
            Self::Protocol => "protocol",
        }
    }
}

/// Requests of gateways.
#[derive(Clone, Debug)]
pub(crate) struct GatewayTraffic {
    pub(crate) requests: Family<OutcomeLabels, Counter>,
    pub(crate) in_flight: Gauge,
    pub(crate) placed: Counter,
    pub(crate) retried: Counter,
}

impl Default for GatewayTraffic {
    fn default() -> Self {
        let requests = Family::<OutcomeLabels, Counter>::default();
        for outcome in Outcome::ALL {
            drop(requests.get_or_create(&OutcomeLabels { outcome: outcome.name() }));
        }
        let (in_flight, placed, retried) = Default::default();
        Self { requests, in_flight, placed, retried }
    }
}

#[cfg_attr(not(feature = "gateway"), expect(dead_code, reason = "the gateway counts"))]
impl GatewayTraffic {
    /// A request came.
    pub(crate) fn began(&self) {
        self.in_flight.inc();
    }

    /// An engine failed it before, or not.
    pub(crate) fn retried(&self, was: bool) {
        self.retried.inc_by(u64::from(was));
    }

    /// A request that [began](Self::began) is over.
    pub(crate) fn over(&self, outcome: Outcome) {
        self.in_flight.dec();
        self.ended(outcome);
    }

    /// A request ended so, perhaps before it began.
    pub(crate) fn ended(&self, outcome: Outcome) {
        self.requests.get_or_create(&OutcomeLabels { outcome: outcome.name() }).inc();
    }
}

/// What a Kubernetes cluster says of engines.
#[derive(Clone, Debug, Default)]
pub(crate) struct KubernetesTraffic {
    pub(crate) lists: Counter,
    pub(crate) events: Counter,
    pub(crate) failures: Counter,
    pub(crate) registered: Gauge,
    pub(crate) waiting: Gauge,
}

#[cfg_attr(not(feature = "kubernetes"), expect(dead_code, reason = "the discovery in Kubernetes counts"))]
impl KubernetesTraffic {
    /// So many engines that are ready are registered, and so many are not yet.
    pub(crate) fn engines(&self, registered: usize, waiting: usize) {
        self.registered.set(i64::try_from(registered).unwrap_or(i64::MAX));
        self.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }
}

/// Why an object of a hot prefix is not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// The settings name no master of a store.
    Off,
    /// The settings say that copies are only counted.
    DryRun,
    /// Too many prefixes wait to be copied.
    Busy,
    /// No store has told an object of the block.
    Unknown,
    /// It has as many replicas as it may have.
    Enough,
    /// It is not in the store any more, or not yet.
    Gone,
    /// Too many copies are in progress.
    InFlight,
    /// Too many copies were begun in this minute.
    Rate,
    /// No other node has room for it.
    NoRoom,
    /// The master does not answer.
    Unreachable,
    /// The master refuses for another reason, which the log has.
    Refused,
}

impl Kept {
    const ALL: [Self; 11] = [
        Self::Off,
        Self::DryRun,
        Self::Busy,
        Self::Unknown,
        Self::Enough,
        Self::Gone,
        Self::InFlight,
        Self::Rate,
        Self::NoRoom,
        Self::Unreachable,
        Self::Refused,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::DryRun => "dry_run",
            Self::Busy => "busy",
            Self::Unknown => "unknown",
            Self::Enough => "enough",
            Self::Gone => "gone",
            Self::InFlight => "in_flight",
            Self::Rate => "rate",
            Self::NoRoom => "no_room",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ReasonLabels {
    pub(crate) reason: &'static str,
}

/// Copies of objects in the store.
#[derive(Clone, Debug)]
pub(crate) struct CopyTraffic {
    pub(crate) asked: Counter,
    pub(crate) done: Counter,
    pub(crate) failed: Counter,
    pub(crate) in_flight: Gauge,
    pub(crate) refused: Family<ReasonLabels, Counter>,
}

impl Default for CopyTraffic {
    fn default() -> Self {
        let refused = Family::<ReasonLabels, Counter>::default();
        for kept in Kept::ALL {
            drop(refused.get_or_create(&ReasonLabels { reason: kept.name() }));
        }
        let (asked, done, failed, in_flight) = Default::default();
        Self { asked, done, failed, in_flight, refused }
    }
}

impl CopyTraffic {
    /// So many objects are not copied.
    pub(crate) fn keep(&self, kept: Kept, objects: u64) {
        self.refused.get_or_create(&ReasonLabels { reason: kept.name() }).inc_by(objects);
    }

    /// So many copies are in progress.
    pub(crate) fn in_flight(&self, copies: usize) {
        self.in_flight.set(i64::try_from(copies).unwrap_or(i64::MAX));
    }
}
