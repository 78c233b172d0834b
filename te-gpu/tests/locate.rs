//! Where memory is, whether it is still the same, and how it is exported to NICs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use common::Fake;
use te_core::device::Devices;
use te_core::{ErrorKind, GpuVendor, Location, MemSpan};
use te_gpu::{Config, Gpu};

fn kind<T>(result: Result<T, te_core::Error>) -> Result<T, ErrorKind> {
    result.map_err(|error| error.kind)
}

fn here(fake: &Fake) -> Gpu {
    fake.gpu(fake.config())
}

#[test]
fn devices_are_numbered_in_the_order_of_their_addresses() {
    for fake in [Fake::cuda(), Fake::hip()] {
        fake.set("devices", 2);
        let gpu = here(&fake);
        let devices = gpu.devices().unwrap();
        let of = |nth: usize| (devices[nth].ordinal, devices[nth].location, devices[nth].pci.unwrap().bus);
        // The driver shows the device that is last on the bus first.
        assert_eq!(of(0), (0, Location::Device(fake.vendor(), 1), 0xC0));
        assert_eq!(of(1), (1, Location::Device(fake.vendor(), 0), 0xB0));
        assert_eq!((devices[0].uuid, devices[1].uuid), ([1; 16], [2; 16]));
        for (ordinal, index) in [(0, 1), (1, 0)] {
            let location = Location::Device(fake.vendor(), index);
            let span = fake.allocate_at(ordinal, 100, location);
            assert_eq!(gpu.locate(span.as_ptr(), 100), Some(location));
        }
    }
}

#[test]
fn the_node_of_a_device_is_that_of_its_address() {
    let fake = Fake::cuda();
    let sysfs = tempfile::tempdir().unwrap();
    let device = sysfs.path().join("bus/pci/devices/0000:c0:00.0");
    std::fs::create_dir_all(&device).unwrap();
    std::fs::write(device.join("numa_node"), "3\n").unwrap();
    let gpu = fake.gpu(Config { sysfs: sysfs.path().to_owned(), ..fake.config() });
    assert_eq!(gpu.devices().unwrap()[0].numa_node, Some(3));
    // A stager works where the node does not exist, too.
    assert!(gpu.stager(fake.location()).is_ok());
    let nowhere = here(&fake);
    assert_eq!(nowhere.devices().unwrap()[0].numa_node, Some(0), "the driver's own attribute");
}

#[test]
fn memory_is_located_within_one_allocation() {
    for fake in [Fake::cuda(), Fake::hip()] {
        let gpu = here(&fake);
        let (span, other) = (fake.allocate(10_000), fake.allocate(10_000));
        let (ptr, len) = (span.as_ptr(), span.len());
        assert_eq!(gpu.locate(ptr, len), Some(fake.location()));
        assert_eq!(gpu.locate(ptr.wrapping_add(9_999), 1), Some(fake.location()));
        assert_eq!(gpu.locate(ptr, len + 1), None);
        assert_eq!(gpu.locate(ptr, usize::MAX), None);
        let beyond = MemSpan::new(ptr, len + 1);
        assert_eq!(kind(gpu.examine(beyond).map(|_| ())), Err(ErrorKind::OutOfRange));
        let between = (other.as_ptr().addr()).abs_diff(ptr.addr());
        let both = MemSpan::new(ptr.min(other.as_ptr()), between + 1);
        assert_eq!(gpu.locate(both.as_ptr(), both.len()), None, "two allocations are not one");
        let mut host = [0; 64];
        assert_eq!(gpu.locate(host.as_mut_ptr(), 64), None);
        let block = gpu.examine(span.part(5_000, 10).unwrap()).unwrap();
        assert_eq!((block.location, block.base, block.bytes), (fake.location(), ptr.addr(), 10_000));
        assert!(block.is_legacy_ipc && !block.is_fabric);
    }
}

#[test]
fn an_allocation_of_more_than_4_gib_has_its_length() {
    for fake in [Fake::cuda(), Fake::hip()] {
        let gpu = here(&fake);
        let bytes = (5 << 30) + 100;
        let span = fake.allocate(bytes);
        assert_eq!(gpu.locate(span.as_ptr(), bytes), Some(fake.location()));
        assert_eq!(gpu.locate(span.as_ptr(), bytes + 1), None);
        assert_eq!(gpu.examine(span).unwrap().bytes, bytes);
    }
}

#[test]
fn a_driver_that_knows_fewer_attributes_locates_memory_as_well() {
    let fake = Fake::cuda();
    fake.set("few_attributes", 1);
    let gpu = here(&fake);
    let span = fake.allocate(10_000);
    assert_eq!(gpu.locate(span.as_ptr(), span.len()), Some(fake.location()));
    assert_eq!(gpu.locate(span.as_ptr(), span.len() + 1), None);
    let block = gpu.examine(span).unwrap();
    assert_eq!((block.base, block.bytes), (span.as_ptr().addr(), 10_000));
}

#[test]
fn managed_memory_counts_as_host_memory() {
    let fake = Fake::cuda();
    let gpu = here(&fake);
    let managed = fake.allocate_raw(0, 4_096, true);
    let span = MemSpan::new(std::ptr::without_provenance_mut(managed), 4_096);
    assert_eq!(gpu.locate(span.as_ptr(), 4_096), None);
    assert_eq!(kind(gpu.dmabuf(span).map(|_| ())), Err(ErrorKind::NotFound));
}

#[test]
fn memory_that_was_freed_and_allocated_again_is_stale() {
    for fake in [Fake::cuda(), Fake::hip()] {
        let gpu = here(&fake);
        let span = fake.allocate(64 << 10);
        let block = gpu.examine(span).unwrap();
        assert_eq!(gpu.recheck(&block), Ok(()));
        fake.free(span);
        assert_eq!(kind(gpu.recheck(&block)), Err(ErrorKind::NotFound));
        let again = fake.allocate(64 << 10);
        assert_eq!(again.as_ptr(), span.as_ptr(), "the fake driver uses addresses again");
        assert_eq!(kind(gpu.recheck(&block)), Err(ErrorKind::Stale));
        assert_eq!(gpu.recheck(&gpu.examine(again).unwrap()), Ok(()));
    }
}

#[test]
fn a_dmabuf_covers_the_span() {
    for fake in [Fake::cuda(), Fake::hip()] {
        let gpu = here(&fake);
        let span = fake.allocate(20_000);
        fake.fill(span, &[7; 20_000]);
        let part = span.part(5_000, 9_000).unwrap();
        fake.fill(part, &[9; 9_000]);
        let (fd, offset) = gpu.dmabuf(part).unwrap();
        let file = std::fs::File::from(fd.as_fd().try_clone_to_owned().unwrap());
        let mut bytes = vec![0; 9_001];
        file.read_exact_at(&mut bytes, offset).unwrap();
        assert!(bytes[..9_000] == [9; 9_000] && bytes[9_000] == 7);
        let mut host = [0; 64];
        let host = MemSpan::new(host.as_mut_ptr(), 64).at(fake.location());
        assert_eq!(kind(gpu.dmabuf(host).map(|_| ())), Err(ErrorKind::NotFound));
        fake.set("dma_bufs", 0);
        assert_eq!(kind(gpu.dmabuf(part).map(|_| ())), Err(ErrorKind::Unsupported));
    }
}

#[test]
fn memory_of_three_mappings_is_three_dmabufs() {
    let fake = Fake::cuda();
    let gpu = here(&fake);
    let chunk = 2 << 20;
    let span = fake.map_chunks(3, chunk);
    assert_eq!(gpu.locate(span.as_ptr(), span.len()), Some(fake.location()));
    assert_eq!(gpu.locate(span.as_ptr(), span.len() + 1), None);
    let whole: Vec<u8> = (0..span.len()).map(|at| (at / 1_000) as u8).collect();
    fake.fill(span, &whole);
    let part = span.part(1_000_000, 4_000_000).unwrap();
    assert_eq!(kind(gpu.dmabuf(part).map(|_| ())), Err(ErrorKind::Unsupported), "one would not cover it");
    let parts = gpu.dmabufs(part).unwrap();
    assert_eq!(parts.len(), 3);
    let mut at = 1_000_000;
    for part in parts {
        assert_eq!(part.span.as_ptr(), span.as_ptr().wrapping_add(at));
        let mut bytes = vec![0; part.span.len()];
        std::fs::File::from(part.fd).read_exact_at(&mut bytes, part.offset).unwrap();
        assert!(bytes == whole[at..at + bytes.len()]);
        at += bytes.len();
    }
    assert_eq!(at, 5_000_000);
    // A hop may cross from one mapping to the next.
    let mut stager = gpu.stager(fake.location()).unwrap();
    let slot = stager.take().unwrap();
    let crossing = span.part(chunk as u64 - 100, 300).unwrap();
    let hop = common::hop(1, slot.index, 0, crossing, te_core::device::HopDirection::ToDevice);
    fake.fill(slot.span, &vec![0xAB; slot.span.len()]);
    common::all_are_ok(&common::run(&mut *stager, &[hop])).unwrap();
    assert!(fake.bytes(crossing) == [0xAB; 300]);
}

#[test]
fn writes_of_peers_are_flushed_where_the_device_needs_it() {
    let fake = Fake::cuda();
    let gpu = here(&fake);
    assert_eq!(gpu.flush_writes(fake.location()), Ok(()));
    assert_eq!(fake.calls("cuFlushGPUDirectRDMAWrites"), 0, "they are ordered for the owner");
    fake.set("ordering", 0);
    assert_eq!(gpu.flush_writes(fake.location()), Ok(()));
    assert_eq!(fake.calls("cuFlushGPUDirectRDMAWrites"), 1);
    let other = Location::Device(GpuVendor::Nvidia, 9);
    assert_eq!(kind(gpu.flush_writes(other)), Err(ErrorKind::Unsupported));
}
