//! Property tests: the batch table, the slicer and the route against models that are simple enough to be
//! right.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use te_core::{
    BatchHandle, BatchTable, CancelReason, Completion, ErrorKind, HealthConfig, HealthRoute, Instant, Op,
    RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Route, Slice, Slicer, Status, Token,
    TransferRequest,
};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn request(len: u64, local: u64, remote: u64) -> TransferRequest {
    TransferRequest {
        op: Op::Write,
        local: RegionOffset::new(RegionId::new(3, 1), local),
        remote: RemoteOffset::new(RemoteRegionId::new(5, 1), remote),
        len,
    }
}

fn blank() -> Slice {
    let request = request(0, 0, 0);
    Slice { token: Token(0), local: request.local, remote: request.remote, len: 0, op: Op::Read }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn cuts_are_whole_slices_and_one_last_piece(slice_bytes in 0u32.., len in 0u64..1 << 40) {
        let slicer = Slicer::new(slice_bytes);
        let whole = u64::from(slicer.slice_bytes());
        // Requests with more pieces than a test can count are checked by arithmetic: all pieces are whole
        // except the last two.
        let mut left = len.min(whole * 1000 + len % (2 * whole));
        let mut pieces = Vec::new();
        while left > 0 {
            let piece = u64::from(slicer.cut(left));
            prop_assert!(piece > 0 && piece <= left);
            pieces.push(piece);
            left -= piece;
        }
        prop_assert!(pieces.iter().rev().skip(1).all(|&piece| piece == whole));
        if let [.., last] = pieces[..] {
            prop_assert!(last < whole + whole / 4);
            prop_assert!(pieces.len() == 1 || last >= whole / 4, "a tail of {last} of {whole} was not merged");
        }
        prop_assert_eq!(slicer.cut(0), 0);
    }
}

/// The calls of a caller of the table.
#[derive(Clone, Debug)]
enum Step {
    Create(Vec<u64>),
    /// Cut up to this many slices of a batch, of which the transport accepts this many.
    Submit(usize, usize, usize),
    /// End the n-th slice in flight, with success or not.
    End(usize, bool),
    Refuse(usize),
    Cancel(usize, bool),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![Just(0u64), 1u64..4000];
    let step = prop_oneof![
        2 => vec(len, 1..5).prop_map(Step::Create),
        6 => (0usize..6, 0usize..9, 0usize..9).prop_map(|(b, cut, accept)| Step::Submit(b, cut, accept)),
        8 => (0usize..64, prop::bool::weighted(0.9)).prop_map(|(n, ok)| Step::End(n, ok)),
        1 => (0usize..6).prop_map(Step::Refuse),
        1 => (0usize..6, any::<bool>()).prop_map(|(b, timeout)| Step::Cancel(b, timeout)),
        2 => (0usize..6).prop_map(Step::Free),
    ];
    vec(step, 1..200)
}

#[derive(Clone, Default)]
struct TaskModel {
    len: u64,
    cut: u64,
    done: u64,
    in_flight: usize,
    error: bool,
    stopped: bool,
}

impl TaskModel {
    fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.stopped || self.cut == self.len)
    }
}

struct BatchModel {
    handle: BatchHandle,
    tasks: Vec<TaskModel>,
    submitted: bool,
    canceled: Option<CancelReason>,
}

impl BatchModel {
    fn is_over(&self) -> bool {
        self.tasks.iter().all(TaskModel::is_over)
    }

    fn status(&self) -> Status {
        match (self.is_over(), self.tasks.iter().all(|task| task.done == task.len), self.canceled) {
            (false, ..) if self.submitted => Status::Pending,
            (false, ..) => Status::Waiting,
            (true, true, _) => Status::Completed,
            (true, false, Some(CancelReason::Canceled)) => Status::Canceled,
            (true, false, Some(CancelReason::TimedOut)) => Status::TimedOut,
            (true, false, None) => Status::Failed,
        }
    }
}

const SLICE: u64 = 512;

/// The table, and what a model of it knows.
struct Tables {
    table: BatchTable,
    batches: Vec<BatchModel>,
    freed: Vec<BatchHandle>,
    /// Token to (batch, task, length).
    in_flight: BTreeMap<u64, (BatchHandle, usize, u64)>,
}

impl Tables {
    fn new() -> Self {
        let table = BatchTable::new(4, 4);
        Self { table, batches: Vec::new(), freed: Vec::new(), in_flight: BTreeMap::new() }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        let batches = self.batches.len();
        match step {
            Step::Create(lens) => self.create(&lens),
            Step::Submit(which, cut, accept) => {
                which.checked_rem(batches).map_or(Ok(()), |index| self.submit(index, cut, accept))
            }
            Step::End(which, ok) => {
                which.checked_rem(self.in_flight.len()).map_or(Ok(()), |nth| self.end(nth, ok))
            }
            Step::Refuse(which) => which.checked_rem(batches).map_or(Ok(()), |index| self.refuse(index)),
            Step::Cancel(which, timed_out) => {
                let reason = if timed_out { CancelReason::TimedOut } else { CancelReason::Canceled };
                which.checked_rem(batches).map_or(Ok(()), |index| self.cancel(index, reason))
            }
            Step::Free(which) => which.checked_rem(batches).map_or(Ok(()), |index| self.free(index)),
        }
    }

    fn create(&mut self, lens: &[u64]) -> Result<(), TestCaseError> {
        let requests: Vec<_> = lens.iter().map(|&len| request(len, 1000, 2000)).collect();
        let created = self.table.create(requests.into_iter(), Slicer::new(SLICE as u32));
        if self.batches.len() == 4 {
            prop_assert_eq!(created.map_err(|error| error.kind), Err(ErrorKind::Full));
            return Ok(());
        }
        let handle = created.expect("room for another batch");
        let tasks = lens.iter().map(|&len| TaskModel { len, ..TaskModel::default() }).collect();
        self.batches.push(BatchModel { handle, tasks, submitted: false, canceled: None });
        Ok(())
    }

    fn submit(&mut self, index: usize, cut: usize, accept: usize) -> Result<(), TestCaseError> {
        let batch = &mut self.batches[index];
        let mut out = [blank(); 8];
        let count = self.table.next(batch.handle, &mut out[..cut.min(8)]).expect("live");
        // The expected slices, in order and without gaps.
        let mut expected = batch.tasks.iter().enumerate().flat_map(|(at, task)| {
            let mut from = task.cut;
            let stopped = task.stopped;
            std::iter::from_fn(move || {
                let len = u64::from(Slicer::new(SLICE as u32).cut(task.len - from));
                let piece = (at, from, len);
                from += len;
                (len > 0 && !stopped).then_some(piece)
            })
        });
        let mut pieces = Vec::new();
        for slice in &out[..count] {
            let (at, from, len) = expected.next().expect("no more slices than bytes");
            prop_assert_eq!((slice.local.offset, slice.remote.offset), (1000 + from, 2000 + from));
            prop_assert_eq!(u64::from(slice.len), len);
            pieces.push((at, len));
        }
        prop_assert!(count == cut.min(8) || expected.next().is_none(), "the table returned too few slices");
        drop(expected);
        let accepted = accept.min(count);
        self.table.accepted(&out[..accepted]);
        for (slice, (at, len)) in out[..accepted].iter().zip(pieces) {
            batch.submitted = true;
            batch.tasks[at].cut += len;
            batch.tasks[at].in_flight += 1;
            let twice = self.in_flight.insert(slice.token.0, (batch.handle, at, len));
            prop_assert!(twice.is_none(), "a token in flight was used again");
        }
        Ok(())
    }

    fn end(&mut self, nth: usize, ok: bool) -> Result<(), TestCaseError> {
        let (&token, &(handle, at, len)) = self.in_flight.iter().nth(nth).expect("nth of len");
        self.in_flight.remove(&token);
        let batch = self.batches.iter_mut().find(|batch| batch.handle == handle).expect("not freed");
        let task = &mut batch.tasks[at];
        task.in_flight -= 1;
        let completion = if ok {
            task.done += len;
            Completion::applied(Token(token))
        } else {
            task.stopped = true;
            task.error = true;
            Completion::unknown(Token(token), ErrorKind::Rail.into())
        };
        let over = self.table.complete(&completion);
        prop_assert_eq!(over, batch.is_over().then_some(handle));
        Ok(())
    }

    fn refuse(&mut self, index: usize) -> Result<(), TestCaseError> {
        let batch = &mut self.batches[index];
        let mut out = [blank()];
        if self.table.next(batch.handle, &mut out).expect("live") == 0 {
            return Ok(());
        }
        let at = batch.tasks.iter().position(|task| !task.stopped && task.cut < task.len).expect("next");
        batch.submitted = true;
        batch.tasks[at].stopped = true;
        batch.tasks[at].error = true;
        let over = self.table.refused(&out[0], ErrorKind::OutOfRange.into());
        prop_assert_eq!(over, batch.is_over().then_some(batch.handle));
        Ok(())
    }

    fn cancel(&mut self, index: usize, reason: CancelReason) -> Result<(), TestCaseError> {
        let batch = &mut self.batches[index];
        if !batch.is_over() {
            batch.canceled.get_or_insert(reason);
            batch.tasks.iter_mut().for_each(|task| task.stopped = true);
        }
        let over = self.table.cancel(batch.handle, reason).expect("live");
        prop_assert_eq!(over, batch.is_over().then_some(batch.handle));
        for (&token, of) in &self.in_flight {
            let is_of = self.table.is_of(batch.handle, Token(token));
            prop_assert_eq!(is_of, of.0 == batch.handle, "a cancel is about the slices of its batch alone");
        }
        Ok(())
    }

    fn free(&mut self, index: usize) -> Result<(), TestCaseError> {
        let result = self.table.free(self.batches[index].handle).map_err(|error| error.kind);
        if self.batches[index].is_over() {
            prop_assert_eq!(result, Ok(()));
            self.freed.push(self.batches.remove(index).handle);
        } else {
            prop_assert_eq!(result, Err(ErrorKind::Busy));
        }
        Ok(())
    }

    /// Compares everything that the table reports with the model.
    fn check(&mut self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.table.live(), self.batches.len());
        for batch in &self.batches {
            let whole = self.table.progress(batch.handle).expect("live");
            prop_assert_eq!(whole.status, batch.status());
            prop_assert_eq!(whole.bytes_done, batch.tasks.iter().map(|task| task.done).sum::<u64>());
            prop_assert_eq!(whole.error.is_some(), batch.tasks.iter().any(|task| task.error));
            let submitted = batch.tasks.iter().all(|task| task.stopped || task.cut == task.len);
            let left = self.table.next(batch.handle, &mut [blank()]).expect("live");
            prop_assert_eq!(
                left == 0,
                submitted,
                "nothing is left to cut exactly when all is submitted or stopped"
            );
            for (at, task) in batch.tasks.iter().enumerate() {
                let progress = self.table.task_progress(batch.handle, at).expect("live");
                prop_assert_eq!(progress.bytes_done, task.done);
                prop_assert_eq!(progress.status.is_terminal(), task.is_over());
            }
        }
        for handle in &self.freed {
            prop_assert_eq!(self.table.progress(*handle).map_err(|error| error.kind), Err(ErrorKind::Stale));
            prop_assert_eq!(self.table.free(*handle).map_err(|error| error.kind), Err(ErrorKind::Stale));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn the_batch_table_agrees_with_its_model(steps in steps()) {
        let mut tables = Tables::new();
        for step in steps {
            tables.step(step)?;
            tables.check()?;
        }
    }
}

/// The calls and events of a route.
#[derive(Clone, Debug)]
enum Event {
    Send(u32, u32),
    End(usize, u64, Option<ErrorKind>),
    Return(usize),
    Tick(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let kind = prop_oneof![
        6 => Just(None),
        2 => Just(Some(ErrorKind::Rail)),
        1 => Just(Some(ErrorKind::TimedOut)),
        1 => Just(Some(ErrorKind::AccessDenied)),
    ];
    let event = prop_oneof![
        5 => (0u32..16, 1u32..1 << 20).prop_map(|(mask, len)| Event::Send(mask, len)),
        5 => (0usize..32, 1u64..1_000_000, kind).prop_map(|(n, nanos, kind)| Event::End(n, nanos, kind)),
        1 => (0usize..32).prop_map(Event::Return),
        2 => (0u64..50_000_000).prop_map(Event::Tick),
    ];
    vec(event, 1..300)
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn the_route_keeps_its_books_and_its_pauses(events in events()) {
        const RAILS: usize = 4;
        let config = HealthConfig::default();
        let mut route = HealthRoute::new(&[100, 100, 150, 300], config);
        let mut in_flight: Vec<(usize, Slice)> = Vec::new();
        let mut bytes = [0u64; RAILS];
        let mut faults_in_row = [0u32; RAILS];
        let mut now = Instant::ZERO;
        for event in events {
            match event {
                Event::Send(mask, len) => {
                    let slice = Slice { len, ..blank() };
                    let usable = |rail: usize| {
                        mask & 1 << rail != 0
                            && route.health(rail).expect("a rail").paused_until.is_none_or(|until| until <= now)
                    };
                    let (any, open) = ((0..RAILS).any(usable), (0..RAILS).any(|rail| {
                        mask & 1 << rail != 0 && route.health(rail).expect("a rail").paused_until.is_none()
                    }));
                    match route.route(&slice, mask) {
                        Some(rail) => {
                            prop_assert!(mask & 1 << rail != 0, "rail {rail} does not reach the remote region");
                            let until = route.health(rail).expect("a rail").paused_until;
                            prop_assert!(until.is_none_or(|until| until <= now), "rail {rail} is paused");
                            route.accepted(rail, &slice);
                            bytes[rail] += u64::from(len);
                            if until.is_some() {
                                let again = route.route(&slice, 1 << rail);
                                prop_assert_eq!(again, None, "a paused rail gets one probe, not two");
                            }
                            in_flight.push((rail, slice));
                        }
                        None => prop_assert!(!open, "a rail without pause was passed over (any usable: {any})"),
                    }
                }
                Event::End(which, nanos, kind) => {
                    let Some(index) = which.checked_rem(in_flight.len()) else { continue };
                    let (rail, slice) = in_flight.swap_remove(index);
                    let end = match kind {
                        None => Completion::applied(slice.token),
                        Some(kind) => Completion::not_applied(slice.token, kind.into()),
                    };
                    route.completed(rail, &slice, &end, nanos, bytes[rail]);
                    bytes[rail] -= u64::from(slice.len);
                    match kind {
                        None => faults_in_row[rail] = 0,
                        Some(kind) if kind.is_rail_fault() => faults_in_row[rail] += 1,
                        Some(_) => {}
                    }
                    let paused = route.health(rail).expect("a rail").paused_until;
                    if kind.is_none() {
                        prop_assert_eq!(paused, None, "success brings a rail back");
                    } else if faults_in_row[rail] >= config.errors_max {
                        prop_assert!(paused.is_some(), "{} faults in a row and no pause", faults_in_row[rail]);
                    }
                    if let Some(until) = paused {
                        prop_assert!(until - now <= config.backoff_max);
                    }
                }
                Event::Return(which) => {
                    let Some(index) = which.checked_rem(in_flight.len()) else { continue };
                    let (rail, slice) = in_flight.swap_remove(index);
                    route.returned(rail, &slice);
                    bytes[rail] -= u64::from(slice.len);
                }
                Event::Tick(nanos) => {
                    now = Instant::from_nanos(now.as_nanos() + nanos);
                    route.tick(now);
                }
            }
            for (rail, &bytes) in bytes.iter().enumerate() {
                prop_assert_eq!(route.bytes_in_flight(rail), bytes);
                prop_assert!(route.health(rail).expect("a rail").bandwidth > 0);
            }
        }
    }

    #[test]
    fn a_faster_rail_gets_more_and_no_rail_starves(speeds in vec(1u64..20, 2..5), len in 4096u32..1 << 20) {
        let mut route = HealthRoute::new(&vec![100; speeds.len()], HealthConfig::default());
        let reachable = (1 << speeds.len()) - 1;
        let slice = Slice { len, ..blank() };
        // One server per rail: each sends its queue at its speed, in bytes per nanosecond.
        let mut free_at = vec![0u64; speeds.len()];
        let mut queue: Vec<(u64, usize, u64, u64)> = Vec::new();
        let mut sent = vec![0u64; speeds.len()];
        let mut now = 0;
        for _ in 0..4000 {
            while queue.len() < 32 {
                let rail = route.route(&slice, reachable).expect("no rail is paused");
                route.accepted(rail, &slice);
                free_at[rail] = free_at[rail].max(now) + u64::from(len) / speeds[rail];
                queue.push((free_at[rail], rail, now, route.bytes_in_flight(rail)));
                sent[rail] += 1;
            }
            let (at, _) = queue.iter().enumerate().min_by_key(|(_, entry)| entry.0).expect("32 of them");
            let (ends, rail, began, ahead) = queue.swap_remove(at);
            now = ends;
            route.tick(Instant::from_nanos(now));
            route.completed(rail, &slice, &Completion::applied(slice.token), ends - began, ahead);
        }
        let total: u64 = speeds.iter().sum();
        for (rail, &speed) in speeds.iter().enumerate() {
            let (share, fair) = (sent[rail] as f64 / 4032.0, speed as f64 / total as f64);
            prop_assert!(share > fair * 0.5 - 0.02 && share < fair * 1.5 + 0.05, "rail {rail}: {share} of {fair}");
        }
    }
}
