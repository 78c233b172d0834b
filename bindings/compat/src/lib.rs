//! Mooncake's semantics in Rust, over Snowskin's engine and store: one implementation for the Python drop-in
//! and for the C libraries.
//!
//! ```text
//!   mooncake.engine   mooncake.store    libtransfer_engine   libmooncake_store    libsnowskin
//!        │                  │                   │                   │                  │
//!        ▼                  ▼                   │                   ▼                  │
//!     engine::Engine   store::Store ◄───────────┼───────────── (numbers)               │
//!        │                  │                   ▼                                      │
//!        └───────────► engine::Session   (typed results, batches by id)                │
//!                           │                                                          │
//!     codes, config, env    │ names, slabs, borrowed memory        ffi: guard, texts ◄─┘
//!                           ▼
//!                     te_engine, store_client
//! ```
//!
//! * [`clients`]: clients of the store for many threads, and memory by raw address.
//! * [`codes`]: the one table of Mooncake's numbers.
//! * [`config`], [`env`](mod@env): its settings, as dictionary, file and environment.
//! * [`engine`]: its `TransferEngine`. A [`Session`](engine::Session) has typed results; an
//!   [`Engine`](engine::Engine) returns its numbers.
//! * [`store`]: its `MooncakeDistributedStore`, with its numbers.
//! * [`ffi`]: what interfaces to foreign languages share.
//!
//! Nothing here is global, nothing panics, and every type may be used by any number of threads. Where
//! Mooncake's own behaviour is a fault (python.md 1.1, 1.2), these types do better: a call that runs out of
//! time leaves no transfer behind, an id that was freed is refused, and a store that is not set up returns a
//! number.
//!
//! ```
//! use snowskin_compat::engine::{Copy, Engine};
//! use te_core::Op;
//!
//! let engine = Engine::new();
//! assert_eq!(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0);
//! let name = format!("127.0.0.1:{}", engine.rpc_port());
//! let buffer = engine.allocate_managed(8192);
//! let copy = Copy { local: buffer, remote: buffer + 4096, len: 4096 };
//! // SAFETY: the engine keeps the buffer mapped.
//! let code = unsafe { engine.transfer_sync(&name, Op::Write, &[copy], None, "") };
//! assert_eq!(code, snowskin_compat::codes::OK);
//! ```
#![deny(unsafe_code)]

pub mod clients;
pub mod codes;
pub mod config;
pub mod engine;
pub mod env;
pub mod ffi;
pub mod store;
mod sys;

pub use sys::{read_bytes, write_bytes};
