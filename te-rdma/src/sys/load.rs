//! libibverbs, found at run time: a table of its functions, or one reason why RDMA is not available.
//!
//! Nothing is linked: a program starts on a host without the library, without kernel support or without a
//! device, and the log says once what is missing. The library is never closed: drivers start threads and keep
//! pointers into it.
//!
//! `fork`: from Linux 5.12 on the kernel itself copies pinned pages for a child. On older kernels
//! `ibv_fork_init(3)` would have to be called before anything else; it marks every registration
//! `MADV_DONTFORK`, fails on parts of huge pages, and removes the memory from children. It is left to the
//! user: libibverbs calls it when the environment has `IBV_FORK_SAFE=1`, and [`Library::survives_fork`]
//! reports the result.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use super::abi::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid_entry,
    ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

/// Why RDMA is not available on this host. It is no failure of the program: other fabrics work.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRdma {
    /// The library cannot be loaded; holds the dynamic linker's message.
    NoLibrary(String),
    /// The library lacks this function, which is required.
    OldLibrary(&'static str),
    /// The kernel has no user verbs.
    NoKernelSupport,
    /// Listing the devices failed with this errno.
    Unlistable(i32),
    /// There is no device.
    NoDevice,
}

impl fmt::Display for NoRdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no RDMA here, because ")?;
        match self {
            Self::NoLibrary(why) => write!(
                f,
                "libibverbs.so.1 cannot be loaded ({why}): install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or \
                 libibverbs (Fedora, RHEL), or the vendor's package"
            ),
            Self::OldLibrary(name) => {
                write!(f, "libibverbs.so.1 has no `{name}`: update rdma-core to a release of the last ten years")
            }
            Self::NoKernelSupport => {
                f.write_str("the kernel has no user verbs: `modprobe ib_uverbs` and the device's driver")
            }
            Self::Unlistable(errno) => write!(
                f,
                "its devices cannot be listed ({}): check /sys/class/infiniband_verbs",
                std::io::Error::from_raw_os_error(*errno)
            ),
            Self::NoDevice => f.write_str(
                "there is no device (`rdma link` lists them): load the NIC's driver, pass the device into the container, or \
                 make a software device with `rdma link add rxe0 type rxe netdev eth0`",
            ),
        }
    }
}

impl std::error::Error for NoRdma {}

macro_rules! library {
    (
        required { $($name:ident @ $version:literal : fn($($arg:ty),*) $(-> $out:ty)?;)* }
        optional { $($opt:ident as $opt_symbol:literal @ $opt_version:literal : fn($($opt_arg:ty),*) $(-> $opt_out:ty)?;)* }
    ) => {
        /// The functions of libibverbs that this fabric calls, under their own names.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $out)?,)*
            $(pub(super) $opt: Option<unsafe extern "C" fn($($opt_arg),*) $(-> $opt_out)?>,)*
        }

        impl Library {
            /// # Safety
            /// `handle` came from `dlopen` of libibverbs.
            unsafe fn fill(handle: *mut c_void) -> Result<Self, NoRdma> {
                Ok(Self {
                    $($name: {
                        let name = stringify!($name);
                        // SAFETY: `handle` is good (the caller's promise).
                        let symbol = unsafe { find(handle, concat!(stringify!($name), "\0"), concat!($version, "\0")) };
                        if symbol.is_null() {
                            return Err(NoRdma::OldLibrary(name));
                        }
                        // SAFETY: a function of this name and version has the signature of verbs.h, which is
                        // written above.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $out)?>(symbol)
                        }
                    },)*
                    $($opt: {
                        // SAFETY: as above.
                        let symbol = unsafe { find(handle, concat!($opt_symbol, "\0"), concat!($opt_version, "\0")) };
                        // SAFETY: as above; null becomes `None`.
                        unsafe {
                            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($opt_arg),*) $(-> $opt_out)?>>(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

library! {
    required {
        ibv_get_device_list @ "IBVERBS_1.1": fn(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list @ "IBVERBS_1.1": fn(*mut *mut ibv_device);
        ibv_get_device_name @ "IBVERBS_1.1": fn(*mut ibv_device) -> *const c_char;
        ibv_open_device @ "IBVERBS_1.1": fn(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device @ "IBVERBS_1.1": fn(*mut ibv_context) -> c_int;
        ibv_query_device @ "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port @ "IBVERBS_1.1": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        ibv_query_gid @ "IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut [u8; 16]) -> c_int;
        ibv_get_async_event @ "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event @ "IBVERBS_1.1": fn(*mut ibv_async_event);
        ibv_alloc_pd @ "IBVERBS_1.1": fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd @ "IBVERBS_1.1": fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr @ "IBVERBS_1.1": fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel @ "IBVERBS_1.0": fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel @ "IBVERBS_1.0": fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq @ "IBVERBS_1.1":
            fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq @ "IBVERBS_1.1": fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event @ "IBVERBS_1.1": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events @ "IBVERBS_1.1": fn(*mut ibv_cq, u32);
        ibv_create_qp @ "IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp @ "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_destroy_qp @ "IBVERBS_1.1": fn(*mut ibv_qp) -> c_int;
    }
    optional {
        reg_mr_iova2 as "ibv_reg_mr_iova2" @ "IBVERBS_1.8":
            fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        reg_dmabuf_mr as "ibv_reg_dmabuf_mr" @ "IBVERBS_1.12":
            fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        query_gid_ex as "_ibv_query_gid_ex" @ "IBVERBS_1.11":
            fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        is_fork_initialized as "ibv_is_fork_initialized" @ "IBVERBS_1.13": fn() -> c_int;
    }
}

impl Library {
    /// The library of this process. It is loaded by the first call, which logs the reason if it fails.
    pub(super) fn get() -> Result<&'static Self, NoRdma> {
        static LIBRARY: OnceLock<Result<Library, NoRdma>> = OnceLock::new();
        LIBRARY
            .get_or_init(|| {
                let loaded = Self::load(c"libibverbs.so.1");
                if let Err(reason) = &loaded {
                    log::info!("{reason}");
                }
                loaded
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    fn load(name: &CStr) -> Result<Self, NoRdma> {
        // SAFETY: `name` is a C string; the constructors of rdma-core's library may run at any time.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: no argument; the text is copied before this thread calls the linker again.
            let why = unsafe { libc::dlerror() };
            let why = if why.is_null() {
                "no reason given".to_owned()
            } else {
                // SAFETY: `dlerror` returns a C string that is valid until that call.
                unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned()
            };
            return Err(NoRdma::NoLibrary(why));
        }
        // SAFETY: `handle` came from `dlopen`, and is never closed.
        unsafe { Self::fill(handle) }
    }

    /// Whether registered memory survives a `fork` of this process; `None`: the library is too old to report
    /// it.
    pub(super) fn survives_fork(&self) -> Option<bool> {
        const IBV_FORK_DISABLED: c_int = 0;
        // SAFETY: no argument; it only reads what the library found out when it was loaded.
        self.is_fork_initialized.map(|query| unsafe { query() } != IBV_FORK_DISABLED)
    }
}

/// The address of a function; null: there is none. glibc knows symbol versions. Where the library or the C
/// library has none, the name alone decides.
///
/// # Safety
/// `handle` came from `dlopen`; `name` and `version` end with a NUL.
unsafe fn find(handle: *mut c_void, name: &'static str, version: &'static str) -> *mut c_void {
    debug_assert!(name.ends_with('\0') && version.ends_with('\0'), "C strings");
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: the caller's promise.
        let symbol = unsafe { libc::dlvsym(handle, name.as_ptr().cast(), version.as_ptr().cast()) };
        if !symbol.is_null() {
            return symbol;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { libc::dlsym(handle, name.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_a_reason_and_no_panic() {
        let Err(reason) = Library::load(c"libibverbs-that-is-not-there.so.1") else {
            panic!("it is not there")
        };
        assert!(matches!(reason, NoRdma::NoLibrary(_)));
        let text = reason.to_string();
        assert!(text.starts_with("no RDMA here, because libibverbs.so.1 cannot be loaded"), "{text}");
        assert!(text.contains("not-there") && text.contains("install libibverbs1"), "{text}");
    }

    #[test]
    fn a_library_without_verbs_is_too_old() {
        // The C library has none of the functions.
        let Err(reason) = Library::load(c"libc.so.6") else { panic!("it has no verbs") };
        assert_eq!(reason, NoRdma::OldLibrary("ibv_get_device_list"));
        assert!(reason.to_string().contains("update rdma-core"));
    }

    #[test]
    fn every_reason_names_the_remedy() {
        let reasons = [
            (NoRdma::NoKernelSupport, "modprobe ib_uverbs"),
            (NoRdma::Unlistable(libc::EACCES), "check /sys/class/infiniband_verbs"),
            (NoRdma::NoDevice, "rdma link"),
        ];
        for (reason, hint) in reasons {
            let text = reason.to_string();
            assert!(text.starts_with("no RDMA here, because ") && text.contains(hint), "{text}");
        }
    }
}
