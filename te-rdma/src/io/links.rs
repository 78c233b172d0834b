//! The states of our queue pairs: made, offered, connected, in error, destroyed.

use core::time::Duration;

use te_core::{Error, ErrorKind, Instant};
use te_fabric::Slab;
use te_fabric::table::Name;

use super::link::{Link, Phase};
use crate::stats::Stats;
use crate::sys::verbs::{MrAccess, QpConfig, QpStep, Verbs};

/// Our queue pairs, by index, and by a name that completions carry.
#[derive(Debug, Default)]
pub(crate) struct Links {
    links: Slab<Box<Link>, u32>,
    /// Work requests posted and not ended, on all queue pairs.
    outstanding: u32,
    /// Queue pairs in error.
    flushing: u32,
    next_generation: u32,
    made: u64,
    destroyed: u64,
    /// How often a queue pair with posted work was put in error.
    flushes: u64,
    quarantined_bytes: u64,
}

/// The result of destroying a queue pair.
#[derive(Debug)]
pub(crate) enum Destroyed {
    /// It is destroyed. Work that is still posted on it ends with its own failure or, without one, with this
    /// error; `None`: it is sent again.
    Gone(Box<Link>, Option<Error>),
    /// The device refused; it is tried again at this time. The device may still execute its posted work.
    Kept(Instant),
    /// There is none with this index.
    Unknown,
}

/// How long a queue pair in error may take to flush.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlushLimits {
    pub(crate) now: Instant,
    /// A queue pair in error is destroyed after this time if it has not flushed, milliseconds.
    pub(crate) flush_ms_max: u32,
    /// The device is lost: nothing flushes any more.
    pub(crate) device_lost: bool,
}

impl Links {
    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    /// The bound for a walk over all of them.
    pub(crate) fn bound(&self) -> u32 {
        self.links.bound()
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Link> {
        self.links.get(index).map(|link| &**link)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Link> {
        self.links.get_mut(index).map(|link| &mut **link)
    }

    /// The index of the queue pair with this name, unless it is destroyed.
    #[inline]
    pub(crate) fn index(&self, name: u32) -> Option<u32> {
        self.links.index(name)
    }

    #[inline]
    pub(crate) const fn outstanding(&self) -> u32 {
        self.outstanding
    }

    pub(crate) const fn any_flushing(&self) -> bool {
        self.flushing > 0
    }

    pub(crate) const fn count(&self, stats: &mut Stats) {
        stats.qps_made = self.made;
        stats.qps_destroyed = self.destroyed;
        stats.flushes = self.flushes;
        stats.quarantined_bytes = self.quarantined_bytes;
    }

    /// Makes a queue pair to `peer`, in phase `Offered`. It gives peers no access to our memory.
    ///
    /// # Errors
    /// The provider's; `Full` when there are no more names.
    pub(crate) fn make<V: Verbs>(
        &mut self,
        verbs: &mut V,
        (peer, number): (u32, u8),
        shape: QpConfig,
        (psn, mtu): (u32, u32),
    ) -> Result<&Link, Error> {
        if self.links.len() as u64 >= <u32 as Name>::SLOTS_MAX {
            return Err(ErrorKind::Full.into());
        }
        let qp = verbs.create_qp(shape)?;
        if let Err(error) = verbs.modify_qp(qp.handle, QpStep::Init(MrAccess::empty())) {
            let _ = verbs.destroy_qp(qp.handle);
            return Err(error);
        }
        self.made += 1;
        self.next_generation = self.next_generation.wrapping_add(1);
        let (index, name) = self.links.reserve();
        let pieces = shape.depth as usize * shape.sges as usize;
        let generation = self.next_generation;
        let link = Link { generation, psn, mtu, ..Link::new(qp, peer, number, name, pieces) };
        self.links.put(index, Box::new(link));
        self.get(index).ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// Notes that `count` work requests were posted on a queue pair.
    #[inline]
    pub(crate) const fn posted(&mut self, count: u32) {
        self.outstanding += count;
    }

    /// Notes that work request `sequence` of a queue pair, and every earlier one, has ended; returns the
    /// queue pair. `None`: no such work request is posted.
    #[inline]
    pub(crate) fn ended(&mut self, index: u32, sequence: u32) -> Option<&mut Link> {
        let link = &mut **self.links.get_mut(index)?;
        if !link.has(sequence) {
            return None;
        }
        let left = link.next.wrapping_sub(sequence) - 1;
        self.outstanding -= link.outstanding - left;
        link.outstanding = left;
        Some(link)
    }

    /// Puts a queue pair in error. Its slices end with `new`; `None`: they are sent again. Returns the time
    /// at which it is to be destroyed; `None`: it does not exist, or was in error before and keeps its first
    /// error.
    pub(crate) fn fail<V: Verbs>(
        &mut self,
        verbs: &mut V,
        index: u32,
        new: Option<Error>,
        limits: FlushLimits,
    ) -> Option<Instant> {
        let link = &mut **self.links.get_mut(index)?;
        if let Phase::Flushing { error, .. } = &mut link.phase {
            *error = error.or(new);
            return None;
        }
        self.flushes += u64::from(!link.posted.is_empty());
        let flushes = verbs.modify_qp(link.qp.handle, QpStep::Error).is_ok() && !limits.device_lost;
        let wait_ms = if flushes { u64::from(limits.flush_ms_max) } else { 0 };
        let until = limits.now + Duration::from_millis(wait_ms);
        link.phase = Phase::Flushing { until, error: new };
        self.flushing += 1;
        Some(until)
    }

    /// Destroys a queue pair. Only a destroyed queue pair no longer touches memory: one that cannot be
    /// destroyed is kept, with its slices, and their memory is not handed back.
    pub(crate) fn destroy<V: Verbs>(&mut self, verbs: &mut V, index: u32, limits: FlushLimits) -> Destroyed {
        let Some(link) = self.links.get_mut(index) else { return Destroyed::Unknown };
        let error_of_flush = match link.phase {
            Phase::Flushing { error, .. } => error,
            _ => None,
        };
        let was_flushing = matches!(link.phase, Phase::Flushing { .. });
        if let Err(error) = verbs.destroy_qp(link.qp.handle) {
            // A queue pair that is being connected can be destroyed afterwards; nothing was posted on it.
            let connecting = error.code == libc::EBUSY && link.next == 0;
            if link.quarantined.is_none() && !connecting {
                log::error!(
                    "queue pair {:#x} cannot be destroyed, so {} bytes are quarantined: {error}",
                    link.qp.number,
                    link.bytes
                );
                link.quarantined = Some(link.bytes);
                self.quarantined_bytes += link.bytes;
            }
            self.flushing += u32::from(!was_flushing);
            let until = limits.now + Duration::from_millis(u64::from(limits.flush_ms_max));
            link.phase = Phase::Flushing { until, error: error_of_flush };
            return Destroyed::Kept(until);
        }
        let Some(link) = self.links.take(index) else { return Destroyed::Unknown };
        self.links.release(index);
        self.destroyed += 1;
        self.flushing -= u32::from(was_flushing);
        self.outstanding -= link.outstanding;
        self.quarantined_bytes -= link.quarantined.unwrap_or(0);
        Destroyed::Gone(link, error_of_flush)
    }

    /// The time at which a queue pair in error is destroyed, whether it has flushed or not.
    pub(crate) fn flushes_until(&self, index: u32) -> Option<Instant> {
        match self.get(index)?.phase {
            Phase::Flushing { until, .. } => Some(until),
            _ => None,
        }
    }

    /// Notes that a peer is gone, for its queue pairs that could not be destroyed.
    pub(crate) fn orphan(&mut self, peer: u32) {
        for index in 0..self.links.bound() {
            if let Some(link) = self.links.get_mut(index)
                && link.peer == peer
            {
                link.peer = u32::MAX;
            }
        }
    }

    /// Destroys all of them, for good.
    pub(crate) fn destroy_all<V: Verbs>(&mut self, verbs: &mut V) {
        for index in 0..self.links.bound() {
            if let Some(link) = self.links.take(index) {
                let _ = verbs.destroy_qp(link.qp.handle);
                self.links.release(index);
            }
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::io::link::Piece;
    use crate::sim::{DeviceConfig, SimConfig, SimDevice, SimFabric};

    const SHAPE: QpConfig = QpConfig { depth: 4, sges: 1, inline_bytes: 0 };
    const LIMITS: FlushLimits =
        FlushLimits { now: Instant::from_millis(10), flush_ms_max: 500, device_lost: false };

    fn device() -> (SimFabric, SimDevice) {
        let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
        let device = fabric.device(DeviceConfig::default());
        (fabric, device)
    }

    /// One live queue pair with three work requests of ten bytes.
    fn busy(verbs: &mut SimDevice) -> (Links, u32) {
        let mut links = Links::default();
        let name = links.make(verbs, (3, 1), SHAPE, (7, 1_024)).expect("room for one").name;
        let index = links.index(name).expect("it was just made");
        let link = links.get_mut(index).expect("it was just made");
        assert_eq!((link.phase, link.peer, link.number, link.psn), (Phase::Offered, 3, 1, 7));
        link.phase = Phase::Live;
        for sequence in 0..3 {
            link.posted.push_back(Piece { slot: sequence, sequence, bytes: 10 });
        }
        (link.next, link.outstanding, link.bytes) = (3, 3, 30);
        links.posted(3);
        (links, index)
    }

    #[test]
    fn a_completion_ends_what_was_posted_before_it_once() {
        let (_fabric, mut verbs) = device();
        let (mut links, index) = busy(&mut verbs);
        assert!(links.ended(index, 1).is_some());
        assert_eq!(links.outstanding(), 1);
        assert!(links.ended(index, 1).is_none() && links.ended(index, 3).is_none());
        assert!(links.ended(index, 2).is_some());
        assert_eq!(links.outstanding(), 0);
    }

    #[test]
    fn one_in_error_keeps_its_first_error_and_goes_with_what_is_posted() {
        let (_fabric, mut verbs) = device();
        let (mut links, index) = busy(&mut verbs);
        let rail = Some(Error::new(ErrorKind::Rail));
        assert_eq!(links.fail(&mut verbs, index, rail, LIMITS), Some(Instant::from_millis(510)));
        assert_eq!(links.fail(&mut verbs, index, Some(ErrorKind::PeerDead.into()), LIMITS), None);
        assert!(links.any_flushing() && links.flushes_until(index) == Some(Instant::from_millis(510)));
        let Destroyed::Gone(link, error) = links.destroy(&mut verbs, index, LIMITS) else {
            panic!("a working device destroys it")
        };
        assert_eq!((link.posted.len(), error, links.len()), (3, rail, 0));
        assert_eq!((links.outstanding(), links.any_flushing()), (0, false));
        assert_eq!((links.made, links.destroyed, links.flushes, links.quarantined_bytes), (1, 1, 1, 0));
        assert!(matches!(links.destroy(&mut verbs, index, LIMITS), Destroyed::Unknown));
    }

    #[test]
    fn one_that_cannot_be_destroyed_is_in_quarantine_until_it_can() {
        let (_fabric, mut verbs) = device();
        let (mut links, index) = busy(&mut verbs);
        // It is not a queue pair of the other device.
        let (_fabric, mut other) = device();
        for _ in 0..2 {
            let kept = links.destroy(&mut other, index, LIMITS);
            assert!(matches!(kept, Destroyed::Kept(until) if until == Instant::from_millis(510)));
            assert_eq!((links.quarantined_bytes, links.outstanding()), (30, 3));
        }
        assert!(matches!(links.destroy(&mut verbs, index, LIMITS), Destroyed::Gone(..)));
        assert_eq!((links.quarantined_bytes, links.outstanding(), links.any_flushing()), (0, 0, false));
    }

    #[test]
    fn a_lost_device_is_not_waited_for() {
        let (_fabric, mut verbs) = device();
        let (mut links, index) = busy(&mut verbs);
        let lost = FlushLimits { device_lost: true, ..LIMITS };
        assert_eq!(links.fail(&mut verbs, index, None, lost), Some(LIMITS.now));
    }
}
