//! [`Names`]: the objects of a store, by the engine's hash that is in their names.

use std::collections::{BTreeMap, HashMap};

use conductor_core::EngineHash;
use conductor_core::events::{Batch, Event, Source};
use conductor_core::knowledge::PublisherId;

/// Bytes that an object takes beside its name.
const ENTRY_BYTES: usize = 64;

type OfStore = HashMap<EngineHash, Vec<Box<str>>>;

/// The names, as far as there is memory. They are a hint: an object that is gone is told from one that is
/// there by the master.
#[derive(Debug)]
pub(crate) struct Names {
    stores: BTreeMap<PublisherId, OfStore>,
    /// Whose objects may be copied.
    tenant: String,
    bytes_max: usize,
    bytes: usize,
    objects: u64,
    dropped: u64,
}

impl Names {
    pub(crate) fn new(tenant: &str, bytes_max: usize) -> Self {
        Self {
            stores: BTreeMap::new(),
            tenant: tenant.to_owned(),
            bytes_max,
            bytes: 0,
            objects: 0,
            dropped: 0,
        }
    }

    /// Takes the names out of a store's events.
    pub(crate) fn heard(&mut self, id: PublisherId, events: &Batch) {
        for event in events.events() {
            match event {
                Event::Stored(stored) => self.each(stored.hashes, &stored.source, |names, hash, name| {
                    names.put(id, hash, name);
                }),
                Event::Removed(removed) => self.each(removed.hashes, &removed.source, |names, hash, name| {
                    names.remove(id, hash, name);
                }),
                Event::Cleared(_) => self.forget(id),
            }
        }
    }

    fn each(
        &mut self,
        hashes: &[EngineHash],
        source: &Source<'_>,
        mut act: impl FnMut(&mut Self, EngineHash, &str),
    ) {
        let own = source.tenant.is_none_or(|tenant| tenant.is_empty() || tenant == self.tenant);
        if let Some(name) = source.object.filter(|_| own) {
            hashes.iter().for_each(|hash| act(self, *hash, name));
        }
    }

    fn put(&mut self, id: PublisherId, hash: EngineHash, name: &str) {
        let objects = self.stores.entry(id).or_default().entry(hash).or_default();
        if objects.iter().any(|known| &**known == name) {
            return;
        }
        if self.bytes + name.len() + ENTRY_BYTES > self.bytes_max {
            self.dropped += 1;
            if objects.is_empty()
                && let Some(store) = self.stores.get_mut(&id)
            {
                store.remove(&hash);
            }
            return;
        }
        objects.push(name.into());
        self.bytes += name.len() + ENTRY_BYTES;
        self.objects += 1;
    }

    fn remove(&mut self, id: PublisherId, hash: EngineHash, name: &str) {
        let Some(store) = self.stores.get_mut(&id) else { return };
        let Some(objects) = store.get_mut(&hash) else { return };
        let Some(at) = objects.iter().position(|known| &**known == name) else { return };
        objects.swap_remove(at);
        if objects.is_empty() {
            store.remove(&hash);
        }
        self.bytes -= name.len() + ENTRY_BYTES;
        self.objects -= 1;
    }

    /// Forgets what a store said.
    pub(crate) fn forget(&mut self, id: PublisherId) {
        for name in self.stores.remove(&id).into_iter().flatten().flat_map(|(_, objects)| objects) {
            self.bytes -= name.len() + ENTRY_BYTES;
            self.objects -= 1;
        }
    }

    /// The objects of a block in all stores.
    pub(crate) fn of(&self, hash: EngineHash) -> impl Iterator<Item = &str> {
        self.stores.values().filter_map(move |store| store.get(&hash)).flatten().map(|name| &**name)
    }

    /// Objects, their bytes, and objects for which there was no memory.
    pub(crate) fn size(&self) -> (u64, u64, u64) {
        (self.objects, self.bytes as u64, self.dropped)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use conductor_core::Tier;
    use conductor_core::events::encode::{Layout, encode};
    use conductor_core::events::{Decoder, Dialect, Extra, Removed, Stored};

    const STORE: PublisherId = PublisherId(7);

    fn key(hash: u64, rank: u32) -> String {
        format!("m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@{hash:064x}")
    }

    fn message(tenant: &str, hash: u64, rank: u32, is_stored: bool) -> Batch {
        let (name, hashes) = (key(hash, rank), [EngineHash(hash)]);
        let source =
            Source { tenant: Some(tenant), object: Some(&name), medium: Some("cpu"), ..Source::default() };
        let event = match is_stored {
            true => Event::Stored(Stored {
                hashes: &hashes,
                parent: None,
                tokens: &[],
                block_tokens: 0,
                lora: None,
                salt: None,
                extra: Extra::default(),
                tier: Tier::Store,
                group: None,
                source,
            }),
            false => Event::Removed(Removed { hashes: &hashes, tier: Tier::Store, group: None, source }),
        };
        let (mut out, mut batch) = (Vec::new(), Batch::new());
        encode(Layout::Mooncake, 0.0, None, &[event], &mut out);
        Decoder::new(Dialect::Mooncake).decode(&out, &mut batch).unwrap();
        batch
    }

    #[test]
    fn names_follow_the_events_of_a_store_and_are_bounded() {
        let one = key(0, 0).len() + ENTRY_BYTES;
        let mut names = Names::new("t", 100 * one);
        let of = |names: &Names, hash| names.of(EngineHash(hash)).map(str::to_owned).collect::<Vec<_>>();
        for rank in [0, 1, 1] {
            names.heard(STORE, &message("t", 5, rank, true));
        }
        names.heard(STORE, &message("other", 6, 0, true));
        assert_eq!((of(&names, 5), of(&names, 6).len()), (vec![key(5, 0), key(5, 1)], 0));
        names.heard(STORE, &message("t", 5, 0, false));
        names.heard(STORE, &message("t", 5, 0, false));
        assert_eq!((of(&names, 5), names.size()), (vec![key(5, 1)], (1, one as u64, 0)));
        (100..1_100).for_each(|hash| names.heard(STORE, &message("t", hash, 0, true)));
        assert_eq!(names.size(), (100, 100 * one as u64, 901));
        assert_eq!(names.stores[&STORE].len(), 100, "what was dropped leaves nothing");
        names.forget(STORE);
        assert_eq!((names.size(), names.stores.len()), ((0, 0, 901), 0));
    }
}
