//! Open segments of a session, by name and by number, and how they follow their owners through restarts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use te_core::{Access, Op};
use te_engine::{RemoteRegion, SegmentError, SegmentHandle, TransferEngine};

use super::EngineError;

/// The number of a segment of a session, as the C interface passes it. It stays the same when the owner
/// restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentNumber(u32);

impl SegmentNumber {
    /// The session's own memory (`LOCAL_SEGMENT`).
    pub const LOCAL: Self = Self(0);

    /// The segment with this number, which may not exist. `None` for a negative number.
    #[must_use]
    pub fn from_raw(raw: i32) -> Option<Self> {
        u32::try_from(raw).ok().map(Self)
    }

    /// The number.
    #[must_use]
    pub const fn to_raw(self) -> i32 {
        // `SEGMENTS_MAX` is far below the largest number.
        self.0 as i32
    }
}

/// Most names that one session opens.
const SEGMENTS_MAX: usize = 65_536;
/// Longest name, bytes.
const NAME_BYTES_MAX: usize = 1024;

/// The segments of a session.
pub(super) struct Segments {
    rows: RwLock<Rows>,
}

struct Rows {
    by_name: HashMap<Arc<str>, SegmentNumber>,
    /// By number.
    all: Vec<Arc<Segment>>,
}

/// One segment. Its owner may have restarted since it was opened: then it is opened again before its next
/// use.
pub(super) struct Segment {
    name: Arc<str>,
    /// What is attached. `None`: nothing, because it was closed, or never opened.
    attached: RwLock<Option<Arc<Attached>>>,
    /// A transfer has failed since the owner was last asked.
    suspect: AtomicBool,
    /// How often it was opened and not closed.
    opens: AtomicU32,
    /// Held while a thread asks the owner.
    asking: Mutex<()>,
}

/// A segment as it was when its owner was last asked.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) handle: SegmentHandle,
    /// In the order of their addresses.
    regions: Vec<RemoteRegion>,
}

impl Attached {
    /// Whether the owner exports the same as when `other` was made: a transfer that failed then would fail
    /// again.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        self.handle == other.handle && self.regions == other.regions
    }

    /// Whether the owner is the same process as when `other` was made.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        self.handle == other.handle
    }

    /// Whether `len` bytes at `addr` lie in one region that the owner exports for this direction.
    pub(super) fn allows(&self, op: Op, addr: u64, len: u64) -> bool {
        let after = self.regions.partition_point(|region| region.addr <= addr);
        let Some(region) = after.checked_sub(1).map(|at| &self.regions[at]) else { return false };
        let needed = match op {
            Op::Read => Access::REMOTE_READ,
            Op::Write => Access::REMOTE_WRITE,
        };
        region.access.contains(needed)
            && (addr - region.addr).checked_add(len).is_some_and(|end| end <= region.len)
    }
}

impl Segments {
    /// The table with the session's own segment, which is opened at its first use.
    pub(super) fn new(own_name: &str) -> Self {
        let own: Arc<str> = own_name.into();
        let by_name = HashMap::from([(own.clone(), SegmentNumber::LOCAL)]);
        Self { rows: RwLock::new(Rows { by_name, all: vec![Arc::new(Segment::new(own))] }) }
    }

    /// Opens the segment `name`; leading slashes are dropped, as in Mooncake. A name that is open has the
    /// same number again, and its owner is not asked.
    ///
    /// # Errors
    /// `Argument` for a name that is empty or too long, and when too many names are open; `Segment`.
    pub(super) fn open(&self, engine: &TransferEngine, name: &str) -> Result<SegmentNumber, EngineError> {
        let name = checked(name)?;
        if let Some((number, segment)) = self.find(name) {
            segment.current(engine)?;
            segment.opens.fetch_add(1, Ordering::Relaxed);
            return Ok(number);
        }
        let segment = Arc::new(Segment::new(name.into()));
        // The owner is asked before the table is locked: a name that does not exist takes no place in it.
        segment.current(engine)?;
        segment.opens.store(1, Ordering::Relaxed);
        let mut rows = self.rows.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(&number) = rows.by_name.get(name) {
            // Another thread was faster. Its segment is that of the table; both share one handle, of which
            // each has one use.
            segment.detach(engine);
            rows.all[number.0 as usize].opens.fetch_add(1, Ordering::Relaxed);
            return Ok(number);
        }
        if rows.all.len() >= SEGMENTS_MAX {
            segment.detach(engine);
            return Err(EngineError::argument(format!(
                "{SEGMENTS_MAX} segments were opened: a session opens no more"
            )));
        }
        let number = SegmentNumber(rows.all.len() as u32);
        rows.by_name.insert(segment.name.clone(), number);
        rows.all.push(segment);
        Ok(number)
    }

    /// The segment with this number.
    ///
    /// # Errors
    /// `Argument` for a number that was never given out.
    pub(super) fn get(&self, number: SegmentNumber) -> Result<Arc<Segment>, EngineError> {
        let rows = self.rows.read().unwrap_or_else(PoisonError::into_inner);
        rows.all
            .get(number.0 as usize)
            .cloned()
            .ok_or_else(|| EngineError::argument(format!("there is no segment {}: open it first", number.0)))
    }

    /// The segment of this name, if it was opened.
    pub(super) fn find(&self, name: &str) -> Option<(SegmentNumber, Arc<Segment>)> {
        let rows = self.rows.read().unwrap_or_else(PoisonError::into_inner);
        let number = *rows.by_name.get(name)?;
        Some((number, rows.all[number.0 as usize].clone()))
    }

    /// Closes a segment: after as many calls as it was opened, its remote regions are detached. The number
    /// stays valid, and a later use opens the segment again.
    ///
    /// # Errors
    /// `Argument` for a number that was never given out.
    pub(super) fn close(&self, engine: &TransferEngine, number: SegmentNumber) -> Result<(), EngineError> {
        let segment = self.get(number)?;
        let one_less = |opens: u32| opens.checked_sub(1);
        let before = segment.opens.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less);
        if before == Ok(1) && number != SegmentNumber::LOCAL {
            segment.detach(engine);
        }
        Ok(())
    }

    /// All segments that are attached.
    pub(super) fn attached(&self) -> Vec<Arc<Segment>> {
        let rows = self.rows.read().unwrap_or_else(PoisonError::into_inner);
        rows.all.iter().filter(|segment| segment.attached().is_some()).cloned().collect()
    }
}

impl Segment {
    fn new(name: Arc<str>) -> Self {
        Self {
            name,
            attached: RwLock::new(None),
            suspect: AtomicBool::new(false),
            opens: AtomicU32::new(0),
            asking: Mutex::new(()),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn attached(&self) -> Option<Arc<Attached>> {
        self.attached.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that a transfer has failed: before the next use, the owner is asked.
    pub(super) fn suspect(&self) {
        self.suspect.store(true, Ordering::Release);
    }

    /// The segment, opened if it is not open, and refreshed if a transfer has failed since.
    ///
    /// # Errors
    /// `Segment`.
    pub(super) fn current(&self, engine: &TransferEngine) -> Result<Arc<Attached>, EngineError> {
        match self.attached() {
            Some(attached) if !self.suspect.load(Ordering::Acquire) => Ok(attached),
            known => self.ask(engine, known.as_ref()),
        }
    }

    /// Asks the owner what it exports, unless another thread has done so since the caller saw `known`. After
    /// a restart of the owner the segment is opened again.
    ///
    /// # Errors
    /// `Segment`.
    pub(super) fn ask(
        &self,
        engine: &TransferEngine,
        known: Option<&Arc<Attached>>,
    ) -> Result<Arc<Attached>, EngineError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.attached();
        if let Some(now) = &now
            && !known.is_some_and(|known| Arc::ptr_eq(known, now))
        {
            return Ok(now.clone());
        }
        // Cleared first: a transfer that fails meanwhile makes it suspect again.
        let was_suspect = self.suspect.swap(false, Ordering::AcqRel);
        let asked = self.ask_owner(engine, now.as_deref());
        match asked {
            Ok(handle) => {
                let regions = engine.segment_regions(handle).map_err(|source| self.failed(source))?;
                let attached = Arc::new(Attached { handle, regions });
                *self.attached.write().unwrap_or_else(PoisonError::into_inner) = Some(attached.clone());
                Ok(attached)
            }
            Err(source) => {
                if was_suspect {
                    self.suspect();
                }
                Err(self.failed(source))
            }
        }
    }

    fn ask_owner(
        &self,
        engine: &TransferEngine,
        now: Option<&Attached>,
    ) -> Result<SegmentHandle, SegmentError> {
        let Some(now) = now else { return engine.open_segment(&self.name) };
        match engine.refresh_segment(now.handle) {
            Ok(()) => Ok(now.handle),
            Err(SegmentError::Restarted { .. } | SegmentError::NotFound) => {
                log::info!("segment {:?} is opened again: its owner has restarted", self.name);
                let handle = engine.open_segment(&self.name)?;
                close(engine, now.handle);
                Ok(handle)
            }
            Err(error) => Err(error),
        }
    }

    fn detach(&self, engine: &TransferEngine) {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let attached = self.attached.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(attached) = attached {
            close(engine, attached.handle);
        }
    }

    pub(super) fn failed(&self, source: SegmentError) -> EngineError {
        EngineError::Segment { name: self.name.to_string(), source }
    }
}

/// Closes a handle of the engine. One that transfers still use stays until the engine stops.
fn close(engine: &TransferEngine, handle: SegmentHandle) {
    if let Err(error) = engine.close_segment(handle) {
        log::debug!("a segment stays open: {error}");
    }
}

/// A name without its leading slashes.
pub(super) fn checked(name: &str) -> Result<&str, EngineError> {
    let name = name.trim_start_matches('/');
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let len = name.len();
        return Err(EngineError::argument(format!(
            "a segment name of {len} bytes: give 1 to {NAME_BYTES_MAX} bytes, such as host:port"
        )));
    }
    Ok(name)
}
