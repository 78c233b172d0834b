//! A peer's export, as `MultiTransport` takes it apart: it must be refused as a whole or reach at least one rail.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, Features, HealthConfig, HealthRoute, Instant,
    MemSpan, Memory, MultiTransport, RegionId, RemoteRegionId, Slice, Token, Transport,
};

/// Takes any export that is not empty and does nothing with it.
struct Rail {
    name: &'static str,
    attached: usize,
}

impl Memory for Rail {
    unsafe fn register(&mut self, _: RegionId, _: MemSpan, _: Access) -> Result<(), Error> {
        Err(Error::new(ErrorKind::Unsupported))
    }
    fn deregister(&mut self, _: RegionId) -> Result<(), Error> {
        Err(Error::new(ErrorKind::NotFound))
    }
    fn export(&self, _: RegionId, _: &mut [u8]) -> Result<usize, Error> {
        Err(Error::new(ErrorKind::NotFound))
    }
    fn attach(&mut self, _: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        if blob.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        self.attached += 1;
        Ok(())
    }
    fn detach(&mut self, _: RemoteRegionId) -> Result<(), Error> {
        self.attached -= 1;
        Ok(())
    }
}

impl Transport for Rail {
    fn name(&self) -> &'static str {
        self.name
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ)
            .with_slice_bytes(1 << 16, 1 << 20)
            .with_inflight_max(16)
            .with_export_bytes_max(64)
    }
    fn submit(&mut self, _: &[Slice]) -> Result<usize, Error> {
        Ok(0)
    }
    fn poll(&mut self, _: Instant, _: &mut [Completion]) -> usize {
        0
    }
    fn poll_at(&self) -> Option<Instant> {
        None
    }
    fn cancel(&mut self, _: Token) -> Result<(), Error> {
        Err(Error::new(ErrorKind::NotFound))
    }
    fn fence(&mut self, _: Token, _: RemoteRegionId) -> Result<(), Error> {
        Err(Error::new(ErrorKind::NotFound))
    }
}

fuzz_target!(|blob: &[u8]| {
    let rails = ["tcp", "shm"].map(|name| Rail { name, attached: 0 });
    let route = HealthRoute::new(&[100, 100], HealthConfig::default());
    let mut multi = MultiTransport::new(rails, route, 16).expect("two rails");
    let segment = RemoteRegionId::new(0, 1);
    let attached = |multi: &MultiTransport<Rail, HealthRoute>| -> usize {
        multi.rails().iter().map(|rail| rail.attached).sum()
    };
    match multi.attach(segment, blob) {
        Ok(()) => {
            assert_eq!(multi.reachable(segment).count_ones() as usize, attached(&multi));
            assert!(attached(&multi) > 0);
            multi.detach(segment).expect("nothing uses it");
        }
        Err(_) => assert_eq!(multi.reachable(segment), 0),
    }
    assert_eq!(attached(&multi), 0);
});
