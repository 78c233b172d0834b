//! The table of copy paths that a settings file gives to `te-gpu`: what parses is printed as text that means
//! the same, and the plan by it names only paths that the device has.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_core::device::HopDirection;
use te_gpu::plan::{Offer, PathTable, Plan};

fuzz_target!(|bytes: &[u8]| {
    let Some((&how, bytes)) = bytes.split_first() else { return };
    let Ok(text) = core::str::from_utf8(bytes) else { return };
    let table = match text.parse::<PathTable>() {
        Ok(table) => table,
        Err(error) => {
            assert!(error.to_string().len() < 1_024);
            return;
        }
    };
    assert_eq!(table.to_string().parse(), Ok(table));
    let offer = Offer { batch: how & 1 != 0, kernel: how & 2 != 0 };
    let plan = Plan::new(table, offer);
    for direction in [HopDirection::ToDevice, HopDirection::ToHost] {
        for (count, bytes) in [(0, 0), (1, u64::MAX), (5, 5), (64, 1 << 20), (u32::MAX, u64::MAX)] {
            assert!(offer.has(plan.choose(direction, count, bytes)));
        }
    }
});
