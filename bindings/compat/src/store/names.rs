//! [`Names`]: which segments of the store have which name, for placements that callers write as names.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use store_client::{Client, NodeId, Placement, SegmentEntry, SegmentNo, StoreError};

use super::options::ReplicateConfig;

/// How long a list of the segments is used.
const FRESH: Duration = Duration::from_secs(1);
/// Most names that a placement takes.
const PREFERRED_MAX: usize = store_core::placement::NAMED_MAX;

/// The segments of the store by name and by endpoint, as the master listed them a short time ago.
#[derive(Default)]
pub(super) struct Names {
    known: Mutex<Option<Known>>,
}

struct Known {
    at: Instant,
    segments: HashMap<String, (SegmentNo, NodeId)>,
    by_number: HashMap<SegmentNo, (String, NodeId)>,
}

impl Names {
    /// The placement that a configuration asks for. Names that do not exist are left out: the object is then
    /// placed elsewhere, as in Mooncake. `own` is the name of this process's segment.
    pub(super) fn placement(&self, client: &mut Client, config: &ReplicateConfig, own: &str) -> Placement {
        let mut placement = Placement::ANY;
        if !config.names_places() {
            return placement;
        }
        let mut known = self.lock();
        if let Err(error) = refresh(&mut known, client, false) {
            log::warn!("the segments of the store could not be listed: {error}");
        }
        let Some(known) = known.as_ref() else { return placement };
        for name in config.preferred_segments.iter().take(PREFERRED_MAX) {
            match known.segments.get(name) {
                // At most as many as the placement has room for.
                Some((segment, _)) => drop(placement.preferred.push(*segment)),
                None => log::debug!("there is no segment `{}`: it is not preferred", name.escape_debug()),
            }
        }
        if config.prefer_alloc_in_same_node {
            placement.near = known.segments.get(own).map(|(_, node)| *node);
        }
        placement
    }

    /// The segments with these names, as the master lists them now. `None`: there is none.
    ///
    /// # Errors
    /// No answer from the master.
    pub(super) fn numbers_of(
        &self,
        client: &mut Client,
        names: &[&str],
    ) -> Result<Vec<Option<SegmentNo>>, StoreError> {
        let mut known = self.lock();
        let known = refresh(&mut known, client, true)?;
        Ok(names.iter().map(|name| known.segments.get(*name).map(|(segment, _)| *segment)).collect())
    }

    /// The names of segments; empty for one that has gone.
    ///
    /// # Errors
    /// No answer from the master.
    pub(super) fn names_of(
        &self,
        client: &mut Client,
        segments: &[SegmentNo],
    ) -> Result<Vec<String>, StoreError> {
        let mut known = self.lock();
        let mut list = refresh(&mut known, client, false)?;
        if segments.iter().any(|segment| !list.by_number.contains_key(segment)) {
            list = refresh(&mut known, client, true)?;
        }
        let name = |segment| list.by_number.get(segment).map(|(name, _)| name.clone()).unwrap_or_default();
        Ok(segments.iter().map(name).collect())
    }

    /// The node of a segment; `None` for one that has gone.
    ///
    /// # Errors
    /// No answer from the master.
    pub(super) fn node_of(&self, client: &mut Client, segment: SegmentNo) -> Result<Option<u64>, StoreError> {
        let mut known = self.lock();
        let known = refresh(&mut known, client, false)?;
        Ok(known.by_number.get(&segment).map(|(_, node)| node.get()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known, after a look whether it is fresh enough; `anew`: what the master says now.
fn refresh<'k>(
    known: &'k mut Option<Known>,
    client: &mut Client,
    anew: bool,
) -> Result<&'k Known, StoreError> {
    let fresh = known.take_if(|known| !anew && known.at.elapsed() < FRESH);
    let now = match fresh {
        Some(fresh) => fresh,
        // What is stale stays when the master does not answer.
        None => list(client)?,
    };
    Ok(known.insert(now))
}

impl Known {
    fn of(entries: Vec<SegmentEntry>) -> Self {
        let (mut segments, mut by_number) = (HashMap::new(), HashMap::new());
        for entry in entries {
            let at = (entry.segment, entry.node);
            segments.insert(entry.endpoint, at);
            segments.insert(entry.name.clone(), at);
            by_number.insert(entry.segment, (entry.name, entry.node));
        }
        Self { at: Instant::now(), segments, by_number }
    }
}

fn list(client: &mut Client) -> Result<Known, StoreError> {
    Ok(Known::of(client.master().segments()?))
}
