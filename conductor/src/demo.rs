//! A cluster of mock engines, the Conductor and its proxy in one process, and a workload for it.
//!
//! ```text
//!   workload ──▶ proxy ──▶ prefill engines ──▶ decode engines     (mock engines, one thread)
//!                  │            │ events, loads      │
//!                  └─ place ──▶ Conductor ◀──────────┘
//! ```

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::mock::{Flavor, MockConfig, MockEngine, MockEngines, Role, Seen, Workload};
use crate::proxy::Figures;
use crate::{
    Conductor, ConductorHandle, Config, EngineConfig, EngineKind, PolicyName, ScheduleConfig, StartError,
};

/// How long the engines' events may take to be heard.
const START_MAX: Duration = Duration::from_secs(30);
const START_PAUSE: Duration = Duration::from_millis(1);

/// A cluster to start.
#[derive(Clone, Debug)]
pub struct Demo {
    /// Engines that compute prompts. With 0, the others do it, too.
    pub prefill: u32,
    /// Engines that generate; at least 1.
    pub decode: u32,
    /// Their settings; role and addresses are set here.
    pub engine: MockConfig,
    /// The rule that places requests.
    pub policy: PolicyName,
    /// Address of the proxy; with port 0 the system chooses a port.
    pub listen: SocketAddr,
}

/// Why a cluster does not start.
#[derive(Debug)]
pub enum DemoError {
    /// The Conductor.
    Conductor(StartError),
    /// A mock engine, the proxy or a thread.
    System(io::Error),
    /// The engines' events were not heard in time.
    NotHeard,
}

impl fmt::Display for DemoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conductor(error) => error.fmt(f),
            Self::System(error) => write!(f, "the system refused an address or a thread: {error}"),
            Self::NotHeard => {
                let s = START_MAX.as_secs();
                write!(f, "the events of the engines are not heard after {s} s: the machine is too busy")
            }
        }
    }
}

impl std::error::Error for DemoError {}

impl From<io::Error> for DemoError {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

/// A running cluster. Dropping it stops it: fields are dropped from the top.
#[derive(Debug)]
pub struct Cluster {
    conductor: ConductorHandle,
    proxy: SocketAddr,
    engines: MockEngines,
}

impl Cluster {
    /// Starts all parts.
    ///
    /// # Errors
    /// See [`DemoError`].
    pub fn start(demo: &Demo) -> Result<Self, DemoError> {
        let decode = if demo.prefill == 0 { Role::Both } else { Role::Decode };
        let roles = (0..demo.prefill).map(|_| Role::Prefill).chain((0..demo.decode).map(|_| decode));
        let with = |role| MockConfig { role, load_beside_events: true, ..demo.engine.clone() };
        let engines = MockEngines::start(roles.map(with).collect())?;
        let settings = Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            proxy_listen: Some(demo.listen),
            engines: engines.engines().iter().enumerate().map(|(at, one)| settings_of(at, one)).collect(),
            // Nothing is refused, so that every policy gets the same requests.
            schedule: ScheduleConfig {
                policy: demo.policy,
                ttft_slo_ms: 0,
                tbt_slo_ms: 0,
                ..ScheduleConfig::default()
            },
            ..Config::default()
        };
        let conductor = Conductor::bind(settings).and_then(Conductor::spawn).map_err(DemoError::Conductor)?;
        let proxy = conductor.proxy_addr().ok_or_else(|| io::Error::other("the proxy did not start"))?;
        // Requests are placed on engines whose events are heard.
        let until = Instant::now() + START_MAX;
        while !conductor.hears_all() {
            if Instant::now() >= until {
                return Err(DemoError::NotHeard);
            }
            std::thread::sleep(START_PAUSE);
        }
        Ok(Self { conductor, proxy, engines })
    }

    /// The address of the proxy.
    #[must_use]
    pub fn proxy(&self) -> SocketAddr {
        self.proxy
    }

    /// The address of the Conductor's HTTP interface.
    #[must_use]
    pub fn conductor(&self) -> SocketAddr {
        self.conductor.addr()
    }

    /// The engines, those for prefill first.
    #[must_use]
    pub fn engines(&self) -> &[MockEngine] {
        self.engines.engines()
    }

    /// What the proxy has done so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.conductor.proxy_figures().unwrap_or_default()
    }

    /// Sends a workload until `wait` returns.
    ///
    /// # Errors
    /// The system refused a thread.
    pub fn run(&self, workload: Workload, wait: impl FnOnce()) -> io::Result<Ran> {
        let ended = Arc::new(AtomicBool::new(false));
        let (until, proxy) = (Arc::clone(&ended), self.proxy());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let clients = std::thread::Builder::new()
            .name("snowskin-clients".into())
            .spawn(move || runtime.block_on(workload.run(proxy, until)))?;
        wait();
        ended.store(true, Ordering::Relaxed);
        let seen = clients.join().map_err(|_| io::Error::other("the thread of the clients panicked"))?;
        let tokens = self.engines().iter().map(MockEngine::prompt_tokens);
        let (computed, reused) = tokens.fold((0, 0), |sum, engine| (sum.0 + engine.0, sum.1 + engine.1));
        Ok(Ran {
            hit_rate: reused as f64 / (computed + reused).max(1) as f64,
            first_tokens: self.figures().first_tokens,
            requests: self.engines().iter().map(|engine| engine.requests().0).collect(),
            seen,
        })
    }
}

/// What a workload gave.
#[derive(Clone, Debug)]
pub struct Ran {
    /// What the clients saw.
    pub seen: Seen,
    /// Part of the prompt tokens that was reused, of all that engines had to compute or reuse.
    pub hit_rate: f64,
    /// Predicted and actual time to the first token, of the last requests.
    pub first_tokens: Vec<(Duration, Duration)>,
    /// Requests of each engine.
    pub requests: Vec<u64>,
}

impl Ran {
    /// The median of |predicted − actual| / actual of the time to the first token, of so many last requests.
    #[must_use]
    pub fn prediction_error(&self, last: usize) -> f64 {
        let last = self.first_tokens.iter().rev().take(last);
        let mut errors: Vec<f64> = last
            .map(|(predicted, actual)| {
                let (predicted, actual) = (predicted.as_secs_f64(), actual.as_secs_f64());
                (predicted - actual).abs() / actual.max(1e-9)
            })
            .collect();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied().unwrap_or(0.0)
    }
}

/// An engine as the Conductor's settings name it.
#[must_use]
pub fn settings_of(at: usize, engine: &MockEngine) -> EngineConfig {
    let config = engine.config();
    let endpoint = |addr: Option<SocketAddr>| addr.map(|addr| format!("tcp://{addr}")).unwrap_or_default();
    let (role, name) = match config.role {
        Role::Prefill => (crate::Role::Prefill, "prefill"),
        Role::Decode => (crate::Role::Decode, "decode"),
        Role::Both => (crate::Role::Both, "engine"),
    };
    EngineConfig {
        instance: format!("{name}-{at}"),
        kind: if config.flavor == Flavor::Sglang { EngineKind::Sglang } else { EngineKind::Vllm },
        endpoint: endpoint(engine.events()),
        replay_endpoint: endpoint(engine.replay()),
        model: config.model.clone(),
        block_tokens: config.block_tokens,
        role,
        http: engine.http().to_string(),
        bootstrap_port: engine.http().port(),
        ..EngineConfig::default()
    }
}
