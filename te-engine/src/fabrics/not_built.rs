//! In place of the settings of fabrics that this build lacks. Any settings are accepted and ignored, with one
//! warning, so that one configuration file serves builds with and without a fabric.

use std::sync::Once;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

/// A module that stands for the crate of a fabric, with the type of its settings.
macro_rules! not_built {
    ($fabric:literal, $crate_name:ident) => {
        not_built!($fabric, $crate_name, not(feature = $fabric));
    };
    ($fabric:literal, $crate_name:ident, $lacks:meta) => {
        #[cfg($lacks)]
        pub(crate) mod $crate_name {
            use super::*;

            /// The settings of a fabric that this build lacks: any are accepted, and none are kept.
            #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
            #[non_exhaustive]
            pub struct Config {}

            impl<'de> Deserialize<'de> for Config {
                fn deserialize<D: Deserializer<'de>>(settings: D) -> Result<Self, D::Error> {
                    static WARNED: Once = Once::new();
                    IgnoredAny::deserialize(settings)?;
                    let built_by = concat!("build with --features ", $fabric);
                    WARNED.call_once(|| {
                        log::warn!(
                            "the settings of {} are ignored: this build lacks it; {built_by}",
                            $fabric
                        );
                    });
                    Ok(Self {})
                }
            }
        }
    };
}

not_built!("cxl", te_cxl);
not_built!("nvmeof", te_nvmeof);
not_built!("rdma", te_rdma);
not_built!("tcp", te_tcp);
not_built!("cuda", te_gpu, not(any(feature = "cuda", feature = "hip")));
