//! `snowskin admin masters` and `switchover`: which of several masters leads, and letting another one lead.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::commands::MasterArg;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, printable, thousands};
use crate::{Outcome, output};

const MASTERS_HELP: &str = "Examples:
  snowskin admin masters --at 10.0.0.5:9003
  snowskin admin masters --json | jq '.masters[] | select(.in_sync)'";
const SWITCHOVER_HELP: &str = "Examples:
  snowskin admin switchover                    to the master that is least behind
  snowskin admin switchover --to 2 --admin-secret-file secret";

/// Longest response that is read, bytes.
const ANSWER_BYTES_MAX: u64 = 256 << 10;
const TIMEOUT: Duration = Duration::from_secs(3);

/// List the masters of the cluster: which leads, and which may take over
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{MASTERS_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Masters {
    /// HTTP address of a master.
    #[arg(long, default_value = "127.0.0.1:9003", value_name = "ADDR:PORT")]
    at: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Let another master lead, with all objects
///
/// Clients and nodes find the new leader by themselves. The answer comes when the switchover has begun.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{SWITCHOVER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Switchover {
    /// HTTP address of the master that leads.
    #[arg(long, default_value = "127.0.0.1:9003", value_name = "ADDR:PORT")]
    at: String,
    /// Number of the master that is to lead, as `snowskin admin masters` lists it. Without it: the one that
    /// is least behind.
    #[arg(long, value_name = "ID")]
    to: Option<u64>,
    #[command(flatten)]
    master: MasterArg,
}

/// What a master says of all masters of its cluster; none if it is alone.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Said {
    id: String,
    role: String,
    serving: bool,
    lineage: u64,
    term: u64,
    lsn: u64,
    masters: Vec<Row>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    id: String,
    rpc: String,
    leads: bool,
    in_sync: bool,
    stage: Option<String>,
    lsn: Option<u64>,
}

pub(super) fn masters(args: &Masters) -> Outcome {
    let said = ask_masters(&args.at)?;
    if args.json {
        output::print_json(&said)?;
        return Ok(Exit::Ok);
    }
    output::print(&masters_table(&said, usize::MAX))?;
    Ok(Exit::Ok)
}

/// Asks a master, at its HTTP address.
pub(crate) fn ask_masters(at: &str) -> anyhow::Result<Said> {
    let body = ask(at, "GET /api/v1/masters HTTP/1.0\r\n", "")?;
    serde_json::from_str(&body).context("the answer is not one of a master")
}

/// The masters, in lines of this many columns.
pub(crate) fn masters_table(said: &Said, columns: usize) -> String {
    if said.masters.is_empty() {
        return "this master is alone: start it with --ha to have several\n".to_owned();
    }
    let mut table = Table::new(&[
        ("master", Align::Left),
        ("address", Align::Left),
        ("leads", Align::Left),
        ("in sync", Align::Left),
        ("command", Align::Right),
        ("behind", Align::Right),
    ]);
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    for row in &said.masters {
        let shown = |lsn: Option<u64>| lsn.map_or_else(|| "-".to_owned(), thousands);
        // The leader says how far the others are.
        let behind = row.lsn.map(|lsn| said.lsn.saturating_sub(lsn)).filter(|_| said.serving);
        table.row([
            row.id.clone(),
            printable(&row.rpc),
            yes(row.leads),
            yes(row.in_sync),
            shown(row.lsn),
            shown(behind),
        ]);
    }
    format!("lineage {}, term {}\n{}", said.lineage, said.term, table.render_in(columns))
}

pub(super) fn switchover(args: &Switchover) -> Outcome {
    #[derive(Deserialize)]
    struct Begun {
        to: String,
    }
    let body = match args.to {
        Some(to) => format!("{{\"to\":\"{to}\"}}"),
        None => "{}".to_owned(),
    };
    let mut head = "POST /api/v1/switchover HTTP/1.0\r\nContent-Type: application/json\r\n".to_owned();
    let secret = args.master.admin_secret();
    if secret.is_set() {
        let text = std::str::from_utf8(secret.bytes()).context("the admin secret is not text")?;
        anyhow::ensure!(!text.contains(['\r', '\n']), "the admin secret has more than one line");
        head.push_str(&format!("Authorization: Bearer {text}\r\n"));
    }
    let said = ask(&args.at, &head, &body)?;
    let begun: Begun = serde_json::from_str(&said).context("the answer is not one of a master")?;
    output::print(&format!("master {} takes over\n", printable(&begun.to)))?;
    Ok(Exit::Ok)
}

/// Sends a request, whose head is without its last line; returns the body of the answer.
fn ask(at: &str, head: &str, body: &str) -> anyhow::Result<String> {
    let at = at.trim_start_matches("http://").trim_end_matches('/');
    let unreachable = |error: anyhow::Error| {
        Failure::failed(format!("http://{}: {error:#}", printable(at)))
            .hint("give the --http address of a master with --at")
    };
    let (status, said) = exchange(at, head, body).map_err(unreachable)?;
    if status == 200 {
        return Ok(said);
    }
    let why = serde_json::from_str::<serde_json::Value>(&said).ok();
    let why = why.as_ref().and_then(|why| why["error"].as_str()).unwrap_or(said.trim());
    let failure = Failure::failed(format!("http://{}: {}", printable(at), printable(why)));
    Err(failure.hint("`snowskin admin masters` shows which master leads").into())
}

fn exchange(at: &str, head: &str, body: &str) -> anyhow::Result<(u16, String)> {
    let addr = at.to_socket_addrs()?.next().context("no such address")?;
    let mut stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    write!(stream, "{head}Host: {at}\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    anyhow::ensure!(text.starts_with("HTTP/"), "the server there does not speak HTTP");
    let (head, body) = text.split_once("\r\n\r\n").context("not an HTTP response")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.context("not an HTTP response")?, body.to_owned()))
}
