//! The native half of the package `mooncake`: its classes by their names, over [`snowskin_compat`].
//!
//! ```text
//!   mooncake/engine.py    mooncake/store.py        re-exports
//!          └──────┬───────────┘
//!     _native.mooncake (this module)               arguments, types, the GIL
//!                 │            └──▶ snowskin/_mooncake/*.py      tensors
//!        snowskin_compat::{engine, store}          what calls mean, and their codes
//! ```
//!
//! Nothing here decides what a call means: this module converts arguments and results, keeps objects alive
//! that operations use, and gives the GIL back while they run.

mod absent;
mod buffer;
mod convert;
mod engine;
mod enums;
mod host;
mod pool;
mod signature;
mod store;
mod values;

use pyo3::prelude::*;

pub(crate) use signature::shown;

/// Adds the module `mooncake` to `parent`.
///
/// # Errors
/// What Python raises while classes are made.
pub(crate) fn register(parent: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = parent.py();
    let module = PyModule::new(py, "mooncake")?;
    enums::register(&module)?;
    values::register(&module)?;
    engine::register(&module)?;
    buffer::register(&module)?;
    pool::register(&module)?;
    host::register(&module)?;
    store::register(&module)?;
    absent::register(&module)?;
    parent.add_submodule(&module)?;
    // `import snowskin._native.mooncake` looks there.
    py.import("sys")?.getattr("modules")?.set_item("snowskin._native.mooncake", &module)
}
