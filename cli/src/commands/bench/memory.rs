//! Where the buffers of a benchmark are: in host memory, or in memory of a GPU.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use te_core::{Access, Location, MemoryKinds, RegionId};
use te_engine::{Config, Engine, SharedRegion, TransferEngine};

use super::pool::{self, Claimed};
use crate::exit::Failure;
use crate::{fail, sys};

/// The memory of a buffer: `host`, `cuda:N` or `hip:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place(Location);

impl Place {
    /// Memory that the CPU reaches.
    pub(super) const HOST: Self = Self(Location::Host);

    /// Whether it is memory of a GPU.
    pub(super) fn is_device(self) -> bool {
        !(MemoryKinds::HOST | MemoryKinds::POOL).contains(self.0.kind())
    }

    /// The place of memory at this location.
    pub(super) fn of(location: Location) -> Self {
        if location.kind() == MemoryKinds::HOST { Self::HOST } else { Self(location) }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "host" {
            return Ok(Self::HOST);
        }
        let location: Result<Location, _> = text.parse();
        let kinds = MemoryKinds::CUDA | MemoryKinds::HIP;
        match location.ok().filter(|location| kinds.contains(location.kind())) {
            Some(location) => Ok(Self(location)),
            None => Err("write host, or cuda:0 or hip:0 with the number of the GPU".to_owned()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.kind() == MemoryKinds::HOST { f.write_str("host") } else { self.0.fmt(f) }
    }
}

/// The GPU of a benchmark and the library of its driver.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct GpuArgs {
    /// The library of the GPU's driver. Default: libcuda.so.1 or libamdhip64.so, where the dynamic linker has
    /// it.
    #[arg(long, value_name = "PATH")]
    gpu_library: Option<PathBuf>,
}

/// What a report says about the driver of a GPU.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct GpuDriver {
    /// The library that was asked for.
    library: String,
    /// The version that the driver reports.
    version: i32,
}

impl GpuArgs {
    /// The flags for a child.
    pub(super) fn to_args(&self) -> Vec<String> {
        let library = self.gpu_library.iter().map(|path| path.display().to_string());
        library.flat_map(|path| ["--gpu-library".to_owned(), path]).collect()
    }

    /// Has an engine use the library.
    #[cfg(any(feature = "cuda", feature = "hip"))]
    pub(super) fn apply(&self, config: &mut Config) {
        // One of the two is used: that of the memory.
        config.gpu.cuda_library.clone_from(&self.gpu_library);
        config.gpu.hip_library.clone_from(&self.gpu_library);
    }

    /// Has an engine use the library.
    #[cfg(not(any(feature = "cuda", feature = "hip")))]
    #[allow(clippy::unused_self, reason = "as in a build for GPUs")]
    pub(super) fn apply(&self, _config: &mut Config) {}
}

#[cfg(any(feature = "cuda", feature = "hip"))]
mod gpu {
    use te_core::{Location, MemoryKinds};
    use te_gpu::{DeviceBuffer, Gpu};

    use super::{GpuArgs, GpuDriver};
    use crate::exit::Failure;

    /// The devices of the vendor whose memory this is.
    fn open(args: &GpuArgs, location: Location) -> Result<Gpu, Failure> {
        let mut config = te_gpu::Config::default();
        let made = if location.kind() == MemoryKinds::CUDA {
            config.cuda_library.clone_from(&args.gpu_library);
            cuda(config)
        } else {
            config.hip_library.clone_from(&args.gpu_library);
            hip(config)
        };
        let gpu = made.ok_or_else(|| super::not_built(location))?;
        let gpu = gpu.map_err(|error| Failure::failed(format!("gpu: {error}")))?;
        let devices = gpu.devices().map_err(|error| {
            Failure::failed(format!("{location}: {error}")).hint("`snowskin doctor` reports what is missing")
        })?;
        if devices.iter().any(|device| device.location == location) {
            return Ok(gpu);
        }
        let there: Vec<String> = devices.iter().map(|device| device.location.to_string()).collect();
        Err(Failure::failed(format!("{location} is not there: this host has {}", there.join(", "))))
    }

    fn cuda(config: te_gpu::Config) -> Option<Result<Gpu, te_gpu::SettingError>> {
        #[cfg(feature = "cuda")]
        return Some(Gpu::cuda(config));
        #[cfg(not(feature = "cuda"))]
        {
            drop(config);
            None
        }
    }

    fn hip(config: te_gpu::Config) -> Option<Result<Gpu, te_gpu::SettingError>> {
        #[cfg(feature = "hip")]
        return Some(Gpu::hip(config));
        #[cfg(not(feature = "hip"))]
        {
            drop(config);
            None
        }
    }

    pub(super) fn allocate(
        args: &GpuArgs,
        location: Location,
        bytes: usize,
    ) -> Result<DeviceBuffer, Failure> {
        let gpu = open(args, location)?;
        gpu.allocate(location, bytes)
            .map_err(|error| Failure::failed(format!("{bytes} bytes of {location}: {error}")))
    }

    pub(super) fn driver(args: &GpuArgs, location: Location) -> Result<GpuDriver, Failure> {
        let gpu = open(args, location)?;
        let default = if location.kind() == MemoryKinds::CUDA { "libcuda.so.1" } else { "libamdhip64.so" };
        let library = args.gpu_library.as_ref().map_or(default.to_owned(), |path| path.display().to_string());
        let version = gpu.driver_version().map_err(|error| Failure::failed(error.to_string()))?;
        Ok(GpuDriver { library, version })
    }
}

fn not_built(location: Location) -> Failure {
    Failure::failed(format!("this build knows no memory of {location}"))
        .hint("build it with the features `cuda` and `hip`")
}

/// The driver of the GPU that has this memory; `None` for host memory.
///
/// # Errors
/// There is no such GPU.
pub(super) fn driver(args: &GpuArgs, place: Place) -> Result<Option<GpuDriver>, Failure> {
    if !place.is_device() {
        return Ok(None);
    }
    #[cfg(any(feature = "cuda", feature = "hip"))]
    return gpu::driver(args, place.0).map(Some);
    #[cfg(not(any(feature = "cuda", feature = "hip")))]
    {
        let _ = args;
        Err(not_built(place.0))
    }
}

/// Registered memory of a benchmark. It is dropped after its engine, or unregistered before.
pub(super) enum Buffer {
    /// Host memory that the engine allocated.
    Host(SharedRegion),
    /// Memory of a GPU.
    #[cfg(any(feature = "cuda", feature = "hip"))]
    Device(RegionId, te_gpu::DeviceBuffer),
    /// Memory of a CXL pool, of a target.
    Pool(RegionId, Claimed),
}

impl Buffer {
    /// Allocates and registers memory at a place, and touches all of its pages.
    ///
    /// # Errors
    /// There is no such GPU, it has no memory left, or the fabrics of the engine do not move its memory.
    pub(super) fn new(
        engine: &mut Engine,
        place: Place,
        gpu: &GpuArgs,
        bytes: usize,
        access: Access,
    ) -> anyhow::Result<Self> {
        if place.is_device() {
            return Self::on_device(place, gpu, bytes, |span| sys::register(engine, span, access));
        }
        let region = engine.alloc_shared(bytes, access)?;
        touch(&region)?;
        Ok(Self::Host(region))
    }

    /// As [`new`](Self::new), for an engine that serves by itself.
    ///
    /// # Errors
    /// As there.
    pub(super) fn served(
        engine: &TransferEngine,
        place: Place,
        gpu: &GpuArgs,
        bytes: usize,
    ) -> anyhow::Result<Self> {
        let access = Access::all();
        if place.is_device() {
            return Self::on_device(place, gpu, bytes, |span| sys::register_with(engine, span, access));
        }
        if let Some(claimed) = pool::claim(engine, bytes)? {
            let region = sys::register_with(engine, claimed.span, access)?;
            return Ok(Self::Pool(region, claimed));
        }
        let region = engine.alloc_shared(bytes, access)?;
        touch(&region)?;
        Ok(Self::Host(region))
    }

    #[cfg(any(feature = "cuda", feature = "hip"))]
    fn on_device(
        place: Place,
        gpu: &GpuArgs,
        bytes: usize,
        register: impl FnOnce(te_core::MemSpan) -> Result<RegionId, te_engine::RegisterError>,
    ) -> anyhow::Result<Self> {
        let buffer = gpu::allocate(gpu, place.0, bytes)?;
        match register(buffer.span()) {
            Ok(region) => Ok(Self::Device(region, buffer)),
            Err(error) => fail(
                Failure::failed(format!("memory of {place} is not moved over these fabrics: {error}")).hint(
                    "fabric tcp moves it through host memory, and rdma where the driver exports dma-bufs",
                ),
            ),
        }
    }

    #[cfg(not(any(feature = "cuda", feature = "hip")))]
    fn on_device(
        place: Place,
        _gpu: &GpuArgs,
        _bytes: usize,
        _register: impl FnOnce(te_core::MemSpan) -> Result<RegionId, te_engine::RegisterError>,
    ) -> anyhow::Result<Self> {
        fail(not_built(place.0))
    }

    /// The region.
    pub(super) fn id(&self) -> RegionId {
        match self {
            Self::Host(region) => region.id(),
            #[cfg(any(feature = "cuda", feature = "hip"))]
            Self::Device(region, _) => *region,
            Self::Pool(region, _) => *region,
        }
    }

    /// Gives back what is not freed by dropping it, when the region is unregistered.
    pub(super) fn release(&self) {
        if let Self::Pool(_, claimed) = self {
            claimed.release();
        }
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
        match self {
            Self::Host(region) => region.write(offset, bytes)?,
            #[cfg(any(feature = "cuda", feature = "hip"))]
            Self::Device(_, buffer) => buffer.write(offset, bytes)?,
            Self::Pool(..) => anyhow::bail!("only peers write the target's memory in a pool"),
        }
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        match self {
            Self::Host(region) => region.read(offset, bytes)?,
            #[cfg(any(feature = "cuda", feature = "hip"))]
            Self::Device(_, buffer) => buffer.read(offset, bytes)?,
            Self::Pool(..) => anyhow::bail!("only peers read the target's memory in a pool"),
        }
        Ok(())
    }
}

/// Touches all pages, so that the kernel allocates them now and not during a measurement.
pub(super) fn touch(region: &SharedRegion) -> anyhow::Result<()> {
    const PAGE: usize = 4096;
    let page = [1; PAGE];
    for offset in (0..region.len()).step_by(PAGE) {
        region.write(offset as u64, &page[..PAGE.min(region.len() - offset)])?;
    }
    Ok(())
}
