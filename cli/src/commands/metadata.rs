//! Where segments are looked up by name, and under which name ours is registered.

use std::convert::Infallible;
use std::str::FromStr;

use te_engine::{MetadataConfig, MetadataSource, SourceError};

use crate::exit::Failure;

/// What this build can look names up in.
const HELP: &str = match (cfg!(feature = "redis"), cfg!(feature = "etcd")) {
    (false, false) => {
        "Where segments are looked up by name: p2p (nowhere: names are addresses) or http://HOST:PORT/metadata (a master's --http). \
         This build has neither redis:// nor etcd://"
    }
    (true, false) => {
        "Where segments are looked up by name: p2p (nowhere: names are addresses), http://HOST:PORT/metadata (a master's --http) or \
         redis://[USER:PASSWORD@]HOST:PORT[/DB]. A password is better kept in the environment. This build has no etcd://"
    }
    (false, true) => {
        "Where segments are looked up by name: p2p (nowhere: names are addresses), http://HOST:PORT/metadata (a master's --http) or \
         etcd://HOST:PORT[,HOST:PORT…]. This build has no redis://"
    }
    (true, true) => {
        "Where segments are looked up by name: p2p (nowhere: names are addresses), http://HOST:PORT/metadata (a master's --http), \
         redis://[USER:PASSWORD@]HOST:PORT[/DB] or etcd://HOST:PORT[,HOST:PORT…]. A password is better kept in the environment"
    }
};

/// The directory of names.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MetadataArg {
    /// Where segments are looked up by name.
    #[arg(
        long,
        help = HELP,
        env = "SNOWSKIN_METADATA",
        hide_env_values = true,
        default_value = "p2p",
        value_name = "URL"
    )]
    metadata: Url,
}

impl MetadataArg {
    /// For an engine that looks names up.
    pub(crate) fn config(&self) -> Result<MetadataConfig, Failure> {
        let source =
            self.metadata.0.clone().map_err(|error| Failure::usage(format!("--metadata: {error}")))?;
        let mut config = MetadataConfig::default();
        config.source = source;
        Ok(config)
    }

    /// For an engine that is registered as `segment`.
    pub(crate) fn config_of(&self, segment: Option<&str>) -> Result<MetadataConfig, Failure> {
        let mut config = self.config()?;
        if segment.is_some() && config.source.is_peer_to_peer() {
            return Err(Failure::usage("--segment needs --metadata: a server to be registered at"));
        }
        config.name = segment.map(Into::into);
        Ok(config)
    }
}

/// A connection string, or what is wrong with it: an error of clap's would repeat it, with the password.
#[derive(Clone, Debug)]
struct Url(Result<MetadataSource, SourceError>);

impl FromStr for Url {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.parse()))
    }
}
