//! Hash maps whose contents decide everything: they print and serialise in the order of their keys, so that
//! two maps with equal contents are equal for [digests](crate::Master::digest) and snapshots, whatever their
//! histories were.

use core::fmt::{self, Debug};
use core::hash::{BuildHasher, Hash};
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};

use alloc::vec::Vec;
use hashbrown::HashMap;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A hasher that is made of a seed.
pub(crate) trait Seeded: BuildHasher {
    fn seeded(seed: u64) -> Self;
}

impl Seeded for foldhash::fast::FixedState {
    fn seeded(seed: u64) -> Self {
        Self::with_seed(seed)
    }
}

impl Seeded for foldhash::quality::FixedState {
    fn seeded(seed: u64) -> Self {
        Self::with_seed(seed)
    }
}

/// A [`HashMap`] that knows its seed.
pub(crate) struct Map<K, V, S> {
    seed: u64,
    map: HashMap<K, V, S>,
}

impl<K, V, S: Seeded> Map<K, V, S> {
    pub(crate) fn with_seed(seed: u64) -> Self {
        Self { seed, map: HashMap::with_hasher(S::seeded(seed)) }
    }
}

impl<K: Ord, V, S> Map<K, V, S> {
    fn sorted(&self) -> Vec<(&K, &V)> {
        let mut all: Vec<(&K, &V)> = self.map.iter().collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }
}

impl<K, V, S> Deref for Map<K, V, S> {
    type Target = HashMap<K, V, S>;

    fn deref(&self) -> &HashMap<K, V, S> {
        &self.map
    }
}

impl<K, V, S> DerefMut for Map<K, V, S> {
    fn deref_mut(&mut self) -> &mut HashMap<K, V, S> {
        &mut self.map
    }
}

impl<K: Ord + Debug, V: Debug, S> Debug for Map<K, V, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.seed, Entries(self.sorted())).fmt(f)
    }
}

/// The seed, then the entries.
impl<K: Ord + Serialize, V: Serialize, S> Serialize for Map<K, V, S> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        (self.seed, Entries(self.sorted())).serialize(serializer)
    }
}

struct Entries<T>(T);

impl<K: Debug, V: Debug> Debug for Entries<Vec<(&K, &V)>> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().copied()).finish()
    }
}

impl<K: Serialize, V: Serialize> Serialize for Entries<Vec<(&K, &V)>> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

impl<'de, K, V, S> Deserialize<'de> for Map<K, V, S>
where
    K: Deserialize<'de> + Eq + Hash,
    V: Deserialize<'de>,
    S: Seeded,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (seed, Entries(entries)) = Deserialize::deserialize(deserializer)?;
        let entries: Vec<(K, V)> = entries;
        let mut this = Self::with_seed(seed);
        this.map.reserve(entries.len());
        this.map.extend(entries);
        Ok(this)
    }
}

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Deserialize<'de> for Entries<Vec<(K, V)>> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<K, V>(PhantomData<(K, V)>);
        impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Visitor<'de> for Pairs<K, V> {
            type Value = Vec<(K, V)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the entries of a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Vec<(K, V)>, A::Error> {
                // The length is not trusted: the list grows with what is there.
                let mut entries = Vec::new();
                while let Some(entry) = from.next_entry()? {
                    entries.push(entry);
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Pairs(PhantomData)).map(Entries)
    }
}
