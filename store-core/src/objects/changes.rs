//! Which objects have changed: for a leader whose answers wait for its followers, and for followers outside
//! of the store ([`crate::kv_events`]).

use alloc::vec::Vec;
use core::fmt;
use core::mem::take;

use crate::{FullKey, TenantNo};

/// Bytes of keys that wait to be taken. Beyond them the keys are given up, and everything counts as changed.
const KEY_BYTES_MAX: usize = 64 << 20;

/// The keys whose objects have changed, if they are noted. No part of the state: it prints the same whatever
/// it holds.
#[derive(Default)]
pub(crate) struct Changes {
    /// Hashes of the keys.
    hashes: Option<Vec<u64>>,
    keys: Option<Keys>,
}

/// Keys, one behind the other.
#[derive(Default)]
pub(crate) struct Keys {
    bytes: Vec<u8>,
    lens: Vec<(TenantNo, u16)>,
    /// Not every key is here.
    lost: bool,
}

impl Changes {
    pub(crate) fn note_hashes(&mut self) {
        self.hashes = Some(Vec::new());
    }

    /// Forgets the keys that were noted so far.
    pub(crate) fn note_keys(&mut self) {
        self.keys = Some(Keys::default());
    }

    pub(crate) const fn are_noted(&self) -> bool {
        self.hashes.is_some() || self.keys.is_some()
    }

    pub(crate) const fn are_keys_noted(&self) -> bool {
        self.keys.is_some()
    }

    pub(crate) fn note(&mut self, hash: u64, key: FullKey<'_>) {
        if let Some(hashes) = &mut self.hashes {
            hashes.push(hash);
        }
        if let Some(keys) = &mut self.keys {
            keys.note(key);
        }
    }

    /// The number of a tenant is about to mean another one.
    pub(crate) fn lose_keys_of(&mut self, tenant: TenantNo) {
        if let Some(keys) = self.keys.as_mut().filter(|keys| keys.lens.iter().any(|(of, _)| *of == tenant)) {
            keys.lose();
        }
    }

    pub(crate) fn take_hashes(&mut self) -> impl Iterator<Item = u64> {
        self.hashes.iter_mut().flat_map(|hashes| hashes.drain(..))
    }

    /// The keys that were noted; [`Self::give_back`] the value, whose memory is used again.
    pub(crate) fn take_keys(&mut self) -> Option<Keys> {
        self.keys.as_mut().map(take)
    }

    pub(crate) fn give_back(&mut self, mut keys: Keys) {
        keys.bytes.clear();
        keys.lens.clear();
        if let Some(kept) = self.keys.as_mut().filter(|kept| kept.lens.is_empty() && !kept.lost) {
            *kept = keys;
        }
    }
}

impl Keys {
    fn note(&mut self, key: FullKey<'_>) {
        if self.lost {
        } else if self.bytes.len() + key.key.len() > KEY_BYTES_MAX {
            self.lose();
        } else {
            self.bytes.extend_from_slice(key.key);
            self.lens.push((key.tenant, key.key.len() as u16));
        }
    }

    fn lose(&mut self) {
        *self = Self { lost: true, ..Self::default() };
    }

    pub(crate) const fn is_lost(&self) -> bool {
        self.lost
    }

    /// A key is as often among them as its object has changed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = FullKey<'_>> {
        let mut rest = &*self.bytes;
        self.lens.iter().map(move |&(tenant, len)| {
            let (key, others) = rest.split_at(len.into());
            rest = others;
            FullKey { tenant, key }
        })
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Changes")
    }
}
