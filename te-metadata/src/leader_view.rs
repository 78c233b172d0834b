//! [`LeaderView`]: who leads, in a hash on Redis, as Mooncake's clients look for it.

use std::format;
use std::string::String;
use std::time::Duration;

use crate::error::MetadataError;
use crate::redis::Redis;
use crate::source::{Kind, MetadataSource};

/// Publishes who leads under `mooncake-store/{CLUSTER}/master_view`, with the fields that Mooncake's Redis
/// backend reads: `leader_address`, `view_version`, `owner_token`
/// (`ha/leadership/backends/redis/redis_leader_coordinator.cpp`). The entry has a time to live, which
/// Mooncake's own masters renew as well.
pub struct LeaderView {
    server: String,
    redis: Redis,
    key: String,
}

impl LeaderView {
    /// The server of `source`, and the name of the cluster. Nothing is sent yet.
    ///
    /// # Errors
    /// `Refused` when `source` is not Redis.
    pub fn open(source: &MetadataSource, cluster: &str, timeout: Duration) -> Result<Self, MetadataError> {
        let Kind::Redis(of) = &source.0 else {
            let reason = "write redis://[USER:PASSWORD@]HOST:PORT[/DB]".into();
            return Err(MetadataError::Refused { server: format!("{source}"), reason });
        };
        let redis = Redis::new(of, timeout);
        // Between braces, so that all keys of a cluster are on one server of a Redis cluster.
        let cluster = cluster.replace(['{', '}'], "_");
        let key = format!("mooncake-store/{{{cluster}}}/master_view");
        Ok(Self { server: redis.name(), redis, key })
    }

    /// Kind and address of the server, without passwords.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Says that `leader` leads, as the view `version`, for `ttl`. Returns whether it is so: not if there is
    /// a later view.
    ///
    /// # Errors
    /// `Unreachable`, `Refused`.
    pub fn publish(
        &self,
        leader: &str,
        version: u64,
        owner: &str,
        ttl: Duration,
    ) -> Result<bool, MetadataError> {
        self.redis.publish_view(&self.key, leader, version, owner, ttl).map_err(|fault| {
            let server = self.server.clone();
            match fault {
                crate::backoff::Fault::Unreachable(reason) => MetadataError::Unreachable { server, reason },
                crate::backoff::Fault::Refused(reason) => MetadataError::Refused { server, reason },
                crate::backoff::Fault::Garbage(what) => {
                    MetadataError::Garbage { server, key: self.key.clone(), what }
                }
            }
        })
    }
}

impl std::fmt::Debug for LeaderView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LeaderView").field(&self.server).finish()
    }
}
