//! Checks `deploy/compose.yaml`: what it refers to exists, and what it starts is restricted.
//!
//! Only the keys that are listed here may appear in the file, so that a typing error is a finding and not a
//! default.

use super::program::Program;
use super::yaml;
use anyhow::{Context as _, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

const TOP: [&str; 5] = ["name", "services", "secrets", "volumes", "x-snowskin"];
const SERVICE: [&str; 17] = [
    "build",
    "cap_drop",
    "command",
    "depends_on",
    "environment",
    "healthcheck",
    "image",
    "logging",
    "mem_limit",
    "ports",
    "read_only",
    "restart",
    "secrets",
    "security_opt",
    "stop_grace_period",
    "ulimits",
    "volumes",
];
const HEALTH: [&str; 5] = ["interval", "retries", "start_period", "test", "timeout"];
/// The image that the Dockerfile builds.
const IMAGE: &str = "snowskin";

/// The parsed file.
pub(crate) struct Compose {
    /// Services by name.
    pub(crate) services: BTreeMap<String, Service>,
    top: Value,
}

/// One service, which runs in one container.
pub(crate) struct Service {
    pub(crate) image: String,
    pub(crate) command: Vec<String>,
    /// Command of the health check, without the leading `CMD`.
    pub(crate) health: Vec<String>,
    /// Time until it must be healthy: the start period and all retries.
    pub(crate) healthy_within: Duration,
    /// Services that must be healthy before this one starts.
    pub(crate) after: Vec<String>,
    /// Time within which it must stop.
    pub(crate) stops_within: Duration,
    value: Value,
}

impl Compose {
    /// # Errors
    /// The file cannot be read or is not YAML.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Self::of(yaml::read(path)?)
    }

    fn of(top: Value) -> Result<Self> {
        let services = top["services"].as_object().context("no `services`")?;
        let services = services.iter().map(|(name, value)| (name.clone(), Service::of(value))).collect();
        Ok(Self { services, top })
    }

    /// Services that run our program.
    pub(crate) fn ours(&self) -> impl Iterator<Item = (&String, &Service)> {
        self.services.iter().filter(|(_, service)| service.is_ours())
    }

    /// The findings. Paths of mounted files are relative to `dir`, the directory of the file.
    pub(super) fn judge(&self, program: &Program, dir: &Path) -> Vec<String> {
        let mut findings = unknown_keys("the file", &self.top, &TOP);
        for (name, service) in &self.services {
            let mut said = unknown_keys("it", &service.value, &SERVICE);
            said.extend(unknown_keys("its health check", &service.value["healthcheck"], &HEALTH));
            said.extend(self.judge_references(service, dir));
            said.extend(service.judge_hardening());
            if service.is_ours() {
                said.extend(program.judge(&service.command));
                let health = service.health.split_first();
                match health {
                    Some((path, rest)) if path == "/usr/bin/snowskin" => said.extend(program.judge(rest)),
                    _ => said.push("its health check does not run the only program of the image".to_owned()),
                }
            }
            findings.extend(said.into_iter().map(|what| format!("{name}: {what}")));
        }
        findings
    }

    /// Checks that services, secrets, volumes and files that it names exist.
    fn judge_references(&self, service: &Service, dir: &Path) -> Vec<String> {
        let mut findings = Vec::new();
        for after in &service.after {
            match self.services.get(after) {
                None => findings.push(format!("depends on `{after}`, which is not a service")),
                Some(other) if other.health.is_empty() => {
                    findings.push(format!("waits for the health of `{after}`, which has no health check"));
                }
                Some(_) => {}
            }
        }
        for secret in texts(&service.value["secrets"]) {
            if self.top["secrets"].get(&secret).is_none() {
                findings.push(format!("the secret `{secret}` is not declared"));
            }
        }
        for volume in texts(&service.value["volumes"]) {
            let from = volume.split(':').next().unwrap_or_default();
            let there = if from.starts_with('.') {
                dir.join(from).exists()
            } else {
                self.top["volumes"].get(from).is_some()
            };
            if !there {
                findings.push(format!("it mounts a file that does not exist: `{volume}`"));
            }
        }
        findings
    }
}

impl Service {
    fn of(value: &Value) -> Self {
        let health = &value["healthcheck"];
        let tries = health["retries"].as_u64().unwrap_or(3) as u32;
        let seconds =
            |value: &Value, default| duration(value.as_str().unwrap_or_default()).unwrap_or(default);
        let interval = seconds(&health["interval"], Duration::from_secs(30));
        let after = value["depends_on"].as_object().map(|after| after.keys().cloned().collect());
        Self {
            image: value["image"].as_str().unwrap_or_default().to_owned(),
            command: texts(&value["command"]),
            health: texts(&health["test"]).into_iter().skip(1).collect(),
            healthy_within: seconds(&health["start_period"], Duration::ZERO) + interval * tries,
            after: after.unwrap_or_default(),
            stops_within: seconds(&value["stop_grace_period"], Duration::from_secs(10)),
            value: value.clone(),
        }
    }

    fn is_ours(&self) -> bool {
        self.image == IMAGE
    }

    /// Checks that it has no rights that a container does not need.
    fn judge_hardening(&self) -> Vec<String> {
        let value = &self.value;
        let mut findings = Vec::new();
        let mut wants = |holds: bool, what: &str| {
            if !holds {
                findings.push(what.to_owned());
            }
        };
        wants(!self.health.is_empty(), "it has no health check");
        wants(value["restart"].is_string(), "it has no restart policy");
        wants(texts(&value["cap_drop"]) == ["ALL"], "it keeps capabilities: set `cap_drop: [ALL]`");
        let privileges = texts(&value["security_opt"]);
        wants(privileges.iter().any(|option| option == "no-new-privileges:true"), "it may gain privileges");
        wants(!self.is_ours() || value["read_only"] == true, "its file system is writable");
        let tagged = self.image.split_once(':').is_some_and(|(_, tag)| tag != "latest");
        wants(self.is_ours() || tagged, "its image has no version");
        let ports = texts(&value["ports"]);
        wants(
            ports.iter().all(|port| port.starts_with("127.0.0.1:")),
            "it publishes a port to other machines",
        );
        findings
    }
}

fn unknown_keys(what: &str, value: &Value, known: &[&str]) -> Vec<String> {
    let keys = value.as_object().into_iter().flat_map(|map| map.keys());
    keys.filter(|key| !known.contains(&key.as_str()))
        .map(|key| format!("{what} has the unknown key `{key}`"))
        .collect()
}

/// The texts of a list. Items that are not texts are left out.
fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|item| Some(item.as_str()?.to_owned())).collect()
}

/// `5s`, `1m30s`.
fn duration(text: &str) -> Option<Duration> {
    let mut seconds = 0;
    let mut number = String::new();
    for c in text.chars() {
        let factor = match c {
            '0'..='9' => {
                number.push(c);
                continue;
            }
            's' => 1,
            'm' => 60,
            'h' => 3600,
            _ => return None,
        };
        seconds += number.parse::<u64>().ok()? * factor;
        number.clear();
    }
    (number.is_empty() && !text.is_empty()).then(|| Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn judged(service: Value) -> Vec<String> {
        let compose = Compose::of(json!({"services": {"it": service}})).expect("it has services");
        let service = &compose.services["it"];
        let mut findings = unknown_keys("it", &service.value, &SERVICE);
        findings.extend(compose.judge_references(service, Path::new("deploy")));
        findings.extend(service.judge_hardening());
        findings
    }

    fn restricted() -> Value {
        json!({
            "image": "other:1.2",
            "restart": "always",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "healthcheck": {"test": ["CMD", "x"], "interval": "5s", "retries": 2, "start_period": "1m"},
        })
    }

    #[test]
    fn a_restricted_service_has_no_findings() {
        assert_eq!(judged(restricted()), Vec::<String>::new());
        assert_eq!(Service::of(&restricted()).healthy_within, Duration::from_secs(70));
    }

    #[test]
    fn each_missing_restriction_is_found() {
        for (key, value, expected) in [
            ("cap_drop", json!([]), "capabilities"),
            ("security_opt", json!([]), "privileges"),
            ("image", json!("other"), "version"),
            ("image", json!("snowskin"), "writable"),
            ("ports", json!(["9003:9003"]), "other machines"),
            ("healthcheck", json!({}), "no health check"),
            ("depends_on", json!({"missing": {}}), "not a service"),
            ("secrets", json!(["s"]), "not declared"),
            ("volumes", json!(["./nothing:/x"]), "does not exist"),
            ("privileged", json!(true), "unknown"),
        ] {
            let mut service = restricted();
            service[key] = value;
            let findings = judged(service);
            assert!(findings.len() == 1 && findings[0].contains(expected), "{key}: {findings:?}");
        }
    }

    #[test]
    fn durations_are_read_in_the_format_of_compose() {
        assert_eq!(duration("1m30s"), Some(Duration::from_secs(90)));
        assert_eq!((duration("5"), duration("5ms"), duration("")), (None, None, None));
    }
}
