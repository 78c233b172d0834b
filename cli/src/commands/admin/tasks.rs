//! Copying and moving replicas, and draining segments.

use std::time::{Duration, Instant};

use serde::Serialize;
use store_client::RpcConnection;
use store_core::message::{
    CancelTasks, CreateTasks, DrainInfo, DrainStatus, ListTasks, NewTask, OrderSegments, QueryTasks,
    RetryTasks, SegmentOrder, SegmentState, TaskInfo, TaskQuery, TaskState,
};
use store_core::{ErrorCode, Key, SegmentNo, TaskId};

use super::list::{SegmentRow, ask_segments, segment_called};
use crate::commands::{MasterArg, no_master};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{Align, Table, figure, printable, thousands};
use crate::size::ByteSize;
use crate::{Outcome, fail, output, sys};

/// How often a running operation is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Tasks per page.
const PAGE: u32 = 1_000;

const TASKS_HELP: &str = "Examples:
  snowskin admin tasks
  snowskin admin tasks --state failed
  snowskin admin tasks 17 --retry";
const COPY_HELP: &str = "Examples:
  snowskin admin copy greeting --wait
  snowskin admin copy greeting --to node-7";
const MOVE_HELP: &str = "Examples:
  snowskin admin move greeting --from node-3 --wait
  snowskin admin move greeting --from node-3 --to node-7";
const DRAIN_HELP: &str = "Examples:
  snowskin admin drain node-7 --wait          move all its objects to other nodes, and wait for the end
  snowskin admin drain node-7 --maintenance   accept no new objects, but keep serving
  snowskin admin drain node-7 --undo          put it back into use";

/// Move all objects off segments, so that the segments can be removed without loss
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{DRAIN_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Drain {
    /// Segments by name or number, or nodes by number; without any, show the segments that are not active.
    #[arg(value_name = "SEGMENT|NODE")]
    which: Vec<String>,
    /// Accept no new objects, and move nothing.
    #[arg(long, conflicts_with = "undo", requires = "which")]
    maintenance: bool,
    /// Put the segments back into use.
    #[arg(long, requires = "which")]
    undo: bool,
    /// Wait until the segments are empty, or nothing more can be moved: no other segment has room, or the
    /// objects that are left are damaged, which `admin tasks --state failed` lists.
    #[arg(long, conflicts_with_all = ["maintenance", "undo"])]
    wait: bool,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// List tasks: replicas that are being copied or moved
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{TASKS_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Tasks {
    /// Only these tasks; without any, all known tasks.
    #[arg(value_name = "ID")]
    ids: Vec<u64>,
    /// Only tasks in this state.
    #[arg(long, value_name = "STATE", value_parser = ["pending", "processing", "done", "failed", "canceled"])]
    state: Option<String>,
    /// Cancel these tasks.
    #[arg(long, requires = "ids", conflicts_with_all = ["retry", "state"])]
    cancel: bool,
    /// Retry these tasks, which have failed.
    #[arg(long, requires = "ids", conflicts_with = "state")]
    retry: bool,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// Copy an object to another segment, and verify the copy
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{COPY_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Copy {
    /// Key of the object.
    key: String,
    /// The destination; without it, the master chooses.
    #[arg(long, value_name = "SEGMENT")]
    to: Option<String>,
    #[command(flatten)]
    how: How,
}

/// Move a replica of an object to another segment, and verify it there
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{MOVE_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Move {
    /// Key of the object.
    key: String,
    /// The segment whose replica is removed when the new one is readable.
    #[arg(long, value_name = "SEGMENT")]
    from: String,
    /// The destination; without it, the master chooses.
    #[arg(long, value_name = "SEGMENT")]
    to: Option<String>,
    #[command(flatten)]
    how: How,
}

#[derive(Debug, clap::Args)]
struct How {
    /// Wait for the end of the task.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    master: MasterArg,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// A task, for tables and JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TaskRow {
    /// Identifiers are texts in JSON, because numbers above 2^53 are not exact in many languages.
    id: String,
    key: String,
    bytes: u64,
    state: &'static str,
    cause: &'static str,
    from: Option<SegmentNo>,
    to: Option<SegmentNo>,
    attempts: u32,
    error: Option<String>,
    age_ms: u64,
}

impl From<TaskInfo<'_>> for TaskRow {
    fn from(info: TaskInfo<'_>) -> Self {
        Self {
            id: info.id.to_string(),
            key: info.key.to_string(),
            bytes: info.len,
            state: info.state.name(),
            cause: info.cause.name(),
            from: info.source,
            to: info.target,
            attempts: info.attempts,
            error: info.error.map(|error| error.to_string()),
            age_ms: info.age_ms,
        }
    }
}

#[derive(Debug, Serialize)]
struct DrainRow {
    segment: SegmentNo,
    name: String,
    state: &'static str,
    used_bytes: u64,
    moving: u32,
    moved_total: u64,
    dropped_total: u64,
    failed_total: u64,
    left_no_room: u64,
    left_unfinished: u64,
    left_bad: u64,
}

pub(super) fn drain(args: &Drain) -> Outcome {
    sys::catch_interrupts();
    let mut rpc = args.master.connect()?;
    let known = ask_segments(&mut rpc)?;
    let mut wanted = Vec::new();
    for which in &args.which {
        wanted.extend(named(&known, which)?);
    }
    let mut drains: Vec<DrainInfo> = if wanted.is_empty() {
        status(&mut rpc, &[])?
    } else {
        let state = match (args.maintenance, args.undo) {
            (true, _) => SegmentState::Maintenance,
            (_, true) => SegmentState::Active,
            _ => SegmentState::Draining,
        };
        let orders = wanted.iter().map(|&segment| SegmentOrder { segment, state });
        let ((), found) = rpc.call::<OrderSegments>(&(), orders).map_err(no_master)?;
        found
            .collect::<Result<_, _>>()
            .map_err(|code| anyhow::Error::from(store_client::StoreError::from(code)))?
    };
    if wanted.is_empty() {
        wanted.extend(drains.iter().map(|drain| drain.segment));
    }
    while args.wait && drains.iter().any(goes_on) {
        if let Some(exit) = sys::wait_for_interrupt(Some(POLL_INTERVAL)) {
            return Ok(exit);
        }
        let last = std::mem::replace(&mut drains, status(&mut rpc, &wanted)?);
        if let Some(lost) = gone(&last, &drains) {
            let lost = Failure::failed(format!("segment {lost} was removed before it was drained"));
            return fail(lost.hint("its node ended: objects without another replica are lost"));
        }
    }
    let rows: Vec<DrainRow> = drains.iter().map(|drain| row_of(drain, &known)).collect();
    if args.json {
        output::print_json(&rows)?;
    } else {
        output::print(&drain_table(&rows))?;
    }
    let stuck = args.wait && rows.iter().any(|row| row.state != SegmentState::Drained.name());
    Ok(if stuck { Exit::Failed } else { Exit::Ok })
}

/// Drains a segment, and waits until it is empty, nothing more can be moved, or `timeout` is over.
pub(crate) fn drain_one(
    rpc: &mut RpcConnection,
    segment: SegmentNo,
    timeout: Duration,
) -> anyhow::Result<DrainInfo> {
    let deadline = Instant::now() + timeout;
    let order = SegmentOrder { segment, state: SegmentState::Draining };
    let mut drain = {
        let ((), mut found) = rpc.call::<OrderSegments>(&(), std::iter::once(order)).map_err(no_master)?;
        found.next().unwrap_or(Err(ErrorCode::InternalError)).map_err(store_client::StoreError::from)?
    };
    while goes_on(&drain) && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL.min(deadline.saturating_duration_since(Instant::now())));
        let now = status(rpc, &[segment])?;
        let gone = || Failure::failed("the master has removed the node");
        drain = *now.first().ok_or_else(gone)?;
    }
    Ok(drain)
}

/// Whether a drain has objects left that it can move.
fn goes_on(drain: &DrainInfo) -> bool {
    let stays = (drain.left_no_room > 0 || drain.left_bad > 0) && drain.left_unfinished == 0;
    drain.state == SegmentState::Draining && (!stays || drain.moving > 0)
}

/// A segment that was being drained and does not exist any more.
fn gone(last: &[DrainInfo], now: &[DrainInfo]) -> Option<SegmentNo> {
    let draining = last.iter().filter(|drain| drain.state == SegmentState::Draining);
    draining.map(|drain| drain.segment).find(|segment| now.iter().all(|drain| drain.segment != *segment))
}

fn status(rpc: &mut RpcConnection, which: &[SegmentNo]) -> anyhow::Result<Vec<DrainInfo>> {
    let ((), found) = rpc.call::<DrainStatus>(&(), which.iter().copied()).map_err(no_master)?;
    // A segment that was removed in the meantime is not among them.
    Ok(found.flatten().collect())
}

/// The segments that a name or a number denotes: one, or all segments of a node.
fn named(known: &[SegmentRow], which: &str) -> anyhow::Result<Vec<SegmentNo>> {
    let no = which.parse::<SegmentNo>().ok();
    let found: Vec<SegmentNo> = known
        .iter()
        .filter(|row| row.name == which || Some(row.segment) == no || row.node == which)
        .map(|row| row.segment)
        .collect();
    if found.is_empty() {
        let failure = Failure::new(Exit::NotFound, format!("{}: no such segment or node", printable(which)));
        return Err(failure.hint("`snowskin admin segments` lists them").into());
    }
    Ok(found)
}

fn row_of(drain: &DrainInfo, known: &[SegmentRow]) -> DrainRow {
    let name = known.iter().find(|row| row.segment == drain.segment).map(|row| row.name.clone());
    DrainRow {
        segment: drain.segment,
        name: name.unwrap_or_default(),
        state: drain.state.name(),
        used_bytes: drain.used_bytes,
        moving: drain.moving,
        moved_total: drain.moved_total,
        dropped_total: drain.dropped_total,
        failed_total: drain.failed_total,
        left_no_room: drain.left_no_room,
        left_unfinished: drain.left_unfinished,
        left_bad: drain.left_bad,
    }
}

fn drain_table(rows: &[DrainRow]) -> String {
    if rows.is_empty() {
        return "every segment is active\n".to_owned();
    }
    let mut table = Table::new(&[
        ("segment", Align::Left),
        ("state", Align::Left),
        ("used", Align::Right),
        ("moving", Align::Right),
        ("moved", Align::Right),
        ("dropped", Align::Right),
        ("failed", Align::Right),
        ("no room elsewhere", Align::Right),
        ("not yet", Align::Right),
        ("bad", Align::Right),
    ]);
    for row in rows {
        table.row([
            printable(&row.name),
            row.state.to_owned(),
            ByteSize(row.used_bytes).approximate(),
            thousands(row.moving.into()),
            thousands(row.moved_total),
            thousands(row.dropped_total),
            thousands(row.failed_total),
            thousands(row.left_no_room),
            thousands(row.left_unfinished),
            thousands(row.left_bad),
        ]);
    }
    table.render()
}

/// Requests tasks in this state, or in any, at most `most`.
pub(crate) fn ask_tasks(
    rpc: &mut RpcConnection,
    state: Option<TaskState>,
    most: usize,
) -> anyhow::Result<Vec<TaskRow>> {
    let mut rows = Vec::new();
    let mut query = TaskQuery { cursor: 0, limit: PAGE.min(u32::try_from(most).unwrap_or(PAGE)), state };
    if most == 0 {
        return Ok(rows);
    }
    loop {
        let (at, found) = rpc.call::<ListTasks>(&query, std::iter::empty()).map_err(no_master)?;
        rows.extend(found.map(TaskRow::from));
        query.cursor = at.cursor;
        if query.cursor == 0 || rows.len() >= most {
            rows.truncate(most);
            return Ok(rows);
        }
    }
}

pub(super) fn list(args: &Tasks) -> Outcome {
    let mut rpc = args.master.connect()?;
    let mut rows = Vec::new();
    let mut missing = Vec::new();
    if args.ids.is_empty() {
        rows = ask_tasks(&mut rpc, args.state.as_deref().and_then(TaskState::named), usize::MAX)?;
    }
    for ids in args.ids.chunks(PAGE as usize) {
        let mut asked = ids.iter();
        let ids = ids.iter().copied().map(TaskId::new);
        // One answer per id, in the order of the request.
        let mut take = |found: Result<TaskInfo<'_>, ErrorCode>| match (asked.next(), found) {
            (_, Ok(task)) => rows.push(TaskRow::from(task)),
            (id, Err(error)) => missing.extend(id.map(|id| format!("{id}: {error}"))),
        };
        if args.cancel {
            rpc.call::<CancelTasks>(&(), ids).map_err(no_master)?.1.for_each(&mut take);
        } else if args.retry {
            rpc.call::<RetryTasks>(&(), ids).map_err(no_master)?.1.for_each(&mut take);
        } else {
            rpc.call::<QueryTasks>(&(), ids).map_err(no_master)?.1.for_each(&mut take);
        }
    }
    let known = ask_segments(&mut rpc)?;
    if !rows.is_empty() || missing.is_empty() || args.json {
        show(&rows, &known, args.json)?;
    }
    if missing.is_empty() { Ok(Exit::Ok) } else { fail(Failure::new(Exit::NotFound, missing.join("\n"))) }
}

pub(super) fn copy(args: &Copy) -> Outcome {
    create(&args.key, None, args.to.as_deref(), &args.how)
}

pub(super) fn move_(args: &Move) -> Outcome {
    create(&args.key, Some(&args.from), args.to.as_deref(), &args.how)
}

fn create(key: &str, from: Option<&str>, to: Option<&str>, how: &How) -> Outcome {
    sys::catch_interrupts();
    let mut rpc = how.master.connect()?;
    let known = ask_segments(&mut rpc)?;
    let one = |name: &str| match named(&known, name)?[..] {
        [no] => Ok(no),
        _ => fail(Failure::usage(format!("{}: this node has several segments: name one", printable(name)))),
    };
    let task = NewTask {
        key: Key(key.as_bytes()),
        source: from.map(one).transpose()?,
        target: to.map(one).transpose()?,
    };
    let created = {
        let ((), mut created) = rpc.call::<CreateTasks>(&(), std::iter::once(task)).map_err(no_master)?;
        created.next().unwrap_or(Err(ErrorCode::InternalError))
    };
    let id = created.map_err(|code| crate::commands::refused(key, &code.into()))?;
    loop {
        let row = {
            let ((), mut found) = rpc.call::<QueryTasks>(&(), std::iter::once(id)).map_err(no_master)?;
            found.next().unwrap_or(Err(ErrorCode::TaskNotFound)).map(|task| (task.state, TaskRow::from(task)))
        };
        let (state, row) = row.map_err(|code| crate::commands::refused(key, &code.into()))?;
        if !how.wait || state.is_finished() {
            show(std::slice::from_ref(&row), &known, how.json)?;
            let failed = matches!(state, TaskState::Failed | TaskState::Canceled);
            return Ok(if failed { Exit::Failed } else { Exit::Ok });
        }
        if let Some(exit) = sys::wait_for_interrupt(Some(POLL_INTERVAL)) {
            return Ok(exit);
        }
    }
}

fn show(rows: &[TaskRow], known: &[SegmentRow], json: bool) -> anyhow::Result<()> {
    if json {
        return output::print_json(&rows);
    }
    if rows.is_empty() {
        return output::print("no tasks\n");
    }
    output::print(&task_table(rows, known, usize::MAX))
}

/// A table of tasks, within `columns` columns if possible.
pub(crate) fn task_table(rows: &[TaskRow], known: &[SegmentRow], columns: usize) -> String {
    let mut table = Table::new(&[
        ("task", Align::Right),
        ("object", Align::Left),
        ("bytes", Align::Right),
        ("state", Align::Left),
        ("why", Align::Left),
        ("from", Align::Left),
        ("to", Align::Left),
        ("tries", Align::Right),
        ("age", Align::Right),
        ("", Align::Left),
    ]);
    let name = |no: Option<SegmentNo>| no.map_or_else(|| "–".to_owned(), |no| segment_called(no, known));
    for row in rows {
        table.row([
            row.id.clone(),
            printable(&row.key),
            thousands(row.bytes),
            row.state.to_owned(),
            row.cause.to_owned(),
            printable(&name(row.from)),
            printable(&name(row.to)),
            row.attempts.to_string(),
            format!("{} s", figure(row.age_ms as f64 / 1e3)),
            row.error.clone().unwrap_or_default(),
        ]);
    }
    table.render_in(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_a_segment_or_all_of_a_node() {
        let no = SegmentNo::new;
        let row = |segment, name: &str, node: &str| SegmentRow {
            kind: "memory",
            segment: no(segment),
            name: name.into(),
            endpoint: String::new(),
            node: node.into(),
            state: "active",
            capacity_bytes: 1,
            used_bytes: 0,
            free_bytes_largest: 1,
        };
        let known = [row(1, "a", "00aa"), row(2, "b", "00aa"), row(3, "c", "00cc")];
        assert_eq!(named(&known, "b").unwrap(), [no(2)]);
        assert_eq!(named(&known, "3").unwrap(), [no(3)]);
        assert_eq!(named(&known, "00aa").unwrap(), [no(1), no(2)]);
        assert!(named(&known, "d").is_err() && named(&known, "").is_err());
    }

    #[test]
    fn a_drain_goes_on_until_it_is_empty_or_nothing_fits_elsewhere() {
        let drain = DrainInfo { state: SegmentState::Draining, ..DrainInfo::default() };
        assert!(goes_on(&drain));
        assert!(!goes_on(&DrainInfo { left_no_room: 3, ..drain }));
        assert!(goes_on(&DrainInfo { left_no_room: 3, moving: 1, ..drain }));
        assert!(!goes_on(&DrainInfo { left_bad: 1, ..drain }));
        assert!(goes_on(&DrainInfo { left_bad: 1, left_unfinished: 1, ..drain }));
        assert!(!goes_on(&DrainInfo { state: SegmentState::Drained, ..drain }));
    }

    #[test]
    fn a_segment_that_goes_before_it_is_drained_is_missed() {
        let drain =
            |segment, state| DrainInfo { segment: SegmentNo::new(segment), state, ..DrainInfo::default() };
        let last = [drain(1, SegmentState::Drained), drain(2, SegmentState::Draining)];
        assert_eq!(gone(&last, &last), None);
        assert_eq!(gone(&last, &last[1..]), None, "it was empty");
        assert_eq!(gone(&last, &last[..1]), Some(SegmentNo::new(2)));
        assert_eq!(gone(&last, &[last[0], drain(2, SegmentState::Drained)]), None);
    }

    #[test]
    fn every_state_of_a_task_has_its_name_back() {
        for state in ["pending", "processing", "done", "failed", "canceled"] {
            assert_eq!(TaskState::named(state).map(TaskState::name), Some(state));
        }
    }
}
