//! Memory of devices: registered with the client alone, and moved through slots (`crate::mover`).

use std::sync::Arc;

use te_core::device::Devices;
use te_core::{ErrorKind, MemSpan, RegionId};
use te_engine::RegisterError;

use super::Client;
use crate::error::{DeviceError, StoreError};
use crate::item::{Get, Sink};
use crate::memory::{OnDevice, is_device};

impl Client {
    /// Registers memory that is on a device, by what the engine says or by what the caller says.
    pub(super) fn register_device(&mut self, span: MemSpan) -> Result<RegionId, StoreError> {
        let kind = span.location().kind();
        let devices = self.engine.devices().filter(|devices| devices.kinds().contains(kind));
        let unknown = DeviceError::Unknown { location: span.location() };
        self.register_on(devices.ok_or(StoreError::DeviceMemory(unknown))?, span)
    }

    /// Registers memory of these devices.
    fn register_on(&mut self, devices: Arc<dyn Devices>, span: MemSpan) -> Result<RegionId, StoreError> {
        if span.is_empty() {
            return Err(RegisterError::Empty.into());
        }
        let location = span.location();
        let (addr, len) = (span.as_ptr().addr() as u64, span.len() as u64);
        let allocation = devices.allocation(span).map_err(|error| {
            StoreError::DeviceMemory(match error.kind {
                ErrorKind::OutOfRange | ErrorKind::NotFound => DeviceError::OutOfRange { addr, len },
                _ => DeviceError::Failed { location, error },
            })
        })?;
        let stager = self.mover.open_stager(&mut self.engine, &devices, allocation.location)?;
        let span = span.at(allocation.location);
        Ok(self.memory.insert_device(OnDevice { span, allocation, devices, stager }))
    }

    pub(super) fn unregister_device(&mut self, region: RegionId) -> Result<(), StoreError> {
        if self.memory.device(region).is_none() {
            return Err(RegisterError::NotFound.into());
        }
        // Those of an operation that was given up.
        match self.mover.hops_of(region) {
            0 => {
                self.memory.remove(region);
                Ok(())
            }
            hops => Err(RegisterError::Busy { requests: u32::try_from(hops).unwrap_or(u32::MAX) }.into()),
        }
    }

    /// Checks that parts of an object do not go to several devices: a piece of it is in a slot of one.
    pub(super) fn check_one_device(&self, item: &Get<'_>) -> Result<(), StoreError> {
        let regions: &mut dyn Iterator<Item = RegionId> = match &item.sink {
            Sink::Fragments(parts) => &mut parts.iter().map(|part| part.into.region),
            Sink::Regions(ranges) if item.part.is_some() => &mut ranges.iter().map(|range| range.region),
            _ => return Ok(()),
        };
        let mut stagers = regions
            .filter(|region| is_device(*region))
            .filter_map(|region| self.memory.device(region).map(|device| device.stager));
        let Some(first) = stagers.next() else { return Ok(()) };
        match stagers.all(|stager| stager == first) {
            true => Ok(()),
            false => Err(StoreError::DeviceMemory(DeviceError::SeveralDevices)),
        }
    }
}
