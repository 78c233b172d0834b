//! Settings of the endpoint picker for gateways.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{ConfigError, wrong};

/// The endpoint picker of the Gateway API Inference Extension (proposal 004, v1.0.0): a gateway asks over
/// Envoy's external processing (gRPC) which engine a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Address at which gateways ask for engines (feature `gateway`), for example `0.0.0.0:9002`; none: no
    /// gateway asks. It has no TLS and authenticates no client. Default none.
    pub listen: Option<SocketAddr>,
    /// Most requests of gateways at a time, 1 to 1,000,000. Default 8,192.
    pub streams_max: u32,
    /// Longest time for a request to arrive from the gateway with its body, milliseconds, at least 1. Default
    /// 30,000.
    pub body_ms_max: u32,
    /// Most bytes of bodies that are held at a time, MiB, 1 to 1,048,576. Requests beyond it are refused
    /// (HTTP 503). Default 256.
    pub bodies_mib_max: u32,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self { listen: None, streams_max: 8_192, body_ms_max: 30_000, bodies_mib_max: 256 }
    }
}

impl GatewayConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let ranges = [
            ("streams_max", self.streams_max, 1_000_000),
            ("body_ms_max", self.body_ms_max, u32::MAX),
            ("bodies_mib_max", self.bodies_mib_max, 1 << 20),
        ];
        for (field, value, most) in ranges {
            if !(1..=most).contains(&value) {
                return Err(wrong(&format!("gateway.{field}"), format!("must be 1 to {most}")));
            }
        }
        if self.listen.is_some() && !cfg!(feature = "gateway") {
            return Err(wrong("gateway.listen", "needs a program that is built with the feature `gateway`"));
        }
        Ok(())
    }
}
