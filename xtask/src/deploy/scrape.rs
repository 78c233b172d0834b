//! Checks the files of Prometheus and Grafana: scrape targets, jobs, variables, mounts.

use super::compose::Compose;
use super::yaml;
use crate::cmd::Cmd;
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Jobs of processes that are not started by files in this repository.
const JOBS_OF_OTHERS: [&str; 1] = ["snowskin-client"];

/// One address that Prometheus scrapes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Target {
    pub(crate) service: String,
    pub(crate) port: u16,
}

/// All targets of the sample configuration.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn targets(deploy: &Path) -> Result<Vec<Target>> {
    let config = yaml::read(&deploy.join("prometheus/prometheus.yml"))?;
    let jobs = config["scrape_configs"].as_array().context("no `scrape_configs`")?;
    let lists = jobs.iter().flat_map(|job| job["static_configs"].as_array().into_iter().flatten());
    let addresses = lists.flat_map(|list| list["targets"].as_array().into_iter().flatten());
    addresses
        .map(|address| {
            let address = address.as_str().context("a target is a text")?;
            let (service, port) = address.rsplit_once(':').context("a target names its port")?;
            Ok(Target { service: service.to_owned(), port: port.parse()? })
        })
        .collect()
}

/// The findings.
///
/// # Errors
/// A file cannot be read or has the wrong format.
pub(super) fn judge(deploy: &Path, compose: &Compose) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for target in targets(deploy)? {
        let http = |service: &super::compose::Service| {
            let ends = format!(":{}", target.port);
            service.command.iter().any(|word| word.starts_with("--") && word.ends_with(&ends))
        };
        match compose.services.get(&target.service) {
            None => findings
                .push(format!("prometheus.yml: `{}` is not a service of compose.yaml", target.service)),
            Some(service) if !http(service) => findings.push(format!(
                "prometheus.yml: `{}` does not listen on port {}",
                target.service, target.port
            )),
            Some(_) => {}
        }
    }
    let config = yaml::read(&deploy.join("prometheus/prometheus.yml"))?;
    let jobs = config["scrape_configs"].as_array().into_iter().flatten();
    let jobs: BTreeSet<&str> = jobs.filter_map(|job| job["job_name"].as_str()).collect();
    let alerts = read(deploy, "prometheus/alerts.yml")?;
    let dashboard: Value = serde_json::from_str(&read(deploy, "grafana/snowskin.json")?)
        .context("grafana/snowskin.json is not JSON")?;
    for (file, text) in [("alerts.yml", &alerts), ("snowskin.json", &dashboard.to_string())] {
        for job in jobs_named(text) {
            if !jobs.contains(job.as_str()) && !JOBS_OF_OTHERS.contains(&job.as_str()) {
                findings.push(format!("{file}: prometheus.yml has no job `{job}`"));
            }
        }
    }
    findings.extend(judge_dashboard(&dashboard));
    findings.extend(judge_provisioning(deploy, compose)?);
    Ok(findings)
}

/// Variables in queries exist; windows of rates follow the resolution; no two panels share a number or a
/// place.
fn judge_dashboard(dashboard: &Value) -> Vec<String> {
    const BUILT_IN: [&str; 3] = ["__rate_interval", "__range", "__interval"];
    let mut findings = Vec::new();
    let variables = dashboard["templating"]["list"].as_array().into_iter().flatten();
    let variables: BTreeSet<&str> = variables.filter_map(|variable| variable["name"].as_str()).collect();
    let (mut ids, mut places) = (BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        let title = panel["title"].as_str().unwrap_or_default();
        let place = ["x", "y"].map(|key| panel["gridPos"][key].as_u64());
        if !ids.insert(panel["id"].as_u64()) || !places.insert(place) {
            findings.push(format!("snowskin.json: `{title}` has the number or the place of another panel"));
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().unwrap_or_default();
            for name in expr.split('$').skip(1) {
                let end = |c: char| !c.is_ascii_alphanumeric() && c != '_';
                let name = name.trim_start_matches('{').split(end).next().unwrap_or_default();
                if !variables.contains(name) && !BUILT_IN.contains(&name) {
                    findings.push(format!("snowskin.json: `{title}` uses the unknown variable `{name}`"));
                }
            }
            if expr.contains("snowskin_") && !expr.contains("$cluster") {
                findings.push(format!("snowskin.json: `{title}` mixes clusters: `{expr}`"));
            }
            // A window of a day may be fixed: the comparison with the last day does not depend on the
            // resolution.
            let mut windows = expr.split('[').skip(1).map(|rest| rest.split(']').next().unwrap_or_default());
            if windows.any(|window| !["$__rate_interval", "$__range", "1d"].contains(&window)) {
                findings.push(format!(
                    "snowskin.json: `{title}` has a window that does not follow the resolution"
                ));
            }
        }
    }
    findings
}

/// What promtool reports about the configuration, and about the dashboard's queries; `None` when it is not
/// installed.
///
/// # Errors
/// It cannot be run.
pub(super) fn judge_by_promtool(deploy: &Path, scratch: &Path) -> Result<Option<Vec<String>>> {
    if Cmd::new("promtool --version").stdout(deploy).is_none() {
        return Ok(None);
    }
    let dashboard: Value = serde_json::from_str(&read(deploy, "grafana/snowskin.json")?)?;
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let rules = targets.zip(0..).map(|(target, number): (&Value, u32)| {
        let expr = target["expr"].as_str().unwrap_or_default();
        let expr = expr.replace("$__rate_interval", "5m").replace("$__range", "1h");
        json!({"record": format!("panel:{number}"), "expr": expr})
    });
    // JSON is a subset of YAML.
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules.collect::<Vec<_>>()}]});
    let file = scratch.join("dashboard.yml");
    fs::write(&file, rules.to_string())?;
    let mut findings = Vec::new();
    for (check, path) in [("config", deploy.join("prometheus/prometheus.yml")), ("rules", file)] {
        let output = Command::new("promtool").arg("check").arg(check).arg(&path).output()?;
        if !output.status.success() {
            findings
                .push(format!("promtool check {check}: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
    }
    Ok(Some(findings))
}

/// Provisioned files are mounted where Grafana looks for them.
fn judge_provisioning(deploy: &Path, compose: &Compose) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let text = read(deploy, "compose.yaml")?;
    let provider = yaml::read(&deploy.join("grafana/provisioning/dashboards/snowskin.yml"))?;
    let at = provider["providers"][0]["options"]["path"].as_str().unwrap_or_default();
    if !text.contains(&format!(":{at}/snowskin.json")) {
        findings.push(format!("compose.yaml does not mount the dashboard at `{at}`"));
    }
    let source = yaml::read(&deploy.join("grafana/provisioning/datasources/prometheus.yml"))?;
    let url = source["datasources"][0]["url"].as_str().unwrap_or_default();
    let host = url.trim_start_matches("http://").split(':').next().unwrap_or_default();
    if !compose.services.contains_key(host) {
        findings.push(format!("the data source `{url}` is not a service of compose.yaml"));
    }
    Ok(findings)
}

/// Every `job="…"`; alternatives are returned separately.
fn jobs_named(text: &str) -> Vec<String> {
    let text = text.replace("\\\"", "\"");
    let found = ["job=\"", "job=~\""].iter().flat_map(|start| text.split(start).skip(1).collect::<Vec<_>>());
    let names = found.filter_map(|rest| rest.split('"').next());
    names.flat_map(|name| name.split('|')).map(str::to_owned).collect()
}

fn read(deploy: &Path, name: &str) -> Result<String> {
    fs::read_to_string(deploy.join(name)).with_context(|| format!("cannot read {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_found_in_rules_and_in_the_json_of_dashboards() {
        let text = r#"up{job="a"} and x{job=~\"b|c\"}"#;
        assert_eq!(jobs_named(text), ["a", "b", "c"]);
    }

    #[test]
    fn a_panel_that_uses_unknown_names_is_found() {
        let panel = |expr: &str, y: u32| json!({"id": y, "title": "P", "gridPos": {"x": 0, "y": y}, "targets": [{"expr": expr}]});
        let good = "rate(snowskin_a_total{cluster=~\"$cluster\"}[$__rate_interval])";
        let dashboard =
            |panels: Vec<Value>| json!({"templating": {"list": [{"name": "cluster"}]}, "panels": panels});
        assert_eq!(judge_dashboard(&dashboard(vec![panel(good, 0), panel(good, 1)])), Vec::<String>::new());
        for bad in [
            "rate(snowskin_a_total{cluster=~\"$cluster\"}[5m])",
            "snowskin_a",
            "snowskin_a{cluster=~\"$cluster\",instance=~\"$unknown\"}",
        ] {
            assert_eq!(judge_dashboard(&dashboard(vec![panel(bad, 0)])).len(), 1, "{bad}");
        }
        assert_eq!(judge_dashboard(&dashboard(vec![panel(good, 0), panel(good, 0)])).len(), 1);
    }
}
