//! The OpenAI proxy: requests go to the engines that the Conductor chose, answers come back as they are made.
//!
//! ```text
//!   client ──▶ request ──▶ token ids ──▶ decide ──▶ prefill engine ──▶ decode engine ──▶ client
//!              (limits)    (given, or     (Place)       │ died            │ died
//!                           /tokenize)      ▲───────────┴─────────────────┘
//!                                           └ elsewhere, with the tokens that were sent so far
//! ```

mod body;
mod client;
mod listener;
mod place;

pub use body::{Answer, CollectError, Sink, Stream, collect};
pub use client::{Exchange, Message, Pool, SendError};
pub use listener::{Asked, ConnectionLimits, serve};
pub use place::{Ask, Engine, Handover, Place, Placed, Progress, Refused, Reservation};
