//! `--metadata` and `--segment`: the directory in which segments are found by name, and the name of this
//! process in it.

use std::convert::Infallible;
use std::str::FromStr;

use te_engine::{MetadataConfig, MetadataSource, SourceError};

use crate::exit::Failure;

/// The directories that this build supports.
const HELP: &str = match (cfg!(feature = "redis"), cfg!(feature = "etcd")) {
    (false, false) => {
        "Where segments are looked up by name: p2p (no directory: names are addresses) or \
         http://HOST:PORT/metadata (a master's --http). This build supports neither redis:// nor etcd://"
    }
    (true, false) => {
        "Where segments are looked up by name: p2p (no directory: names are addresses), \
         http://HOST:PORT/metadata (a master's --http) or redis://[USER:PASSWORD@]HOST:PORT[/DB]. Prefer the \
         variable for a URL with a password. This build does not support etcd://"
    }
    (false, true) => {
        "Where segments are looked up by name: p2p (no directory: names are addresses), \
         http://HOST:PORT/metadata (a master's --http) or etcd://HOST:PORT[,HOST:PORT…]. This build does not \
         support redis://"
    }
    (true, true) => {
        "Where segments are looked up by name: p2p (no directory: names are addresses), \
         http://HOST:PORT/metadata (a master's --http), redis://[USER:PASSWORD@]HOST:PORT[/DB] or \
         etcd://HOST:PORT[,HOST:PORT…]. Prefer the variable for a URL with a password"
    }
};

/// The metadata directory.
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
    /// Configuration of an engine that only looks up names.
    pub(crate) fn config(&self) -> Result<MetadataConfig, Failure> {
        let source =
            self.metadata.0.clone().map_err(|error| Failure::usage(format!("--metadata: {error}")))?;
        let mut config = MetadataConfig::default();
        config.source = source;
        Ok(config)
    }

    /// Configuration of an engine that is registered as `segment`, if given.
    pub(crate) fn config_of(&self, segment: Option<&str>) -> Result<MetadataConfig, Failure> {
        let mut config = self.config()?;
        if segment.is_some() && config.source.is_peer_to_peer() {
            return Err(Failure::usage(
                "--segment needs --metadata URL: the directory in which to register the name",
            ));
        }
        config.name = segment.map(Into::into);
        Ok(config)
    }
}

/// A connection string, or what is wrong with it. An error of clap's would repeat the string, including its
/// password.
#[derive(Clone, Debug)]
struct Url(Result<MetadataSource, SourceError>);

impl FromStr for Url {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.parse()))
    }
}
