//! Puts that stay open while their bytes are written range by range: [`Client::start_puts`].

use std::collections::HashMap;

use store_core::ErrorCode;
use store_core::chunks::RangeSums;
use store_core::client::{CloseItem, OpenPut, PutEnding, PutItem, RangeItem};
use store_core::message::{PutOptions, PutRequest};

use super::{Client, KEYS_PER_CALL_MAX, chunks};
use crate::error::StoreError;
use crate::item::Source;
use crate::mover::{Buffers, RangeWrite};

/// A range of an open put, and where its bytes come from.
#[derive(Clone, Copy, Debug)]
pub struct PutRange<'a> {
    /// Key of the put.
    pub key: &'a [u8],
    /// Offset of the range in the object, bytes.
    pub offset: u64,
    /// The bytes. Their number is the length of the range.
    pub source: Source<'a>,
}

impl<'a> PutRange<'a> {
    /// The range of this put that begins at `offset` and is as long as the source.
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized), offset: u64, source: impl Into<Source<'a>>) -> Self {
        Self { key: key.as_ref(), offset, source: source.into() }
    }
}

/// The open puts of a client, by key.
pub(super) type OpenPuts = HashMap<Vec<u8>, Open>;

pub(super) struct Open {
    put: OpenPut,
    sums: RangeSums,
}

/// How an open put ends, and its trailer.
type Ending = (PutEnding, Vec<u8>);

/// The results of a batch: each item's own, or one error for all items.
type Results = Vec<Result<(), StoreError>>;

impl Client {
    /// Starts puts of objects with these lengths, bytes, which stay open: their bytes are written range
    /// by range, in any order and in any number of calls ([`write_puts`](Self::write_puts)), until they
    /// are [ended](Self::end_puts) or [revoked](Self::revoke_puts). No reader sees an object before its
    /// end.
    ///
    /// A put stays open for as long as the master's `put_start_discard_timeout_ms`; from then on nothing is
    /// written any more, and another writer may take the key. Open puts end with the client: their space is
    /// then free when the nodes have confirmed that it is gone.
    ///
    /// # Errors
    /// For an item: `ObjectAlreadyExists` when the key exists, unless the options say that it is replaced,
    /// and when this client has an open put of the key; otherwise as [`put`](crate::Store::put).
    pub fn start_puts(&mut self, items: &[(&[u8], u64)], options: &PutOptions) -> Results {
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |(key, _)| key.len()) {
            match self.usable() {
                Ok(()) => self.start_some(items, options, &mut results),
                Err(error) => results.extend(items.iter().map(|_| Err(error.clone()))),
            }
        }
        self.publish();
        results
    }

    fn start_some(&mut self, items: &[(&[u8], u64)], options: &PutOptions, results: &mut Results) {
        let request = PutRequest { nonce: self.nonce(), options: *options, writer: self.engine.identity() };
        let taken = |puts: &OpenPuts, at: usize| {
            let (key, _) = items[at];
            puts.contains_key(key) || items[..at].iter().any(|(other, _)| *other == key)
        };
        // No object has an empty key, so the state machine refuses an item that is refused here.
        let open: Vec<PutItem<'_>> = (0..items.len())
            .map(|at| {
                let (key, len) = items[at];
                PutItem { key: if taken(&self.puts, at) { &[] } else { key }, len, checksum: 0 }
            })
            .collect();
        self.put.open(open.iter().copied(), request);
        self.mover.begin(0);
        self.run_put(0, Buffers::Write(&[]));
        for (at, (key, len)) in items.iter().enumerate() {
            if open[at].key.is_empty() && !key.is_empty() {
                results.push(Err(ErrorCode::ObjectAlreadyExists.into()));
                continue;
            }
            results.push(match (self.put.result(at), self.put.opened(at)) {
                (_, Some(put)) => {
                    self.puts.insert(key.to_vec(), Open { put, sums: RangeSums::new(*len) });
                    Ok(())
                }
                (Some(Err(code)), None) => Err(self.put_failed(code)),
                (_, None) => Err(ErrorCode::InternalError.into()),
            });
        }
    }

    /// Writes ranges of open puts, of the same put or of several. Each byte of an object is written once, and
    /// its checksum is computed in transit: the source must not change during the call.
    ///
    /// # Errors
    /// For an item: `NotStarted`; `BadWrite` for a range that is empty, not inside the object, or not new;
    /// for memory that cannot be used, and for bytes that could not be moved, as
    /// [`put`](crate::Store::put). After bytes could not be moved, or the put's time is over, the put can
    /// only be revoked: every further write, and its end, fail with `TransferFail`.
    pub fn write_puts(&mut self, writes: &[PutRange<'_>]) -> Results {
        let mut results = Vec::with_capacity(writes.len());
        for writes in writes.chunks(KEYS_PER_CALL_MAX) {
            match self.usable() {
                Ok(()) => self.write_some(writes, &mut results),
                Err(error) => results.extend(writes.iter().map(|_| Err(error.clone()))),
            }
        }
        self.publish();
        results
    }

    fn write_some(&mut self, writes: &[PutRange<'_>], results: &mut Results) {
        self.settle();
        let (mut items, mut ranges, mut accepted) = (Vec::new(), Vec::new(), Vec::new());
        let first = results.len();
        for write in writes {
            let claimed = self.claim(write);
            if let Ok(put) = claimed {
                items.push(RangeItem { put, offset: write.offset, len: write.source.len() });
                ranges.push(RangeWrite { offset: write.offset, source: write.source });
                accepted.push(results.len() - first);
            }
            results.push(claimed.map(|_| ()));
        }
        if items.is_empty() {
            return;
        }
        self.mover.begin_ranges(items.iter().map(|item| item.offset));
        self.put.write(items.iter().copied());
        self.run_put(items.len(), Buffers::Write(&ranges));
        for (item, at) in accepted.into_iter().enumerate() {
            let Some(open) = self.puts.get_mut(writes[at].key) else { continue };
            self.put.note_writes(item, &mut open.put);
            match self.put.result(item) {
                Some(Ok(_)) => {
                    let parts = self.mover.take_parts(item);
                    parts.into_iter().for_each(|(offset, len, crc32c)| open.sums.add(offset, len, crc32c));
                    self.counters.written_bytes += items[item].len;
                }
                failed => {
                    let code = failed.and_then(Result::err).unwrap_or(ErrorCode::InternalError);
                    results[first + at] = Err(self.mover.device_error(item).unwrap_or(code.into()));
                }
            }
        }
    }

    /// Checks a write, and claims its range.
    fn claim(&mut self, write: &PutRange<'_>) -> Result<OpenPut, StoreError> {
        self.check_source(&write.source)?;
        let open = self.puts.get_mut(write.key).ok_or(StoreError::NotStarted)?;
        if open.put.has_failed() {
            return Err(ErrorCode::TransferFail.into());
        }
        let (start, len) = (write.offset, write.source.len());
        if open.sums.claim(start, len) { Ok(open.put) } else { Err(StoreError::BadWrite { start, len }) }
    }

    /// Ends open puts: their objects are readable from then on. What is stored is verified by readers as if
    /// it had been written in one piece.
    ///
    /// # Errors
    /// For an item: `NotStarted`; `Incomplete` when bytes are missing, and `TransferFail` after a write that
    /// failed: the put stays open then. After any other error the put is over: as
    /// [`put`](crate::Store::put), or the outcome is unknown when the master did not answer.
    pub fn end_puts(&mut self, keys: &[&[u8]]) -> Results {
        self.close_puts(keys, Self::ending)
    }

    /// Whether this client has an open put of the key: one that was started, and neither ended nor revoked.
    #[must_use]
    pub fn has_open_put(&self, key: &[u8]) -> bool {
        self.puts.contains_key(key)
    }

    /// Revokes open puts: their objects never exist, and a key that an open put was to replace keeps its
    /// object.
    ///
    /// # Errors
    /// For an item: `NotStarted`; no answer from the master: the put is over nevertheless, and its space is
    /// free when the master or the nodes have given the writer up.
    pub fn revoke_puts(&mut self, keys: &[&[u8]]) -> Results {
        self.close_puts(keys, |_| Ok((PutEnding::Revoke, Vec::new())))
    }

    /// How an open put is committed, and its trailer.
    fn ending(open: &Open) -> Result<Ending, StoreError> {
        if open.put.has_failed() {
            return Err(ErrorCode::TransferFail.into());
        }
        let sums = open.sums.finish().ok_or(StoreError::Incomplete { missing: open.sums.missing() })?;
        Ok((PutEnding::Commit { checksum: sums.whole() }, sums.trailer().to_vec()))
    }

    fn close_puts(
        &mut self,
        keys: &[&[u8]],
        ending: impl Fn(&Open) -> Result<Ending, StoreError>,
    ) -> Results {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            match self.usable() {
                Ok(()) => self.close_some(keys, &ending, &mut results),
                Err(error) => results.extend(keys.iter().map(|_| Err(error.clone()))),
            }
        }
        self.publish();
        results
    }

    fn close_some(
        &mut self,
        keys: &[&[u8]],
        ending: &impl Fn(&Open) -> Result<Ending, StoreError>,
        results: &mut Results,
    ) {
        let (mut items, mut trailers, mut accepted) = (Vec::new(), Vec::new(), Vec::new());
        let first = results.len();
        for &key in keys {
            let wanted = self.puts.get(key).ok_or(StoreError::NotStarted).and_then(ending);
            let wanted = wanted.map(|(ending, trailer)| {
                // A key that is named twice has no open put the second time.
                if let Some(open) = self.puts.remove(key) {
                    items.push(CloseItem { key, put: open.put, ending });
                    trailers.push(trailer);
                    accepted.push(results.len() - first);
                }
            });
            results.push(wanted);
        }
        if items.is_empty() {
            return;
        }
        let slices: Vec<[&[u8]; 1]> = trailers.iter().map(|trailer| [trailer.as_slice()]).collect();
        self.mover.begin_ranges(slices.iter().map(|_| 0));
        self.put.close(items.iter().copied());
        self.run_put(items.len(), Buffers::Close(&slices));
        for (item, at) in accepted.into_iter().enumerate() {
            let commits = matches!(items[item].ending, PutEnding::Commit { .. });
            match self.put.result(item).unwrap_or(Err(ErrorCode::InternalError)) {
                Ok(_) => self.counters.puts += u64::from(commits),
                Err(code) if commits => results[first + at] = Err(self.put_failed(code)),
                Err(code) => results[first + at] = Err(code.into()),
            }
        }
    }
}
