//! Numbers and structures of the drivers' interfaces, as in `cuda.h` and `hip_runtime_api.h`.
//!
//! The two interfaces have the same shapes; what differs is in [`Api`]. Numbers that are not marked otherwise
//! are those of both.

use std::ffi::{c_int, c_void};

use te_core::GpuVendor;

/// Which of the two interfaces a library has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each is made by a feature")]
pub(crate) enum Api {
    Cuda,
    Hip,
}

impl Api {
    pub(crate) const fn vendor(self) -> GpuVendor {
        match self {
            Self::Cuda => GpuVendor::Nvidia,
            Self::Hip => GpuVendor::Amd,
        }
    }

    /// The smallest version of the driver that has every function and number that is used here.
    pub(crate) const fn version_min(self) -> i32 {
        match self {
            // 12.0: `cuGetProcAddress_v2`.
            Self::Cuda => 12_000,
            // 6.0: the values of memory types changed there.
            Self::Hip => 60_000_000,
        }
    }

    /// What hides devices from a process.
    pub(crate) const fn visible_variable(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA_VISIBLE_DEVICES",
            Self::Hip => "HIP_VISIBLE_DEVICES",
        }
    }
}

/// A context, stream, event, module or function: an address that only the driver uses.
pub(crate) type Opaque = *mut c_void;
/// An address of device memory, or of host memory as the device sees it.
pub(crate) type DevicePtr = u64;

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const NOT_INITIALIZED: c_int = 3;
pub(crate) const DEINITIALIZED: c_int = 4;
pub(crate) const NO_DEVICE: c_int = 100;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: c_int = 712;
pub(crate) const NOT_PERMITTED: c_int = 800;
pub(crate) const NOT_SUPPORTED: c_int = 801;

/// Errors after which a context does nothing any more: uncorrectable memory errors, faults of a kernel, a
/// device that is gone, a server of MPS that ended its client (810). A device that is not available (46) may
/// be later.
pub(crate) const fn is_sticky(code: c_int) -> bool {
    matches!(
        code,
        DEINITIALIZED | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911 | 999
    )
}

// Attributes of pointers.
/// CUDA alone.
pub(crate) const POINTER_CONTEXT: c_int = 1;
pub(crate) const POINTER_MEMORY_TYPE: c_int = 2;
pub(crate) const POINTER_SYNC_MEMOPS: c_int = 6;
pub(crate) const POINTER_BUFFER_ID: c_int = 7;
pub(crate) const POINTER_IS_MANAGED: c_int = 8;
pub(crate) const POINTER_DEVICE_ORDINAL: c_int = 9;
pub(crate) const POINTER_IS_LEGACY_IPC_CAPABLE: c_int = 10;
pub(crate) const POINTER_RANGE_START: c_int = 11;
pub(crate) const POINTER_RANGE_SIZE: c_int = 12;
pub(crate) const POINTER_ALLOWED_HANDLE_TYPES: c_int = 14;
pub(crate) const POINTER_IS_GPU_DIRECT_RDMA_CAPABLE: c_int = 15;
/// CUDA alone.
pub(crate) const POINTER_MAPPING_SIZE: c_int = 18;
/// CUDA alone.
pub(crate) const POINTER_MAPPING_BASE: c_int = 19;
/// CUDA alone.
pub(crate) const POINTER_MEMORY_BLOCK_ID: c_int = 20;

/// The memory type of page-locked host memory.
pub(crate) const MEMORY_TYPE_HOST: u32 = 1;
/// The memory type of device memory.
pub(crate) const MEMORY_TYPE_DEVICE: u32 = 2;

// Attributes of devices, of CUDA alone.
pub(crate) const DEVICE_COMPUTE_MAJOR: c_int = 75;
pub(crate) const DEVICE_COMPUTE_MINOR: c_int = 76;
pub(crate) const DEVICE_VMM: c_int = 102;
pub(crate) const DEVICE_POSIX_FD: c_int = 103;
pub(crate) const DEVICE_WRITES_ORDERING: c_int = 118;
pub(crate) const DEVICE_STREAM_MEM_OPS_64: c_int = 122;
pub(crate) const DEVICE_FABRIC: c_int = 128;
pub(crate) const DEVICE_HOST_NUMA_ID: c_int = 134;

/// Writes of a NIC are ordered for the owner of the memory from this value of the ordering on.
pub(crate) const WRITES_ORDERED_FOR_OWNER: c_int = 100;

pub(crate) const HOST_REGISTER_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_DEVICEMAP: u32 = 2;
/// The device only reads the memory, which may be mapped without the right to write.
pub(crate) const HOST_REGISTER_READ_ONLY: u32 = 8;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
/// Calls of this thread do not disturb a capture of another stream.
pub(crate) const CAPTURE_RELAXED: c_int = 2;
/// A stream waits until the word is this value or a later one.
pub(crate) const WAIT_VALUE_GEQ: u32 = 0;

pub(crate) const FLUSH_TARGET_CURRENT_CTX: c_int = 0;
pub(crate) const FLUSH_TO_OWNER: c_int = 100;

/// Handle types of allocations, as bits.
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
pub(crate) const HANDLE_FABRIC: u32 = 8;

pub(crate) const RANGE_HANDLE_DMA_BUF: c_int = 1;
/// The context may reach memory of other devices that it opens.
pub(crate) const IPC_LAZY_PEER_ACCESS: u32 = 1;

const LOCATION_DEVICE: c_int = 1;
const ALLOCATION_PINNED: c_int = 1;
const ACCESS_READ: c_int = 1;
const ACCESS_READ_WRITE: c_int = 3;
pub(crate) const GRANULARITY_MINIMUM: c_int = 0;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemLocation {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`. HIP's is shorter by the reserved bytes at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProp {
    kind: c_int,
    pub(crate) handle_types: u32,
    location: MemLocation,
    win32_meta: *mut c_void,
    compression: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProp {
    pub(crate) const fn on(ordinal: c_int, handle_types: u32, gpu_direct_rdma_capable: bool) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types,
            location: MemLocation { kind: LOCATION_DEVICE, id: ordinal },
            win32_meta: std::ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma_capable: gpu_direct_rdma_capable as u8,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDesc {
    location: MemLocation,
    flags: c_int,
}

impl AccessDesc {
    pub(crate) const fn read_write(ordinal: c_int) -> Self {
        let location = MemLocation { kind: LOCATION_DEVICE, id: ordinal };
        Self { location, flags: ACCESS_READ_WRITE }
    }

    pub(crate) const fn read(ordinal: c_int) -> Self {
        Self { flags: ACCESS_READ, ..Self::read_write(ordinal) }
    }
}

/// When a copy of a batch may read its source.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceOrder {
    /// In the order of the stream.
    Stream = 1,
    /// At any time, even before earlier work of the stream has ended. Right for our own slots alone, which
    /// the host filled before the call.
    Any = 3,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyAttributes {
    pub(crate) order: SourceOrder,
    source: MemLocation,
    destination: MemLocation,
    flags: u32,
}

impl CopyAttributes {
    pub(crate) const fn new(order: SourceOrder) -> Self {
        let unknown = MemLocation { kind: 0, id: 0 };
        Self { order, source: unknown, destination: unknown, flags: 0 }
    }
}

/// `CUuuid`.
pub(crate) type Uuid = [u8; 16];
/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// One copy of the kernel, as its text reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: u32,
    pub(crate) flags: u32,
}

const _: () = {
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<CopyAttributes>() == 24);
    assert!(size_of::<Descriptor>() == 24);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_end_a_context_are_told_from_those_that_pass() {
        for code in [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999] {
            assert!(is_sticky(code), "{code}");
        }
        // A device that is not available may be later; a full server of MPS takes other clients.
        for code in [SUCCESS, 1, 2, 3, 46, 100, 201, 400, NOT_READY, 701, 704, 720, 800, 801, 809, 900, 1_000]
        {
            assert!(!is_sticky(code), "{code}");
        }
    }
}
