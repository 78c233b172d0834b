//! An endpoint picker for gateways: the Gateway API Inference Extension's protocol (proposal 004, v1.0.0)
//! over Envoy's external processing, which is gRPC.
//!
//! ```text
//!   client ──▶ gateway (Envoy) ── headers, body ──▶ gRPC ──▶ Picker ──▶ token ids ──▶ decide
//!                 │        ◀── x-gateway-destination-endpoint ── (header, metadata envoy.lb)
//!                 ▼
//!              engine ──▶ gateway ── headers, body of the answer ──▶ Picker ──▶ how the reservation goes
//! ```
//!
//! * The gateway sends the body as `FULL_DUPLEX_STREAMED` or `BUFFERED`, and the answer's headers; without
//!   the answer's body a request counts as ended as soon as its stream ends.
//! * The prompt is found as the proxy finds it: token ids are used as they are, text goes through an engine's
//!   `/tokenize`.
//! * A reservation ends exactly once, whatever happens to the stream: it is dropped with it.
//! * Endpoints are the engines' HTTP addresses. Gateways need them as `IP:PORT`.
//!
//! It is not a proxy: of prefill and decode engines it names the decode engine as the destination and the
//! prefill engine in `x-prefiller-host-port`, for a sidecar that carries out the prefill. There is no TLS.

mod picker;
mod proto;
mod record;
mod server;

pub(crate) use server::GatewayServer;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
