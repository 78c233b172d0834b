//! [`GpuMemory`]: the GPUs whose memory an engine registers.

use std::fmt;
use std::sync::Arc;

use te_core::device::Devices;
use te_core::{Location, MemSpan, MemoryKinds};

use crate::config::Config;
use crate::error::StartError;

/// The devices of each vendor that this build knows. Nothing is loaded before the process has memory of one.
#[derive(Clone, Default)]
pub(crate) struct GpuMemory {
    all: Option<Arc<dyn Devices>>,
    #[cfg(feature = "nvlink")]
    cuda: Option<te_gpu::Gpu>,
}

impl GpuMemory {
    /// The devices that this build knows.
    ///
    /// # Errors
    /// A setting of [`Config::gpu`] is out of its limits.
    #[cfg(any(feature = "cuda", feature = "hip"))]
    pub(crate) fn open(config: &Config) -> Result<Self, StartError> {
        #[cfg(feature = "cuda")]
        let cuda = te_gpu::Gpu::cuda(config.gpu.clone()).map_err(refused)?;
        let made: [Option<Arc<dyn Devices>>; 2] = [
            #[cfg(feature = "cuda")]
            Some(Arc::new(cuda.clone())),
            #[cfg(not(feature = "cuda"))]
            None,
            #[cfg(feature = "hip")]
            Some(Arc::new(te_gpu::Gpu::hip(config.gpu.clone()).map_err(refused)?)),
            #[cfg(not(feature = "hip"))]
            None,
        ];
        Ok(Self {
            all: match made {
                [Some(first), Some(second)] => Some(Arc::new(both::Both { first, second })),
                [one, other] => one.or(other),
            },
            #[cfg(feature = "nvlink")]
            cuda: Some(cuda),
        })
    }

    /// No devices: this build knows none.
    #[cfg(not(any(feature = "cuda", feature = "hip")))]
    pub(crate) fn open(config: &Config) -> Result<Self, StartError> {
        let _ = config;
        Ok(Self::default())
    }

    /// For what stages memory of devices: a fabric, or a caller of the engine.
    pub(crate) fn devices(&self) -> Option<Arc<dyn Devices>> {
        self.all.clone()
    }

    /// The devices of NVIDIA, for the fabric that shares their memory.
    #[cfg(feature = "nvlink")]
    pub(crate) fn cuda(&self) -> Option<te_gpu::Gpu> {
        self.cuda.clone()
    }

    /// The span, at the device on which it is. The kind of memory that the caller has named counts; of which
    /// device it is, the driver knows better, where it knows the memory.
    ///
    /// A span that only begins or ends in memory of a device is said to be there as well: then fabrics refuse
    /// it, while the CPU would fail on it as host memory.
    pub(crate) fn located(&self, span: MemSpan) -> MemSpan {
        let Some(devices) = &self.all else { return span };
        let (said, (first, len)) = (span.location(), (span.as_ptr(), span.len()));
        if said != Location::Host {
            let asks = said.kind() != MemoryKinds::HOST;
            let found = asks.then(|| devices.locate(first, len)).flatten();
            return span.at(found.filter(|found| found.kind() == said.kind()).unwrap_or(said));
        }
        // On a host without GPUs, registering plain memory for one operation asks no dynamic linker.
        if devices.kinds().is_empty() {
            return span;
        }
        let last = first.wrapping_add(len.saturating_sub(1));
        let Some(at_an_end) = devices.locate(first, 1).or_else(|| devices.locate(last, 1)) else {
            return span;
        };
        span.at(devices.locate(first, len).unwrap_or(at_an_end))
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuMemory").field(&self.all.as_ref().map(|devices| devices.kinds())).finish()
    }
}

/// The devices that this build knows, for a caller without an engine. `None`: it knows none. Nothing is
/// loaded before the process has memory of one.
///
/// # Errors
/// A setting of [`Config::gpu`] is out of its limits.
pub fn devices(config: &Config) -> Result<Option<Arc<dyn Devices>>, StartError> {
    Ok(GpuMemory::open(config)?.devices())
}

#[cfg(any(feature = "cuda", feature = "hip"))]
pub(crate) fn refused(error: te_gpu::SettingError) -> StartError {
    StartError::Gpu(std::boxed::Box::new(error))
}

#[cfg(any(feature = "cuda", feature = "hip"))]
mod both {
    use std::boxed::Box;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::vec::Vec;

    use te_core::device::{Allocation, Devices, DmaBuf, Stager};
    use te_core::{Error, ErrorKind, Location, MemSpan, MemoryKinds};

    /// The devices of two vendors.
    pub(super) struct Both {
        pub(super) first: Arc<dyn Devices>,
        pub(super) second: Arc<dyn Devices>,
    }

    impl Both {
        fn of(&self, location: Location) -> &Arc<dyn Devices> {
            if self.first.kinds().contains(location.kind()) { &self.first } else { &self.second }
        }
    }

    impl Devices for Both {
        fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
            self.first.locate(ptr, len).or_else(|| self.second.locate(ptr, len))
        }

        fn allocation(&self, span: MemSpan) -> Result<Allocation, Error> {
            match self.first.allocation(span) {
                Err(error) if error.kind == ErrorKind::NotFound => self.second.allocation(span),
                found => found,
            }
        }

        fn kinds(&self) -> MemoryKinds {
            self.first.kinds() | self.second.kinds()
        }

        fn dmabuf(&self, span: MemSpan) -> Result<(OwnedFd, u64), Error> {
            self.of(span.location()).dmabuf(span)
        }

        fn dmabufs(&self, span: MemSpan) -> Result<Vec<DmaBuf>, Error> {
            self.of(span.location()).dmabufs(span)
        }

        fn is_peer_direct(&self, location: Location) -> bool {
            self.of(location).is_peer_direct(location)
        }

        fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error> {
            self.of(location).stager(location)
        }
    }
}
