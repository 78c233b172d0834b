//! `snowskin.Store`: the blocking interface.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use store_client::{Prefetching, PutOptions};

use super::core::Core;
use super::jobs::{Answer, Fetched, Given, Key, Wanted};
use super::listing::{Listing, Query};
use super::results::{self, Batch, ObjectInfo, PutResult};
use super::settings::Settings;
use crate::errors::Fault;
use crate::options::{deadline, limit_ms, put_options};
use crate::{gil, keys, logging};

/// Items of one job of a bulk operation: its progress, and what other operations wait for.
pub(super) const CHUNK: usize = 512;
/// Jobs of a bulk operation that are under way together.
const JOBS: usize = 2;
/// How long `close` waits by default, seconds; the same in its signature.
const CLOSE_S: f64 = 2.0;

/// A store of objects: immutable bytes with a name, in the memory of many machines.
///
/// Open one with :meth:`connect`. A store is used by any number of threads at a time; their operations are
/// gathered into batches. No method holds the GIL while it waits, and Ctrl-C ends every wait.
///
/// Keys are ``str`` or ``bytes``. Values are all objects with the buffer protocol or with ``__dlpack__`` in
/// host memory, contiguous in C order; their ``nbytes`` bytes are stored, without type and shape (see
/// :mod:`snowskin.tensor` for both).
///
/// ``timeout`` is in seconds; ``None`` means as long as the operation's own limits (``call_timeout`` and
/// ``transfer_timeout`` of :meth:`connect`). After :exc:`Timeout` the operation goes on and keeps its buffers
/// until its end: nothing ever writes into a buffer that was given back.
///
/// >>> store.put("prompt/0", b"kv block").stored
/// True
/// >>> with store.get("prompt/0") as lease:
/// ...     bytes(lease)
/// b'kv block'
/// >>> store.get("prompt/1") is None  # a miss is not an error
/// True
#[pyclass(frozen, weakref, module = "snowskin")]
pub(crate) struct Store {
    core: Arc<Core>,
    place: String,
}

/// Waits for an answer.
fn wait<T: Send>(
    py: Python<'_>,
    answer: &Answer<T>,
    until: Option<Instant>,
    timeout: Option<f64>,
) -> PyResult<T> {
    match gil::wait(py, answer, until)? {
        Some(Ok(value)) => Ok(value),
        Some(Err(fault)) => Err(fault.into_err(py)),
        None => Err(Fault::timeout(timeout.unwrap_or_default()).into_err(py)),
    }
}

/// The limit on a wait.
#[derive(Clone, Copy)]
struct Limit {
    until: Option<Instant>,
    timeout: Option<f64>,
}

impl Limit {
    fn new(py: Python<'_>, timeout: Option<f64>) -> PyResult<Self> {
        Ok(Self { until: deadline(py, timeout)?, timeout })
    }

    fn wait<T: Send>(self, py: Python<'_>, answer: &Answer<T>) -> PyResult<T> {
        wait(py, answer, self.until, self.timeout)
    }
}

/// Carries out a bulk operation in jobs of [`CHUNK`] items, and reports its progress after each.
fn in_chunks<I, T: Send>(
    py: Python<'_>,
    items: Vec<I>,
    limit: Limit,
    progress: Option<&Bound<'_, PyAny>>,
    send: impl Fn(Vec<I>) -> Answer<Vec<T>>,
    mut each: impl FnMut(T) -> PyResult<()>,
) -> PyResult<()> {
    let total = items.len();
    let mut items = items.into_iter();
    let mut under_way = VecDeque::new();
    let mut done = 0;
    loop {
        while under_way.len() < JOBS {
            let chunk: Vec<I> = items.by_ref().take(CHUNK).collect();
            if chunk.is_empty() {
                break;
            }
            under_way.push_back(send(chunk));
        }
        let Some(answer) = under_way.pop_front() else { return Ok(()) };
        for item in limit.wait(py, &answer)? {
            each(item)?;
            done += 1;
        }
        if let Some(progress) = progress {
            progress.call1((done, total))?;
        }
    }
}

impl Store {
    pub(super) const fn new(core: Arc<Core>, place: String) -> Self {
        Self { core, place }
    }

    fn get_one(&self, py: Python<'_>, wanted: Wanted, limit: Limit) -> PyResult<Py<PyAny>> {
        let mut fetched = limit.wait(py, &self.core.get(vec![wanted]))?;
        match fetched.pop() {
            Some(fetched) => {
                results::fetched(py, fetched).map(Bound::unbind).map_err(|failed| failed.into_err(py))
            }
            None => Ok(py.None()),
        }
    }

    fn put_one(
        &self,
        py: Python<'_>,
        given: Given,
        options: PutOptions,
        limit: Limit,
    ) -> PyResult<PutResult> {
        let mut stored = limit.wait(py, &self.core.put(vec![given], options))?;
        match stored.pop() {
            Some(stored) => results::stored(py, stored).map_err(|fault| fault.into_err(py)),
            None => Ok(PutResult { stored: false }),
        }
    }

    fn get_batch<'py>(
        &self,
        py: Python<'py>,
        wanted: Vec<Wanted>,
        progress: Option<&Bound<'py, PyAny>>,
        limit: Limit,
    ) -> PyResult<Bound<'py, PyAny>> {
        let batch = Batch::new(py);
        let none = || py.None().into_bound(py);
        let each = |fetched: Fetched| batch.push(results::fetched(py, fetched), none);
        in_chunks(py, wanted, limit, progress, |chunk| self.core.get(chunk), each)?;
        batch.finish()
    }
}

#[pymethods]
impl Store {
    /// Opens a store. The arguments are those of :class:`snowskin.Config`, which describes them; a ``Config``
    /// is accepted in their place. ``ValueError`` comes before anything is opened.
    ///
    /// ``with`` closes the store at its end.
    #[staticmethod]
    #[pyo3(
        signature = (*arguments, **options),
        text_signature = "(master=None, *, memory=None, rails='auto', local=None, tenant='default', secret=None, cluster_secret=None, admin_secret=None, listen='127.0.0.1:0', advertise=None, node_name=None, pool='1GiB', connect_timeout=2.0, call_timeout=5.0, transfer_timeout=10.0, gpu_library=None)"
    )]
    fn connect(
        py: Python<'_>,
        arguments: &Bound<'_, PyTuple>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let class = py.import("snowskin._config")?.getattr("Config")?;
        let config = match (arguments.len(), options) {
            (1, None) if arguments.get_item(0)?.is_instance(&class)? => arguments.get_item(0)?,
            _ => class.call(arguments, options)?,
        };
        logging::update_level(py)?;
        let settings = Settings::new(py, &config.extract()?)?;
        let place = settings.place();
        match gil::blocking(py, move || settings.open())? {
            Ok(core) => Ok(Self::new(core, place)),
            Err(fault) => Err(fault.into_err(py)),
        }
    }

    /// Stores an object. The result is true when it was stored, and false when the key exists.
    ///
    /// ``value`` is a buffer, or a list or tuple of buffers, whose bytes are joined.
    ///
    /// ``pin`` is ``None``, ``"soft"`` (evicted last) or ``"hard"`` (never evicted). ``replicas`` is the
    /// number of copies wanted; at least one is made. Objects of one ``group`` (a name or a number) are
    /// evicted together. ``ttl`` removes the object after so many seconds. ``overwrite`` replaces an object
    /// that exists: gets find the old bytes until the new ones are stored, and also after that if the put
    /// fails. Until then there has to be room for both. ``disk`` says whether the object is copied to a disk
    /// of a node that has it: ``"auto"`` (before it is evicted), ``"never"``, or ``"now"`` (as soon as it is
    /// stored; the call does not wait for it).
    ///
    /// >>> store.put("pinned", bytearray(4096), pin="soft", group="prompt-7").stored
    /// True
    /// >>> store.put("framed", [b"header", bytes(2)]).stored
    /// True
    /// >>> bytes(store.get("framed"))
    /// b'header\x00\x00'
    #[pyo3(signature = (key, value, *, pin=None, replicas=1, group=None, ttl=None, overwrite=false, disk="auto", timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn put(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        pin: Option<&str>,
        replicas: i64,
        group: Option<&Bound<'_, PyAny>>,
        ttl: Option<f64>,
        overwrite: bool,
        disk: &str,
        timeout: Option<f64>,
    ) -> PyResult<PutResult> {
        let options = put_options(py, pin, replicas, group, ttl, overwrite, disk)?;
        let limit = Limit::new(py, timeout)?;
        self.put_one(py, results::given(key, value)?, options, limit)
    }

    /// Stores many objects: a mapping, or pairs of key and value. Options are those of :meth:`put`.
    ///
    /// The result has one ``bool`` per item: whether it was stored. An item that failed is ``False``, and its
    /// error is in ``results.errors``. ``progress(done, total)`` is called as items end.
    ///
    /// >>> results = store.put_many({f"block/{i}": bytes([i]) * 100 for i in range(3)})
    /// >>> list(results), results.errors
    /// ([True, True, True], {})
    #[pyo3(signature = (items, *, pin=None, replicas=1, group=None, ttl=None, overwrite=false, disk="auto", progress=None, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn put_many<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        pin: Option<&str>,
        replicas: i64,
        group: Option<&Bound<'py, PyAny>>,
        ttl: Option<f64>,
        overwrite: bool,
        disk: &str,
        progress: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = put_options(py, pin, replicas, group, ttl, overwrite, disk)?;
        let limit = Limit::new(py, timeout)?;
        let batch = Batch::new(py);
        let each = |stored| batch.push_bool(results::stored(py, stored).map(|result| result.stored));
        in_chunks(
            py,
            results::many_given(items)?,
            limit,
            progress,
            |chunk| self.core.put(chunk, options),
            each,
        )?;
        batch.finish()
    }

    /// Reads an object, or a part of it, into memory of the store. ``None`` is a miss.
    ///
    /// >>> store.put("digits", b"0123456789").stored
    /// True
    /// >>> bytes(store.get("digits", offset=2, length=3))
    /// b'234'
    #[pyo3(signature = (key, *, offset=0, length=None, timeout=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        offset: u64,
        length: Option<u64>,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let part = results::part(py, offset, length)?;
        let wanted = Wanted { key: keys::from_python(key)?, part, into: None };
        self.get_one(py, wanted, Limit::new(py, timeout)?)
    }

    /// Reads an object, or a part of it, into a buffer, and returns the number of bytes. ``None`` is a miss.
    ///
    /// An object that is longer than the buffer is refused with :exc:`InvalidArgument`, and nothing is
    /// written. After a miss, parts of the buffer may have been written.
    ///
    /// >>> store.put("answer", b"42").stored
    /// True
    /// >>> buffer = bytearray(8)
    /// >>> store.get_into("answer", buffer), buffer[:2]
    /// (2, bytearray(b'42'))
    #[pyo3(signature = (key, buffer, *, offset=0, length=None, timeout=None))]
    fn get_into(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        buffer: &Bound<'_, PyAny>,
        offset: u64,
        length: Option<u64>,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let part = results::part(py, offset, length)?;
        let limit = Limit::new(py, timeout)?;
        self.get_one(py, results::wanted_into(key, buffer, part)?, limit)
    }

    /// Reads many objects. The result has one lease per key, and ``None`` for each miss. A key that failed is
    /// ``None``, too, and its error is in ``results.errors``. ``with`` releases all leases.
    ///
    /// >>> store.put_many({"a": b"1", "b": b"22"}).errors
    /// {}
    /// >>> with store.get_many(["a", "x", "b"]) as leases:
    /// ...     [lease and bytes(lease) for lease in leases]
    /// [b'1', None, b'22']
    #[pyo3(signature = (keys, *, progress=None, timeout=None))]
    fn get_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        progress: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = results::keys_of(keys)?.into_iter().map(Wanted::whole).collect();
        self.get_batch(py, wanted, progress, Limit::new(py, timeout)?)
    }

    /// Reads many objects into buffers: a mapping of keys to buffers, or pairs. The result has the number of
    /// bytes per item, and ``None`` for each miss; errors are in ``results.errors``.
    #[pyo3(signature = (items, *, progress=None, timeout=None))]
    fn get_many_into<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        progress: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wanted = results::many_into(items)?;
        self.get_batch(py, wanted, progress, Limit::new(py, timeout)?)
    }

    /// Reads the longest prefix of ``keys`` that is in the store: the keys of a prompt's blocks, in order.
    /// The result has one lease per key, up to the first key that is not there.
    ///
    /// >>> store.put_many({"p/0": b"a", "p/1": b"b", "p/3": b"d"}).errors
    /// {}
    /// >>> with store.get_prefix(["p/0", "p/1", "p/2", "p/3"]) as leases:
    /// ...     [bytes(lease) for lease in leases]
    /// [b'a', b'b']
    #[pyo3(signature = (keys, *, timeout=None))]
    fn get_prefix<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let keys = results::keys_of(keys)?;
        let fetched = Limit::new(py, timeout)?.wait(py, &prefix(&self.core, keys))?;
        prefix_results(py, fetched)?.finish()
    }

    /// Copies objects that are on disks alone into memory, and waits until they are there, for ``deadline``
    /// seconds at most: the blocks of a prompt that will be read soon. The result has one ``bool`` per key:
    /// whether it is in memory now, where it is leased for a while.
    ///
    /// >>> store.put("soon", b"x").stored
    /// True
    /// >>> store.prefetch(["soon", "nothing"], deadline=0.5)
    /// [True, False]
    #[pyo3(signature = (keys, *, deadline=1.0))]
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, deadline: f64) -> PyResult<Vec<bool>> {
        let deadline = Duration::from_millis(limit_ms(py, "deadline", deadline)?.into());
        let keys = results::keys_of(keys)?;
        let mut waiting = Prefetching::new(keys.len(), deadline);
        loop {
            let asked: Vec<Key> = waiting.left().iter().map(|at| keys[*at].clone()).collect();
            let answer = self.core.call(move |worker| worker.prefetch(&asked));
            let Some(pause) = waiting.heard(&Limit::new(py, None)?.wait(py, &answer)?) else { break };
            py.detach(|| thread::sleep(pause));
            py.check_signals()?;
        }
        Ok(waiting.into_there())
    }

    /// Whether a get would find the object. Does not count as a use of it.
    #[pyo3(signature = (key, *, timeout=None))]
    fn exists(&self, py: Python<'_>, key: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<bool> {
        let answer = self.core.exists(vec![keys::from_python(key)?]);
        Ok(Limit::new(py, timeout)?.wait(py, &answer)?.first().copied().unwrap_or(false))
    }

    /// Whether gets would find the objects, in one request.
    ///
    /// >>> store.put("here", b"x").stored
    /// True
    /// >>> store.exists_many(["here", "there"])
    /// [True, False]
    #[pyo3(signature = (keys, *, timeout=None))]
    fn exists_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<bool>> {
        let keys = results::keys_of(keys)?;
        Limit::new(py, timeout)?.wait(py, &self.core.exists(keys))
    }

    /// Removes an object. The result is false if there was none. :exc:`Leased` while a reader holds a lease
    /// of the master on it, or while it is being written, unless ``force`` is set.
    #[pyo3(signature = (key, *, force=false, timeout=None))]
    fn remove(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        force: bool,
        timeout: Option<f64>,
    ) -> PyResult<bool> {
        let answer = self.core.remove(vec![keys::from_python(key)?], force);
        let removed = Limit::new(py, timeout)?.wait(py, &answer)?.pop().unwrap_or(Ok(false));
        removed.map_err(|fault| fault.into_err(py))
    }

    /// Removes many objects. The result has one ``bool`` per key; errors are in ``results.errors``.
    ///
    /// >>> store.put_many({"r/0": b"x", "r/1": b"y"}).errors
    /// {}
    /// >>> list(store.remove_many(["r/0", "r/1", "r/2"], force=True))
    /// [True, True, False]
    #[pyo3(signature = (keys, *, force=false, timeout=None))]
    fn remove_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        force: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let keys = results::keys_of(keys)?;
        let batch = Batch::new(py);
        for removed in Limit::new(py, timeout)?.wait(py, &self.core.remove(keys, force))? {
            batch.push_bool(removed)?;
        }
        batch.finish()
    }

    /// Removes every object whose key matches a regular expression, and returns their number. Objects that
    /// readers hold, and objects that are being written, stay unless ``force`` is set.
    #[pyo3(signature = (pattern, *, force=false, timeout=None))]
    fn remove_matching(
        &self,
        py: Python<'_>,
        pattern: String,
        force: bool,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        Limit::new(py, timeout)?.wait(py, &remove_matching(&self.core, pattern, force))
    }

    /// Length and checksum of an object; ``None`` if there is none. A get that follows soon finds the object.
    #[pyo3(signature = (key, *, timeout=None))]
    fn stat(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Option<ObjectInfo>> {
        let answer = stat(&self.core, keys::from_python(key)?);
        Limit::new(py, timeout)?.wait(py, &answer)
    }

    /// Iterates over the objects whose keys begin with ``prefix``, in no particular order, one page of the
    /// master at a time.
    ///
    /// >>> store.put_many({"l/0": b"x", "l/1": b"yy"}).errors
    /// {}
    /// >>> sorted((info.key, info.nbytes) for info in store.list("l/"))
    /// [('l/0', 1), ('l/1', 2)]
    #[pyo3(signature = (prefix=None))]
    fn list(&self, prefix: Option<&Bound<'_, PyAny>>) -> PyResult<Listing> {
        let prefix = prefix.map(keys::prefix).transpose()?.unwrap_or_default();
        Ok(Listing::new(Arc::clone(&self.core), Query::Prefix(prefix)))
    }

    /// Iterates over the objects whose keys match a regular expression anywhere (anchor it with ``^``).
    /// Expressions are those of Rust's ``regex``, without look-around and back-references: a search takes
    /// time in proportion to the keys.
    fn scan(&self, pattern: String) -> Listing {
        Listing::new(Arc::clone(&self.core), Query::Pattern(pattern))
    }

    /// Counters of this store: hits, misses, bytes, and the memory of its leases.
    #[pyo3(signature = (*, timeout=None))]
    fn stats<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let counters = Limit::new(py, timeout)?.wait(py, &counters(&self.core))?;
        counters_dict(py, &self.core, counters)
    }

    /// Address at which the memory that this store lends is reached; ``None`` if it lends none.
    #[getter]
    fn endpoint(&self) -> Option<String> {
        self.core.node_endpoint()
    }

    /// Whether the store was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.core.is_closed()
    }

    /// Closes the store: operations that have been asked for are carried out, further ones are refused, and
    /// memory that the store lends is withdrawn, with the objects in it. Returns whether all that was over
    /// within ``timeout`` seconds; otherwise the rest happens in the background. Leases stay valid.
    #[pyo3(signature = (timeout=2.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let until = deadline(py, Some(timeout))?;
        let slot = self.core.close();
        Ok(gil::wait(py, &slot, until)?.is_some())
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, CLOSE_S).map(drop)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("<snowskin.Store {} {state}>", self.place)
    }

    /// A store is not pickled: pass a ``Config`` to the other process.
    fn __reduce__(&self) -> PyResult<()> {
        Err(pyo3::exceptions::PyTypeError::new_err(
            "a Store cannot be pickled: pass its Config to the other process, and connect there",
        ))
    }
}

/// Reads the objects up to the first that is not there.
pub(super) fn prefix(core: &Core, keys: Vec<Key>) -> Answer<Vec<Fetched>> {
    core.call(move |worker| {
        let there = worker.exists(&keys)?.iter().take_while(|there| **there).count();
        let wanted = keys.into_iter().take(there).map(Wanted::whole).collect();
        Ok(worker.get(wanted))
    })
}

/// The results of a prefix: nothing behind the first object that was not read.
pub(super) fn prefix_results<'py>(py: Python<'py>, fetched: Vec<Fetched>) -> PyResult<Batch<'py>> {
    let batch = Batch::new(py);
    for item in fetched {
        if matches!(item.result, Ok(None)) {
            break;
        }
        let is_error = item.result.is_err();
        batch.push(results::fetched(py, item), || py.None().into_bound(py))?;
        if is_error {
            batch.drop_last()?;
            break;
        }
    }
    Ok(batch)
}

pub(super) fn stat(core: &Core, key: Key) -> Answer<Option<ObjectInfo>> {
    core.call(move |worker| {
        let found = worker.backend.master()?.look_up(&key)?;
        Ok(found.map(|info| ObjectInfo::looked_up(key, info.len, info.checksum)))
    })
}

pub(super) fn remove_matching(core: &Core, pattern: String, force: bool) -> Answer<u64> {
    core.call(move |worker| {
        let mode = store_client::RemoveMode::forced(force);
        Ok(worker.backend.master()?.remove_matching(&pattern, mode)?.removed)
    })
}

/// The client's counters; `None` for a client of the node on this machine, which counts nothing.
pub(super) fn counters(core: &Core) -> Answer<Option<store_client::Counters>> {
    core.call(|worker| Ok(worker.backend.counters()))
}

pub(super) fn counters_dict<'py>(
    py: Python<'py>,
    core: &Core,
    counters: Option<store_client::Counters>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    if let Some(counters) = counters {
        dict.set_item("hits", counters.hits)?;
        dict.set_item("misses", counters.misses)?;
        dict.set_item("checksum_mismatches", counters.checksum_mismatches)?;
        dict.set_item("lease_misses", counters.lease_misses)?;
        dict.set_item("transfer_misses", counters.transfer_misses)?;
        dict.set_item("disk_hits", counters.disk_hits)?;
        dict.set_item("disk_misses", counters.disk_misses)?;
        dict.set_item("replica_failovers", counters.replica_failovers)?;
        dict.set_item("puts", counters.puts)?;
        dict.set_item("put_failures", counters.put_failures)?;
        dict.set_item("read_bytes", counters.read_bytes)?;
        dict.set_item("written_bytes", counters.written_bytes)?;
        dict.set_item("quarantined_pieces", counters.quarantined_pieces)?;
        dict.set_item("connects", counters.connects)?;
    }
    let (used, mapped) = core.pool.used_bytes();
    dict.set_item("pool_used_bytes", used)?;
    dict.set_item("pool_mapped_bytes", mapped)?;
    dict.set_item("pool_bytes_max", core.pool.bytes_max())?;
    Ok(dict)
}
