//! Puts and gets in steps: an object is started once, and moved range by range in any number of calls.
//!
//! Sessions have a client of their own, because what is started belongs to the client that started it. Their
//! calls are carried out one after another.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use store_client::{BufferRange, Get, PutRange, Sink, Source, StoreError};

use super::objects::code_of;
use super::options::group_number;
use super::setup::{Inner, of_clients_error};
use super::{ReplicateConfig, Span, Store};
use crate::clients::{self, Worker, total};
use crate::codes::{self, StoreCode, store as code};

/// The sessions of a store that is set up.
#[derive(Default)]
pub(super) struct Sessions {
    state: Mutex<Option<State>>,
}

struct State {
    worker: Worker,
    /// Keys of the puts that are open.
    puts: HashSet<Vec<u8>>,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all sessions: objects that were not ended never exist.
    pub(super) fn close(&self) {
        drop(self.lock().take());
    }

    /// Ends the registrations of buffers that have been unregistered, unless a call is under way.
    pub(super) fn refresh(&self, inner: &Inner) {
        if let Ok(mut state) = self.state.try_lock()
            && let Some(state) = state.as_mut()
        {
            inner.clients.refresh(&mut state.worker);
        }
    }
}

/// Bytes that are moved: at `offset` of the object whose key is at `owner`.
struct Range {
    owner: usize,
    offset: u64,
    span: Span,
}

impl Store {
    /// Starts puts of objects with these lengths: 0, -600 for a put that this store has started before, -705
    /// for a key that exists. No reader sees an object before its put is ended.
    pub fn put_session_start<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        lens: &[u64],
        config: &ReplicateConfig,
    ) -> Vec<StoreCode> {
        let all = |code| vec![code; keys.len()];
        if keys.len() != lens.len() {
            return all(code::INVALID_PARAMS);
        }
        let groups = config.group_ids.as_deref();
        let mut options = match config.options(keys.len(), false) {
            Ok(options) => options,
            Err(code) => return all(code),
        };
        let started = self.in_session(|inner, state| {
            options.placement = inner.names.placement(state.worker.client.cluster()?, config, inner.name());
            let mut results = all(code::INVALID_PARAMS);
            let is_open = |at: &usize| state.puts.contains(keys[*at].as_ref());
            let (open, fresh): (Vec<usize>, Vec<usize>) = (0..keys.len()).partition(is_open);
            if !open.is_empty() {
                log::error!("put sessions of {} keys are open: end or revoke them first", open.len());
            }
            // A request has one group for all its keys.
            let calls =
                fresh.chunk_by(|one, other| groups.is_none_or(|groups| groups[*one] == groups[*other]));
            for call in calls {
                options.retention.group = groups.map(|groups| group_number(&groups[call[0]]));
                let items: Vec<(&[u8], u64)> =
                    call.iter().map(|at| (keys[*at].as_ref(), lens[*at])).collect();
                let started = state.worker.client.cluster()?.start_puts(&items, &options);
                for (at, started) in call.iter().zip(started) {
                    results[*at] = state.code(Some(started));
                    if results[*at] == codes::OK {
                        state.puts.insert(keys[*at].as_ref().to_vec());
                    }
                }
            }
            Ok(results)
        });
        started.unwrap_or_else(all)
    }

    /// Writes ranges of open puts: for each key the bytes that were written, or a negative number. `into` has
    /// the offset of each span.
    ///
    /// # Safety
    /// As [`batch_put`](Self::batch_put).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn put_session_ranges<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sources: &[Vec<Span>],
        into: &[Vec<u64>],
    ) -> Vec<i64> {
        let (ranges, mut failed) = ranges_of(keys.len(), sources, into);
        let written = self.in_session(|_, state| {
            let places: Vec<Option<BufferRange>> =
                ranges.iter().map(|range| state.place(&range.span)).collect();
            let source = |span: &Span, place: &Option<BufferRange>| match place {
                Some(place) => Source::Region(*place),
                // SAFETY: the caller's promise; `ranges_of` has checked addresses and lengths.
                None => Source::Bytes(unsafe {
                    std::slice::from_raw_parts(span.addr as *const u8, span.len as usize)
                }),
            };
            let write = |(range, place): (&Range, &Option<BufferRange>)| PutRange {
                key: keys[range.owner].as_ref(),
                offset: range.offset,
                source: source(&range.span, place),
            };
            let writes: Vec<PutRange<'_>> = ranges.iter().zip(&places).map(write).collect();
            let results = state.worker.client.cluster()?.write_puts(&writes);
            for (range, result) in ranges.iter().zip(results) {
                if let Err(error) = result {
                    let code = code_of(&mut state.worker, &error);
                    failed[range.owner].get_or_insert(code);
                }
            }
            Ok(())
        });
        sums(&ranges, written.err(), failed)
    }

    /// Ends puts: their objects can be read. -600 for a put that is not open, or that lacks bytes; it stays
    /// open then.
    pub fn put_session_end<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<StoreCode> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let ended = self.in_session(|_, state| {
            let client = state.worker.client.cluster()?;
            let ended = client.end_puts(&keys);
            for key in keys.iter().filter(|key| !client.has_open_put(key)) {
                state.puts.remove(*key);
            }
            Ok(ended.into_iter().map(|ended| state.code(Some(ended))).collect())
        });
        ended.unwrap_or_else(|code| vec![code; keys.len()])
    }

    /// Revokes puts: their objects never exist. -600 for a put that is not open.
    pub fn put_session_revoke<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<StoreCode> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let revoked = self.in_session(|_, state| {
            let revoked = state.worker.client.cluster()?.revoke_puts(&keys);
            for key in &keys {
                state.puts.remove(*key);
            }
            Ok(revoked.into_iter().map(|revoked| state.code(Some(revoked))).collect())
        });
        revoked.unwrap_or_else(|code| vec![code; keys.len()])
    }

    /// Looks objects up and leases them, so that their ranges can be read without a further look: 0, -704.
    pub fn get_session_start<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<StoreCode> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let started = self.in_session(|_, state| {
            // As in Mooncake, a key that is started again starts anew.
            state.end_gets(&keys)?;
            let started = state.worker.client.cluster()?.start_gets(&keys);
            Ok(started.into_iter().map(|started| state.code(Some(started.map(drop)))).collect())
        });
        started.unwrap_or_else(|code| vec![code; keys.len()])
    }

    /// Reads ranges of objects whose gets were started: for each key the bytes that were read, or a negative
    /// number; -600 for one that was not started. `from` has the offset of each span.
    ///
    /// # Safety
    /// As [`batch_get_into`](Self::batch_get_into).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn get_session_ranges<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sinks: &[Vec<Span>],
        from: &[Vec<u64>],
    ) -> Vec<i64> {
        let (ranges, mut failed) = ranges_of(keys.len(), sinks, from);
        if clients::overlap(ranges.iter().map(|range| range.span)) {
            log::error!("get_session_ranges: destinations of one call overlap");
            return vec![code::INVALID_PARAMS.into(); keys.len()];
        }
        let read = self.in_session(|_, state| {
            let places: Vec<Option<BufferRange>> =
                ranges.iter().map(|range| state.place(&range.span)).collect();
            let sink = |span: &Span, place: &Option<BufferRange>| match place {
                Some(place) => Sink::Region(*place),
                // SAFETY: the caller's promise; `ranges_of` has checked addresses and lengths.
                None => Sink::Bytes(unsafe {
                    std::slice::from_raw_parts_mut(span.addr as *mut u8, span.len as usize)
                }),
            };
            let get = |(range, place): (&Range, &Option<BufferRange>)| {
                let end = range.offset + range.span.len;
                Get::new(keys[range.owner].as_ref(), sink(&range.span, place)).range(range.offset..end)
            };
            let mut items: Vec<Get<'_>> = ranges.iter().zip(&places).map(get).collect();
            let _ = state.worker.client.cluster()?.batch_get_started(&mut items);
            let results: Vec<_> = items.into_iter().map(Get::into_result).collect();
            for (range, result) in ranges.iter().zip(results) {
                let code = match result {
                    Ok(Some(_)) => continue,
                    Ok(None) => code::OBJECT_NOT_FOUND,
                    Err(error) => code_of(&mut state.worker, &error),
                };
                failed[range.owner].get_or_insert(code);
            }
            Ok(())
        });
        sums(&ranges, read.err(), failed)
    }

    /// Ends gets, and their leases: 0, also for keys that were not started.
    pub fn get_session_end<K: AsRef<[u8]>>(&self, keys: &[K]) -> StoreCode {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        self.in_session(|_, state| state.end_gets(&keys)).err().unwrap_or(codes::OK)
    }

    fn in_session<T>(
        &self,
        run: impl FnOnce(&Inner, &mut State) -> Result<T, StoreCode>,
    ) -> Result<T, StoreCode> {
        let inner = self.inner()?;
        let mut sessions = inner.sessions.lock();
        if sessions.as_ref().is_some_and(|state| state.worker.is_lost()) {
            // What was started is over.
            *sessions = None;
        }
        let state = match &mut *sessions {
            Some(state) => state,
            none => {
                let worker = inner.clients.dedicated().map_err(|error| of_clients_error(&error))?;
                none.insert(State { worker, puts: HashSet::new() })
            }
        };
        inner.clients.refresh(&mut state.worker);
        run(&inner, state)
    }
}

impl State {
    fn code(&mut self, result: Option<Result<(), StoreError>>) -> StoreCode {
        match result {
            Some(Ok(())) => codes::OK,
            Some(Err(error)) => code_of(&mut self.worker, &error),
            None => code::INTERNAL_ERROR,
        }
    }

    /// The registered memory of a span; `None`: it is plain memory.
    fn place(&self, span: &Span) -> Option<BufferRange> {
        let (region, offset) = self.worker.find(span.addr, span.len)?;
        Some(BufferRange { region, offset, len: span.len })
    }

    fn end_gets(&mut self, keys: &[&[u8]]) -> Result<(), StoreCode> {
        let client = self.worker.client.cluster()?;
        for key in keys {
            // A get that was started several times is ended as often.
            while client.end_gets(&[*key]).contains(&true) {}
        }
        Ok(())
    }
}

/// The ranges of all keys, and a number for each key whose ranges are invalid, or whose lists have different
/// lengths. Ranges without bytes are left out.
fn ranges_of(keys: usize, spans: &[Vec<Span>], offsets: &[Vec<u64>]) -> (Vec<Range>, Vec<Option<StoreCode>>) {
    let mut failed = vec![None; keys];
    let mut ranges = Vec::new();
    for (owner, failed) in failed.iter_mut().enumerate() {
        let of_key = spans.get(owner).zip(offsets.get(owner));
        let ends = |spans: &[Span], offsets: &[u64]| {
            offsets.iter().zip(spans).all(|(offset, span)| offset.checked_add(span.len).is_some())
        };
        let usable = of_key.filter(|(spans, offsets)| {
            spans.len() == offsets.len() && total(spans).is_some() && ends(spans, offsets)
        });
        let Some((spans, offsets)) = usable else {
            *failed = Some(code::INVALID_PARAMS);
            continue;
        };
        let of = |(span, offset): (&Span, &u64)| Range { owner, offset: *offset, span: *span };
        ranges.extend(spans.iter().zip(offsets).filter(|(span, _)| span.len > 0).map(of));
    }
    (ranges, failed)
}

/// The bytes of each key, or its number.
fn sums(ranges: &[Range], all: Option<StoreCode>, failed: Vec<Option<StoreCode>>) -> Vec<i64> {
    let mut sums: Vec<i64> = vec![0; failed.len()];
    for range in ranges {
        sums[range.owner] = sums[range.owner].saturating_add_unsigned(range.span.len);
    }
    let of = |(sum, failed): (i64, Option<StoreCode>)| all.or(failed).map_or(sum, i64::from);
    sums.into_iter().zip(failed).map(of).collect()
}
