//! The descriptor of a Mooncake peer: one that is accepted is written as the same, its ranges are in order,
//! do not overlap and cover each buffer, and an export of a range comes back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_core::Access;
use te_mooncake::SegmentDescriptor;
use te_mooncake::export::Export;

fuzz_target!(|bytes: &[u8]| {
    assert!(Export::parse(bytes).is_err(), "only this process makes exports");
    let Ok(descriptor) = SegmentDescriptor::parse(bytes) else { return };
    assert_eq!(SegmentDescriptor::parse(&descriptor.to_json()).as_ref(), Ok(&descriptor));
    assert!(descriptor.life() != 0);
    let ranges = descriptor.ranges();
    for pair in ranges.windows(2) {
        assert!(pair[0].addr.checked_add(pair[0].len).is_some_and(|end| end <= pair[1].addr));
    }
    for buffer in &descriptor.buffers {
        assert!(ranges.iter().any(|range| range.contains(buffer.addr, buffer.len)));
    }
    for range in &ranges {
        let export = Export {
            access: Access::REMOTE_READ,
            addresses: vec![core::net::IpAddr::from([127, 0, 0, 1])],
            port: descriptor.data_port,
            version: descriptor.version,
            addr: range.addr,
            len: range.len,
            life: descriptor.life(),
            segment: descriptor.name.chars().take(64).collect(),
        };
        let bytes = export.to_bytes().expect("a range of a descriptor can be exported");
        assert_eq!(Export::parse(&bytes), Ok(export));
    }
});
