//! [`Batches`]: the batches of a session, by an id that is never used again, without a lock for readers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;

use super::EngineError;
use super::post::{Post, State};

/// Slots per chunk of the table. Chunks are allocated when they are needed and never freed.
const CHUNK_SLOTS: usize = 1024;
const CHUNKS: usize = 64;
/// Most batches of a session.
pub(super) const BATCHES_MAX: usize = CHUNK_SLOTS * CHUNKS;
/// Bits of an id that are the slot; the others count its uses.
const SLOT_BITS: u32 = BATCHES_MAX.ilog2();
/// Most requests that a batch may be allocated for.
const CAPACITY_MAX: usize = 1 << 20;

/// The batches of a session.
///
/// An id is the number of a slot and the number of its use, so it is looked up without a search, and an id
/// that was freed is not found. Looking up takes no lock and waits for no other thread: callers in C poll
/// their batches in tight loops.
pub(super) struct Batches {
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    free: Mutex<Free>,
}

struct Slot {
    /// The number of the present use, or of the next one if the slot is free.
    uses: AtomicU64,
    batch: ArcSwapOption<Batch>,
}

/// Slots without a batch.
struct Free {
    slots: Vec<u32>,
    /// Slots from this one on were never used.
    unused: u32,
    /// The first number of the uses of each slot.
    uses_from: u64,
}

/// Requests under one id.
pub(super) struct Batch {
    id: u64,
    capacity: usize,
    posts: Posts,
    /// Held while requests are added. The number of requests.
    used: Mutex<usize>,
}

/// The posts of a batch in their order: a list to which one thread at a time appends while any number of
/// others read it.
#[derive(Default)]
struct Posts {
    first: OnceLock<Box<Link>>,
}

struct Link {
    /// Number of requests of the batch before this post.
    before: usize,
    post: Post,
    next: OnceLock<Box<Link>>,
}

impl Batches {
    /// An empty table. Ids of two tables with distant `salt`s differ, so that an id of one session is unknown
    /// in another.
    pub(super) fn new(salt: u64) -> Self {
        // At least 1: no id is 0. The upper bits stay free for the uses to come.
        let uses_from = (salt >> 32).max(1);
        let free = Free { slots: Vec::new(), unused: 0, uses_from };
        Self { chunks: [const { OnceLock::new() }; CHUNKS], free: Mutex::new(free) }
    }

    /// Allocates an id for at most `capacity` requests.
    ///
    /// # Errors
    /// `TooManyBatches`; `Argument` for a capacity of more than 2^20.
    pub(super) fn allocate(&self, capacity: usize) -> Result<Arc<Batch>, EngineError> {
        if capacity > CAPACITY_MAX {
            return Err(EngineError::argument(format!(
                "a batch of {capacity} requests: allocate at most {CAPACITY_MAX}"
            )));
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match free.slots.pop() {
            Some(number) => number,
            None if (free.unused as usize) < BATCHES_MAX => {
                free.unused += 1;
                free.unused - 1
            }
            None => return Err(EngineError::TooManyBatches { batches_max: BATCHES_MAX }),
        };
        let slot = self.slot_or_new(number, free.uses_from);
        let id = slot.uses.load(Ordering::Relaxed) << SLOT_BITS | u64::from(number);
        let batch = Arc::new(Batch { id, capacity, posts: Posts::default(), used: Mutex::new(0) });
        slot.batch.store(Some(batch.clone()));
        Ok(batch)
    }

    /// The batch with this id. Takes no lock.
    ///
    /// # Errors
    /// `UnknownBatch`.
    pub(super) fn get(&self, id: u64) -> Result<Arc<Batch>, EngineError> {
        let found = self.slot(id).and_then(|slot| slot.batch.load_full());
        found.filter(|batch| batch.id == id).ok_or(EngineError::UnknownBatch { batch: id })
    }

    /// Runs `look` on the batch with this id. Takes no lock and counts no reference.
    ///
    /// # Errors
    /// `UnknownBatch`, and those of `look`.
    pub(super) fn look<T>(
        &self,
        id: u64,
        look: impl FnOnce(&Batch) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let unknown = EngineError::UnknownBatch { batch: id };
        let Some(slot) = self.slot(id) else { return Err(unknown) };
        match &*slot.batch.load() {
            Some(batch) if batch.id == id => look(batch),
            _ => Err(unknown),
        }
    }

    /// Frees a batch that has ended, and returns it.
    ///
    /// # Errors
    /// `UnknownBatch`; `BatchBusy` if it has not ended.
    pub(super) fn free(&self, id: u64) -> Result<Arc<Batch>, EngineError> {
        let batch = self.get(id)?;
        // Requests are added under this lock: none is added to a batch that is found to have ended.
        let used = batch.used.lock().unwrap_or_else(PoisonError::into_inner);
        self.look(id, |_| Ok(()))?;
        if !batch.state().is_over() {
            return Err(EngineError::BatchBusy { batch: id });
        }
        if let Some(slot) = self.slot(id) {
            slot.batch.store(None);
            slot.uses.fetch_add(1, Ordering::Relaxed);
            let number = id as u32 & (BATCHES_MAX as u32 - 1);
            self.free.lock().unwrap_or_else(PoisonError::into_inner).slots.push(number);
        }
        drop(used);
        Ok(batch)
    }

    /// All batches.
    pub(super) fn all(&self) -> Vec<Arc<Batch>> {
        let slots = self.chunks.iter().filter_map(OnceLock::get).flatten();
        slots.filter_map(|slot| slot.batch.load_full()).collect()
    }

    fn slot(&self, id: u64) -> Option<&Slot> {
        let number = id as usize & (BATCHES_MAX - 1);
        self.chunks[number / CHUNK_SLOTS].get().map(|chunk| &chunk[number % CHUNK_SLOTS])
    }

    fn slot_or_new(&self, number: u32, uses_from: u64) -> &Slot {
        let number = number as usize;
        let fresh = || Slot { uses: AtomicU64::new(uses_from), batch: ArcSwapOption::empty() };
        let chunk = self.chunks[number / CHUNK_SLOTS]
            .get_or_init(|| std::iter::repeat_with(fresh).take(CHUNK_SLOTS).collect());
        &chunk[number % CHUNK_SLOTS]
    }
}

impl Batch {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Adds the post of `requests` requests that `make` returns, if there is room for it.
    ///
    /// # Errors
    /// `BatchFull`, and those of `make`; nothing was added. `UnknownBatch`: it was freed meanwhile.
    pub(super) fn add(
        &self,
        batches: &Batches,
        requests: usize,
        make: impl FnOnce() -> Result<Post, EngineError>,
    ) -> Result<(), EngineError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if requests > self.capacity - *used {
            return Err(EngineError::BatchFull { capacity: self.capacity, used: *used });
        }
        batches.look(self.id, |_| Ok(()))?;
        let link = Link { before: *used, post: make()?, next: OnceLock::new() };
        self.posts.push(link);
        *used += requests;
        Ok(())
    }

    /// The post that has request number `task`, and the number of the request in it.
    pub(super) fn post_of(&self, task: usize) -> Option<(&Post, usize)> {
        let link = self.posts.iter().take_while(|link| link.before <= task).last()?;
        let task = task - link.before;
        (task < link.post.len()).then_some((&link.post, task))
    }

    /// The posts in the order in which they were added.
    pub(super) fn posts(&self) -> impl Iterator<Item = &Post> {
        self.posts.iter().map(|link| &link.post)
    }

    /// What is known about all requests together. A batch without requests is complete.
    pub(super) fn state(&self) -> State {
        self.posts().fold(State::Completed, |state, post| state.and(post.state()))
    }
}

impl Posts {
    fn iter(&self) -> impl Iterator<Item = &Link> {
        let mut next = self.first.get();
        std::iter::from_fn(move || {
            let link: &Link = next?;
            next = link.next.get();
            Some(link)
        })
    }

    fn push(&self, link: Link) {
        let end = self.iter().last().map_or(&self.first, |last| &last.next);
        // Only the thread that holds `Batch::used` appends.
        let appended = end.set(Box::new(link)).is_ok();
        debug_assert!(appended, "one thread at a time appends");
    }
}

/// A long list is freed link by link: the derived drop would recurse once per link.
impl Drop for Posts {
    fn drop(&mut self) {
        let mut next = self.first.take();
        while let Some(mut link) = next {
            next = link.next.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn done(tasks: usize) -> Result<Post, EngineError> {
        Ok(Post::without_transfers(tasks))
    }

    #[test]
    fn ids_are_never_used_again() {
        let batches = Batches::new(7 << 32);
        let mut seen = HashSet::new();
        for _ in 0..5_000 {
            let batch = batches.allocate(1).unwrap();
            assert!(seen.insert(batch.id()) && batch.id() != 0 && batch.id() != u64::MAX);
            batches.free(batch.id()).unwrap();
        }
        for &id in &seen {
            assert!(matches!(batches.get(id), Err(EngineError::UnknownBatch { .. })));
            assert!(matches!(batches.free(id), Err(EngineError::UnknownBatch { .. })));
            assert!(batches.look(id, |_| Ok(())).is_err());
        }
    }

    #[test]
    fn ids_of_another_session_and_arbitrary_numbers_are_unknown() {
        let (here, there) = (Batches::new(7 << 32), Batches::new(9 << 32));
        let id = here.allocate(1).unwrap().id();
        there.allocate(1).unwrap();
        assert!(there.get(id).is_err());
        for id in [0, 1, 12345, BATCHES_MAX as u64, u64::MAX, u64::MAX >> 1, 1 << 63] {
            assert!(here.get(id).is_err(), "{id:#x}");
        }
    }

    #[test]
    fn a_batch_takes_posts_until_it_is_full() {
        let batches = Batches::new(0);
        let batch = batches.allocate(5).unwrap();
        batch.add(&batches, 2, || done(2)).unwrap();
        batch.add(&batches, 3, || done(3)).unwrap();
        assert!(matches!(
            batch.add(&batches, 1, || done(1)),
            Err(EngineError::BatchFull { capacity: 5, used: 5 })
        ));
        let at = |task| batch.post_of(task).map(|(post, index)| (post.len(), index));
        assert_eq!([at(0), at(1), at(2), at(4)], [Some((2, 0)), Some((2, 1)), Some((3, 0)), Some((3, 2))]);
        assert_eq!([at(5), at(usize::MAX)], [None, None]);
        assert_eq!(batch.state(), State::Completed);
    }

    #[test]
    fn a_post_that_fails_leaves_the_batch_as_it_was() {
        let batches = Batches::new(0);
        let batch = batches.allocate(1).unwrap();
        assert!(batch.add(&batches, 1, || Err(EngineError::argument("no"))).is_err());
        assert!(batch.post_of(0).is_none());
        batch.add(&batches, 1, || done(1)).unwrap();
    }

    #[test]
    fn nothing_is_added_to_a_batch_that_was_freed() {
        let batches = Batches::new(0);
        let batch = batches.allocate(1).unwrap();
        batches.free(batch.id()).unwrap();
        let added = batch.add(&batches, 1, || panic!("no request may be submitted"));
        assert!(matches!(added, Err(EngineError::UnknownBatch { .. })));
    }

    #[test]
    fn the_table_has_a_limit_and_serves_again_after_a_batch_was_freed() {
        let batches = Batches::new(0);
        let first = batches.allocate(0).unwrap().id();
        for _ in 1..BATCHES_MAX {
            batches.allocate(0).unwrap();
        }
        assert!(matches!(batches.allocate(0), Err(EngineError::TooManyBatches { .. })));
        batches.free(first).unwrap();
        assert_ne!(batches.allocate(0).unwrap().id(), first);
        assert!(batches.allocate(CAPACITY_MAX + 1).is_err());
    }

    #[test]
    fn a_batch_of_very_many_posts_is_freed_without_recursion() {
        let batches = Batches::new(0);
        let batch = batches.allocate(100_000).unwrap();
        let mut end = &batch.posts.first;
        for before in 0..100_000 {
            let link = Link { before, post: Post::without_transfers(1), next: OnceLock::new() };
            end = &end.get_or_init(|| Box::new(link)).next;
        }
        batches.free(batch.id()).unwrap();
        drop(batch);
    }

    #[test]
    fn readers_race_with_frees_and_see_the_batch_or_nothing() {
        let batches = Batches::new(0);
        let latest = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..20_000 {
                    let batch = batches.allocate(1).unwrap();
                    batch.add(&batches, 1, || done(1)).unwrap();
                    latest.store(batch.id(), Ordering::Release);
                    batches.free(batch.id()).unwrap();
                }
            });
            while !writer.is_finished() {
                let id = latest.load(Ordering::Acquire);
                match batches.look(id, |batch| Ok((batch.id(), batch.post_of(0).is_some()))) {
                    Ok((found, posted)) => assert!(found == id && posted),
                    Err(EngineError::UnknownBatch { batch }) => assert_eq!(batch, id),
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }
}
