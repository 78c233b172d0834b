//! Recounts what the master counts: the usage of every tenant, the purpose of every byte of a segment, and
//! the tasks.

use store_core::allocator::Allocator as _;
use store_core::chunks::{stored_len, trailer_len};
use store_core::message::{
    ListQuery, Listed, PutOptions, RemoveMode, SegmentState, TaskInfo, TaskQuery, TaskState,
};
use store_core::{AllocatorKind, FullKey, Key, Placement, SegmentNo, TenantNo};

use crate::common::Core;
use crate::scenario::{NODES, TENANTS, split_key};
use crate::shadow::Violation;

const EVERYTHING: ListQuery<'_> = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };

impl Core {
    /// Every tenant is charged for exactly its own space, and no byte is allocated without a purpose.
    pub(crate) fn audit(&mut self) -> Result<(), Violation> {
        self.report.audits += 1;
        let now = self.shown();
        let (mut used, mut held) = (0, 0);
        let allocator = self.master.config().allocator.build(1 << 20);
        let mut wrong = Vec::new();
        for no in 0..=TENANTS.len() as u16 {
            let (mut bytes, mut objects) = (0, 0);
            let mut count = |listed: Listed<'_>| {
                let stored = stored_len(listed.len);
                bytes += stored.next_multiple_of(64) * u64::from(listed.replicas);
                used += allocator.rounded(stored) * u64::from(listed.replicas);
                objects += 1;
            };
            self.master.list_of(now, TenantNo::new(no), &EVERYTHING, |listed| {
                count(listed);
                true
            });
            self.master.unfinished_upserts(now, TenantNo::new(no)).for_each(count);
            let name = if no == 0 { "default" } else { TENANTS[usize::from(no) - 1] };
            let usage = self.master.tenant(name).unwrap_or_default();
            if (usage.bytes, usage.objects) != (bytes, objects) {
                wrong.push(format!("{name} has {bytes} bytes of {objects} objects, and {usage:?}"));
            }
            held += usage.held_bytes;
        }
        let stats = self.master.stats();
        let held_back = stats.quarantined_bytes + stats.deferred_bytes;
        if self.master.config().allocator == AllocatorKind::Offset && held != held_back {
            wrong.push(format!("tenants have {held} bytes pending release, and {stats:?}"));
        }
        let reserved = self.audit_tasks(&mut wrong);
        if used + held_back + reserved != stats.used_bytes {
            wrong.push(format!("{used} bytes of objects, {reserved} of tasks, and {stats:?}"));
        }
        for drain in self.master.drains() {
            if drain.state == SegmentState::Drained && drain.used_bytes + drain.blocks > 0 {
                return Err(Violation::NotDrained(format!("{drain:?} at {:?}", self.now)));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(Violation::Books(format!("at {:?}: {wrong:?}", self.now))) }
    }

    /// Bytes that are reserved for tasks.
    fn audit_tasks(&mut self, wrong: &mut Vec<String>) -> u64 {
        let (mut pending, mut processing, mut reserved) = (0, 0, 0);
        let mut done = Vec::new();
        let allocator = self.master.config().allocator.build(1 << 20);
        let query = TaskQuery { cursor: 0, limit: 4096, state: None };
        self.master.list_tasks(self.shown(), &query, |task: TaskInfo<'_>| {
            match task.state {
                TaskState::Pending => pending += 1,
                TaskState::Processing => processing += 1,
                TaskState::Done => done.push(task.id),
                TaskState::Failed | TaskState::Canceled => {}
            }
            if !task.state.is_finished() {
                reserved += allocator.rounded(stored_len(task.len));
            }
            if task.state != TaskState::Done && self.done.contains(&task.id) {
                wrong.push(format!("{task:?} was done"));
            }
            true
        });
        self.done.extend(done);
        let report = self.master.task_report();
        if (report.pending, report.processing) != (pending, processing) {
            wrong.push(format!("{pending} tasks are pending and {processing} are processed, and {report:?}"));
        }
        let ended = report.done_total + report.failed_total + report.canceled_total;
        // A task that is retried after its end ends more than once.
        if report.created_total > ended + pending + processing {
            wrong.push(format!("a task is lost: {report:?}"));
        }
        reserved
    }

    /// Whether everything that is left on a segment is damaged: it cannot be copied, and a single reader's
    /// report is not enough.
    pub(crate) fn is_rotten(&self, segment: SegmentNo) -> bool {
        let is_there = |key: &[u8]| {
            let (tenant, name) = split_key(key);
            let found =
                self.master.find_replicas(FullKey { tenant: TenantNo::new(tenant as u16 + 1), key: name });
            found.is_ok_and(|replicas| replicas.iter().any(|replica| replica.segment == segment))
        };
        let on_it = self.visible.iter().filter(|(key, _)| is_there(key));
        let mut on_it = on_it.map(|(_, seen)| self.shadow.is_flipped(seen.generation, segment));
        on_it.all(|flipped| flipped)
    }

    /// No task is left, every byte belongs to an object, and after the objects were removed no byte is
    /// allocated.
    pub(crate) fn check_space(&mut self) -> Result<(), Violation> {
        self.audit()?;
        let now = self.shown();
        let master = &mut self.master;
        let (stats, tasks) = (master.stats(), master.task_report());
        if stats.quarantined_bytes + stats.deferred_bytes + stats.objects_processing > 0 {
            return Err(Violation::Leak(format!("{stats:?}")));
        }
        if tasks.pending + tasks.processing > 0 {
            return Err(Violation::Stuck(format!("{tasks:?}")));
        }
        let mut keys = Vec::new();
        for tenant in 0..=TENANTS.len() as u16 {
            master.list_of(now, TenantNo::new(tenant), &EVERYTHING, |listed| {
                keys.push((tenant, listed.key.0.to_vec()));
                true
            });
        }
        for (tenant, key) in &keys {
            assert_eq!(
                master.remove(now, FullKey { tenant: TenantNo::new(*tenant), key }, RemoveMode::Force),
                Ok(())
            );
        }
        let later = now + std::time::Duration::from_secs(1);
        master.handle_timeout(later);
        for usage in master.tenants() {
            if usage.bytes + usage.held_bytes + usage.objects + usage.hard_pinned_bytes > 0 {
                return Err(Violation::Leak(format!("{usage:?}")));
            }
        }
        let segments: Vec<(SegmentNo, u64, u64)> =
            master.segments().map(|info| (info.segment, info.used, info.len)).collect();
        if self.scenario.segment_bytes > 0 && segments.len() != NODES {
            return Err(Violation::Leak(format!("{} segments of {NODES} came back", segments.len())));
        }
        for (segment, used, len) in segments {
            let options =
                PutOptions { replicas: 1, placement: Placement::on(segment), ..PutOptions::DEFAULT };
            let data = len - trailer_len(len);
            let whole = master.put_start(later, format!("whole {segment}").as_bytes(), data, &options);
            if used != 0
                || whole.map_or(SegmentNo::NONE, |allocation| allocation.replicas[0].segment) != segment
            {
                return Err(Violation::Leak(format!(
                    "segment {segment} has {used} bytes used, whole: {whole:?}"
                )));
            }
        }
        Ok(())
    }
}
