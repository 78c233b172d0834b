//! The driver's library, found at run time: a table of its functions, or one reason why there is no GPU.
//!
//! Nothing is linked, and the library is never closed: it starts threads and keeps pointers into itself.
//! A process that has not mapped the library, or not started the driver, cannot own device memory. So
//! [`Driver::find_started`] asks the dynamic linker and the driver whether it has, and a process that only
//! has host memory never maps the library and never starts the driver.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use te_core::GpuVendor;

use super::abi::{
    AccessDesc, AllocationProp, Api, CopyAttributes, DevicePtr, IpcHandle, NO_DEVICE, NOT_INITIALIZED,
    Opaque, SUCCESS, Uuid,
};

/// Why no GPU can be used on this host. It is no failure of the program: host memory works.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGpu {
    /// The driver's library cannot be loaded.
    NoLibrary {
        /// Whose library.
        vendor: GpuVendor,
        /// The dynamic linker's message.
        why: String,
    },
    /// The library lacks this function, which is required.
    OldLibrary {
        /// Whose library.
        vendor: GpuVendor,
        /// The name of the function.
        function: &'static str,
    },
    /// The driver is older than the first that this crate works with.
    OldDriver {
        /// Whose driver.
        vendor: GpuVendor,
        /// The version that it reports.
        version: i32,
    },
    /// The driver refused to start.
    Refused {
        /// Whose driver.
        vendor: GpuVendor,
        /// The function that failed.
        call: &'static str,
        /// The driver's number for the error.
        code: i32,
        /// The driver's name for the error.
        name: String,
    },
    /// There is no device, or this process may see none.
    NoDevice {
        /// Whose devices.
        vendor: GpuVendor,
        /// The value of the variable that hides devices from this process, where it is set.
        visible: Option<String>,
    },
}

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { vendor, why } => write!(
                f,
                "no {} here, because the driver's library cannot be loaded ({why}): install the GPU's driver, or pass it \
                 into the container",
                what(*vendor)
            ),
            Self::OldLibrary { vendor, function } => write!(
                f,
                "no {} here, because the driver's library has no `{function}`: update the driver to {}",
                what(*vendor),
                release_min(*vendor)
            ),
            Self::OldDriver { vendor, version } => write!(
                f,
                "no {} here, because the driver's interface has the version {version}: update the driver to {}",
                what(*vendor),
                release_min(*vendor)
            ),
            Self::Refused { vendor, call, code, name } => write!(
                f,
                "no {} here, because the driver's `{call}` failed with {code} ({name}): check that the kernel module is \
                 loaded and has the version of the library, and that this process may open the device files",
                what(*vendor)
            ),
            Self::NoDevice { vendor, visible: Some(value) } => write!(
                f,
                "no {} here, because the driver shows no device to this process: {} is \"{value}\", unset it or list \
                 devices in it",
                what(*vendor),
                variable(*vendor)
            ),
            Self::NoDevice { vendor, visible: None } => write!(
                f,
                "no {} here, because the driver has no device: load its kernel module, or pass the device into the \
                 container",
                what(*vendor)
            ),
        }
    }
}

impl std::error::Error for NoGpu {}

const fn what(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Amd => "HIP device",
        _ => "CUDA device",
    }
}

const fn release_min(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Amd => "ROCm 6.0 or later",
        _ => "release 525 (CUDA 12.0) or later",
    }
}

const fn variable(vendor: GpuVendor) -> &'static str {
    match vendor {
        GpuVendor::Amd => Api::Hip.visible_variable(),
        _ => Api::Cuda.visible_variable(),
    }
}

macro_rules! driver {
    (
        required { $($name:ident : $cuda:literal | $hip:literal ($($arg:ty),*);)* }
        optional { $($opt:ident : $opt_cuda:literal | $opt_hip:literal ($($opt_arg:ty),*);)* }
    ) => {
        /// The functions of a driver that are called here. An empty name below: the interface has none.
        pub(crate) struct Driver {
            pub(crate) api: Api,
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub(crate) $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> c_int>,)*
            /// `cuMemcpyBatchAsync` of 13.0 and later.
            pub(crate) batch_13: Option<Batch13>,
            /// `cuMemcpyBatchAsync` of 12.8, and HIP's.
            pub(crate) batch_12: Option<Batch12>,
            /// What the driver's interface says its version is.
            pub(crate) version: i32,
        }

        impl Driver {
            /// # Safety
            /// `handle` came from `dlopen` of the library of this interface.
            unsafe fn fill(handle: *mut c_void, api: Api) -> Result<Self, NoGpu> {
                let name_of = |cuda: &'static str, hip: &'static str| match api {
                    Api::Cuda => cuda,
                    Api::Hip => hip,
                };
                Ok(Self {
                    api,
                    $($name: {
                        let name = name_of(concat!($cuda, "\0"), concat!($hip, "\0"));
                        // SAFETY: `handle` is good (the caller's promise).
                        let symbol = unsafe { find(handle, name) };
                        if symbol.is_null() {
                            let function = name_of($cuda, $hip);
                            return Err(NoGpu::OldLibrary { vendor: api.vendor(), function });
                        }
                        // SAFETY: a function of this name has the signature of the vendor's header, which is
                        // written below.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(symbol)
                        }
                    },)*
                    $($opt: {
                        let name = name_of(concat!($opt_cuda, "\0"), concat!($opt_hip, "\0"));
                        // SAFETY: as above.
                        let symbol = unsafe { find(handle, name) };
                        // SAFETY: as above; null becomes `None`.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($opt_arg),*) -> c_int>,
                            >(symbol)
                        }
                    },)*
                    batch_13: None,
                    batch_12: None,
                    version: 0,
                })
            }
        }
    };
}

/// Destinations, sources, sizes, their number, attributes, first copies of the attributes, number of
/// attributes, stream.
pub(crate) type Batch13 = unsafe extern "C" fn(
    *mut DevicePtr,
    *mut DevicePtr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    Opaque,
) -> c_int;
/// The same, with the index of the copy that failed before the stream.
pub(crate) type Batch12 = unsafe extern "C" fn(
    *mut DevicePtr,
    *mut DevicePtr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    Opaque,
) -> c_int;

driver! {
    required {
        init: "cuInit" | "hipInit" (u32);
        driver_version: "cuDriverGetVersion" | "hipDriverGetVersion" (*mut c_int);
        device_count: "cuDeviceGetCount" | "hipGetDeviceCount" (*mut c_int);
        device_get: "cuDeviceGet" | "hipDeviceGet" (*mut c_int, c_int);
        device_pci: "cuDeviceGetPCIBusId" | "hipDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
        pointer_attributes: "cuPointerGetAttributes" | "hipDrvPointerGetAttributes"
            (u32, *const c_int, *const *mut c_void, DevicePtr);
        host_register: "cuMemHostRegister_v2" | "hipHostRegister" (*mut c_void, usize, u32);
        host_unregister: "cuMemHostUnregister" | "hipHostUnregister" (*mut c_void);
        host_device_pointer: "cuMemHostGetDevicePointer_v2" | "hipHostGetDevicePointer"
            (*mut DevicePtr, *mut c_void, u32);
        address_range: "cuMemGetAddressRange_v2" | "hipMemGetAddressRange"
            (*mut DevicePtr, *mut usize, DevicePtr);
        mem_alloc: "cuMemAlloc_v2" | "hipMalloc" (*mut DevicePtr, usize);
        mem_free: "cuMemFree_v2" | "hipFree" (DevicePtr);
        stream_create: "cuStreamCreateWithPriority" | "hipStreamCreateWithPriority" (*mut Opaque, u32, c_int);
        stream_destroy: "cuStreamDestroy_v2" | "hipStreamDestroy" (Opaque);
        stream_query: "cuStreamQuery" | "hipStreamQuery" (Opaque);
        event_create: "cuEventCreate" | "hipEventCreateWithFlags" (*mut Opaque, u32);
        event_record: "cuEventRecord" | "hipEventRecord" (Opaque, Opaque);
        event_query: "cuEventQuery" | "hipEventQuery" (Opaque);
        event_destroy: "cuEventDestroy_v2" | "hipEventDestroy" (Opaque);
        copy_to_device: "cuMemcpyHtoDAsync_v2" | "hipMemcpyHtoDAsync"
            (DevicePtr, *const c_void, usize, Opaque);
        copy_to_host: "cuMemcpyDtoHAsync_v2" | "hipMemcpyDtoHAsync" (*mut c_void, DevicePtr, usize, Opaque);
        copy_in: "cuMemcpyHtoD_v2" | "hipMemcpyHtoD" (DevicePtr, *const c_void, usize);
        copy_out: "cuMemcpyDtoH_v2" | "hipMemcpyDtoH" (*mut c_void, DevicePtr, usize);
    }
    optional {
        get_proc_address: "cuGetProcAddress_v2" | ""
            (*const c_char, *mut *mut c_void, c_int, u64, *mut c_int);
        error_name: "cuGetErrorName" | "hipDrvGetErrorName" (c_int, *mut *const c_char);
        device_attribute: "cuDeviceGetAttribute" | "" (*mut c_int, c_int, c_int);
        device_uuid: "cuDeviceGetUuid_v2" | "hipDeviceGetUuid" (*mut Uuid, c_int);
        context_retain: "cuDevicePrimaryCtxRetain" | "" (*mut Opaque, c_int);
        context_release: "cuDevicePrimaryCtxRelease_v2" | "" (c_int);
        context_push: "cuCtxPushCurrent_v2" | "" (Opaque);
        context_pop: "cuCtxPopCurrent_v2" | "" (*mut Opaque);
        context_current: "cuCtxGetCurrent" | "" (*mut Opaque);
        capture_mode: "cuThreadExchangeStreamCaptureMode" | "hipThreadExchangeStreamCaptureMode" (*mut c_int);
        device_current: "" | "hipGetDevice" (*mut c_int);
        device_set: "" | "hipSetDevice" (c_int);
        pointer_set: "cuPointerSetAttribute" | "hipPointerSetAttribute" (*const c_void, c_int, DevicePtr);
        stream_write: "cuStreamWriteValue64_v2" | "hipStreamWriteValue64" (Opaque, DevicePtr, u64, u32);
        stream_wait: "cuStreamWaitValue64_v2" | "" (Opaque, DevicePtr, u64, u32);
        module_load: "cuModuleLoadDataEx" | ""
            (*mut Opaque, *const c_void, u32, *mut c_int, *mut *mut c_void);
        module_function: "cuModuleGetFunction" | "" (*mut Opaque, Opaque, *const c_char);
        module_unload: "cuModuleUnload" | "" (Opaque);
        launch: "cuLaunchKernel" | ""
            (Opaque, u32, u32, u32, u32, u32, u32, u32, Opaque, *mut *mut c_void, *mut *mut c_void);
        range_handle: "cuMemGetHandleForAddressRange" | "hipMemGetHandleForAddressRange"
            (*mut c_void, DevicePtr, usize, c_int, u64);
        ipc_get: "cuIpcGetMemHandle" | "hipIpcGetMemHandle" (*mut IpcHandle, DevicePtr);
        flush_writes: "cuFlushGPUDirectRDMAWrites" | "" (c_int, c_int);
        vmm_create: "cuMemCreate" | "hipMemCreate" (*mut u64, usize, *const AllocationProp, u64);
        vmm_release: "cuMemRelease" | "hipMemRelease" (u64);
        vmm_reserve: "cuMemAddressReserve" | "hipMemAddressReserve"
            (*mut DevicePtr, usize, usize, DevicePtr, u64);
        vmm_free: "cuMemAddressFree" | "hipMemAddressFree" (DevicePtr, usize);
        vmm_map: "cuMemMap" | "hipMemMap" (DevicePtr, usize, usize, u64, u64);
        vmm_unmap: "cuMemUnmap" | "hipMemUnmap" (DevicePtr, usize);
        vmm_access: "cuMemSetAccess" | "hipMemSetAccess" (DevicePtr, usize, *const AccessDesc, usize);
        vmm_granularity: "cuMemGetAllocationGranularity" | "hipMemGetAllocationGranularity"
            (*mut usize, *const AllocationProp, c_int);
        vmm_export: "cuMemExportToShareableHandle" | "hipMemExportToShareableHandle"
            (*mut c_void, u64, u32, u64);
        ipc_open: "cuIpcOpenMemHandle_v2" | "" (*mut DevicePtr, IpcHandle, u32);
        ipc_close: "cuIpcCloseMemHandle" | "" (DevicePtr);
        vmm_import: "cuMemImportFromShareableHandle" | "" (*mut u64, *mut c_void, u32);
        vmm_retain: "cuMemRetainAllocationHandle" | "" (*mut u64, *mut c_void);
        can_access_peer: "cuDeviceCanAccessPeer" | "" (*mut c_int, c_int, c_int);
        copy_any: "cuMemcpyAsync" | "" (DevicePtr, DevicePtr, usize, Opaque);
        hip_batch: "" | "hipMemcpyBatchAsync"
            (
                *mut DevicePtr, *mut DevicePtr, *mut usize, usize, *mut CopyAttributes, *mut usize, usize,
                *mut usize, Opaque
            );
    }
}

impl Driver {
    /// Loads the library, starts the driver and returns it with the number of its devices. `library`: the
    /// only place to look.
    pub(crate) fn load(api: Api, library: Option<&Path>) -> Result<(Self, i32), NoGpu> {
        let handle =
            open_once(&places(api, library)).map_err(|why| NoGpu::NoLibrary { vendor: api.vendor(), why })?;
        // SAFETY: `handle` came from `dlopen` and is never closed.
        let mut driver = unsafe { Self::fill(handle, api) }?;
        let devices = driver.start()?;
        Ok((driver, devices))
    }

    /// Whether this process has mapped the library and, as far as the library tells it, started the driver.
    /// Elsewhere there is no device memory. It starts nothing.
    pub(crate) fn find_started(api: Api, library: Option<&Path>) -> bool {
        let Ok(handle) = open(&places(api, library), MAPPED) else { return false };
        if api == Api::Hip {
            return true;
        }
        // SAFETY: `handle` came from `dlopen`.
        let symbol = unsafe { find(handle, "cuDeviceGetCount\0") };
        // SAFETY: a function of this name has this signature; null becomes `None`.
        let count = unsafe {
            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut c_int) -> c_int>>(symbol)
        };
        let mut devices = 0;
        // SAFETY: writes one number. It may be called before the driver was started, and says so.
        count.is_none_or(|count| unsafe { count(&raw mut devices) } != NOT_INITIALIZED)
    }

    fn start(&mut self) -> Result<i32, NoGpu> {
        let vendor = self.api.vendor();
        // SAFETY: writes one number. It may be called before `init`.
        let code = unsafe { (self.driver_version)(&raw mut self.version) };
        self.started("cuDriverGetVersion", code)?;
        if self.version < self.api.version_min() {
            return Err(NoGpu::OldDriver { vendor, version: self.version });
        }
        // SAFETY: no memory is involved; the flags have to be 0.
        let code = unsafe { (self.init)(0) };
        self.started("cuInit", code)?;
        let mut count = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.device_count)(&raw mut count) };
        self.started("cuDeviceGetCount", code)?;
        if count < 1 {
            return Err(self.no_device());
        }
        self.find_batch();
        Ok(count)
    }

    fn started(&self, call: &'static str, code: c_int) -> Result<(), NoGpu> {
        match code {
            SUCCESS => Ok(()),
            NO_DEVICE => Err(self.no_device()),
            _ => {
                let name = self.name_of(code);
                Err(NoGpu::Refused { vendor: self.api.vendor(), call, code, name })
            }
        }
    }

    fn no_device(&self) -> NoGpu {
        let visible = std::env::var_os(self.api.visible_variable());
        let visible = visible.map(|value| value.to_string_lossy().chars().take(256).collect());
        NoGpu::NoDevice { vendor: self.api.vendor(), visible }
    }

    /// The batch's signature changed. The driver's version says which one it has, and the driver is asked for
    /// that version by number.
    fn find_batch(&mut self) {
        self.batch_12 = self.hip_batch;
        let Some(get) = self.get_proc_address else { return };
        for version in [13_000, 12_080] {
            if self.version < version {
                continue;
            }
            let mut symbol = std::ptr::null_mut();
            let mut status = 0;
            let name = c"cuMemcpyBatchAsync";
            // SAFETY: a C string, and two places to write to.
            let code = unsafe { get(name.as_ptr(), &raw mut symbol, version, 0, &raw mut status) };
            if code != SUCCESS || symbol.is_null() {
                continue;
            }
            // SAFETY: the driver's function of that version, whose signature is written above.
            unsafe {
                match version {
                    13_000 => self.batch_13 = Some(std::mem::transmute::<*mut c_void, Batch13>(symbol)),
                    _ => self.batch_12 = Some(std::mem::transmute::<*mut c_void, Batch12>(symbol)),
                }
            }
            return;
        }
    }

    /// The driver's name for an error.
    pub(crate) fn name_of(&self, code: c_int) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: one place to write to.
        let named = self.error_name.is_some_and(|get| unsafe { get(code, &raw mut name) } == SUCCESS);
        if !named || name.is_null() {
            return "no name".to_owned();
        }
        // SAFETY: the driver returns a C string that is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// Where the library is looked for.
fn places(api: Api, library: Option<&Path>) -> Vec<PathBuf> {
    if let Some(library) = library {
        return vec![library.to_owned()];
    }
    let names: &[&str] = match api {
        Api::Cuda => &[
            "libcuda.so.1",
            // Some hosts mount the driver there for containers.
            "/usr/local/nvidia/lib64/libcuda.so.1",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
            "/usr/lib64/libcuda.so.1",
        ],
        Api::Hip => {
            &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"]
        }
    };
    names.iter().map(PathBuf::from).collect()
}

/// Finds a library only if the process has mapped it.
const MAPPED: c_int = libc::RTLD_NOW | libc::RTLD_NOLOAD;

/// The library that the process has mapped already, whichever of the places it is, before any other: two
/// copies of a driver's library in one process do not know each other's memory.
fn open_once(places: &[PathBuf]) -> Result<*mut c_void, String> {
    open(places, MAPPED).or_else(|_| open(places, libc::RTLD_NOW | libc::RTLD_LOCAL))
}

fn open(places: &[PathBuf], flags: c_int) -> Result<*mut c_void, String> {
    let mut why = String::new();
    for place in places {
        let Ok(name) = CString::new(place.as_os_str().as_bytes()) else {
            return Err("its path has a zero byte".to_owned());
        };
        // SAFETY: a C string; the library's constructors may run at any time.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if !handle.is_null() {
            return Ok(handle);
        }
        // The first message is the linker's search, a later one says more where there is a file.
        if why.is_empty() || place.is_file() {
            // SAFETY: no argument; the text is copied before this thread calls the linker again.
            let text = unsafe { libc::dlerror() };
            why = match text.is_null() {
                true => format!("{}: not loaded", place.display()),
                // SAFETY: `dlerror` returns a C string that is valid until the next call.
                false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            };
        }
    }
    Err(why)
}

/// The address of a function; null: there is none.
///
/// # Safety
/// `handle` came from `dlopen`; `name` ends with a NUL.
unsafe fn find(handle: *mut c_void, name: &'static str) -> *mut c_void {
    debug_assert!(name.ends_with('\0'), "a C string");
    if name == "\0" {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    unsafe { libc::dlsym(handle, name.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_driver_is_too_old() {
        // The C library has none of the functions.
        for (api, function) in [(Api::Cuda, "cuInit"), (Api::Hip, "hipInit")] {
            let loaded = Driver::load(api, Some(Path::new("libc.so.6"))).map(|_| ());
            assert_eq!(loaded, Err(NoGpu::OldLibrary { vendor: api.vendor(), function }));
        }
    }

    #[test]
    fn a_library_that_is_mapped_goes_before_one_that_is_not() {
        // A library of every host with the C library, which nothing maps, and the C library.
        let places = ["libanl.so.1", "libc.so.6"].map(PathBuf::from);
        let mapped = open(&places[1..], MAPPED);
        assert!(mapped.is_ok());
        assert_eq!(open_once(&places), mapped);
        assert_eq!(open(&places, MAPPED), mapped, "the other library is not mapped");
    }

    #[test]
    fn a_library_is_looked_for_where_hosts_have_it() {
        assert_eq!(places(Api::Cuda, None)[0], Path::new("libcuda.so.1"));
        assert!(places(Api::Cuda, None).iter().any(|place| place.starts_with("/usr/local/nvidia")));
        assert_eq!(places(Api::Hip, Some(Path::new("/x"))), [Path::new("/x")]);
    }

    #[test]
    fn every_reason_names_the_remedy() {
        let vendor = GpuVendor::Nvidia;
        let amd = GpuVendor::Amd;
        let name = "CUDA_ERROR_X".to_owned();
        for (reason, hint) in [
            (NoGpu::NoLibrary { vendor, why: "gone".to_owned() }, "(gone): install the GPU's driver"),
            (NoGpu::OldLibrary { vendor, function: "cuX" }, "update the driver to release 525"),
            (NoGpu::OldDriver { vendor: amd, version: 5 }, "version 5: update the driver to ROCm 6.0"),
            (NoGpu::Refused { vendor, call: "cuInit", code: 3, name }, "3 (CUDA_ERROR_X): check that"),
            (NoGpu::NoDevice { vendor, visible: None }, "load its kernel module"),
            (
                NoGpu::NoDevice { vendor: amd, visible: Some(String::new()) },
                "HIP_VISIBLE_DEVICES is \"\", unset",
            ),
        ] {
            let text = reason.to_string();
            assert!(text.starts_with("no ") && text.contains(hint), "{text}");
        }
    }
}
