//! Listing the devices of this host, and opening one.

use std::ffi::CStr;
use std::path::Path;
use std::ptr::NonNull;

use super::abi::{IBV_TRANSPORT_IB, ibv_device};
use super::convert::last_errno;
use super::load::{Library, NoRdma};
use super::open_error::OpenError;
use super::provider::SystemVerbs;
use super::{context::Context, sysfs};

const SYS: &str = "/sys";

/// A device of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// The kernel's name: `mlx5_0`, `rxe0`.
    pub name: String,
    /// The ports that sysfs lists.
    pub ports: Vec<PortState>,
    /// NUMA node; `None`: unknown.
    pub numa_node: Option<u16>,
}

/// A port of a device, before the device is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortState {
    /// Its number, from 1.
    pub number: u8,
    /// The kernel's name for its state: `ACTIVE`, `DOWN`, `INIT`, `ARMED`, …
    pub state: String,
    /// InfiniBand (true) or Ethernet.
    pub infiniband: bool,
}

impl From<NoRdma> for OpenError {
    fn from(reason: NoRdma) -> Self {
        Self::NoRdma(reason)
    }
}

impl Device {
    /// The devices of this host that have InfiniBand's verbs, in the kernel's order; at least one.
    ///
    /// # Errors
    /// The reason why there are none, which is no failure of the host: other fabrics work.
    pub fn list() -> Result<Vec<Self>, NoRdma> {
        let found = each_device(Library::get()?, |name, _| {
            let ports = sysfs::ports(Path::new(SYS), name);
            let port = |(number, state, infiniband)| PortState { number, state, infiniband };
            Self {
                name: name.to_owned(),
                ports: ports.into_iter().map(port).collect(),
                numa_node: sysfs::numa_node(Path::new(SYS), name),
            }
        })?;
        if found.is_empty() { Err(NoRdma::NoDevice) } else { Ok(found) }
    }

    /// Opens a port (from 1) of the device with this name, with a protection domain and a completion queue.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(name: &str, port: u8) -> Result<SystemVerbs, OpenError> {
        let library = Library::get()?;
        let failed = |call| move |errno: i32| OpenError::Failed { device: name.to_owned(), call, errno };
        // A device has to be opened before the list that it is in is freed.
        let opened = each_device(library, |found, device| {
            if found != name {
                return None;
            }
            // SAFETY: `device` is in a list that is not freed yet.
            let context = unsafe { (library.ibv_open_device)(device.as_ptr()) };
            Some(NonNull::new(context).ok_or_else(last_errno))
        })?;
        let context = opened
            .into_iter()
            .flatten()
            .next()
            .ok_or_else(|| OpenError::NoSuchDevice(name.to_owned()))?
            .map_err(failed("ibv_open_device"))?;
        // SAFETY: just opened, and nothing else has it.
        let context =
            unsafe { Context::new(library, context) }.map_err(|error| failed("ibv_alloc_pd")(error.code))?;
        SystemVerbs::new(context, name, port, sysfs::numa_node(Path::new(SYS), name))
    }
}

/// Whether registered memory survives a `fork` on this host; `None`: there is no library, or it is too old to
/// report it.
#[must_use]
pub fn survives_fork() -> Option<bool> {
    Library::get().ok()?.survives_fork()
}

/// Calls `visit` for each device that has InfiniBand's verbs, before the list is freed.
fn each_device<T>(
    library: &Library,
    mut visit: impl FnMut(&str, NonNull<ibv_device>) -> T,
) -> Result<Vec<T>, NoRdma> {
    let mut count = 0;
    // SAFETY: `count` lives for the call.
    let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return Err(match last_errno() {
            libc::ENOSYS => NoRdma::NoKernelSupport,
            errno => NoRdma::Unlistable(errno),
        });
    }
    let mut results = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries, and each device exists at least until the list is freed.
        // Names are C strings inside the device.
        let (device, name, transport) = unsafe {
            let Some(device) = NonNull::new(*list.add(index)) else { break };
            let name = CStr::from_ptr((library.ibv_get_device_name)(device.as_ptr()));
            (device, name.to_string_lossy().into_owned(), (*device.as_ptr()).transport_type)
        };
        // The verbs of iWARP and usNIC have other meanings.
        if transport == IBV_TRANSPORT_IB {
            results.push(visit(&name, device));
        }
    }
    // SAFETY: made above, freed once; opened devices stay open.
    unsafe { (library.ibv_free_device_list)(list) };
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_gives_devices_or_one_clear_reason() {
        match Device::list() {
            Ok(devices) => assert!(!devices.is_empty() && devices.iter().all(|d| !d.name.is_empty())),
            Err(reason) => assert!(reason.to_string().starts_with("no RDMA here, because "), "{reason}"),
        }
    }

    #[test]
    fn opening_a_device_that_does_not_exist_is_an_error() {
        let Err(error) = Device::open("no-such-device", 1) else { panic!("it does not exist") };
        assert!(matches!(error, OpenError::NoRdma(_) | OpenError::NoSuchDevice(_)), "{error}");
        assert!(!error.to_string().is_empty());
    }

    #[test]
    fn the_error_of_a_failed_call_names_the_remedy() {
        let failed = |errno| {
            OpenError::Failed { device: "mlx5_0".to_owned(), call: "ibv_open_device", errno }.to_string()
        };
        assert!(failed(libc::EACCES).contains("/dev/infiniband"));
        assert!(failed(libc::ENOMEM).contains("ulimit -l"));
        assert!(failed(libc::EIO).contains("ibv_open_device failed"));
    }
}
