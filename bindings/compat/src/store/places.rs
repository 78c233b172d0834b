//! Where objects are: replicas, and the tasks that copy and move them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use store_client::{Client, ErrorCode, SegmentNo, StoreError, TaskEntry, TaskId, TaskState};

use super::Store;
use super::objects::code_of;
use crate::codes::{self, StoreCode, store as code};

/// A readable replica of an object. All replicas are in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Name of the segment that it is on, as [`Store::hostname`] of the process that contributes it; empty
    /// for a segment that has gone meanwhile.
    pub segment: String,
    /// Address of the first byte in the segment.
    pub addr: u64,
    /// Length of the object, bytes.
    pub len: u64,
}

/// Number of a copy or a move, as callers see it: the number of its first task, and the distances of the
/// others. It can be asked for by every store.
pub type TaskNumber = (u64, u64);

/// What a copy or a move has done so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its number.
    pub number: TaskNumber,
    /// Whether the replica at the source goes.
    pub is_move: bool,
    /// How far it is.
    pub progress: Progress,
    /// When it was ordered, milliseconds since 1970.
    pub created_ms: u64,
    /// When it was in this state, milliseconds since 1970: at the order while it is pending, and now.
    pub seen_ms: u64,
    /// The node that carries it out; 0 when that is not known.
    pub node: u64,
    /// Why it failed; empty otherwise.
    pub message: String,
}

/// How far a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Its node has not begun.
    Pending,
    /// Its node carries it out.
    Processing,
    /// It has failed, or was canceled.
    Failed,
    /// The new replicas are readable.
    Done,
}

/// The number of a copy that had nothing to do.
const NOTHING_TO_DO: TaskNumber = (u64::MAX, 0);
/// Bits for the distance of a task from the first one.
const DISTANCE_BITS: u32 = 8;
/// Some targets of a copy were refused: it fails when the others are done.
const REFUSED: u64 = 1 << 63;

impl Store {
    /// The readable replicas of an object. As in Mooncake, it gets a lease.
    ///
    /// # Errors
    /// -704; no answer from the master.
    pub fn replicas(&self, key: &[u8]) -> Result<Vec<Replica>, StoreCode> {
        self.batch_replicas(&[key]).pop().unwrap_or(Err(code::INTERNAL_ERROR))
    }

    /// As [`replicas`](Self::replicas), of many objects.
    pub fn batch_replicas<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<Result<Vec<Replica>, StoreCode>> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let answer = self.with_master(|client| client.master().batch_locate(&keys));
        let located = match answer {
            Ok(located) => located,
            Err(code) => return vec![Err(code); keys.len()],
        };
        let segments = located.iter().flatten().flatten().flat_map(|object| &object.replicas);
        let segments: Vec<SegmentNo> = segments.map(|replica| replica.segment).collect();
        let names = self.names_of(&segments).unwrap_or_default();
        let mut names = names.into_iter();
        let mut of = |object: store_client::Located| {
            let replicas = object.replicas.iter().map(|replica| Replica {
                segment: names.next().unwrap_or_default(),
                addr: replica.addr,
                len: object.len,
            });
            replicas.collect::<Vec<_>>()
        };
        located
            .into_iter()
            .map(|object| match object {
                Ok(Some(object)) => Ok(of(object)),
                Ok(None) => Err(code::OBJECT_NOT_FOUND),
                Err(code) => Err(codes::of_code(code)),
            })
            .collect()
    }

    /// Drops the replicas that objects have on the segment with this name, or all replicas if the name is
    /// empty. Returns the positions of the keys that had any. Objects with a lease are left alone.
    pub fn replica_clear<K: AsRef<[u8]>>(&self, keys: &[K], segment: &str) -> Vec<usize> {
        let segment = match segment {
            "" => None,
            name => match self.numbers_of(&[name]).map(|found| found[0]) {
                Ok(Some(segment)) => Some(segment),
                Ok(None) | Err(_) => return Vec::new(),
            },
        };
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let cleared = self.with_master(|client| client.master().batch_clear_replicas(&keys, segment));
        let cleared = cleared.unwrap_or_default();
        cleared.iter().enumerate().filter(|(_, cleared)| cleared.is_ok()).map(|(at, _)| at).collect()
    }

    /// Orders copies of an object on the segments with these names. A segment that has a replica already is
    /// done.
    ///
    /// # Errors
    /// -600 for a name that no segment has, and for no names; -704; why no target can have a copy.
    pub fn copy_task<N: AsRef<str>>(&self, key: &[u8], targets: &[N]) -> Result<TaskNumber, StoreCode> {
        let names: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        let mut segments = self.known_numbers_of(key, &names)?;
        segments.sort_unstable();
        segments.dedup();
        if segments.is_empty() {
            log::error!("a copy needs at least one target");
            return Err(code::INVALID_PARAMS);
        }
        let ordered = self.with_master(|client| client.master().copy(key, &segments))?;
        number_of(&ordered)
    }

    /// Orders a move of the replica on one segment to another one.
    ///
    /// # Errors
    /// -600 for a name that no segment has, and for the same one twice; -704; -710 without a replica on
    /// `source`.
    pub fn move_task(&self, key: &[u8], source: &str, target: &str) -> Result<TaskNumber, StoreCode> {
        let segments = self.known_numbers_of(key, &[source, target])?;
        if segments[0] == segments[1] {
            log::error!("a move from `{}` to itself", source.escape_debug());
            return Err(code::INVALID_PARAMS);
        }
        let ordered =
            self.with_master(|client| client.master().move_(key, segments[0], Some(segments[1])))?;
        number_of(&[Ok(ordered)])
    }

    /// What a copy or a move has done so far.
    ///
    /// # Errors
    /// -1400 for a number that no task has, or that ended long ago.
    pub fn query_task(&self, number: TaskNumber) -> Result<Task, StoreCode> {
        if number == NOTHING_TO_DO {
            let progress = Progress::Done;
            let (created_ms, message) = (epoch_ms(), String::new());
            let seen_ms = created_ms;
            return Ok(Task { number, is_move: false, progress, created_ms, seen_ms, node: 0, message });
        }
        let tasks = self.with_master(|client| {
            let mut master = client.master();
            tasks_of(number).map(|task| master.task(task)).collect::<Result<Vec<TaskEntry>, _>>()
        })?;
        let progress = progress_of(&tasks, number.1 & REFUSED != 0);
        let age = tasks.iter().map(|task| task.age_ms).max().unwrap_or_default();
        let failed = tasks.iter().find_map(|task| task.error.filter(|_| progress == Progress::Failed));
        let target = tasks.first().and_then(|task| task.target);
        Ok(Task {
            number,
            is_move: tasks.iter().any(|task| task.source.is_some()),
            progress,
            created_ms: epoch_ms().saturating_sub(age),
            seen_ms: epoch_ms().saturating_sub(if progress == Progress::Pending { age } else { 0 }),
            node: target.and_then(|segment| self.node_of(segment)).unwrap_or_default(),
            message: failed.map(|code| code.to_string()).unwrap_or_default(),
        })
    }

    fn with_master<T>(&self, ask: impl FnOnce(&mut Client) -> Result<T, StoreError>) -> Result<T, StoreCode> {
        self.run(|worker| {
            let asked = ask(worker.client.cluster()?);
            asked.map_err(|error| code_of(worker, &error))
        })
    }

    fn names_of(&self, segments: &[SegmentNo]) -> Result<Vec<String>, StoreCode> {
        let inner = self.inner()?;
        self.with_master(|client| inner.names.names_of(client, segments))
    }

    fn node_of(&self, segment: SegmentNo) -> Option<u64> {
        let inner = self.inner().ok()?;
        self.with_master(|client| inner.names.node_of(client, segment)).ok().flatten()
    }

    fn numbers_of(&self, names: &[&str]) -> Result<Vec<Option<SegmentNo>>, StoreCode> {
        let inner = self.inner()?;
        self.with_master(|client| inner.names.numbers_of(client, names))
    }

    /// As [`numbers_of`](Self::numbers_of), for an order that concerns this key. That there is no such object
    /// is said before that there is no such segment.
    fn known_numbers_of(&self, key: &[u8], names: &[&str]) -> Result<Vec<SegmentNo>, StoreCode> {
        let found = self.numbers_of(names)?;
        if let Some(at) = found.iter().position(Option::is_none) {
            log::error!("there is no segment `{}`", names[at].escape_debug());
            let is_missing = self.size(key) == i64::from(code::OBJECT_NOT_FOUND);
            return Err(if is_missing { code::OBJECT_NOT_FOUND } else { code::INVALID_PARAMS });
        }
        Ok(found.into_iter().flatten().collect())
    }
}

fn epoch_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// The number for tasks that were ordered together. A target that has a replica already needs none.
fn number_of(ordered: &[Result<TaskId, ErrorCode>]) -> Result<TaskNumber, StoreCode> {
    let mut tasks: Vec<u64> = ordered.iter().flatten().map(|task| task.get()).collect();
    tasks.sort_unstable();
    tasks.dedup();
    let refusals = ordered.iter().filter_map(|task| task.as_ref().err());
    let refused: Vec<ErrorCode> =
        refusals.copied().filter(|code| *code != ErrorCode::ReplicaAlreadyExists).collect();
    let Some(&last) = tasks.last() else {
        return refused.first().map_or(Ok(NOTHING_TO_DO), |code| Err(codes::of_code(*code)));
    };
    for code in &refused {
        log::warn!("a target of a copy is refused: {code}");
    }
    // Tasks that were ordered together have numbers in a row. One that is older than these was ordered by an
    // earlier call, and has a number from it.
    let near = (1 << DISTANCE_BITS) - 1;
    let room = (u64::BITS - 1) / DISTANCE_BITS;
    let recent: Vec<u64> = tasks.into_iter().filter(|task| last - task <= near).collect();
    let first = recent[0];
    let distances = recent.iter().skip(1).take(room as usize).enumerate();
    let packed =
        distances.fold(0, |packed, (at, task)| packed | (task - first) << (at as u32 * DISTANCE_BITS));
    Ok((first, packed | if refused.is_empty() { 0 } else { REFUSED }))
}

/// The tasks of a number.
fn tasks_of((first, packed): TaskNumber) -> impl Iterator<Item = TaskId> {
    let distances = (0..u64::BITS / DISTANCE_BITS).map(move |at| (packed & !REFUSED) >> (at * DISTANCE_BITS));
    let distances = distances.map(|rest| rest & ((1 << DISTANCE_BITS) - 1)).filter(|distance| *distance > 0);
    let others = distances.map(move |distance| first.wrapping_add(distance));
    std::iter::once(first).chain(others).map(TaskId::new)
}

fn progress_of(tasks: &[TaskEntry], is_refused: bool) -> Progress {
    let count = |wanted: &[TaskState]| tasks.iter().filter(|task| wanted.contains(&task.state)).count();
    let (pending, failed) = (count(&[TaskState::Pending]), count(&[TaskState::Failed, TaskState::Canceled]));
    let done = count(&[TaskState::Done]);
    if pending == tasks.len() {
        Progress::Pending
    } else if done + failed < tasks.len() {
        Progress::Processing
    } else if failed > 0 || is_refused {
        Progress::Failed
    } else {
        Progress::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_the_tasks_that_it_was_made_of() {
        let refused = ErrorCode::ReplicaAlreadyExists;
        for ids in [vec![1], vec![7, 8, 9], vec![300, 40, 41, 295], vec![u64::MAX - 9, u64::MAX - 1]] {
            let ordered: Vec<_> = ids.iter().map(|id| Ok(TaskId::new(*id))).chain([Err(refused)]).collect();
            let number = number_of(&ordered).expect("tasks were ordered");
            let last = ids.iter().max().expect("there are tasks");
            let mut wanted: Vec<u64> = ids.iter().copied().filter(|id| last - id < 256).collect();
            wanted.sort_unstable();
            assert_eq!(tasks_of(number).map(TaskId::get).collect::<Vec<_>>(), wanted);
            assert_eq!(number.1 & REFUSED, 0);
        }
    }

    #[test]
    fn a_copy_that_finds_its_replicas_is_done_and_one_that_finds_no_room_is_refused() {
        assert_eq!(number_of(&[Err(ErrorCode::ReplicaAlreadyExists)]), Ok(NOTHING_TO_DO));
        assert_eq!(number_of(&[Err(ErrorCode::ObjectNotFound)]), Err(-704));
        let some = number_of(&[Ok(TaskId::new(5)), Err(ErrorCode::NoAvailableHandle)]).expect("one task");
        assert_eq!((some.0, some.1 & REFUSED), (5, REFUSED));
        assert_eq!(tasks_of(some).collect::<Vec<_>>(), [TaskId::new(5)]);
    }
}
