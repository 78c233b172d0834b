//! Engines of a Kubernetes cluster: those behind labelled Services, as their EndpointSlices name them.
//!
//! ```text
//!   API server ── list ──▶ all slices, their version ─┐
//!              ── watch from there ──▶ events ────────┴▶ Slices ▶ engines ─┬▶ new: registered
//!       410 Gone, an error, the end of a watch: list again                 └▶ not ready: fenced at once
//! ```
//!
//! A Service says what its engines are in annotations or labels, which Kubernetes copies to its slices:
//! `snowskin.dev/model`, `kind`, `role`, `http-port`, `events-port`, `replay-port`, `block-tokens`,
//! `dp-ranks`, `tenant`, `lora` and `topic`. What it does not say is as in the settings
//! (`conductor.kubernetes`). An engine has the name of its pod.
//!
//! It does not look at pods: readiness is that of the slices, of which an engine that is being stopped is not
//! ready.

mod slices;
mod watch;

pub(crate) use watch::Watcher;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
