//! Settings of the discovery of engines in a Kubernetes cluster.

use serde::{Deserialize, Serialize};

use super::{ConfigError, EngineKind, NAME_BYTES_MAX, Role, wrong};

/// Engines that are found in a Kubernetes cluster, through the EndpointSlices of labelled Services.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesConfig {
    /// The namespace whose EndpointSlices are watched (feature `kubernetes`): `k8s://NAMESPACE` in a pod, or
    /// `k8s+http://HOST:PORT/NAMESPACE` for `kubectl proxy`; empty: none. Default empty.
    pub services: String,
    /// Which EndpointSlices: a label selector. Slices have the labels of their Service. Default
    /// `snowskin.dev/engines=true`.
    pub selector: String,
    /// The model of engines whose Service does not name it (annotation or label `snowskin.dev/model`).
    /// Default empty: such engines are left out.
    pub model: String,
    /// What such engines are (`snowskin.dev/kind`). Default `vllm`.
    pub kind: EngineKind,
    /// What they are for (`snowskin.dev/role`). Default `both`.
    pub role: Role,
    /// Where they serve HTTP: the port's number, or its name in the Service (`snowskin.dev/http-port`).
    /// Default `http`.
    pub http_port: String,
    /// Where they publish events: a number or a name; empty: nowhere (`snowskin.dev/events-port`). Default
    /// `kv-events`.
    pub events_port: String,
    /// Where missed events are asked for: a number or a name; empty: nowhere (`snowskin.dev/replay-port`).
    /// Default `kv-replay`.
    pub replay_port: String,
    /// Tokens per block; 0: as the engine's `/server_info` says (`snowskin.dev/block-tokens`). Default 16.
    pub block_tokens: u32,
    /// Most engines, 1 to 16,384. Default 4,096.
    pub engines_max: u32,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            services: String::new(),
            selector: "snowskin.dev/engines=true".to_owned(),
            model: String::new(),
            kind: EngineKind::default(),
            role: Role::default(),
            http_port: "http".to_owned(),
            events_port: "kv-events".to_owned(),
            replay_port: "kv-replay".to_owned(),
            block_tokens: 16,
            engines_max: 4_096,
        }
    }
}

impl KubernetesConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |field: &str, need: &str| Err(wrong(&format!("kubernetes.{field}"), need));
        if self.services.is_empty() {
            return Ok(());
        }
        if !cfg!(feature = "kubernetes") {
            return wrong("services", "needs a program that is built with the feature `kubernetes`");
        }
        if !["k8s://", "k8s+http://"].iter().any(|scheme| self.services.starts_with(scheme)) {
            return wrong("services", "must be k8s://NAMESPACE or k8s+http://HOST:PORT/NAMESPACE");
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=!,() ".contains(c);
        if self.selector.len() > NAME_BYTES_MAX || !self.selector.chars().all(is_plain) {
            return wrong("selector", "must be a label selector, for example snowskin.dev/engines=true");
        }
        if !(1..=16_384).contains(&self.engines_max) {
            return wrong("engines_max", "must be 1 to 16384");
        }
        Ok(())
    }
}
