//! `libmooncake_store`: Mooncake's C interface to the store (`store_c.h`), over Snowskin.
//!
//! ```text
//!   Rust (linked, or by dlopen), Go …
//!        │  mooncake_store_setup, mooncake_store_put, mooncake_store_get_into …
//!        ▼
//!   api.rs        one function per function of the header: checks what C passes, catches panics
//!        │
//!        ▼
//!   snowskin_compat::store::Store  ──▶  a Snowskin master and its nodes
//! ```
//!
//! The header, `bindings/c/include/store_c.h`, describes every function; docs/c.md has what differs from
//! Mooncake. The library exports the functions of the header and nothing else: rustc writes the version
//! script, and a test reads the symbol table.
//!
//! ```c
//! mooncake_store_t store = mooncake_store_create();
//! mooncake_store_setup(store, "10.0.0.7", "P2PHANDSHAKE", 4ull << 30, 512u << 20, "tcp", "", "10.0.0.1:50051");
//! mooncake_store_put(store, "prompt/0", bytes, length, NULL);
//! int64_t got = mooncake_store_get_into(store, "prompt/0", buffer, sizeof buffer);
//! ```
#![deny(unsafe_code)]

mod api;
