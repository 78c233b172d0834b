//! What the proxy needs of the Conductor: decisions, to which it reports how requests go.

use std::sync::Arc;
use std::time::Duration;

use conductor_core::InstanceId;

use super::client::Pool;
use super::counters::Counters;

/// Decides where requests go. The Conductor's service implements it.
pub trait Place: Send + Sync + 'static {
    /// Chooses engines, and reserves room on them until [`Progress::Done`] or [`Progress::Failed`].
    ///
    /// # Errors
    /// See [`Refused`].
    fn decide(&self, ask: &Ask<'_>) -> Result<Placed, Refused>;

    /// Reports how a reservation goes.
    fn report(&self, reservation: Reservation, progress: Progress);

    /// An engine did not answer, or broke off. It should be avoided until it is known to live.
    fn suspect(&self, instance: InstanceId);

    /// Any engine that serves a model, for its tokenizer.
    fn tokenizer(&self, model: &str) -> Option<Engine>;

    /// The models that engines serve.
    fn models(&self) -> Vec<String>;

    /// Where a proxy counts what it does; by default in counters of its own.
    fn counters(&self) -> Arc<Counters> {
        Arc::default()
    }
}

/// What is reserved by a decision.
pub type Reservation = u64;

/// A request for a decision.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The tenant; empty for the default one.
    pub tenant: &'a str,
    /// The model.
    pub model: &'a str,
    /// The LoRA adapter's name; empty for none.
    pub lora: &'a str,
    /// The salt of the cache; empty for none.
    pub salt: &'a str,
    /// The prompt.
    pub tokens: &'a [u32],
    /// Tokens that the request may generate, if it says so.
    pub output_tokens_max: Option<u32>,
    /// Time since the request came: what is left of the objective is less by this.
    pub waited: Duration,
    /// Engines that failed this request before.
    pub avoid: &'a [InstanceId],
    /// Addresses (`HOST:PORT`) of the engines that may get the request; `None`: all. An engine that only
    /// prefills does not get it.
    pub among: Option<&'a [String]>,
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct Placed {
    /// What is reserved.
    pub reservation: Reservation,
    /// Computes the prompt.
    pub prefill: Engine,
    /// Generates. The same as `prefill` where engines do both.
    pub decode: Engine,
    /// Predicted time to the first token, from now.
    pub ttft: Duration,
    /// Tokens of the prompt that need not be computed.
    pub reused_tokens: u32,
}

/// An engine as the proxy sees it.
#[derive(Clone, Debug)]
pub struct Engine {
    /// Its number.
    pub instance: InstanceId,
    /// Connections to it.
    pub pool: Arc<Pool>,
    /// How prefill and decode engines find each other.
    pub handover: Handover,
}

/// How a prefill engine hands blocks to a decode engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handover {
    /// vLLM: the prefill engine's answer has `kv_transfer_params` for the decode engine's request.
    KvTransferParams,
    /// SGLang: both get the request at once, with the prefill engine's bootstrap server and a common room.
    Bootstrap {
        /// Host of the prefill engine's bootstrap server.
        host: Arc<str>,
        /// Its port.
        port: u16,
    },
}

/// How a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The prompt is computed.
    Prefilled,
    /// The first token came.
    FirstToken,
    /// Tokens came since the last report.
    Tokens(u32),
    /// It ended in order.
    Done,
    /// It ended otherwise: the client left, or an engine failed.
    Failed,
}

/// Why there is no decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No engine serves the model: 404.
    NoModel,
    /// Engines serve the model, but none can be used now: 503.
    NoEngine,
    /// The objective cannot be met: 429.
    Overloaded {
        /// When to try again.
        retry_after: Duration,
    },
}
