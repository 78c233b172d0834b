//! `snowskin conductor sim`: the figures of the FAST'25 paper from its traces, in a simulated cluster.

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use conductor_sim::figures::{Figure, Point, Traces};
use conductor_sim::{Calibration, PolicyKind, Trace};

use super::{plot, what_if};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{self, Align, Table};
use crate::trace::{Limits, TraceReader};
use crate::{Outcome, fail};

const AFTER_HELP: &str = "Examples:
  snowskin conductor sim --figure 14                          the costs beside the paper's measurements
  snowskin conductor sim --figure all --trace-dir DIR         every figure, from the published traces
  snowskin conductor sim --figure 15 --trace-dir DIR --svg split.svg
  snowskin conductor sim --what-if --trace FILE --prefill 6 --nodes 12 --speed 1.5
  snowskin conductor sim --what-if --trace FILE --find-split --tbt-slo-ms 50

Everything is simulated, with the decisions that the Conductor takes in service. \
docs/conductor-figures.md says where the results differ from the paper, and why.";

/// Where the traces are published.
const PUBLISHED: &str = "they are in the repository kvcache-ai/Mooncake, directory FAST25-release/traces; \
    name the directory with --trace-dir DIR, or the files with --conversation FILE and --synthetic FILE";
const CONVERSATION: &str = "conversation_trace.jsonl";
const SYNTHETIC: &str = "synthetic_trace.jsonl";
/// The value of `--figure` for all of them.
const ALL: &str = "all";

/// Simulate the cluster of the FAST'25 paper, or another one, from traces of requests
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// The figures: numbers of the paper, what it leaves open, or all [default: 14].
    #[arg(long, value_delimiter = ',', value_name = "FIGURE,…", value_parser = figures_parser())]
    figure: Vec<Figures>,
    /// Directory of conversation_trace.jsonl and synthetic_trace.jsonl.
    #[arg(long, value_name = "DIR")]
    trace_dir: Option<PathBuf>,
    /// The conversation trace [default: the one in --trace-dir].
    #[arg(long, value_name = "FILE")]
    conversation: Option<PathBuf>,
    /// The synthetic trace [default: the one in --trace-dir].
    #[arg(long, value_name = "FILE")]
    synthetic: Option<PathBuf>,
    /// Seed of the arrivals within their 3-second bins, and of policies that draw.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// How prefill instances are chosen [default: cost].
    #[arg(long, value_name = "POLICY")]
    policy: Option<PolicyKind>,
    /// Print JSON instead of tables: {figure, series, x, paper, ours, kind} per point.
    #[arg(long)]
    json: bool,
    /// Draw the figure into this SVG file.
    #[arg(long, value_name = "FILE", conflicts_with = "what_if")]
    svg: Option<PathBuf>,
    /// Draw each figure into this directory.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["svg", "what_if"])]
    svg_dir: Option<PathBuf>,
    /// Simulate another cluster instead of the paper's figures.
    #[arg(long, requires = "trace", conflicts_with_all = ["figure", "trace_dir", "conversation", "synthetic"])]
    what_if: bool,
    #[command(flatten)]
    cluster: what_if::ClusterArgs,
}

/// One value of `--figure`.
#[derive(Clone, Copy, Debug)]
enum Figures {
    All,
    One(Figure),
}

fn figures_parser() -> impl TypedValueParser<Value = Figures> {
    let names = Figure::ALL.iter().map(|figure| figure.name()).chain([ALL]);
    PossibleValuesParser::new(names).try_map(|name| match &*name {
        ALL => Ok(Figures::All),
        name => name.parse().map(Figures::One),
    })
}

pub(super) fn run(args: &Args) -> Outcome {
    let calibration = Calibration::of_paper().map_err(|error| Failure::failed(error.to_string()))?;
    if args.what_if {
        return what_if::run(&args.cluster, &calibration, args.policy, args.seed, args.json);
    }
    let policy = args.policy.unwrap_or(PolicyKind::Cost);
    let figures = chosen(&args.figure);
    if args.svg.is_some() && figures.len() != 1 {
        return fail(Failure::usage("--svg draws one figure; name a directory for several with --svg-dir"));
    }
    let traces = traces(args, &figures)?;
    let mut points = Vec::new();
    for figure in &figures {
        let of_figure = figure.points(&traces, &calibration, policy, args.seed);
        draw(args, *figure, &of_figure)?;
        if !args.json {
            output::print(&table(*figure, &of_figure))?;
        }
        points.extend(of_figure);
    }
    if args.json {
        output::print_json(&points)?;
    }
    Ok(Exit::Ok)
}

/// The figures of the arguments, each once, in the paper's order.
fn chosen(arguments: &[Figures]) -> Vec<Figure> {
    let named = |figure: &Figure| {
        arguments.iter().any(|argument| match argument {
            Figures::All => true,
            Figures::One(one) => one == figure,
        })
    };
    if arguments.is_empty() { vec![Figure::Latency] } else { Figure::ALL.into_iter().filter(named).collect() }
}

/// The traces, when a figure needs them.
fn traces(args: &Args, figures: &[Figure]) -> anyhow::Result<Traces> {
    let load = |file: &Option<PathBuf>, name: &str| {
        let in_dir = args.trace_dir.as_ref().map(|dir| dir.join(name));
        match file.clone().or(in_dir) {
            Some(file) => trace_of(&file, Some(PUBLISHED)),
            None => fail(Failure::usage(format!("the figure is made of {name}")).hint(PUBLISHED)),
        }
    };
    let mut traces = Traces::default();
    if figures.iter().any(|figure| figure.needs_conversation()) {
        traces.conversation = load(&args.conversation, CONVERSATION)?;
    }
    if figures.iter().any(|figure| figure.needs_synthetic()) {
        traces.synthetic = load(&args.synthetic, SYNTHETIC)?;
    }
    Ok(traces)
}

/// Reads a trace. `hint` tells where to find it when it cannot be opened.
pub(super) fn trace_of(file: &Path, hint: Option<&'static str>) -> anyhow::Result<Trace> {
    if file.is_dir() {
        return fail(Failure::usage(format!("{} is a directory, not a trace", file.display())));
    }
    let reader = match TraceReader::open(file, Limits::default()) {
        Ok(reader) => reader,
        Err(error) => {
            let failure = Failure::failed(error.to_string());
            return fail(match hint {
                Some(hint) => failure.hint(hint),
                None => failure,
            });
        }
    };
    let mut trace = Trace::default();
    for (nth, request) in reader.enumerate() {
        let request = request?;
        if request.timestamp < 0.0 {
            return fail(Failure::failed(format!(
                "{}: request {}: a negative timestamp",
                file.display(),
                nth + 1
            )));
        }
        let added = trace.push(
            request.timestamp as u64,
            request.input_length,
            request.output_length,
            &request.hash_ids,
        );
        if let Err(error) = added {
            return fail(Failure::failed(format!("{}: request {}: {error}", file.display(), nth + 1)));
        }
    }
    if trace.requests().is_empty() {
        return fail(Failure::failed(format!("{}: the trace has no requests", file.display())));
    }
    Ok(trace)
}

fn draw(args: &Args, figure: Figure, points: &[Point]) -> anyhow::Result<()> {
    let file = match (&args.svg, &args.svg_dir) {
        (Some(file), _) => file.clone(),
        (None, Some(dir)) => {
            std::fs::create_dir_all(dir)
                .map_err(|error| Failure::failed(format!("cannot make {}: {error}", dir.display())))?;
            dir.join(format!("conductor-{figure}.svg"))
        }
        (None, None) => return Ok(()),
    };
    let title = format!("{}: {}", heading(figure), figure.title());
    let text = plot::svg(&title, figure.panels(), points);
    match std::fs::write(&file, text) {
        Ok(()) => Ok(()),
        Err(error) => fail(Failure::failed(format!("cannot write {}: {error}", file.display()))),
    }
}

/// "Figure 8", or "Policies".
fn heading(figure: Figure) -> String {
    let name = figure.name();
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        return format!("Figure {name}");
    }
    let (first, rest) = name.split_at(1);
    format!("{}{rest}", first.to_ascii_uppercase())
}

fn table(figure: Figure, points: &[Point]) -> String {
    let mut table = Table::new(&[
        ("series", Align::Left),
        ("x", Align::Left),
        ("paper", Align::Right),
        ("ours", Align::Right),
        ("ours/paper", Align::Right),
        ("kind", Align::Left),
    ]);
    for point in points {
        let ratio = point.paper.filter(|paper| *paper != 0.0).map(|paper| point.ours / paper);
        table.row([
            point.series.clone(),
            point.x.to_string(),
            point.paper.map_or_else(String::new, |paper| format!("{paper:.3}")),
            format!("{:.3}", point.ours),
            ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            point.kind.name().to_owned(),
        ]);
    }
    format!("{}: {}; simulated\n\n{}", heading(figure), figure.title(), table.render())
}
