//! Names: which instances there are, what they serve, and which of their publishers are heard.

use std::collections::BTreeMap;
use std::sync::Arc;

use conductor_core::InstanceId;
use conductor_core::knowledge::PublisherId;

use crate::config::{EngineConfig, EngineKind, Role};
use crate::proxy::Pool;

/// An instance, over all entries of settings and registrations that name it.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) tenant: String,
    pub(crate) name: String,
    pub(crate) model: String,
    /// Tokens per block.
    pub(crate) block_tokens: u32,
    pub(crate) role: Role,
    /// Of those that are equally fast.
    pub(crate) class: String,
    pub(crate) is_store: bool,
    pub(crate) kind: EngineKind,
    /// Where it serves HTTP; empty: unknown.
    pub(crate) http: String,
    /// Where the bootstrap server of a prefill engine of SGLang listens.
    pub(crate) bootstrap_port: u16,
    /// Connections to that address.
    pub(crate) pool: Option<Arc<Pool>>,
}

/// A publisher that is subscribed to.
#[derive(Clone, Debug)]
pub(crate) struct Publisher {
    pub(crate) instance: InstanceId,
    pub(crate) dp_rank: u32,
    /// As it was given: with the endpoint of this rank.
    pub(crate) engine: EngineConfig,
    /// Whether its blocks are part of answers.
    pub(crate) served: bool,
}

/// All names.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    pub(crate) instances: BTreeMap<InstanceId, Instance>,
    pub(crate) publishers: BTreeMap<PublisherId, Publisher>,
}

impl Directory {
    /// The instance of this name.
    pub(crate) fn find(&self, tenant: &str, name: &str) -> Option<InstanceId> {
        let mut found = self.instances.iter().filter(|(_, it)| it.tenant == tenant && it.name == name);
        found.next().map(|(id, _)| *id)
    }

    /// The instances at these addresses.
    pub(crate) fn at(&self, addresses: &[String]) -> Vec<InstanceId> {
        let found = self.instances.iter().filter(|(_, it)| addresses.contains(&it.http));
        found.map(|(id, _)| *id).collect()
    }

    /// A tenant's instances of these names or addresses. Those that do not exist are left out.
    pub(crate) fn named(&self, tenant: &str, names: &[String]) -> Vec<InstanceId> {
        if names.is_empty() {
            return Vec::new();
        }
        let wanted =
            |it: &Instance| it.tenant == tenant && (names.contains(&it.name) || names.contains(&it.http));
        self.instances.iter().filter(|(_, it)| wanted(it)).map(|(id, _)| *id).collect()
    }

    /// Engines of a tenant that serve a model. An empty tenant is `default`.
    pub(crate) fn serving<'a>(
        &'a self,
        tenant: &'a str,
        model: &'a str,
    ) -> impl Iterator<Item = (InstanceId, &'a Instance)> {
        let wanted = move |it: &Instance| it.tenant == tenant && it.model == model && !it.is_store;
        self.instances.iter().filter(move |(_, it)| wanted(it)).map(|(id, it)| (*id, it))
    }

    /// Whether any publisher of an instance is heard; an instance without publishers counts as heard.
    pub(crate) fn is_heard(&self, instance: InstanceId) -> bool {
        let mut of = self.publishers.values().filter(|publisher| publisher.instance == instance).peekable();
        of.peek().is_none() || of.any(|publisher| publisher.served)
    }

    /// The sizes of blocks with which a tenant's engines serve a model, each once.
    pub(crate) fn block_sizes(&self, tenant: &str, model: &str) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.serving(tenant, model).map(|(_, it)| it.block_tokens).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}
