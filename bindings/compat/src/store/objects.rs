//! Operations on objects.

use std::collections::HashMap;
use std::sync::Arc;

use store_client::{
    BufferRange, Fragment, Get, Put, PutOptions, RemoveMode, Sink, Source, Store as _, StoreError,
};

use super::options::group_number;
use super::setup::{Inner, of_clients_error};
use super::{ReplicateConfig, Span, Store};
use crate::clients::{self, Any, Lent, Place, Worker, total};
use crate::codes::{self, StoreCode, store as code};

/// Bytes of an object. Plain memory that the caller owns.
pub type Bytes = Vec<u8>;

/// How much of a sink an object has to fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// As much as it has: `get_into`.
    Any,
    /// All of it: the multi-buffer forms, which return `TRANSFER_FAIL` (-800) for a shorter object.
    Exact,
}

impl Store {
    /// Stores bytes: 0, also when the key exists (the first value stays); -600 for no bytes, an empty key,
    /// and more bytes than the local buffer has.
    pub fn put(&self, key: &[u8], value: &[u8], config: &ReplicateConfig) -> StoreCode {
        self.store_bytes(key, &[value], config, false)
    }

    /// Stores bytes, and replaces an object that exists: 0, or as [`put`](Self::put).
    pub fn upsert(&self, key: &[u8], value: &[u8], config: &ReplicateConfig) -> StoreCode {
        self.store_bytes(key, &[value], config, true)
    }

    /// As [`put`](Self::put), of several pieces that are joined. Without any byte it stores nothing and
    /// returns 0.
    ///
    /// # Safety
    /// As [`batch_put`](Self::batch_put).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn put_parts(&self, key: &[u8], parts: &[Span], config: &ReplicateConfig) -> StoreCode {
        // SAFETY: the caller's promise.
        unsafe { self.store_parts(key, parts, config, false) }
    }

    /// As [`put_parts`](Self::put_parts), and replaces an object that exists.
    ///
    /// # Safety
    /// As [`batch_put`](Self::batch_put).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn upsert_parts(&self, key: &[u8], parts: &[Span], config: &ReplicateConfig) -> StoreCode {
        // SAFETY: the caller's promise.
        unsafe { self.store_parts(key, parts, config, true) }
    }

    /// Stores objects from memory of the caller, without a copy where it lies in registered buffers: one
    /// number per key, 0 also for a key that exists and for an object without bytes, which is not stored. The
    /// local buffer is no limit here.
    ///
    /// # Safety
    /// The memory is mapped and readable until the call returns, and nothing writes it.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn batch_put<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sources: &[Vec<Span>],
        config: &ReplicateConfig,
    ) -> Vec<StoreCode> {
        // SAFETY: the caller's promise.
        unsafe { self.store_batch(keys, sources, config, false) }
    }

    /// As [`batch_put`](Self::batch_put), and replaces objects that exist.
    ///
    /// # Safety
    /// As [`batch_put`](Self::batch_put).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn batch_upsert<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sources: &[Vec<Span>],
        config: &ReplicateConfig,
    ) -> Vec<StoreCode> {
        // SAFETY: the caller's promise.
        unsafe { self.store_batch(keys, sources, config, true) }
    }

    fn store_bytes(&self, key: &[u8], parts: &[&[u8]], config: &ReplicateConfig, upsert: bool) -> StoreCode {
        let spans =
            parts.iter().map(|part| Span { addr: part.as_ptr().addr() as u64, len: part.len() as u64 });
        let spans: Vec<Span> = spans.collect();
        if spans.iter().all(|span| span.len == 0) {
            return code::INVALID_PARAMS;
        }
        #[allow(unsafe_code, reason = "reads the slices that it was given")]
        // SAFETY: the slices are borrowed until this call returns.
        unsafe {
            self.store_parts(key, &spans, config, upsert)
        }
    }

    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn store_parts(
        &self,
        key: &[u8],
        parts: &[Span],
        config: &ReplicateConfig,
        upsert: bool,
    ) -> StoreCode {
        let inner = match self.inner() {
            Ok(inner) => inner,
            Err(code) => return code,
        };
        if total(parts).is_none_or(|total| inner.is_beyond_local_buffer(total)) {
            log::error!(
                "put: the object is longer than the local buffer: raise local_buffer_size, or use put_from"
            );
            return code::INVALID_PARAMS;
        }
        // SAFETY: the caller's promise.
        let stored = unsafe { inner.put(&[key], &[parts.to_vec()], config, upsert) };
        stored.first().copied().unwrap_or(code::INTERNAL_ERROR)
    }

    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn store_batch<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sources: &[Vec<Span>],
        config: &ReplicateConfig,
        upsert: bool,
    ) -> Vec<StoreCode> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        match self.inner() {
            // SAFETY: the caller's promise.
            Ok(inner) => unsafe { inner.put(&keys, sources, config, upsert) },
            Err(code) => vec![code; keys.len()],
        }
    }

    /// The bytes of an object; -704 if there is none, -600 if it is longer than the local buffer.
    ///
    /// # Errors
    /// Mooncake's number.
    pub fn get(&self, key: &[u8]) -> Result<Bytes, StoreCode> {
        self.batch_get(&[key]).pop().unwrap_or(Err(code::INTERNAL_ERROR))
    }

    /// The bytes of objects.
    pub fn batch_get<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<Result<Bytes, StoreCode>> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        match self.inner() {
            Ok(inner) => inner.get(&keys),
            Err(code) => vec![Err(code); keys.len()],
        }
    }

    /// Reads objects into memory of the caller: for each key the number of bytes, or a negative number: -704
    /// if there is no such object, -600 if it is longer than its memory, -800 if it is shorter and `fill` is
    /// [`Exact`](Fill::Exact). After a failure the memory may have been written.
    ///
    /// # Safety
    /// The memory is mapped and writable until the call returns, and nothing else accesses it.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn batch_get_into<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        sinks: &[Vec<Span>],
        fill: Fill,
    ) -> Vec<i64> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        match self.inner() {
            // SAFETY: the caller's promise.
            Ok(inner) => unsafe { inner.get_into(&keys, sinks, fill) },
            Err(code) => vec![i64::from(code); keys.len()],
        }
    }

    /// Reads ranges of objects into buffers, as `get_into_ranges`: buffer `b` receives, for each of its keys,
    /// ranges of that object at offsets of the buffer. The result has the bytes per range, or a negative
    /// number: -704 without such an object, -600 for a range beyond the object or the end of the registered
    /// buffer. What follows a buffer that is not registered is not known, and it is the caller's to use.
    ///
    /// # Safety
    /// The ranges of the buffers are mapped and writable until the call returns, and nothing else accesses
    /// them.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn get_into_ranges<K: AsRef<[u8]>>(
        &self,
        buffers: &[u64],
        keys: &[Vec<K>],
        into: &[Vec<Vec<u64>>],
        from: &[Vec<Vec<u64>>],
        lens: &[Vec<Vec<u64>>],
    ) -> Vec<Vec<Vec<i64>>> {
        let shape = |code: StoreCode| -> Vec<Vec<Vec<i64>>> {
            let count = |buffer: usize, at: usize| into.get(buffer)?.get(at).map(Vec::len);
            let of_key = |buffer, at| vec![i64::from(code); count(buffer, at).unwrap_or(1)];
            let of_buffer =
                |(buffer, keys): (usize, &Vec<K>)| (0..keys.len()).map(|at| of_key(buffer, at)).collect();
            keys.iter().enumerate().map(of_buffer).collect()
        };
        let inner = match self.inner() {
            Ok(inner) => inner,
            Err(code) => return shape(code),
        };
        let count = buffers.len();
        if [keys.len(), into.len(), from.len(), lens.len()].iter().any(|len| *len != count) {
            return shape(code::INVALID_PARAMS);
        }
        let mut wanted = Vec::new();
        for buffer in 0..count {
            let room = inner.clients.room(buffers[buffer]);
            for (at, key) in keys[buffer].iter().enumerate() {
                let (into, from, lens) = (into[buffer].get(at), from[buffer].get(at), lens[buffer].get(at));
                wanted.push((key.as_ref(), ranges(buffers[buffer], room, into, from, lens)));
            }
        }
        // SAFETY: the caller's promise.
        let mut read = unsafe { inner.get_ranges(&wanted) }.into_iter();
        let of_buffer = |keys: &Vec<K>| {
            keys.iter().map(|_| read.next().unwrap_or_else(|| vec![code::INTERNAL_ERROR.into()])).collect()
        };
        keys.iter().map(of_buffer).collect()
    }

    /// For each key 1, 0, or a negative number. An object that is there is leased, as in Mooncake.
    pub fn exists<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<StoreCode> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let asked = self
            .run(|worker| worker.client.batch_exists_leased(&keys).map_err(|error| code_of(worker, &error)));
        match asked {
            Ok(found) => found.into_iter().map(i32::from).collect(),
            Err(code) => vec![code; keys.len()],
        }
    }

    /// The length of an object, or a negative number.
    pub fn size(&self, key: &[u8]) -> i64 {
        let asked = self.run(|worker| worker.client.size(key).map_err(|error| code_of(worker, &error)));
        match asked {
            Ok(Some(len)) => i64::try_from(len).unwrap_or(i64::MAX),
            Ok(None) => code::OBJECT_NOT_FOUND.into(),
            Err(code) => code.into(),
        }
    }

    /// Removes an object: 0, -704, and without `force` -706 while a reader has a lease.
    pub fn remove(&self, key: &[u8], force: bool) -> StoreCode {
        self.batch_remove(&[key], force).pop().unwrap_or(code::INTERNAL_ERROR)
    }

    /// Removes objects: one number per key, as [`remove`](Self::remove).
    pub fn batch_remove<K: AsRef<[u8]>>(&self, keys: &[K], force: bool) -> Vec<StoreCode> {
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let removed = self.run(|worker| {
            let removed = worker.client.batch_remove(&keys, RemoveMode::forced(force));
            let removed = removed.map_err(|error| code_of(worker, &error))?;
            Ok(removed
                .into_iter()
                .map(|removed| match removed {
                    Ok(true) => codes::OK,
                    Ok(false) => code::OBJECT_NOT_FOUND,
                    Err(error) => code_of(worker, &error),
                })
                .collect())
        });
        removed.unwrap_or_else(|code| vec![code; keys.len()])
    }

    /// Removes the objects whose keys match an expression: their number, or a negative number. Without
    /// `force`, objects with a lease stay.
    pub fn remove_by_regex(&self, pattern: &str, force: bool) -> i64 {
        self.remove_many(Some(pattern), force)
    }

    /// Removes all objects: their number, or a negative number. Without `force`, objects with a lease stay.
    pub fn remove_all(&self, force: bool) -> i64 {
        self.remove_many(None, force)
    }

    fn remove_many(&self, pattern: Option<&str>, force: bool) -> i64 {
        let mode = RemoveMode::forced(force);
        let removed = self.run(|worker| {
            let mut master = worker.client.cluster()?.master();
            let removed = match pattern {
                Some(pattern) => master.remove_matching(pattern, mode),
                None => master.remove_all(mode),
            };
            removed.map_err(|error| code_of(worker, &error))
        });
        match removed {
            Ok(removal) => i64::try_from(removal.removed).unwrap_or(i64::MAX),
            Err(code) => code.into(),
        }
    }

    pub(super) fn run<T>(
        &self,
        run: impl FnOnce(&mut Lent<'_>) -> Result<T, StoreCode>,
    ) -> Result<T, StoreCode> {
        let inner: Arc<Inner> = self.inner()?;
        run(&mut inner.lend()?)
    }
}

/// The offsets and destinations of one key's ranges in a buffer of which `room` bytes are registered. `None`:
/// the lists differ in length, or the range is beyond the buffer or the last address.
fn ranges(
    buffer: u64,
    room: Option<u64>,
    into: Option<&Vec<u64>>,
    from: Option<&Vec<u64>>,
    lens: Option<&Vec<u64>>,
) -> Vec<Option<(u64, Span)>> {
    let count = into.map_or(1, Vec::len);
    let (Some(into), Some(from), Some(lens)) = (into, from, lens) else { return vec![None; count] };
    if from.len() != count || lens.len() != count || buffer == 0 {
        return vec![None; count];
    }
    let range = |((into, from), len): ((&u64, &u64), &u64)| {
        let (addr, end) = (buffer.checked_add(*into)?, into.checked_add(*len)?);
        total(&[Span { addr, len: *len }])?;
        room.is_none_or(|room| end <= room).then_some((*from, Span { addr, len: *len }))
    };
    into.iter().zip(from).zip(lens).map(range).collect()
}

/// Mooncake's number for an error of a client.
pub(super) fn code_of(worker: &mut Worker, error: &StoreError) -> StoreCode {
    worker.note(error);
    log::debug!("the store: {error}");
    codes::of_store_error(error)
}

impl Inner {
    fn lend(&self) -> Result<Lent<'_>, StoreCode> {
        self.clients.lend().map_err(|error| of_clients_error(&error))
    }

    /// Stores objects.
    ///
    /// # Safety
    /// As [`Store::batch_put`].
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn put(
        &self,
        keys: &[&[u8]],
        sources: &[Vec<Span>],
        config: &ReplicateConfig,
        upsert: bool,
    ) -> Vec<StoreCode> {
        let all = |code| vec![code; keys.len()];
        if keys.len() != sources.len() {
            return all(code::INVALID_PARAMS);
        }
        let mut options = match config.options(keys.len(), upsert) {
            Ok(options) => options,
            Err(code) => return all(code),
        };
        let mut worker = match self.lend() {
            Ok(worker) => worker,
            Err(code) => return all(code),
        };
        // The node on this machine chooses the place by itself.
        if let Any::Cluster(client) = &mut worker.client {
            options.placement = self.names.placement(client, config, self.name());
        }
        let mut results = all(codes::OK);
        // Keys of one group are stored together: a put has one group.
        let mut groups: HashMap<Option<u64>, Vec<usize>> = HashMap::new();
        for (at, (source, result)) in sources.iter().zip(&mut results).enumerate() {
            match total(source) {
                None => *result = code::INVALID_PARAMS,
                // As in Mooncake: nothing is stored, and that is no error.
                Some(0) => {}
                Some(_) => {
                    let group = config.group_ids.as_ref().map(|groups| group_number(&groups[at]));
                    groups.entry(group).or_default().push(at);
                }
            }
        }
        for (group, items) in groups {
            options.retention.group = group;
            // SAFETY: the caller's promise.
            unsafe { put_some(&mut worker, keys, sources, &items, &options, &mut results) };
        }
        results
    }

    fn get(&self, keys: &[&[u8]]) -> Vec<Result<Bytes, StoreCode>> {
        let mut worker = match self.lend() {
            Ok(worker) => worker,
            Err(code) => return vec![Err(code); keys.len()],
        };
        let mut values = vec![Bytes::new(); keys.len()];
        let mut items: Vec<Get<'_>> =
            keys.iter().zip(&mut values).map(|(key, value)| Get::new(*key, value)).collect();
        let _ = worker.client.batch_get(&mut items);
        let read: Vec<_> = items.into_iter().map(Get::into_result).collect();
        let of = |(read, value): (Result<Option<u64>, StoreError>, Bytes)| match read {
            Ok(Some(_)) => Ok(value),
            Ok(None) => Err(code::OBJECT_NOT_FOUND),
            Err(error) => Err(code_of(&mut worker, &error)),
        };
        read.into_iter().zip(values).map(of).collect()
    }

    /// Reads objects into memory of the caller.
    ///
    /// # Safety
    /// As [`Store::batch_get_into`].
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn get_into(&self, keys: &[&[u8]], sinks: &[Vec<Span>], fill: Fill) -> Vec<i64> {
        let all = |code: StoreCode| vec![i64::from(code); keys.len()];
        let rooms: Option<Vec<u64>> = sinks.iter().map(|sink| total(sink)).collect();
        let Some(rooms) = rooms.filter(|rooms| rooms.len() == keys.len()) else {
            return all(code::INVALID_PARAMS);
        };
        if clients::overlap(sinks.iter().flatten().copied()) {
            if let [_] = keys {
                log::error!("get: parts of the memory for one key overlap");
                return all(code::INVALID_PARAMS);
            }
            // One after the other: the last one stays.
            let each = keys.chunks(1).zip(sinks.chunks(1));
            // SAFETY: the caller's promise.
            return each.flat_map(|(keys, sinks)| unsafe { self.get_into(keys, sinks, fill) }).collect();
        }
        let mut worker = match self.lend() {
            Ok(worker) => worker,
            Err(code) => return all(code),
        };
        // SAFETY: the caller's promise; the worker is returned before this call returns.
        if let Err(error) = unsafe { worker.lend_devices(sinks.iter().map(Vec::as_slice)) } {
            log::error!("get: {error}");
            return all(code_of(&mut worker, &error));
        }
        let places: Vec<Place> = sinks.iter().map(|sink| Place::of(&worker, sink)).collect();
        if let Some(at) = places.iter().position(|place| !place.fits()) {
            log::error!("get: the memory for key {at} has more than {} parts", store_client::PARTS_MAX);
            return all(code::INVALID_PARAMS);
        }
        // SAFETY: the caller's promise.
        let mut slices: Vec<Vec<&mut [u8]>> =
            places.iter().map(|place| unsafe { place.slices_mut() }).collect();
        let sinks = places.iter().zip(&mut slices).map(|(place, slices)| place.sink(slices));
        let mut items: Vec<Get<'_>> =
            keys.iter().zip(sinks).map(|(key, sink)| Get::new(*key, sink)).collect();
        let _ = worker.client.batch_get(&mut items);
        let read: Vec<_> = items.into_iter().map(Get::into_result).collect();
        let bytes = |(read, room): (Result<Option<u64>, StoreError>, u64)| match read {
            Ok(Some(bytes)) if fill == Fill::Exact && bytes != room => code::TRANSFER_FAIL.into(),
            Ok(Some(bytes)) => i64::try_from(bytes).unwrap_or(i64::MAX),
            Ok(None) => code::OBJECT_NOT_FOUND.into(),
            Err(error) => code_of(&mut worker, &error).into(),
        };
        read.into_iter().zip(rooms).map(bytes).collect()
    }

    /// Reads ranges of objects: for each key the bytes per range, or one number.
    ///
    /// # Safety
    /// As [`Store::get_into_ranges`].
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn get_ranges(&self, wanted: &[Wanted<'_>]) -> Vec<Vec<i64>> {
        let ranges = wanted.iter().flat_map(|(_, ranges)| ranges).flatten();
        if clients::overlap(ranges.map(|(_, span)| *span)) {
            log::error!("get_into_ranges: destinations of one call overlap");
            return vec![vec![code::INVALID_PARAMS.into()]; wanted.len()];
        }
        let mut worker = match self.lend() {
            Ok(worker) => worker,
            Err(code) => return vec![vec![code.into()]; wanted.len()],
        };
        let spans = wanted.iter().map(|(_, ranges)| ranges.iter().flatten().map(|(_, span)| *span).collect());
        let spans: Vec<Vec<Span>> = spans.collect();
        // SAFETY: the caller's promise; the worker is returned before this call returns.
        if let Err(error) = unsafe { worker.lend_devices(spans.iter().map(Vec::as_slice)) } {
            log::error!("get_into_ranges: {error}");
            return vec![vec![code_of(&mut worker, &error).into()]; wanted.len()];
        }
        // A key whose memory is registered is read with all its ranges at once; otherwise each range is a
        // read of its own.
        let mut fragments: Vec<Vec<Fragment>> = Vec::with_capacity(wanted.len());
        for (_, ranges) in wanted {
            let fragment = |(offset, span): &(u64, Span)| {
                let (region, at) = worker.find(span.addr, span.len)?;
                Some(Fragment { offset: *offset, into: BufferRange { region, offset: at, len: span.len } })
            };
            let all = ranges.iter().flatten().filter(|(_, span)| span.len > 0).map(fragment);
            fragments.push(all.collect::<Option<_>>().unwrap_or_default());
        }
        let mut items = Vec::new();
        let mut owners = Vec::new();
        for (owner, ((key, ranges), fragments)) in wanted.iter().zip(&fragments).enumerate() {
            let ranges = ranges.iter().flatten().filter(|(_, span)| span.len > 0);
            for fragments in fragments.chunks(store_client::PARTS_MAX) {
                items.push(Get::new(*key, Sink::Fragments(fragments)));
                owners.push(owner);
            }
            for (offset, span) in ranges.filter(|_| fragments.is_empty()) {
                // SAFETY: the caller's promise; `ranges` has checked the address and the length.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(span.addr as *mut u8, span.len as usize) };
                let end = offset.saturating_add(span.len);
                items.push(Get::new(*key, Sink::Bytes(bytes)).range(*offset..end));
                owners.push(owner);
            }
        }
        let _ = worker.client.batch_get(&mut items);
        let mut failed: Vec<Option<StoreCode>> = vec![None; wanted.len()];
        for (owner, item) in owners.into_iter().zip(items) {
            let code = match item.into_result() {
                Ok(Some(_)) => continue,
                Ok(None) => code::OBJECT_NOT_FOUND,
                Err(error) => code_of(&mut worker, &error),
            };
            failed[owner].get_or_insert(code);
        }
        let of = |((_, ranges), failed): (&Wanted<'_>, Option<StoreCode>)| {
            let of_range = |range: &Option<(u64, Span)>| match (range, failed) {
                (None, _) => code::INVALID_PARAMS.into(),
                (_, Some(code)) => code.into(),
                (Some((_, span)), None) => span.len as i64,
            };
            ranges.iter().map(of_range).collect()
        };
        wanted.iter().zip(failed).map(of).collect()
    }
}

/// A key, and where which bytes of its object go: each an offset and local memory. `None`: the range is not
/// valid.
type Wanted<'a> = (&'a [u8], Vec<Option<(u64, Span)>>);

/// Stores those of the objects whose numbers are in `items`.
///
/// # Safety
/// As [`Store::batch_put`].
#[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
unsafe fn put_some(
    worker: &mut Lent<'_>,
    keys: &[&[u8]],
    sources: &[Vec<Span>],
    items: &[usize],
    options: &PutOptions,
    results: &mut [StoreCode],
) {
    // SAFETY: the caller's promise; the caller returns the worker before its own call returns.
    if let Err(error) = unsafe { worker.lend_devices(items.iter().map(|&at| sources[at].as_slice())) } {
        log::error!("put: {error}");
        let code = code_of(worker, &error);
        return items.iter().for_each(|&at| results[at] = code);
    }
    let places: Vec<Place> = items.iter().map(|&at| Place::of(worker, &sources[at])).collect();
    // SAFETY: the caller's promise.
    let slices: Vec<Vec<&[u8]>> = places.iter().map(|place| unsafe { place.slices() }).collect();
    // An object in more parts than a client takes is joined first. Memory of a device cannot be, and is
    // refused.
    let join = |at: usize, place: &Place| match place.fits() || worker.names_device(&sources[at]) {
        true => Vec::new(),
        // SAFETY: the caller's promise; `total` has checked addresses and lengths.
        false => sources[at]
            .iter()
            .filter_map(|span| unsafe { crate::read_bytes(span.addr, span.len as usize) })
            .flatten()
            .collect(),
    };
    let joined: Vec<Vec<u8>> = items.iter().zip(&places).map(|(&at, place)| join(at, place)).collect();
    let sources =
        places.iter().zip(&slices).zip(&joined).map(|((place, slices), joined)| match joined.is_empty() {
            true => place.source(slices),
            false => Source::Bytes(joined),
        });
    let mut puts: Vec<Put<'_>> =
        items.iter().zip(sources).map(|(&at, source)| Put::new(keys[at], source)).collect();
    let _ = worker.client.batch_put(&mut puts, options);
    let stored: Vec<_> = puts.into_iter().map(Put::into_result).collect();
    for (&at, stored) in items.iter().zip(stored) {
        // A key that exists keeps its first value, and that is no error.
        results[at] = stored.map_or_else(|error| code_of(worker, &error), |_| codes::OK);
    }
}
