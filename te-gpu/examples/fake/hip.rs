//! A library that stands in for the HIP library in tests. See `model.rs`.
#![allow(unsafe_code, reason = "plays a C library")]
#![allow(dead_code, reason = "the model has what CUDA alone has, too")]

/// Exports functions under their names in HIP, and counts their calls.
macro_rules! exports {
    ($($cuda:literal | $hip:literal fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        /// A function of the driver.
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(export_name = $hip)]
        #[allow(clippy::too_many_arguments, reason = "as in the header")]
        pub(crate) unsafe extern "C" fn $name($($arg: $kind),*) -> std::ffi::c_int {
            if let Err(code) = crate::faults::enter($hip) {
                return code;
            }
            let run = move || -> Result<(), std::ffi::c_int> { $body };
            crate::faults::leave($hip, run())
        }
    )*};
}

mod calls;
mod control;
mod faults;
mod hip_only;
mod ipc;
mod memory;
mod model;
mod stream;
mod virtual_memory;

use hip_only as vendor;

/// Which of the two drivers this is.
pub(crate) const IS_CUDA: bool = false;
