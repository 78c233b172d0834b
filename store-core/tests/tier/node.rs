//! A node with a disk: a map from locators to objects, of which a crash keeps what was synced.

use std::collections::BTreeMap;

use store_core::SegmentNo;

/// Bytes of an extent.
pub(crate) const EXTENT: u64 = 1 << 16;
/// Bytes of an image, and of every object.
pub(crate) const LEN: u64 = 4_096;

/// What is at a locator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) key: String,
    pub(crate) generation: u64,
    /// What was read from memory when it was written: the generation that was there.
    pub(crate) content: u64,
    pub(crate) synced: bool,
    /// The disk fails to read it.
    pub(crate) broken: bool,
}

/// An order to write that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) key: String,
    pub(crate) generation: u64,
    /// Where the object is in memory.
    pub(crate) addr: u64,
}

pub(crate) struct Node {
    pub(crate) no: u64,
    pub(crate) uuid: [u8; 16],
    pub(crate) alive: bool,
    pub(crate) incarnation: u64,
    pub(crate) segment: SegmentNo,
    pub(crate) disk: SegmentNo,
    pub(crate) mounted: bool,
    pub(crate) ready: bool,
    /// Locators that are still to be announced.
    pub(crate) announce: Vec<u64>,
    pub(crate) images: BTreeMap<u64, Image>,
    /// Generations that were removed, and whether the disk keeps that over a crash.
    pub(crate) removals: BTreeMap<u64, bool>,
    pub(crate) writing: BTreeMap<u64, Write>,
    next: u64,
}

impl Node {
    pub(crate) fn new(no: u64) -> Self {
        Self {
            no,
            uuid: [no as u8; 16],
            alive: false,
            incarnation: 0,
            segment: SegmentNo::NONE,
            disk: SegmentNo::NONE,
            mounted: false,
            ready: false,
            announce: Vec::new(),
            images: BTreeMap::new(),
            removals: BTreeMap::new(),
            writing: BTreeMap::new(),
            next: EXTENT,
        }
    }

    pub(crate) fn write(&mut self, write: &Write, content: u64) -> u64 {
        let locator = self.next;
        self.next += LEN;
        let Write { key, generation, .. } = write.clone();
        self.images.insert(locator, Image { key, generation, content, synced: false, broken: false });
        locator
    }

    pub(crate) fn sync(&mut self) {
        self.images.values_mut().for_each(|image| image.synced = true);
        self.removals.values_mut().for_each(|synced| *synced = true);
        // A removal that is durable is written into the extents' footers, and goes with them.
    }

    /// The oldest extent that is not written to any more.
    pub(crate) fn oldest_extent(&self) -> Option<u64> {
        let oldest = self.images.keys().next()? / EXTENT;
        (oldest < self.next / EXTENT).then_some(oldest)
    }

    pub(crate) fn drop_extent(&mut self, sequence: u64) {
        self.images.retain(|locator, _| locator / EXTENT != sequence);
    }

    /// What was not synced may be lost.
    pub(crate) fn crash(&mut self, mut keeps: impl FnMut() -> bool) {
        (self.alive, self.mounted, self.ready) = (false, false, false);
        self.writing.clear();
        self.announce.clear();
        self.images.retain(|_, image| image.synced || keeps());
        self.removals.retain(|_, synced| *synced || keeps());
        // What was lost is not written again at the same place.
        self.next = (self.next / EXTENT + 1) * EXTENT;
    }

    /// Begins to announce what is on the disk and was not removed, as far as the disk knows.
    pub(crate) fn open(&mut self) {
        let removed = &self.removals;
        let known = self.images.iter().filter(|(_, image)| !removed.contains_key(&image.generation));
        self.announce = known.map(|(locator, _)| *locator).collect();
    }
}
