//! What each decorator adds. `conformance.rs` checks that it keeps the laws.

use core::time::Duration;

use te_core::sim::{SimConfig, SimNet, SimTransport};
use te_core::{
    Access, Completion, Delay, ErrorKind, Fault, FaultConfig, Instant, MemSpan, Memory, Op, Outcome,
    RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Throttle, Token, Trace, TraceEvent,
    Transport,
};

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);

struct Rig<T> {
    net: SimNet,
    here: T,
    _there: SimTransport,
    _memory: Box<[u64]>,
}

fn rig<T: Transport>(decorate: impl FnOnce(SimTransport) -> T) -> Rig<T> {
    let net = SimNet::new(11, SimConfig::CALM);
    let (mut here, mut there) = (decorate(net.node()), net.node());
    let mut memory = vec![0u64; 2048].into_boxed_slice();
    let span = MemSpan::new(memory.as_mut_ptr().cast(), 16 << 10);
    let (near, far) = (span.part(0, 8 << 10).expect("half"), span.part(8 << 10, 8 << 10).expect("half"));
    let mut blob = [0; 64];
    // SAFETY: the memory is dropped after the transports, and no reference to it is made meanwhile.
    unsafe {
        here.register(REGION, near, Access::LOCAL).expect("registered");
        there.register(REGION, far, Access::REMOTE_READ | Access::REMOTE_WRITE).expect("registered");
    }
    let len = there.export(REGION, &mut blob).expect("exported");
    here.attach(REMOTE_REGION, &blob[..len]).expect("attached");
    Rig { net, here, _there: there, _memory: memory }
}

fn slice(token: u64, op: Op, len: u32) -> Slice {
    Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len,
        op,
    }
}

impl<T: Transport> Rig<T> {
    fn finish(&mut self, wanted: usize) -> Vec<Completion> {
        let mut all = Vec::new();
        let mut out = [Completion::applied(Token(0)); 16];
        while all.len() < wanted {
            let next = self.here.poll_at().expect("something to wait for");
            let count = self.here.poll(next.max(self.net.now()), &mut out);
            all.extend_from_slice(&out[..count]);
        }
        all
    }
}

#[test]
fn a_fault_strikes_at_the_nth_occasion_and_only_then() {
    let mut rig = rig(|sim| Fault::new(sim, 1, FaultConfig::default()));
    rig.here.refuse_nth_submit(2);
    assert_eq!(rig.here.submit(&[slice(1, Op::Read, 8)]), Ok(1));
    assert_eq!(rig.here.submit(&[slice(2, Op::Read, 8)]), Ok(0));
    assert_eq!(rig.here.submit(&[slice(2, Op::Read, 8)]), Ok(1));
    rig.finish(2);

    rig.here.fail_nth_completion(1);
    assert_eq!(rig.here.submit(&[slice(3, Op::Write, 8)]), Ok(1));
    assert_eq!(rig.finish(1), [Completion::unknown(Token(3), ErrorKind::Rail.into())]);

    rig.here.drop_nth_slice(2);
    let began = rig.net.now();
    assert_eq!(rig.here.submit(&[slice(4, Op::Read, 8), slice(5, Op::Read, 8)]), Ok(2));
    let ends = rig.finish(2);
    assert_eq!(ends[0], Completion::applied(Token(4)));
    assert_eq!(ends[1], Completion::not_applied(Token(5), ErrorKind::TimedOut.into()));
    assert!(rig.net.now() - began >= FaultConfig::default().drop_timeout);
    let counters = rig.here.counters();
    assert_eq!((counters.submits_refused, counters.completions_failed, counters.slices_dropped), (1, 1, 1));
}

#[test]
fn a_refused_submit_can_be_an_error() {
    let mut config = FaultConfig::default();
    config.submit_error = Some(ErrorKind::System.into());
    let mut rig = rig(|sim| Fault::new(sim, 1, config));
    rig.here.refuse_nth_submit(1);
    assert_eq!(rig.here.submit(&[slice(1, Op::Read, 8)]), Err(ErrorKind::System.into()));
}

#[test]
fn what_a_delay_holds_back_is_still_in_flight() {
    let hold = Duration::from_millis(3);
    let mut rig = rig(|sim| Delay::new(sim, hold));
    assert_eq!(rig.here.submit(&[slice(1, Op::Write, 8)]), Ok(1));
    let mut out = [Completion::applied(Token(0)); 4];
    rig.net.advance_to(Instant::from_millis(1));
    assert_eq!(rig.here.poll(Instant::from_millis(1), &mut out), 0);
    assert_eq!(rig.net.in_flight(), 0, "the fabric has finished");
    assert_eq!(rig.here.deregister(REGION), Err(ErrorKind::Busy.into()));
    assert_eq!(rig.here.detach(REMOTE_REGION), Err(ErrorKind::Busy.into()));
    assert_eq!(rig.here.cancel(Token(1)), Ok(()));
    assert_eq!(rig.here.poll_at(), Some(Instant::from_millis(4)));
    assert_eq!(rig.here.poll(Instant::from_millis(4), &mut out), 1);
    assert_eq!(out[0], Completion::applied(Token(1)));
    assert_eq!(rig.here.cancel(Token(1)), Err(ErrorKind::NotFound.into()));
    assert_eq!((rig.here.deregister(REGION), rig.here.detach(REMOTE_REGION)), (Ok(()), Ok(())));
}

#[test]
fn a_throttle_keeps_to_its_bytes_per_second() {
    // 1 MB/s, 4 KiB in the bucket: of 100 slices of 4 KiB one uses the bucket, one overdraws it, the others
    // take 4.096 ms each.
    let mut rig = rig(|sim| Throttle::new(sim, 1_000_000, 4096));
    let mut out = [Completion::applied(Token(0)); 16];
    let (mut sent, mut done, mut polls) = (0, 0, 0);
    while done < 100 {
        if sent < 100 {
            sent += rig.here.submit(&[slice(sent as u64 + 1, Op::Write, 4096)]).expect("valid");
        }
        let next = rig.here.poll_at().expect("a slice on its way, or a time to come back");
        done += rig.here.poll(next.max(rig.net.now()), &mut out);
        polls += 1;
    }
    let (took, least) = (rig.net.now() - Instant::ZERO, Duration::from_nanos(98 * 4_096_000));
    assert!(took >= least && took < least + Duration::from_millis(5), "{took:?}");
    assert!(polls < 1_000, "poll_at is worth waiting for: {polls} polls");
}

#[test]
fn a_trace_remembers_the_last_events_in_order() {
    let mut rig = rig(|sim| Trace::new(sim, 4));
    assert_eq!(rig.here.submit(&[slice(1, Op::Read, 8), slice(2, Op::Write, 9)]), Ok(2));
    rig.finish(2);
    assert_eq!(rig.here.cancel(Token(7)), Err(ErrorKind::NotFound.into()));
    let events: Vec<_> = rig.here.events().map(|entry| entry.event).collect();
    assert_eq!(events.len(), 4);
    assert!(matches!(events[0], TraceEvent::Accept(slice) if slice.token == Token(2)));
    assert!(matches!(events[1], TraceEvent::Complete(end) if end.outcome == Outcome::Applied));
    assert_eq!(events[3], TraceEvent::Cancel(Token(7), Err(ErrorKind::NotFound.into())));
    // register, attach, submit, two slices, two completions, cancel
    assert_eq!(rig.here.recorded(), 8);
    let printed = rig.here.to_string();
    assert_eq!(printed.lines().count(), 4);
    assert!(printed.contains("Write 0x2: r0.1+0x0 s0.1+0x0, 9 B"), "{printed}");
    assert!(printed.contains("cancel 0x7: not found"), "{printed}");
}
