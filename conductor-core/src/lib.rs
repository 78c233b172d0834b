//! The Conductor as pure state machines: no I/O, no clock, no randomness, no threads.
//!
//! ```text
//!   engines, stores ── frames ──▶ zmtp ──▶ stream ──▶ events ──▶ knowledge ──▶ index
//!                                  gaps, restarts,    decoded     hashes of engines   key ──▶ owners
//!                                  replays            events      become block keys     │
//!                                                                                       │ matches
//!   requests ── tokens ──▶ hash ── block keys ──────────────────────────────────────────┤
//!                                                                                       ▼
//!   reports of engines ──▶ cost (fitted online) ──▶ scheduler: placement, admission, decode, NICs, replicas
//! ```
#![cfg_attr(not(feature = "std"), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub mod cost;
pub mod events;
pub mod hash;
mod ids;
pub mod index;
pub mod knowledge;
pub mod learned;
pub mod scheduler;
pub mod stream;
pub mod zmtp;

pub use ids::{
    BlockKey, Context, ContextId, EngineHash, InstanceId, InstanceMatch, Owner, OwnerId, OwnerMatch, Tier,
};
