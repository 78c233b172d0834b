//! [`Any`]: a client of the cluster, or of the node on this machine.

use std::sync::Arc;

use store_client::local::{LocalClient, LocalConfig, LocalError};
use store_client::{
    Client, ClientConfig, ConnectError, Get, Put, PutOptions, RemoveMode, RetentionChange, Store, StoreError,
    Tally,
};

use te_core::device::Devices;

use super::ClientsError;
use crate::codes::{StoreCode, store as code};

/// What the clients of a pool connect to.
#[derive(Clone, Debug)]
pub enum Origin {
    /// The master and the nodes of a cluster.
    Cluster(Box<ClientConfig>),
    /// The node on this machine, which acts for its clients.
    Local(LocalConfig),
}

/// A client of the cluster, or of the node on this machine. Both have the operations of [`Store`].
pub enum Any {
    /// Of the cluster.
    Cluster(Box<Client>),
    /// Of the node on this machine.
    Local(Box<LocalClient>),
}

impl Any {
    /// Connects.
    ///
    /// # Errors
    /// See [`ConnectError`] and [`LocalError`].
    pub(super) fn connect(origin: &Origin) -> Result<Self, ClientsError> {
        Ok(match origin {
            Origin::Cluster(config) => Self::Cluster(Box::new(Client::connect(config.as_ref().clone())?)),
            Origin::Local(config) => Self::Local(Box::new(LocalClient::connect(config.clone())?)),
        })
    }

    /// The client of the cluster.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` (-1012): the node on this machine does not offer the operation.
    pub fn cluster(&mut self) -> Result<&mut Client, StoreCode> {
        match self {
            Self::Cluster(client) => Ok(client),
            Self::Local(_) => Err(code::NOT_SUPPORTED),
        }
    }

    /// The devices whose memory callers may pass by its address; a client of the node on this machine refuses
    /// it. `None`: this build knows none.
    pub(super) fn devices(&self) -> Option<Arc<dyn Devices>> {
        match self {
            Self::Cluster(client) => client.devices(),
            Self::Local(_) => te_engine::devices(&te_engine::Config::default()).ok().flatten(),
        }
    }

    /// The length of an object, bytes. `None` is a miss.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn size(&mut self, key: &[u8]) -> Result<Option<u64>, StoreError> {
        match self {
            Self::Cluster(client) => Ok(client.master().look_up(key)?.map(|object| object.len)),
            Self::Local(client) => Ok(client.get_buffer(key)?.map(|value| value.span().len() as u64)),
        }
    }

    /// Whether the other side answers.
    pub fn answers(&mut self) -> bool {
        match self {
            Self::Cluster(client) => client.master().stats().is_ok(),
            Self::Local(client) => client.batch_exists(&[b"-"]).is_ok(),
        }
    }
}

/// The client that an operation goes to.
macro_rules! either {
    ($any:expr, $client:ident => $call:expr) => {
        match $any {
            Any::Cluster($client) => $call,
            Any::Local($client) => $call,
        }
    };
}

impl Store for Any {
    fn batch_get(&mut self, items: &mut [Get<'_>]) -> Tally {
        either!(self, client => client.batch_get(items))
    }

    fn batch_put(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally {
        either!(self, client => client.batch_put(items, options))
    }

    fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        either!(self, client => client.batch_exists(keys))
    }

    fn batch_prefetch(&mut self, keys: &[&[u8]]) -> Result<Vec<store_core::message::Prefetched>, StoreError> {
        either!(self, client => client.batch_prefetch(keys))
    }

    fn batch_exists_leased(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        either!(self, client => client.batch_exists_leased(keys))
    }

    fn batch_change_retention(
        &mut self,
        keys: &[&[u8]],
        change: &RetentionChange,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        either!(self, client => client.batch_change_retention(keys, change))
    }

    fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        mode: RemoveMode,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        either!(self, client => client.batch_remove(keys, mode))
    }
}

impl From<ConnectError> for ClientsError {
    fn from(error: ConnectError) -> Self {
        Self::Connect(error)
    }
}

impl From<LocalError> for ClientsError {
    fn from(error: LocalError) -> Self {
        Self::Local(error)
    }
}
