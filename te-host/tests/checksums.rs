//! Checksums that the copier computes during a copy, as they pass through rails and decorators.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use te_core::{
    Access, Completion, Delay, Fault, FaultConfig, HealthConfig, HealthRoute, Instant, Memory,
    MultiTransport, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Throttle, Token, Trace,
    Transport,
};
use te_fabric::testkit::Block;
use te_host::{EXPORT_BYTES_MAX, LocalConfig, LocalTransport, crc32c_of};

const BYTES: usize = 100_000;

#[test]
fn a_requested_checksum_passes_rails_and_decorators() {
    let local = || LocalTransport::new(LocalConfig::default()).unwrap();
    let rails = |rails: Vec<Box<dyn Transport>>| {
        MultiTransport::new(rails, HealthRoute::new(&[100], HealthConfig::default()), 64).unwrap()
    };
    let faulty = Fault::new(local(), 1, FaultConfig::default());
    let slow = Delay::new(Throttle::new(faulty, 100_000_000_000, 1 << 20), Duration::from_micros(1));
    let (mut peer, mut owner) = (rails(vec![Box::new(Trace::new(slow, 8))]), rails(vec![Box::new(local())]));
    let (here, there) = (Block::new(BYTES), Block::new(BYTES));
    let bytes: Vec<u8> = (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    there.set(0, &bytes);
    let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: both blocks outlive the transports' use of them, and are only looked at through copies.
    unsafe {
        peer.register(region, here.span(), Access::LOCAL).unwrap();
        owner.register(region, there.span(), Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
    }
    let mut export = [0; EXPORT_BYTES_MAX + 16];
    let len = owner.export(region, &mut export).unwrap();
    peer.attach(remote, &export[..len]).unwrap();

    let mut now = Instant::ZERO;
    let mut sum_of = |wanted, op, len: usize| {
        peer.set_checksums(wanted);
        let slice = Slice {
            token: Token(7),
            local: RegionOffset::new(region, 0),
            remote: RemoteOffset::new(remote, 0),
            len: len as u32,
            op,
        };
        assert_eq!(peer.submit(&[slice]), Ok(1));
        let mut ended = [Completion::applied(Token(0))];
        while peer.poll(now, &mut ended) == 0 {
            now = now + Duration::from_micros(10);
        }
        assert_eq!((ended[0].token, ended[0].result), (Token(7), Ok(())));
        ended[0].crc32c.map(|crc32c| crc32c.get())
    };
    assert_eq!(sum_of(false, Op::Read, BYTES), None, "not requested");
    for (op, len) in [(Op::Read, BYTES), (Op::Write, BYTES), (Op::Read, 17), (Op::Write, 32 << 10)] {
        assert_eq!(sum_of(true, op, len), Some(crc32c_of(0, &bytes[..len])), "{op:?} of {len} bytes");
    }
    assert_eq!(
        sum_of(true, Op::Write, (32 << 10) - 1),
        None,
        "a short WRITE takes longer to sum than to copy"
    );
    assert_eq!(sum_of(false, Op::Read, BYTES), None, "no longer requested");
    owner.deregister(region).unwrap();
    peer.deregister(region).unwrap();
}
