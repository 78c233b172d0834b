//! The Conductor as a server: subscriptions to engines, HTTP, an OpenAI proxy, metrics.

pub mod mock;
pub mod proxy;
