//! [`Slices`]: the EndpointSlices that are known, and the engines that follow from them.
//!
//! <https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/>, `discovery.k8s.io/v1`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use crate::config::{EngineConfig, KubernetesConfig};

/// Prefix of annotations and labels.
const PREFIX: &str = "snowskin.dev/";
/// Most slices; each has at most 1,000 endpoints.
const SLICES_MAX: usize = 16_384;

/// A list, or a page of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct List {
    pub(super) metadata: ListMeta,
    pub(super) items: Vec<Slice>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ListMeta {
    pub(super) resource_version: String,
    #[serde(rename = "continue")]
    pub(super) more: Option<String>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Slice {
    pub(super) metadata: Meta,
    address_type: String,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<Port>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Meta {
    pub(super) name: String,
    pub(super) resource_version: String,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Endpoint {
    addresses: Vec<String>,
    conditions: Conditions,
    target_ref: Option<Target>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Conditions {
    /// Absent: ready.
    ready: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Target {
    name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

/// Tenant and name of an engine.
pub(super) type Name = (String, String);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Slices {
    config: KubernetesConfig,
    by_name: BTreeMap<String, Slice>,
}

impl Slices {
    pub(super) fn new(config: KubernetesConfig) -> Self {
        Self { config, by_name: BTreeMap::new() }
    }

    /// A list takes the place of everything.
    pub(super) fn replace(&mut self, slices: Vec<Slice>) {
        self.by_name.clear();
        for slice in slices {
            self.put(slice);
        }
    }

    /// A slice is new, or has changed.
    pub(super) fn put(&mut self, slice: Slice) {
        if self.by_name.len() >= SLICES_MAX && !self.by_name.contains_key(&slice.metadata.name) {
            warn!(slice = slice.metadata.name, "more than {SLICES_MAX} EndpointSlices: this one is left out");
            return;
        }
        self.by_name.insert(slice.metadata.name.clone(), slice);
    }

    /// A slice is gone.
    pub(super) fn remove(&mut self, name: &str) {
        self.by_name.remove(name);
    }

    /// Engines that are ready, each once. While an endpoint moves from one slice to another, it may be in
    /// both: it is ready if one of them says so. With addresses of both families, that of IPv4 is used.
    pub(super) fn engines(&self) -> BTreeMap<Name, EngineConfig> {
        let mut engines: BTreeMap<Name, EngineConfig> = BTreeMap::new();
        let ipv4_first = |slice: &&Slice| slice.address_type != "IPv4";
        let mut slices: Vec<&Slice> = self.by_name.values().collect();
        slices.sort_by_key(ipv4_first);
        for slice in slices {
            for endpoint in slice.endpoints.iter().flatten() {
                if endpoint.conditions.ready == Some(false) {
                    continue;
                }
                let engine = match self.engine(slice, endpoint) {
                    Ok(engine) => engine,
                    Err(why) => {
                        warn!(slice = slice.metadata.name, why, "an endpoint is left out");
                        continue;
                    }
                };
                if engines.len() >= self.config.engines_max as usize {
                    warn!(most = self.config.engines_max, "more engines than kubernetes.engines_max");
                    return engines;
                }
                engines.entry((engine.tenant.clone(), engine.instance.clone())).or_insert(engine);
            }
        }
        engines
    }

    fn engine(&self, slice: &Slice, endpoint: &Endpoint) -> Result<EngineConfig, String> {
        let config = &self.config;
        // Of the addresses of an endpoint all but the first mean nothing.
        let address = endpoint.addresses.first().map(String::as_str).unwrap_or_default();
        let ip: IpAddr = address.parse().map_err(|_| format!("{address:?} is not an IP address"))?;
        let host = if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() };
        let defaults = EngineConfig::default();
        let at = |name: &str, default: &str, scheme: &str| {
            let port = slice.says(name).unwrap_or(default);
            Ok::<_, String>(match slice.port(port)? {
                Some(port) => format!("{scheme}{host}:{port}"),
                None => String::new(),
            })
        };
        let engine = EngineConfig {
            instance: match &endpoint.target_ref {
                Some(target) if !target.name.is_empty() => target.name.clone(),
                _ => address.to_owned(),
            },
            model: slice.says("model").unwrap_or(&config.model).to_owned(),
            kind: slice.parsed("kind", config.kind)?,
            role: slice.parsed("role", config.role)?,
            http: at("http-port", &config.http_port, "")?,
            endpoint: at("events-port", &config.events_port, "tcp://")?,
            replay_endpoint: at("replay-port", &config.replay_port, "tcp://")?,
            block_tokens: slice.number("block-tokens", config.block_tokens)?,
            dp_ranks: slice.number("dp-ranks", 1)?,
            tenant: slice.says("tenant").unwrap_or(&defaults.tenant).to_owned(),
            lora: slice.says("lora").unwrap_or_default().to_owned(),
            topic: slice.says("topic").unwrap_or_default().to_owned(),
            ..defaults
        };
        engine.validate().map_err(|error| format!("{} {}", error.field, error.need))?;
        Ok(engine)
    }
}

impl Slice {
    /// What its Service says.
    fn says(&self, name: &str) -> Option<&str> {
        let key = format!("{PREFIX}{name}");
        let maps = [&self.metadata.annotations, &self.metadata.labels];
        maps.into_iter().flatten().find_map(|map| map.get(&key)).map(String::as_str)
    }

    /// A value that is written as in the settings.
    fn parsed<T: DeserializeOwned>(&self, name: &str, default: T) -> Result<T, String> {
        let Some(text) = self.says(name) else { return Ok(default) };
        serde_json::from_value(text.into()).map_err(|error| format!("{PREFIX}{name}: {error}"))
    }

    fn number(&self, name: &str, default: u32) -> Result<u32, String> {
        let Some(text) = self.says(name) else { return Ok(default) };
        text.parse().map_err(|_| format!("{PREFIX}{name}: {text:?} is not a number below 2^32"))
    }

    /// A port by its number or its name; `None`: there is none of this name.
    fn port(&self, text: &str) -> Result<Option<u16>, String> {
        if text.is_empty() {
            return Ok(None);
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().map(Some).map_err(|_| format!("{text} is not a port"));
        }
        let mut ports = self.ports.iter().flatten();
        Ok(ports.find(|port| port.name.as_deref() == Some(text)).and_then(|port| port.port))
    }
}
