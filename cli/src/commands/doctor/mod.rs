//! `snowskin doctor`: facts about this machine, a verdict on each, and how to fix it.

mod checks;
mod facts;

use std::net::SocketAddr;

use serde::Serialize;

use crate::args::Global;
use crate::exit::{EXIT_CODES, Exit};
use crate::output::{self, Align, Table};
use crate::{Outcome, progress};
use checks::{Finding, Verdict};

const AFTER_HELP: &str =
    "Verdicts: ok · warn (works, but slower or less) · fail (something will not work) · skip (unknown).

Examples:
  snowskin doctor                             this machine
  snowskin doctor --master 10.0.0.5:50051     and whether that master answers
  snowskin doctor --json | jq '.checks[] | select(.verdict != \"ok\")'";

/// Look for what would make this machine slow or fail, and say how to fix it
///
/// Looks at limits, memory, network and kernel settings that matter to moving KV blocks, and says for each
/// whether it is fine and what to change. Changes nothing itself. Ends with 1 when a check fails, with 0
/// when all pass or only warn.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Also check that this master answers.
    #[arg(long, env = "SNOWSKIN_MASTER", value_name = "HOST:PORT")]
    master: Option<String>,
    /// Ports that `master` and `node` should find free.
    #[arg(long, value_delimiter = ',', default_values_t = [50051, 9003], value_name = "PORT,…")]
    ports: Vec<u16>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    verdict: Verdict,
    failed: usize,
    warned: usize,
    checks: &'a [Finding],
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    let facts = {
        let _bar = progress::Bar::spinner("looking at this machine", global.quiet);
        facts::gather(&args.ports, args.master.as_deref())
    };
    let findings = checks::run(&facts);
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    let (failed, warned) = (count(Verdict::Fail), count(Verdict::Warn));
    let verdict = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
    if args.json {
        output::print_json(&Report { verdict, failed, warned, checks: &findings })?;
    } else {
        output::print(&render(&findings, failed, warned))?;
    }
    Ok(if failed > 0 { Exit::Failed } else { Exit::Ok })
}

fn render(findings: &[Finding], failed: usize, warned: usize) -> String {
    let mut table = Table::new(&[("check", Align::Left), ("", Align::Left), ("found", Align::Left)]);
    for finding in findings {
        table.row([finding.check, finding.verdict.word(), &finding.found]);
    }
    let mut text = table.render();
    for finding in findings {
        if let Some(fix) = &finding.fix {
            text += &format!("\n{} {}: {}\n", finding.verdict.word(), finding.check, fix);
        }
    }
    text += &match (failed, warned) {
        (0, 0) => "\nNothing to fix.\n".to_owned(),
        _ => format!("\n{failed} failed, {warned} to look at.\n"),
    };
    text
}

/// Where `address` listens, for whoever only wants to know whether it is a socket address at all.
fn resolve(address: &str) -> std::io::Result<SocketAddr> {
    use std::net::ToSocketAddrs as _;
    address.to_socket_addrs()?.next().ok_or_else(|| std::io::Error::other("the name has no address"))
}
