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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use store_master::{Config, MasterHandle, MasterServer};
    use te_core::testkit::{FakeDevices, FakeStaging, PeekPoke as _, pattern};
    use te_core::{GpuVendor, Location, MemSpan, Op};
    use te_engine::Fabrics;

    use crate::engine::PanicAt;
    use crate::{BufferRange, Client, ClientConfig, Get, Node, NodeConfig, PutOptions, Store as _};

    const LEN: usize = 300_000;

    fn store(fabrics: Fabrics) -> (MasterHandle, [Node; 2], Client) {
        let config =
            Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
        let master = MasterServer::bind(config).unwrap().spawn().unwrap();
        let address = master.rpc_addr();
        let nodes = ["a", "b"].map(|name| {
            Node::start(NodeConfig::new(name, address.into(), 16 << 20).fabrics(fabrics)).unwrap()
        });
        let client = Client::connect(ClientConfig::new(address.into()).fabrics(fabrics)).unwrap();
        (master, nodes, client)
    }

    /// Devices whose hops end late and out of order, with few slots.
    fn devices() -> (FakeDevices, MemSpan) {
        let staging = FakeStaging { slots: 4, slot_bytes: 128 << 10, hops_max: 3, polls_max: 9 };
        let devices = FakeDevices::new(7, Location::Device(GpuVendor::Nvidia, 0), staging);
        let span = devices.allocate(4 << 20);
        (devices, span)
    }

    #[allow(unsafe_code, reason = "reads memory of the fake")]
    fn bytes(devices: &FakeDevices, span: MemSpan, offset: usize, len: usize) -> Vec<u8> {
        let mut found = vec![0; len];
        // SAFETY: memory of the fake, which nothing uses now.
        unsafe { devices.peek(span.part(offset as u64, len as u64).unwrap(), &mut found) };
        found
    }

    #[allow(unsafe_code, reason = "writes memory of the fake")]
    fn fill(devices: &FakeDevices, span: MemSpan, offset: usize, bytes: &[u8]) {
        // SAFETY: memory of the fake, which nothing uses now.
        unsafe { devices.poke(span.part(offset as u64, bytes.len() as u64).unwrap(), bytes) };
    }

    #[test]
    fn a_read_that_a_fabric_may_still_carry_out_writes_into_a_slot_alone() {
        let two = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
        let (_master, _nodes, mut client) = store(Fabrics::TCP);
        let (devices, span) = devices();
        let region = client.register_on(Arc::new(devices.clone()), span).unwrap();
        let value = pattern(1, LEN);
        fill(&devices, span, 1, &value);
        assert!(client.put(b"k", BufferRange { region, offset: 1, len: LEN as u64 }, &two).unwrap());
        let into = BufferRange { region, offset: 2 << 20, len: LEN as u64 };
        for round in 1..=20 {
            fill(&devices, span, 2 << 20, &vec![0; LEN]);
            client.engine_mut().stick_next(Op::Read);
            // Another replica is read into the same memory.
            assert_eq!(client.get_with(Get::new(b"k", into)).unwrap(), Some(LEN as u64));
            assert!(bytes(&devices, span, 2 << 20, LEN) == value);
            assert!(client.counters().quarantined_pieces >= round, "the slot is held");
            client.engine_mut().unstick();
        }
        client.unregister(region).unwrap();
    }

    #[test]
    fn an_operation_that_panics_costs_the_client_no_slot() {
        for fabrics in [Fabrics::TCP, Fabrics::SHM] {
            let (_master, _nodes, mut client) = store(fabrics);
            let (devices, span) = devices();
            let region = client.register_on(Arc::new(devices.clone()), span).unwrap();
            let value = pattern(2, LEN);
            fill(&devices, span, 0, &value);
            let source = BufferRange { region, offset: 0, len: LEN as u64 };
            let into = BufferRange { offset: 2 << 20, ..source };
            let options = PutOptions::default();
            assert!(client.put(b"there", source, &options).unwrap());
            for round in 0..40 {
                let at = if round % 2 == 0 { PanicAt::Submit } else { PanicAt::Poll };
                client.engine_mut().panic_next(at);
                let key = format!("k{round}");
                let panicked = catch_unwind(AssertUnwindSafe(|| match round % 4 {
                    0 | 1 => client.put(key.as_bytes(), source, &options).map(drop),
                    _ => client.get_with(Get::new(b"there", into)).map(drop),
                }));
                assert!(panicked.is_err(), "{fabrics} {round}");
                // What was under way is held for a moment at most.
                let read = (0..1000).find_map(|_| client.get_with(Get::new(b"there", into)).ok());
                assert_eq!(read, Some(Some(LEN as u64)), "{fabrics} {round}");
                assert!(bytes(&devices, span, 2 << 20, LEN) == value, "{fabrics} {round}");
            }
            assert!(client.put(b"after", source, &options).unwrap());
            assert_eq!(client.get(b"after").unwrap(), Some(value));
        }
    }
}
