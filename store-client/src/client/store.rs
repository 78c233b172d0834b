//! Implements [`Store`] for [`Client`].

use store_core::message::{
    Exists, ExistsLeased, Prefetch, Prefetched, PutOptions, Removal, Remove, RetentionChange,
};
use store_core::{ErrorCode, Key};

use super::{Client, chunk_len, chunks};
use crate::error::StoreError;
use crate::item::{Get, Put, Tally};
use crate::store::{RemoveMode, Store};

impl Store for Client {
    fn batch_get(&mut self, items: &mut [Get<'_>]) -> Tally {
        let mut tally = Tally::default();
        let mut left = items;
        while !left.is_empty() {
            let (items, rest) = left.split_at_mut(chunk_len(left, |item| item.key.len()));
            left = rest;
            self.get_chunk(items);
            items.iter().for_each(|item| tally.get(&item.result));
        }
        tally
    }

    fn batch_put(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally {
        let mut tally = Tally::default();
        let mut left = items;
        while !left.is_empty() {
            let (items, rest) = left.split_at_mut(chunk_len(left, |item| item.key.len()));
            left = rest;
            self.put_chunk(items, options);
            items.iter().for_each(|item| tally.put(&item.result));
        }
        tally
    }

    fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        self.rpc.begin_trace();
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<Exists>(&(), keys.iter().map(|key| Key(key)))?;
            found.extend(answers);
        }
        self.note_connection();
        Ok(found)
    }

    fn batch_exists_leased(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        self.rpc.begin_trace();
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            // The leases run out by themselves: a get of the objects takes leases of its own.
            let (_, answers) = self.rpc.call::<ExistsLeased>(&(), keys.iter().map(|key| Key(key)))?;
            found.extend(answers);
        }
        self.note_connection();
        Ok(found)
    }

    fn batch_prefetch(&mut self, keys: &[&[u8]]) -> Result<Vec<Prefetched>, StoreError> {
        self.rpc.begin_trace();
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<Prefetch>(&(), keys.iter().map(|key| Key(key)))?;
            found.extend(answers);
        }
        self.note_connection();
        Ok(found)
    }

    fn batch_change_retention(
        &mut self,
        keys: &[&[u8]],
        change: &RetentionChange,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        self.rpc.begin_trace();
        let changed = self.master().change_retention(keys, change)?;
        self.note_connection();
        Ok(changed.into_iter().map(|result| found(result, ErrorCode::ObjectNotFound)).collect())
    }

    fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        mode: RemoveMode,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        self.rpc.begin_trace();
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let force = mode.is_force();
            let removals = keys.iter().map(|key| Removal { key: Key(key), force });
            let (_, answers) = self.rpc.call::<Remove>(&(), removals)?;
            results.extend(answers.map(removed));
        }
        self.note_connection();
        Ok(results)
    }
}

/// Whether the removal found an object.
pub(crate) fn removed(answer: Result<(), ErrorCode>) -> Result<bool, StoreError> {
    found(answer, ErrorCode::KeyNotFound)
}

/// The result of a request about an object, with `false` for one that does not exist, whose code is `no`.
pub(crate) fn found(answer: Result<(), ErrorCode>, no: ErrorCode) -> Result<bool, StoreError> {
    match answer {
        Ok(()) => Ok(true),
        Err(code) if code == no => Ok(false),
        Err(code) => Err(code.into()),
    }
}
