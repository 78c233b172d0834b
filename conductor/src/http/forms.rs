//! Bodies of requests, in the spellings of Mooncake's indexer, of Dynamo's, and of this Conductor.

use serde::Deserialize;
use serde_json::Value;

use crate::config::{EngineConfig, EngineKind, NAME_BYTES_MAX, Role};
use crate::http::answer::Shape;

/// `POST /query`, `/query_by_hash` and `/schedule`, without the arrays of tokens and hashes, which
/// `numbers.rs` reads. Unknown fields are ignored, as those interfaces do.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct QueryForm {
    pub(crate) model: Option<String>,
    /// Dynamo's name of `model`.
    pub(crate) model_name: Option<String>,
    pub(crate) lora_name: Option<String>,
    /// Deprecated by Mooncake; ignored where `lora_name` is given.
    pub(crate) lora_id: Option<Value>,
    pub(crate) tenant_id: Option<String>,
    /// Dynamo's older name of `tenant_id`.
    pub(crate) routing_group: Option<String>,
    pub(crate) instance_id: Option<Value>,
    pub(crate) block_size: Option<u32>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) additional_salt: Option<String>,
    /// A prompt as text: an engine's `/tokenize` makes token ids of it.
    #[serde(alias = "prompt")]
    pub(crate) text: Option<String>,
    /// For `/schedule` by hashes: the length of the prompt, tokens.
    pub(crate) tokens: Option<u32>,
    /// For `/schedule`: tokens of output, if known.
    #[serde(alias = "max_tokens", alias = "expected_output_tokens")]
    pub(crate) expected_output: Option<u32>,
    /// For `/schedule`: limits on the predicted times, milliseconds; 0: none. Those of the settings
    /// otherwise.
    pub(crate) ttft_slo_ms: Option<u32>,
    pub(crate) tbt_slo_ms: Option<u32>,
    /// For `/schedule`: instances that failed the request before, by name or HTTP address.
    pub(crate) avoid: Vec<Value>,
}

/// What a query is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) tenant: String,
    pub(crate) model: String,
    pub(crate) lora: String,
    pub(crate) salt: String,
    pub(crate) block_size: Option<u32>,
    pub(crate) instance: Option<String>,
}

impl QueryForm {
    /// What it is about.
    ///
    /// # Errors
    /// What is missing or too long.
    pub(crate) fn about(&self) -> Result<About, String> {
        let first = |names: [&Option<String>; 2]| names.into_iter().flatten().next().cloned();
        let about = About {
            tenant: named_tenant(first([&self.tenant_id, &self.routing_group])),
            model: first([&self.model, &self.model_name]).ok_or("send `model`, the name of the model")?,
            lora: self.lora_name.clone().unwrap_or_default(),
            salt: first([&self.cache_salt, &self.additional_salt]).unwrap_or_default(),
            block_size: self.block_size.filter(|size| *size > 0),
            instance: self.instance_id.as_ref().and_then(text_of),
        };
        let names = [
            ("model", &about.model),
            ("tenant_id", &about.tenant),
            ("lora_name", &about.lora),
            ("cache_salt", &about.salt),
        ];
        let long = names.into_iter().find(|(_, name)| name.len() > NAME_BYTES_MAX).map(|(field, _)| field);
        match long {
            Some(field) => Err(format!("`{field}` has more than {NAME_BYTES_MAX} bytes")),
            None => Ok(about),
        }
    }

    /// The instances to avoid: names, which Dynamo writes as numbers, or addresses.
    pub(crate) fn avoid(&self) -> Vec<String> {
        self.avoid.iter().filter_map(text_of).collect()
    }

    /// The shape of the answer: the one that the query string names, or that of the interface whose fields
    /// the request uses.
    pub(crate) fn shape(&self, named: Option<Shape>) -> Shape {
        let dynamo = self.model.is_none() && self.model_name.is_some() || self.routing_group.is_some();
        named.unwrap_or(if dynamo { Shape::Dynamo } else { Shape::Tenants })
    }
}

/// `POST /register` and `/unregister`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RegisterForm {
    pub(crate) endpoint: Option<String>,
    pub(crate) replay_endpoint: Option<String>,
    #[serde(rename = "type", alias = "kind")]
    pub(crate) kind: Option<EngineKind>,
    #[serde(alias = "model", alias = "model_name")]
    pub(crate) modelname: Option<String>,
    pub(crate) lora_name: Option<String>,
    #[serde(alias = "routing_group")]
    pub(crate) tenant_id: Option<String>,
    #[serde(alias = "worker_id")]
    pub(crate) instance_id: Option<Value>,
    pub(crate) block_size: Option<u32>,
    pub(crate) dp_rank: Option<u32>,
    #[serde(alias = "additional_salt", alias = "cache_salt")]
    pub(crate) additionalsalt: Option<String>,
    /// Mooncake's rule for computing an engine's hashes. Not needed: the Conductor learns them from events.
    pub(crate) hash_profile: Option<Value>,
    pub(crate) dp_ranks: Option<u32>,
    pub(crate) bind: Option<bool>,
    pub(crate) topic: Option<String>,
    pub(crate) http: Option<String>,
    pub(crate) role: Option<Role>,
    pub(crate) bootstrap_port: Option<u16>,
    pub(crate) class: Option<String>,
}

impl RegisterForm {
    /// The entry that the settings would have.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) fn engine(&self) -> Result<EngineConfig, String> {
        let default = EngineConfig::default();
        let http = self.http.clone().unwrap_or_default();
        // What is not said is asked of the engine, where that is possible.
        let asks = !http.is_empty();
        let instance = self.instance_id.as_ref().and_then(text_of).ok_or("send `instance_id`")?;
        Ok(EngineConfig {
            instance,
            kind: self.kind.unwrap_or_default(),
            endpoint: self.endpoint.clone().unwrap_or_default(),
            replay_endpoint: self.replay_endpoint.clone().unwrap_or_default(),
            bind: self.bind.unwrap_or_default(),
            topic: self.topic.clone().unwrap_or_default(),
            model: self.modelname.clone().ok_or("send `modelname`, the name of the model")?,
            lora: self.lora_name.clone().unwrap_or_default(),
            tenant: named_tenant(self.tenant_id.clone()),
            salt: self.additionalsalt.clone().unwrap_or_default(),
            block_tokens: match self.block_size {
                None if !asks => return Err("send `block_size`, the tokens per block".to_owned()),
                size => size.unwrap_or(0),
            },
            dp_rank: self.dp_rank.unwrap_or(default.dp_rank),
            dp_ranks: self.dp_ranks.unwrap_or(if asks && self.endpoint.is_none() { 0 } else { 1 }),
            role: self.role.unwrap_or_default(),
            http,
            class: self.class.clone().unwrap_or_default(),
            bootstrap_port: self.bootstrap_port.unwrap_or(default.bootstrap_port),
        })
    }

    /// The publishers that `/unregister` is about: tenant, instance, and one rank or all.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) fn identity(&self) -> Result<(String, String, Option<u32>), String> {
        let instance = self.instance_id.as_ref().and_then(text_of).ok_or("send `instance_id`")?;
        Ok((named_tenant(self.tenant_id.clone()), instance, self.dp_rank))
    }
}

/// Reports of a reservation.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ProgressForm {
    /// Output tokens since the last report.
    #[serde(alias = "output_tokens", alias = "num_tokens")]
    pub(crate) tokens: Option<u32>,
}

/// The tenant of a request that may not name one.
fn named_tenant(tenant: Option<String>) -> String {
    tenant.filter(|tenant| !tenant.is_empty()).unwrap_or_else(|| "default".to_owned())
}

/// A name that Mooncake writes as a text and Dynamo as a number.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()).filter(|text| !text.is_empty()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_both_interfaces_say_the_same() {
        let mooncake =
            r#"{"model":"m","tenant_id":"t","instance_id":"7","block_size":16,"cache_salt":"s","x":1}"#;
        let dynamo =
            r#"{"model_name":"m","routing_group":"t","instance_id":7,"block_size":16,"additional_salt":"s"}"#;
        let [mooncake, dynamo]: [QueryForm; 2] =
            [mooncake, dynamo].map(|text| serde_json::from_str(text).unwrap());
        assert_eq!(mooncake.about().unwrap(), dynamo.about().unwrap());
        assert_eq!((mooncake.shape(None), dynamo.shape(None)), (Shape::Tenants, Shape::Dynamo));
        assert_eq!(dynamo.shape(Some(Shape::Instances)), Shape::Instances);
    }

    #[test]
    fn a_registration_of_mooncakes_document_is_an_entry_of_the_settings() {
        let text = r#"{"endpoint":"tcp://1.1.1.1:5557","replay_endpoint":"tcp://1.1.1.1:5558","type":"vLLM",
            "modelname":"deepseek","lora_name":"sql-adapter","tenant_id":"default",
            "instance_id":"vllm-prefill-node1","block_size":128,"dp_rank":3,"additionalsalt":"w8a8",
            "hash_profile":{"strategy":"vllm_v1"}}"#;
        let engine = serde_json::from_str::<RegisterForm>(text).unwrap().engine().unwrap();
        engine.validate().unwrap();
        assert_eq!((engine.kind, engine.block_tokens, engine.dp_rank), (EngineKind::Vllm, 128, 3));
        assert_eq!((engine.lora.as_str(), engine.salt.as_str()), ("sql-adapter", "w8a8"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let missing = |text: &str| serde_json::from_str::<RegisterForm>(text).unwrap().engine().unwrap_err();
        assert!(missing("{}").contains("instance_id"));
        assert!(missing(r#"{"instance_id":"a"}"#).contains("modelname"));
        assert!(missing(r#"{"instance_id":"a","modelname":"m"}"#).contains("block_size"));
        assert!(QueryForm::default().about().unwrap_err().contains("model"));
    }
}
