//! `snowskin._native`: the native module of the Python package `snowskin`.
//!
//! ```text
//!   Python threads                                         event loops
//!        │  Store, Engine, Region, Batch                        │  AsyncStore, await batch
//!        ▼                                                      ▼
//!   gil: waits in slices, without the GIL                  aio: one eventfd per loop, no thread pool
//!        │                                                      │
//!        └──────────────┬───────────────────────────────────────┘
//!                       ▼
//!   store: jobs ──▶ the client's thread ──▶ store_client      engine: te_engine::TransferEngine
//!                       │                                        │
//!   buffers, dlpack: memory of Python objects, exported as long as native code may touch it
//!   pool, lease: memory of gets, lent as memoryview, NumPy array, DLPack tensor
//!                       │
//!   attendant: the only thread that attaches (log messages, releases)    lifecycle: atexit, 2 s
//! ```
//!
//! What a user sees is documented in `docs/python.md` and in the docstrings, whose examples are tests:
//!
//! ```python
//! import snowskin
//!
//! with snowskin.Store.connect("127.0.0.1:50051") as store:
//!     store.put("prompt/0", b"kv block")
//!     with store.get("prompt/0") as lease:
//!         print(bytes(lease))
//! ```
//!
//! # Rules
//! * Nothing waits with the GIL held, and no lock is held while a thread attaches or detaches.
//! * A buffer of Python stays exported as long as native code may touch it, whatever its caller does: give up
//!   waiting, be interrupted, be cancelled.
//! * No thread that moves bytes attaches to the interpreter.
//! * Nothing here panics on purpose. A panic becomes a `PanicException` of the calling thread: the module is
//!   built with unwinding (profile `ffi`).
//! * Every class is `Send + Sync`, so the module declares that it needs no GIL.
//!
//! # How it is built
//! pyo3's feature `extension-module` leaves Python's symbols to the interpreter that loads the module, and
//! `abi3-py311` makes one module for all versions from 3.11 on, without an interpreter at build time. So
//! `cargo build --workspace` builds this crate on a machine without Python; `cargo xtask wheel` makes the
//! wheel.
#![deny(unsafe_code)]

mod aio;
mod attendant;
mod buffers;
mod cuda_array;
mod dlpack;
mod engine;
mod errors;
mod gil;
mod guess;
mod keys;
mod lease;
mod lifecycle;
mod logging;
mod memory;
mod mooncake;
mod options;
mod overlap;
mod pool;
mod ranges;
mod slot;
mod store;

use pyo3::prelude::*;

/// Re-reads the level of the logger ``snowskin``, which decides what native code formats at all. Stores and
/// engines do it when they are opened.
#[pyfunction]
fn update_log_level(py: Python<'_>) -> PyResult<()> {
    logging::update_level(py)
}

/// The native half of the package ``snowskin``.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    logging::install();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<lease::TensorView>()?;
    store::register(module)?;
    engine::register(module)?;
    mooncake::register(module)?;
    module.add_function(wrap_pyfunction!(aio::abandon, module)?)?;
    module.add_function(wrap_pyfunction!(update_log_level, module)?)?;
    module.add_function(wrap_pyfunction!(lifecycle::close_everything, module)?)
}
