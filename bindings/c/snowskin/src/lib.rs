//! `libsnowskin`: Snowskin's own C interface (`snowskin.h`) to the store and the Transfer Engine.
//!
//! ```text
//!   C, C++ and every language that calls C
//!        │  handles, codes, snowskin_error **
//!        ▼
//!   store.rs ──▶ snowskin_compat::clients ──▶ store_client     objects
//!   node.rs ───────────────────────────────▶ store_client     memory for the store
//!   engine.rs ─────────────────────────────▶ te_engine        memory, transfers, notifications
//!   fault.rs      codes and sentences; no panic leaves a function
//! ```
//!
//! The header, `bindings/c/include/snowskin.h`, describes every function; docs/c.md has complete programs.
//! The library exports the functions of the header and nothing else: rustc writes the version script, and a
//! test reads the symbol table.
//!
//! ```c
//! snowskin_error *error = NULL;
//! snowskin_store *store;
//! if (snowskin_store_connect(NULL, &store, &error) != SNOWSKIN_OK)
//!     fail(snowskin_error_message(error));
//! snowskin_store_put(store, "prompt/0", 8, bytes, length, NULL, NULL, &error);
//! ```
#![deny(unsafe_code)]

mod engine;
mod fault;
mod node;
mod store;
