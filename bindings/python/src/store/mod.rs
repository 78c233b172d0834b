//! `snowskin.Store`, and the native half of `snowskin.aio.Store`.
//!
//! ```text
//!   Store ──────┐
//!   AsyncStore ─┴─▶ Core ──▶ Queue ──▶ Worker: the client's thread ──▶ Backend
//!                    │                    │
//!                    └── Pool ◄───────────┘ places of gets; leases hold blocks of it
//! ```

mod asynchronous;
mod backend;
mod core;
mod jobs;
mod listing;
mod reading;
mod results;
mod settings;
mod synchronous;
mod worker;

use pyo3::prelude::*;
use pyo3::types::PyModule;

pub(crate) use settings::{address, rails, secret};

/// Adds the classes to the module.
///
/// # Errors
/// No memory.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<synchronous::Store>()?;
    module.add_class::<asynchronous::AsyncStore>()?;
    module.add_class::<listing::Listing>()?;
    module.add_class::<results::PutResult>()?;
    module.add_class::<results::ObjectInfo>()?;
    module.add_function(wrap_pyfunction!(settings::check_config, module)?)
}
