//! What works with a device, found out by trying.

use std::fmt;

use te_core::device::Devices;
use te_core::{Error, ErrorKind, Location};

use crate::Gpu;

/// What works with a device: each was tried, because what a driver says about a device is not always so.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// Copies between page-locked memory and the device.
    pub stager: Result<(), Error>,
    /// The device stores completion words, so that polls need no call of the driver.
    pub words: bool,
    /// The batch call.
    pub batch: bool,
    /// The copy kernel was compiled, and copied what it should.
    pub kernel: bool,
    /// Memory that other processes of the host map by a file descriptor.
    pub posix_fd: Result<(), Error>,
    /// Memory that processes of the NVLink domain map. Error 800: this process has no IMEX channel (check
    /// `/dev/nvidia-caps-imex-channels`).
    pub fabric: Result<(), Error>,
    /// Device memory as a dma-buf, which NICs register.
    pub dmabuf: Result<(), Error>,
    /// NICs register device memory by its address.
    pub is_peer_direct: bool,
}

/// One line for each.
impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tried = |result: &Result<(), Error>| match result {
            Ok(()) => "yes".to_owned(),
            Err(error) => format!("no: {error}"),
        };
        let is = |value| if value { "yes" } else { "no" };
        writeln!(f, "copies through page-locked memory: {}", tried(&self.stager))?;
        writeln!(f, "completion words: {}", is(self.words))?;
        writeln!(f, "batch call: {}", is(self.batch))?;
        writeln!(f, "copy kernel: {}", is(self.kernel))?;
        writeln!(f, "shared by file descriptor: {}", tried(&self.posix_fd))?;
        writeln!(f, "shared by fabric handle: {}", tried(&self.fabric))?;
        writeln!(f, "dma-buf: {}", tried(&self.dmabuf))?;
        write!(f, "registered by address: {}", is(self.is_peer_direct))
    }
}

impl Gpu {
    /// Tries everything with a device. It takes some milliseconds, and some MiB of the device's memory.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device.
    pub fn probe(&self, location: Location) -> Result<Probe, Error> {
        let device = self.device(location)?;
        let stager = self.open_stager(location);
        let marks = stager.as_ref().map(|stager| (stager.stores_words(), stager.plan().offer()));
        let (words, offer) = marks.unwrap_or_default();
        let buffer = self.allocate(location, 4_096);
        let missing =
            |buffer: &crate::DeviceBuffer| buffer.refused().unwrap_or(ErrorKind::Unsupported.into());
        let of =
            |buffer: &Result<crate::DeviceBuffer, Error>, has: fn(crate::HandleTypes) -> bool| match buffer {
                Ok(buffer) if has(buffer.handle_types()) => Ok(()),
                Ok(buffer) => Err(missing(buffer)),
                Err(error) => Err(*error),
            };
        let fabric = of(&buffer, |types| types.fabric);
        let posix_fd = of(&buffer, |types| types.posix_fd);
        let dmabuf = match &buffer {
            Ok(buffer) => self.dmabuf(buffer.span()).map(|_| ()),
            Err(error) => Err(*error),
        };
        let is_peer_direct = self.is_peer_direct(device.info.location);
        let stager = stager.map(|_| ());
        let (batch, kernel) = (offer.batch, offer.kernel);
        Ok(Probe { stager, words, batch, kernel, posix_fd, fabric, dmabuf, is_peer_direct })
    }
}
