//! The descriptor of a peer's engine: regions that are accepted do not overlap, are in order, and are written
//! as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_engine::Descriptor;

fuzz_target!(|bytes: &[u8]| {
    let Ok(descriptor) = Descriptor::parse(bytes) else { return };
    for pair in descriptor.regions.windows(2) {
        assert!(pair[0].addr.checked_add(pair[0].len).is_some_and(|end| end <= pair[1].addr));
    }
    assert_eq!(Descriptor::parse(&descriptor.to_bytes()), Ok(descriptor));
});
