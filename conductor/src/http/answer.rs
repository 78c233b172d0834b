//! Answers to queries, in three shapes.
//!
//! | Shape | Chosen by | Looks like |
//! |---|---|---|
//! | [`Tenants`](Shape::Tenants) | default; `?shape=tenants` | Mooncake's document: `{"TENANT":{"INSTANCE":{…}}}` |
//! | [`Instances`](Shape::Instances) | `?shape=instances` | Mooncake's rewrite: `{"instances":{…}}` |
//! | [`Dynamo`](Shape::Dynamo) | `model_name` or `routing_group`; `?shape=dynamo` | that of Dynamo's indexer |
//!
//! All counts are tokens. Those of tiers are cumulative: `GPU` ≤ `CPU` ≤ `DISK` = `longest_matched`. `STORE`
//! is what a store has that all instances can read.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use conductor_core::InstanceId;
use conductor_core::knowledge::{Matches, RankMatch};
use serde::Deserialize;

use crate::directory::Directory;

/// The shape of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Shape {
    /// Mooncake's documented answer: by tenant and instance.
    Tenants,
    /// That of Mooncake's rewrite: under `instances`.
    Instances,
    /// That of Dynamo's indexer.
    Dynamo,
}

/// The answer to a query.
pub(crate) struct Answer<'a> {
    pub(crate) shape: Shape,
    pub(crate) tenant: &'a str,
    pub(crate) model: &'a str,
    /// Answer about this instance only.
    pub(crate) instance: Option<&'a str>,
    pub(crate) block_tokens: u32,
    pub(crate) matches: &'a Matches,
}

impl Answer<'_> {
    /// The answer as JSON.
    pub(crate) fn write(&self, directory: &Directory) -> String {
        let mut out = String::with_capacity(256 + 128 * self.matches.instances.len());
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(self.block_tokens);
        match self.shape {
            Shape::Tenants => {
                out.push('{');
                text(&mut out, self.tenant);
                out.push(':');
                self.instances(&mut out, directory, ["longest_matched", "GPU", "DP", "CPU", "DISK", "STORE"]);
                out.push('}');
            }
            Shape::Instances => {
                out.push_str("{\"tenant_id\":");
                text(&mut out, self.tenant);
                out.push_str(",\"instances\":");
                self.instances(&mut out, directory, ["longest_matched", "GPU", "DP", "CPU", "DISK", "STORE"]);
                out.push('}');
            }
            Shape::Dynamo => {
                out.push_str("{\"scores\":{");
                let mut first = true;
                self.each(directory, |name, ranks| {
                    comma(&mut out, &mut first);
                    text(&mut out, name);
                    out.push_str(":{");
                    let mut first = true;
                    for rank in ranks {
                        comma(&mut out, &mut first);
                        let _ = write!(out, "\"{}\":{}", rank.dp_rank, tokens(rank.disk));
                    }
                    out.push('}');
                });
                out.push_str("},\"frequencies\":[],\"instances\":");
                self.instances(&mut out, directory, ["longest_matched", "gpu", "dp", "cpu", "disk", "store"]);
                out.push('}');
            }
        }
        out
    }

    /// Calls `each` with every instance that is asked about, those without a match included.
    fn each(&self, directory: &Directory, mut each: impl FnMut(&str, &[RankMatch])) {
        let ranks = &self.matches.ranks;
        let mut by_instance: BTreeMap<InstanceId, &[RankMatch]> = BTreeMap::new();
        for group in ranks.chunk_by(|a, b| a.instance == b.instance) {
            if let Some(first) = group.first() {
                by_instance.insert(first.instance, group);
            }
        }
        for (id, instance) in directory.serving(self.tenant, self.model) {
            let wanted = self.instance.is_none_or(|name| name == instance.name);
            if wanted && instance.block_tokens == self.block_tokens {
                each(&instance.name, by_instance.get(&id).copied().unwrap_or_default());
            }
        }
    }

    /// An object of instances.
    fn instances(&self, out: &mut String, directory: &Directory, names: [&str; 6]) {
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(self.block_tokens);
        let [longest, gpu, dp, cpu, disk, store] = names;
        out.push('{');
        let mut first = true;
        self.each(directory, |name, ranks| {
            comma(out, &mut first);
            text(out, name);
            let most = |of: fn(&RankMatch) -> u32| tokens(ranks.iter().map(of).max().unwrap_or_default());
            let _ = write!(
                out,
                ":{{\"{longest}\":{},\"{gpu}\":{},\"{dp}\":{{",
                most(|r| r.disk),
                most(|r| r.gpu)
            );
            let mut first = true;
            for rank in ranks {
                comma(out, &mut first);
                let _ = write!(out, "\"{}\":{}", rank.dp_rank, tokens(rank.gpu));
            }
            let _ = write!(out, "}},\"{cpu}\":{},\"{disk}\":{}", most(|r| r.cpu), most(|r| r.disk));
            if self.matches.store > 0 {
                let _ = write!(out, ",\"{store}\":{}", tokens(self.matches.store));
            }
            out.push('}');
        });
        out.push('}');
    }
}

/// A comma between two items.
fn comma(out: &mut String, first: &mut bool) {
    if !std::mem::take(first) {
        out.push(',');
    }
}

/// A text of foreign origin as JSON.
fn text(out: &mut String, text: &str) {
    match serde_json::to_string(text) {
        Ok(quoted) => out.push_str(&quoted),
        Err(_) => out.push_str("\"\""),
    }
}
