//! A library that stands in for the CUDA driver in tests. See `model.rs`.
#![allow(unsafe_code, reason = "plays a C library")]

/// Exports functions under their names in CUDA, and counts their calls.
macro_rules! exports {
    ($($cuda:literal | $hip:literal fn $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        /// A function of the driver.
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(export_name = $cuda)]
        #[allow(clippy::too_many_arguments, reason = "as in the header")]
        pub(crate) unsafe extern "C" fn $name($($arg: $kind),*) -> std::ffi::c_int {
            if let Err(code) = crate::faults::enter($cuda) {
                return code;
            }
            let run = move || -> Result<(), std::ffi::c_int> { $body };
            crate::faults::leave($cuda, run())
        }
    )*};
}

mod calls;
mod control;
mod cuda_only;
mod faults;
mod ipc;
mod memory;
mod model;
mod stream;
mod virtual_memory;

use cuda_only as vendor;

/// Which of the two drivers this is.
pub(crate) const IS_CUDA: bool = true;
