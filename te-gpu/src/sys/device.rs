//! A device: what it is, and its primary context, which calls enter and leave.
//!
//! The context is the *primary* one, which the CUDA runtime (and so PyTorch) uses as well: device memory of
//! one context is not memory of another. It is retained when it is first needed and released with the
//! [`Device`]. A thread's current context is the caller's: each group of calls enters the context and
//! restores what was there.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use te_core::topology::PciAddress;
use te_core::{Error, ErrorKind, Location};

use super::abi::{Api, CAPTURE_RELAXED, Opaque, SUCCESS, is_sticky};
use super::abi::{DEINITIALIZED, NOT_PERMITTED, NOT_SUPPORTED, OUT_OF_MEMORY};
use super::load::{Driver, NoGpu};
use crate::affinity::{numa_node, number};

/// What is known about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The location of its memory, with its number among the vendor's devices in PCI order.
    pub location: Location,
    /// The number that the driver gives it in this process.
    pub ordinal: u16,
    /// Its PCI address, where the driver reports one.
    pub pci: Option<PciAddress>,
    /// The NUMA node that it is next to.
    pub numa_node: Option<u16>,
    /// Its identity, the same in every process and container; zeroes where the driver reports none.
    pub uuid: [u8; 16],
    /// Compute capability of a CUDA device: major and minor.
    pub compute: Option<(u16, u16)>,
}

/// A device and its context, shared by all that use them.
pub(crate) struct Device {
    pub(crate) driver: Arc<Driver>,
    pub(crate) info: DeviceInfo,
    /// The primary context, once it was retained. HIP has none: `Retained(null)`.
    context: OnceLock<Retained>,
    retaining: Mutex<()>,
    /// The context does nothing any more.
    dead: AtomicBool,
    /// The process that it belongs to. A fork inherits the value, and no context.
    process: u32,
    /// Stagers whose memory could not be taken back, because hops did not end.
    pub(crate) quarantined: AtomicU64,
}

struct Retained(Opaque);

// SAFETY: a context is used by any thread; the driver locks it.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Device {
    /// Lists the devices that the driver shows.
    pub(crate) fn list(
        driver: Driver,
        count: c_int,
        sysfs: &std::path::Path,
    ) -> Result<Vec<Arc<Self>>, NoGpu> {
        let vendor = driver.api.vendor();
        let driver = Arc::new(driver);
        let count = u16::try_from(count).unwrap_or(0).min(te_core::topology::GPUS_MAX as u16);
        let mut found = Vec::new();
        for ordinal in 0..count {
            let mut handle = 0;
            // SAFETY: writes one number.
            let code = unsafe { (driver.device_get)(&raw mut handle, ordinal.into()) };
            if code != SUCCESS {
                let name = driver.name_of(code);
                return Err(NoGpu::Refused { vendor, call: "cuDeviceGet", code, name });
            }
            found.push((ordinal, pci_address(&driver, ordinal.into())));
        }
        let numbers = number(sysfs, vendor, &found.iter().map(|(_, pci)| *pci).collect::<Vec<_>>());
        let mut devices = Vec::new();
        for ((ordinal, pci), index) in found.into_iter().zip(numbers) {
            let attribute = |attribute| attribute_of(&driver, attribute, ordinal.into());
            let near = pci.and_then(|pci| numa_node(sysfs, pci));
            let by_driver =
                || attribute(super::abi::DEVICE_HOST_NUMA_ID).and_then(|node| u16::try_from(node).ok());
            let major = attribute(super::abi::DEVICE_COMPUTE_MAJOR);
            let minor = attribute(super::abi::DEVICE_COMPUTE_MINOR);
            let compute = major.zip(minor).map(|(major, minor)| (major as u16, minor as u16));
            let info = DeviceInfo {
                location: Location::Device(vendor, index),
                ordinal,
                pci,
                numa_node: near.or_else(by_driver),
                uuid: uuid(&driver, ordinal.into()),
                compute,
            };
            devices.push(Arc::new(Self {
                driver: Arc::clone(&driver),
                info,
                context: OnceLock::new(),
                retaining: Mutex::new(()),
                dead: AtomicBool::new(false),
                process: std::process::id(),
                quarantined: AtomicU64::new(0),
            }));
        }
        Ok(devices)
    }

    pub(crate) fn ordinal(&self) -> c_int {
        self.info.ordinal.into()
    }

    /// An attribute of a CUDA device; `None`: the driver does not report it.
    pub(crate) fn attribute(&self, attribute: c_int) -> Option<c_int> {
        attribute_of(&self.driver, attribute, self.ordinal())
    }

    /// Whether this device can reach memory of another one.
    pub(crate) fn can_access(&self, other: &Self) -> bool {
        let Some(ask) = self.driver.can_access_peer else { return false };
        let mut can = 0;
        // SAFETY: writes one number.
        self.check(unsafe { ask(&raw mut can, self.ordinal(), other.ordinal()) }).is_ok() && can != 0
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Whether this process is a fork of the one that the device belongs to: nothing may be called, and
    /// page-locked memory is not mapped.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Translates the driver's answer, and remembers an error from which the context does not recover.
    #[inline]
    pub(crate) fn check(&self, code: c_int) -> Result<(), Error> {
        if code == SUCCESS { Ok(()) } else { Err(self.failed(code)) }
    }

    #[cold]
    fn failed(&self, code: c_int) -> Error {
        if is_sticky(code) {
            self.died(code);
        }
        error_of(code)
    }

    /// The context does nothing any more.
    #[cold]
    pub(crate) fn died(&self, code: c_int) {
        if !self.dead.swap(true, Ordering::Relaxed) {
            // Logging may allocate; it happens once per device.
            log::error!(
                "{}: the context failed with {code}; transfers of its memory end with this error until the process restarts",
                self.info.location
            );
        }
    }

    /// Whether something was given back by a call that returned `code`. It is called once: a driver may
    /// report earlier failures of other work in any call, though the call itself worked. What was not given
    /// back is lost for the life of the process.
    pub(crate) fn gave_back(&self, what: &str, code: c_int) -> bool {
        if code != SUCCESS {
            log::error!("{}: {what} may be lost: giving it back failed with {code}", self.info.location);
            let _remembers_death = self.check(code);
        }
        code == SUCCESS
    }

    /// Whether a context is ours, or none.
    pub(crate) fn is_own_context(&self, context: usize) -> bool {
        context == 0 || self.context.get().is_some_and(|retained| retained.0.addr() == context)
    }

    /// Makes the context current for this thread until the value is dropped. Captures of the caller's streams
    /// are not disturbed by calls in between.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, Error> {
        let context = self.context()?;
        let leaves = match self.driver.api {
            Api::Cuda => self.push(context)?,
            Api::Hip => self.select()?,
        };
        let mut capture_mode = CAPTURE_RELAXED;
        let exchanged = self.driver.capture_mode.map(|exchange| {
            // SAFETY: reads and writes one number.
            unsafe { exchange(&raw mut capture_mode) }
        });
        Ok(Entered {
            device: self,
            leaves,
            capture_mode: (exchanged == Some(SUCCESS)).then_some(capture_mode),
        })
    }

    /// CUDA: the context that is current for this thread.
    fn current_context(&self) -> Result<Opaque, Error> {
        let get = self.driver.context_current.ok_or(ErrorKind::Unsupported)?;
        let mut current = ptr::null_mut();
        // SAFETY: writes one address.
        self.check(unsafe { get(&raw mut current) })?;
        Ok(current)
    }

    fn push(&self, context: Opaque) -> Result<Leaves, Error> {
        let push = self.driver.context_push.ok_or(ErrorKind::Unsupported)?;
        if self.current_context()? == context {
            return Ok(Leaves::Nothing);
        }
        // SAFETY: a context that stays retained as long as the device.
        let code = unsafe { push(context) };
        // The error may be one of earlier work.
        if code != SUCCESS && self.current_context() != Ok(context) {
            return Err(self.failed(code));
        }
        Ok(Leaves::Context(context))
    }

    fn select(&self) -> Result<Leaves, Error> {
        let (Some(current), Some(set)) = (self.driver.device_current, self.driver.device_set) else {
            return Err(ErrorKind::Unsupported.into());
        };
        let mut before = 0;
        // SAFETY: writes one number.
        self.check(unsafe { current(&raw mut before) })?;
        // SAFETY: no memory is involved.
        let code = unsafe { set(self.ordinal()) };
        if code != SUCCESS {
            // It may have worked.
            self.leave(Leaves::Device(before));
            return Err(self.failed(code));
        }
        Ok(Leaves::Device(before))
    }

    /// Restores what was current before.
    fn leave(&self, leaves: Leaves) {
        let is_restored = match leaves {
            Leaves::Nothing => true,
            Leaves::Context(context) => {
                let mut popped = ptr::null_mut();
                // SAFETY: pops what `push` pushed.
                let mut pop = || self.driver.context_pop.map(|pop| unsafe { pop(&raw mut popped) });
                // The context was not current before: while it is, it was not popped.
                pop() == Some(SUCCESS)
                    || self.current_context().is_ok_and(|now| now != context)
                    || (self.current_context() == Ok(context) && pop() == Some(SUCCESS))
            }
            Leaves::Device(before) => {
                // SAFETY: no memory is involved.
                let set = || self.driver.device_set.map(|set| unsafe { set(before) });
                // It does no harm to set the same device again.
                set() == Some(SUCCESS) || set() == Some(SUCCESS)
            }
        };
        if !is_restored {
            log::error!("{}: the caller's context could not be restored", self.info.location);
        }
    }

    /// The same, to give something back: what is not given back is lost, so it is tried twice. An attempt
    /// that failed has changed nothing.
    pub(crate) fn enter_to_free(&self) -> Result<Entered<'_>, Error> {
        if self.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        self.enter().or_else(|_| self.enter())
    }

    fn context(&self) -> Result<Opaque, Error> {
        if let Some(retained) = self.context.get() {
            return Ok(retained.0);
        }
        let _one = self.retaining.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(retained) = self.context.get() {
            return Ok(retained.0);
        }
        let mut context = ptr::null_mut();
        if self.driver.api == Api::Cuda {
            let retain = self.driver.context_retain.ok_or(ErrorKind::Unsupported)?;
            // SAFETY: writes one address.
            self.check(unsafe { retain(&raw mut context, self.ordinal()) })?;
        }
        Ok(self.context.get_or_init(|| Retained(context)).0)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let (context, release) = (self.context.get(), self.driver.context_release);
        if let (Some(_), Some(release), false) = (context, release, self.is_forked()) {
            // SAFETY: retained once by `context`; everything that uses it holds an `Arc` of the device.
            self.gave_back("the context", unsafe { release(self.ordinal()) });
        }
    }
}

/// What was current before.
#[derive(Clone, Copy)]
enum Leaves {
    /// The same.
    Nothing,
    /// CUDA: another context, below this one.
    Context(Opaque),
    /// HIP: this device.
    Device(c_int),
}

/// The device's context is current for this thread.
pub(crate) struct Entered<'a> {
    device: &'a Device,
    leaves: Leaves,
    /// How the thread's calls act on captures otherwise, where the driver can tell.
    capture_mode: Option<c_int>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let (Some(mode), Some(exchange)) = (self.capture_mode, self.device.driver.capture_mode) {
            let restore = || {
                let mut mode = mode;
                // SAFETY: reads and writes one number.
                unsafe { exchange(&raw mut mode) }
            };
            // It does no harm to set the same mode again.
            if restore() != SUCCESS && restore() != SUCCESS {
                log::error!("{}: the capture mode could not be restored", self.device.info.location);
            }
        }
        self.device.leave(self.leaves);
    }
}

/// What the driver's number means here.
pub(crate) fn error_of(code: c_int) -> Error {
    let kind = match code {
        OUT_OF_MEMORY => ErrorKind::Full,
        NOT_PERMITTED | NOT_SUPPORTED => ErrorKind::Unsupported,
        DEINITIALIZED => ErrorKind::Rail,
        code if is_sticky(code) => ErrorKind::Rail,
        _ => ErrorKind::System,
    };
    Error::with_code(kind, code)
}

fn attribute_of(driver: &Driver, attribute: c_int, ordinal: c_int) -> Option<c_int> {
    let get = driver.device_attribute?;
    let mut value = 0;
    // SAFETY: writes one number.
    (unsafe { get(&raw mut value, attribute, ordinal) } == SUCCESS).then_some(value)
}

fn pci_address(driver: &Driver, ordinal: c_int) -> Option<PciAddress> {
    let mut text = [0_u8; 32];
    // SAFETY: the driver writes a C string of at most that many bytes.
    let code = unsafe { (driver.device_pci)(text.as_mut_ptr().cast(), text.len() as c_int, ordinal) };
    if code != SUCCESS {
        return None;
    }
    let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    // Drivers write eight or four digits of the domain, and capital letters.
    text.to_ascii_lowercase().trim().parse().ok()
}

fn uuid(driver: &Driver, ordinal: c_int) -> [u8; 16] {
    let mut uuid = [0; 16];
    if let Some(get) = driver.device_uuid {
        // SAFETY: writes 16 bytes.
        if unsafe { get(&raw mut uuid, ordinal) } != SUCCESS {
            return [0; 16];
        }
    }
    uuid
}
