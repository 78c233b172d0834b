//! The export of a peer, as `MultiTransport` parses it: it must be refused as a whole or reach at least one
//! rail.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_core::testkit::NullTransport;
use te_core::{HealthConfig, HealthRoute, Memory, MultiTransport, RemoteRegionId};

fuzz_target!(|blob: &[u8]| {
    let rails = ["tcp", "shm"].map(|name| NullTransport::new(16).named(name));
    let route = HealthRoute::new(&[100, 100], HealthConfig::default());
    let mut multi = MultiTransport::new(rails, route, 16).expect("two rails");
    let remote_region = RemoteRegionId::new(0, 1);
    let attached = |multi: &MultiTransport<NullTransport, HealthRoute>| -> usize {
        multi.rails().iter().map(NullTransport::attached).sum()
    };
    match multi.attach(remote_region, blob) {
        Ok(()) => {
            assert_eq!(multi.reachable(remote_region).count_ones() as usize, attached(&multi));
            assert!(attached(&multi) > 0);
            multi.detach(remote_region).expect("nothing uses it");
        }
        Err(_) => assert_eq!(multi.reachable(remote_region), 0),
    }
    assert_eq!(attached(&multi), 0);
});
