//! The fabric between GPUs, of one host and of the hosts of an NVLink domain, and between them and shared
//! host memory: one rail.

use std::error::Error as StdError;
use std::fmt;
use std::net::SocketAddr;
use std::vec::Vec;

use te_core::device::Devices as _;
use te_fabric::ConfigError;
use te_nvlink::NvlinkTransport;

use super::{Cause, Fabric, FabricContext, Rail};
use crate::config::Config;

/// NVLink, PCIe and copies within a GPU: one rail.
pub(super) struct Nvlink;

impl Fabric for Nvlink {
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        let gpu = context.gpus.cuda().ok_or(NoGpu).map_err(Cause::absent)?;
        if gpu.kinds().is_empty() {
            return Err(Cause::absent(NoGpu));
        }
        let config = te_nvlink::Config {
            inflight_max: context.config.inflight_slices_max.min(1 << 20),
            identity: context.identity,
            bind: SocketAddr::new(context.control.ip(), 0),
            advertise: context.advertise(),
            ..context.config.nvlink.clone()
        };
        Ok(Rail::only(NvlinkTransport::new(config, gpu)?))
    }

    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        config.nvlink.validate()
    }

    fn is_asked_for(&self, config: &Config) -> bool {
        config.nvlink.port != 0
    }
}

/// The host has no GPU whose memory could be shared.
#[derive(Debug)]
struct NoGpu;

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no NVIDIA GPU: check `snowskin doctor`, and the setting gpu.cuda_library")
    }
}

impl StdError for NoGpu {}
