//! `snowskin._native.AsyncStore`: the native half of `snowskin.aio.Store`. Each method begins an operation
//! and returns an `asyncio.Future`; the coroutines around them are in Python.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use store_client::{Prefetched, PutOptions};

use super::core::Core;
use super::jobs::{Answer, Fetched, Wanted};
use super::listing::{self, Query};
use super::results::{self, Batch, ObjectInfo};
use super::settings::Settings;
use super::synchronous::{counters, counters_dict, prefix, prefix_results, remove_matching, stat};
use crate::errors::Fault;
use crate::options::put_options;
use crate::slot::Filled;
use crate::{aio, gil, keys, logging};

/// An open store of an event loop.
#[pyclass(frozen, weakref, module = "snowskin._native")]
pub(crate) struct AsyncStore {
    core: Arc<Core>,
    place: String,
}

/// A future for an answer. `convert` makes its value.
fn future<'py, T, C>(py: Python<'py>, answer: Answer<T>, convert: C) -> PyResult<Bound<'py, PyAny>>
where
    T: Send + 'static,
    C: FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
{
    aio::future(py, Filled(answer), move |py, result| match result {
        Ok(value) => convert(py, value),
        Err(fault) => Err(fault.into_err(py)),
    })
}

/// The value of the only get.
fn one(py: Python<'_>, mut fetched: Vec<Fetched>) -> PyResult<Py<PyAny>> {
    match fetched.pop() {
        Some(fetched) => {
            results::fetched(py, fetched).map(Bound::unbind).map_err(|failed| failed.into_err(py))
        }
        None => Ok(py.None()),
    }
}

/// Values and errors of a part of a batch.
fn pair(py: Python<'_>, fetched: Vec<Fetched>) -> PyResult<Py<PyAny>> {
    let batch = Batch::new(py);
    for item in fetched {
        batch.push(results::fetched(py, item), || py.None().into_bound(py))?;
    }
    batch.pair().map(Bound::unbind)
}

/// Yes or no per item, and the errors.
fn bools(py: Python<'_>, items: impl IntoIterator<Item = Result<bool, Fault>>) -> PyResult<Py<PyAny>> {
    let batch = Batch::new(py);
    for item in items {
        batch.push_bool(item)?;
    }
    batch.pair().map(Bound::unbind)
}

#[pymethods]
impl AsyncStore {
    /// Opens a store on a thread of its own; the future's value is an `AsyncStore`.
    #[staticmethod]
    fn connect<'py>(py: Python<'py>, config: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        logging::update_level(py)?;
        let settings = Settings::new(py, &config.extract()?)?;
        let place = settings.place();
        let answer = gil::spawn(move || settings.open()).map_err(|fault| fault.into_err(py))?;
        aio::future(py, Filled(answer), move |py, opened| {
            let core = opened.map_err(Fault::from).flatten().map_err(|fault| fault.into_err(py))?;
            Ok(Py::new(py, Self { core, place })?.into_any())
        })
    }

    fn get<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let part = results::part(py, offset, length)?;
        let wanted = Wanted { key: keys::from_python(key)?, part, into: None };
        future(py, self.core.get(vec![wanted]), one)
    }

    fn get_into<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        buffer: &Bound<'py, PyAny>,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let part = results::part(py, offset, length)?;
        future(py, self.core.get(vec![results::wanted_into(key, buffer, part)?]), one)
    }

    /// A part of `get_many`: the future's value is a list of leases and a dict of errors.
    fn get_chunk<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let wanted = results::keys_of(keys)?.into_iter().map(Wanted::whole).collect();
        future(py, self.core.get(wanted), pair)
    }

    /// A part of `get_many_into`.
    fn get_into_chunk<'py>(&self, py: Python<'py>, items: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        future(py, self.core.get(results::many_into(items)?), pair)
    }

    fn get_prefix<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        future(py, prefix(&self.core, results::keys_of(keys)?), |py, fetched| {
            prefix_results(py, fetched)?.finish().map(Bound::unbind)
        })
    }

    #[expect(clippy::too_many_arguments, reason = "they are keywords of the coroutine")]
    fn put<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        pin: Option<&str>,
        replicas: i64,
        group: Option<&Bound<'py, PyAny>>,
        ttl: Option<f64>,
        overwrite: bool,
        disk: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = put_options(py, pin, replicas, group, ttl, overwrite, disk)?;
        self.put_given(py, results::given(key, value)?, options)
    }

    /// A part of `put_many`: the future's value is a list of bools and a dict of errors.
    #[expect(clippy::too_many_arguments, reason = "they are keywords of the coroutine")]
    fn put_chunk<'py>(
        &self,
        py: Python<'py>,
        items: &Bound<'py, PyAny>,
        pin: Option<&str>,
        replicas: i64,
        group: Option<&Bound<'py, PyAny>>,
        ttl: Option<f64>,
        overwrite: bool,
        disk: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = put_options(py, pin, replicas, group, ttl, overwrite, disk)?;
        let answer = self.core.put(results::many_given(items)?, options);
        future(py, answer, |py, stored| {
            bools(py, stored.into_iter().map(|item| results::stored(py, item).map(|result| result.stored)))
        })
    }

    /// One step of `prefetch`: for each key whether it is in memory, or ``None`` where it is nowhere.
    fn prefetch<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let keys = results::keys_of(keys)?;
        future(py, self.core.call(move |worker| worker.prefetch(&keys)), |py, found| {
            let steps = found.into_iter().map(|found| match found {
                Prefetched::Absent => None,
                Prefetched::Coming => Some(false),
                Prefetched::InMemory => Some(true),
            });
            Ok(PyList::new(py, steps.collect::<Vec<_>>())?.into_any().unbind())
        })
    }

    fn exists_many<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        future(py, self.core.exists(results::keys_of(keys)?), |py, found| {
            Ok(found.into_pyobject(py)?.into_any().unbind())
        })
    }

    /// The future's value is a list of bools and a dict of errors.
    fn remove_many<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        force: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        future(py, self.core.remove(results::keys_of(keys)?, force), bools)
    }

    fn remove_matching<'py>(
        &self,
        py: Python<'py>,
        pattern: String,
        force: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        future(py, remove_matching(&self.core, pattern, force), |py, removed| {
            Ok(removed.into_pyobject(py)?.into_any().unbind())
        })
    }

    fn stat<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        future(py, stat(&self.core, keys::from_python(key)?), |py, info| match info {
            Some(info) => Ok(Py::new(py, info)?.into_any()),
            None => Ok(py.None()),
        })
    }

    /// A page of a listing by prefix (`pattern` is `None`) or pattern: the future's value is a list of
    /// `ObjectInfo` and the next cursor, 0 after the last page.
    fn page<'py>(
        &self,
        py: Python<'py>,
        prefix: &Bound<'py, PyAny>,
        pattern: Option<String>,
        cursor: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let query = match pattern {
            Some(pattern) => Query::Pattern(pattern),
            None => Query::Prefix(keys::prefix(prefix)?),
        };
        future(py, listing::page(&self.core, &query, cursor), |py, page| {
            let infos: Vec<ObjectInfo> = page.entries.into_iter().map(ObjectInfo::listed).collect();
            Ok((infos, page.cursor).into_pyobject(py)?.into_any().unbind())
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let core = Arc::clone(&self.core);
        future(py, counters(&self.core), move |py, counters| {
            let dict: Bound<'_, PyDict> = counters_dict(py, &core, counters)?;
            Ok(dict.into_any().unbind())
        })
    }

    #[getter]
    fn endpoint(&self) -> Option<String> {
        self.core.node_endpoint()
    }

    #[getter]
    fn closed(&self) -> bool {
        self.core.is_closed()
    }

    #[getter]
    fn place(&self) -> &str {
        &self.place
    }

    /// Closes the store. The future's value is `None`, when everything is over.
    fn close<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        aio::future(py, Filled(self.core.close()), |py, ()| Ok(py.None()))
    }
}

impl AsyncStore {
    fn put_given<'py>(
        &self,
        py: Python<'py>,
        given: super::jobs::Given,
        options: PutOptions,
    ) -> PyResult<Bound<'py, PyAny>> {
        future(py, self.core.put(vec![given], options), |py, mut stored| match stored.pop() {
            Some(stored) => match results::stored(py, stored) {
                Ok(result) => Ok(Py::new(py, result)?.into_any()),
                Err(fault) => Err(fault.into_err(py)),
            },
            None => Ok(py.None()),
        })
    }
}
