//! `snowskin mock-engine`: an engine to the outside, with a cost model in place of a GPU.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use conductor::mock::{Flavor, MockConfig, MockEngines, Role};
use serde::Serialize;

use crate::commands::master::announce;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "It computes nothing: times follow from the cost of LLaMA3-70B on 8 A800, and texts are made of hashes of \
    their prompts. Its cache, its events and its protocols are those of an engine.

Examples:
  snowskin mock-engine --listen 127.0.0.1:8000 --events 127.0.0.1:5557 --replay 127.0.0.1:5558
  snowskin mock-engine --flavor sglang --role prefill --load 127.0.0.1:5559 --speed 20
  snowskin mock-engine --speed 0 --fail-after 1000
  curl localhost:8000/v1/completions -d '{\"prompt\":\"hello\",\"max_tokens\":8,\"stream\":true}'";

/// How often the end of the engine is looked for.
const ENDED_CHECK: Duration = Duration::from_millis(200);

/// Run a mock engine: the HTTP interface and the KV events of vLLM or SGLang, without a GPU
///
/// Runs in the foreground until Ctrl-C or SIGTERM, and then stops in order (exit code 0).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Address of its HTTP server; port 0 picks a free port.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address at which it publishes KV events [default: none].
    #[arg(long, value_name = "ADDR:PORT")]
    events: Option<SocketAddr>,
    /// Address at which it replays them [default: none].
    #[arg(long, value_name = "ADDR:PORT")]
    replay: Option<SocketAddr>,
    /// Address at which it publishes its load [default: none].
    #[arg(long, value_name = "ADDR:PORT")]
    load: Option<SocketAddr>,
    /// Topic of its events.
    #[arg(long, default_value = "", value_name = "TOPIC")]
    topic: String,
    /// The model that it claims to serve.
    #[arg(long, default_value = "mock", value_name = "NAME")]
    model: String,
    /// What it does.
    #[arg(long, default_value = "both")]
    role: RoleArg,
    /// Whose interfaces it has.
    #[arg(long, default_value = "vllm")]
    flavor: FlavorArg,
    #[command(flatten)]
    engine: EngineArgs,
    /// It dies after so many generated tokens, and closes every connection.
    #[arg(long, value_name = "TOKENS")]
    fail_after: Option<u64>,
    /// Print all addresses as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// What mock engines have in common.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EngineArgs {
    /// Tokens per block.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    block_tokens: u32,
    /// Blocks in the GPU's memory.
    #[arg(long, default_value_t = 16_384, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    gpu_blocks: u32,
    /// Blocks in the host's memory.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1 << 24))]
    cpu_blocks: u32,
    /// Blocks on the disk.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1 << 24))]
    disk_blocks: u32,
    /// How many times faster than the simulated engine it is; 0: it answers at once.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    pub(crate) speed: f64,
    /// Standard deviation of the time of a step, as a part of it, 0 to 1.
    #[arg(long, default_value_t = 0.0, value_name = "PART")]
    noise: f64,
    /// Seed of the noise.
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

impl EngineArgs {
    /// The settings of an engine.
    pub(crate) fn config(&self) -> anyhow::Result<MockConfig> {
        if !(self.speed.is_finite() && (0.0..=1e6).contains(&self.speed)) {
            return fail(Failure::usage(format!("--speed {}: give 0 to 1,000,000", self.speed)));
        }
        if !(0.0..=1.0).contains(&self.noise) {
            return fail(Failure::usage(format!("--noise {}: give 0 to 1", self.noise)));
        }
        Ok(MockConfig {
            block_tokens: self.block_tokens,
            gpu_blocks: self.gpu_blocks,
            cpu_blocks: self.cpu_blocks,
            disk_blocks: self.disk_blocks,
            speed: self.speed,
            noise: self.noise,
            seed: self.seed,
            ..MockConfig::default()
        })
    }
}

/// What an engine does.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleArg {
    /// It computes prompts for decode engines.
    Prefill,
    /// It generates from prompts that prefill engines computed.
    Decode,
    /// Both.
    Both,
}

/// Whose interfaces an engine has.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FlavorArg {
    /// vLLM 0.33.
    Vllm,
    /// vLLM 0.22, whose events are arrays.
    VllmArrays,
    /// SGLang 0.5.23.
    Sglang,
}

impl From<FlavorArg> for Flavor {
    fn from(flavor: FlavorArg) -> Self {
        match flavor {
            FlavorArg::Vllm => Self::Vllm,
            FlavorArg::VllmArrays => Self::VllmArrays,
            FlavorArg::Sglang => Self::Sglang,
        }
    }
}

/// The line that an engine prints when it serves.
#[derive(Serialize)]
struct Ready {
    ready: &'static str,
    http: String,
    events: Option<String>,
    replay: Option<String>,
    load: Option<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let config = MockConfig {
        listen: args.listen,
        events: args.events,
        replay: args.replay,
        load: args.load,
        topic: args.topic.clone(),
        model: args.model.clone(),
        role: match args.role {
            RoleArg::Prefill => Role::Prefill,
            RoleArg::Decode => Role::Decode,
            RoleArg::Both => Role::Both,
        },
        flavor: args.flavor.into(),
        fail_after_tokens: args.fail_after,
        ..args.engine.config()?
    };
    let running = MockEngines::start(vec![config]).context("cannot start a mock engine")?;
    let [engine] = running.engines() else { return fail(Failure::failed("no engine was started")) };
    let text = |addr: Option<SocketAddr>| addr.map(|addr| addr.to_string());
    let ready = Ready {
        ready: "mock-engine",
        http: engine.http().to_string(),
        events: text(engine.events()),
        replay: text(engine.replay()),
        load: text(engine.load()),
    };
    announce(args.json, &ready, || {
        let part = |what: &str, at: &Option<String>| match at {
            Some(at) => format!(", {what} tcp://{at}"),
            None => String::new(),
        };
        format!(
            "mock engine ready at http://{}/v1{}{}{}; Ctrl-C ends it\n",
            ready.http,
            part("events", &ready.events),
            part("replay", &ready.replay),
            part("load", &ready.load),
        )
    });
    while !engine.is_dead() && sys::wait_for_interrupt(Some(ENDED_CHECK)).is_none() {}
    if engine.is_dead() {
        return fail(Failure::failed("the engine died, as --fail-after wanted"));
    }
    tracing::info!("stopping");
    drop(running);
    Ok(Exit::Ok)
}
