//! `libtransfer_engine`: Mooncake's C interface to the Transfer Engine (`transfer_engine_c.h`), over
//! Snowskin.
//!
//! ```text
//!   NIXL, TensorRT-LLM, Go, Rust …
//!        │  createTransferEngine, submitTransfer, getTransferStatus …
//!        ▼
//!   api.rs        one function per function of the header: checks what C passes, catches panics
//!        │
//!        ▼
//!   snowskin_compat::engine::Session
//! ```
//!
//! The header, `bindings/c/include/transfer_engine_c.h`, describes every function; docs/c.md has what differs
//! from Mooncake. The library exports the functions of the header and nothing else: rustc writes the version
//! script, and a test reads the symbol table.
//!
//! ```c
//! transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "10.0.0.7", NULL, 0, 1);
//! registerLocalMemory(engine, buffer, length, "*", 1);
//! segment_id_t peer = openSegment(engine, "10.0.0.8:15428");
//! batch_id_t batch = allocateBatchID(engine, 1);
//! transfer_request_t request = { OPCODE_WRITE, buffer, peer, remote_address, length };
//! submitTransfer(engine, batch, &request, 1);
//! ```
#![deny(unsafe_code)]

mod api;
