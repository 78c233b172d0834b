//! The Conductor as a server: subscriptions to engines, HTTP, an OpenAI proxy, metrics.
