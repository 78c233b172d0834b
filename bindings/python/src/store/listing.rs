//! Listings: pages of keys from the master, one object at a time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use store_client::{ListEntry, ListPage};

use super::core::Core;
use super::jobs::{Answer, Key};
use super::results::ObjectInfo;
use crate::gil;

/// Objects per page.
const PAGE: u32 = 1_000;

/// Which objects are listed.
#[derive(Clone, Debug)]
pub(super) enum Query {
    /// Keys that begin with these bytes.
    Prefix(Key),
    /// Keys that match a regular expression.
    Pattern(String),
}

/// Asks for a page. `cursor` is 0 for the first page.
pub(super) fn page(core: &Core, query: &Query, cursor: u64) -> Answer<ListPage> {
    let query = query.clone();
    core.call(move |worker| {
        let mut master = worker.backend.master()?;
        Ok(match &query {
            Query::Prefix(prefix) => master.list(prefix, cursor, PAGE)?,
            Query::Pattern(pattern) => master.find(pattern, cursor, PAGE)?,
        })
    })
}

/// An iterator over objects. It asks the master for a page at a time, so objects that are put or removed
/// meanwhile may or may not be among them.
#[pyclass(frozen, module = "snowskin")]
pub(crate) struct Listing {
    core: Arc<Core>,
    query: Query,
    state: Mutex<State>,
}

struct State {
    entries: VecDeque<ListEntry>,
    /// `None`: the last page has arrived.
    cursor: Option<u64>,
}

impl Listing {
    pub(super) fn new(core: Arc<Core>, query: Query) -> Self {
        Self { core, query, state: Mutex::new(State { entries: VecDeque::new(), cursor: Some(0) }) }
    }

    /// The next object of the pages that have arrived, or the cursor of the page to ask for.
    fn step(&self) -> Result<Option<ListEntry>, u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match (state.entries.pop_front(), state.cursor) {
            (Some(entry), _) => Ok(Some(entry)),
            (None, None) => Ok(None),
            (None, Some(cursor)) => Err(cursor),
        }
    }

    fn arrived(&self, page: ListPage) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.entries.extend(page.entries);
        state.cursor = Some(page.cursor).filter(|&cursor| cursor != 0);
    }
}

#[pymethods]
impl Listing {
    const fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<ObjectInfo>> {
        loop {
            match self.step() {
                Ok(entry) => return Ok(entry.map(ObjectInfo::listed)),
                // A page may be empty without being the last.
                Err(cursor) => {
                    let answer = page(&self.core, &self.query, cursor);
                    match gil::wait(py, &answer, None)? {
                        Some(Ok(page)) => self.arrived(page),
                        Some(Err(fault)) => return Err(fault.into_err(py)),
                        None => return Ok(None),
                    }
                }
            }
        }
    }
}
