//! What the conformance suite cannot see: memory in use when it is revoked, owners and peers that lie, memory
//! that was freed, devices that fail, memory that cannot be shared.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "../../te-gpu/tests/common/mod.rs"]
mod fakes;

use common::{
    INITIATOR, MIB, REGION, REMOTE, TARGET, bytes, export, poll, register, run, slice, transport, until, with,
};
use fakes::Fake;
use te_core::testkit::{CountingAlloc, allocations, is_counting};
use te_core::{
    Access, Completion, ErrorKind, ExpelMode, MemSpan, Memory, Op, Outcome, RegionId, RemoteRegionId, Token,
    Transport,
};
use te_nvlink::{Config, Export, NotExported, NvlinkTransport};

const BYTES: usize = MIB;

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// An owner and an initiator with a region each, as two processes have them.
struct Two {
    initiator: NvlinkTransport,
    owner: NvlinkTransport,
    fakes: [Fake; 2],
    here: MemSpan,
    there: MemSpan,
}

impl Two {
    fn new() -> Self {
        let fakes = [Fake::cuda(), Fake::cuda()];
        let (mut initiator, mut owner) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
        let (here, there) = (fakes[0].allocate(BYTES), fakes[1].allocate(BYTES));
        register(&mut initiator, REGION, here, Access::LOCAL);
        register(&mut owner, REGION, there, Access::all());
        initiator.attach(REMOTE, &export(&owner, REGION)).unwrap();
        let mut two = Self { initiator, owner, fakes, here, there };
        assert_eq!(two.run(Op::Write), Ok(()), "warm");
        two
    }

    fn run(&mut self, op: Op) -> Result<(), te_core::Error> {
        run(&mut self.initiator, Some(&mut self.owner), &[slice(9, op, 0, 0, BYTES as u32)])[0]
    }

    /// A WRITE of these bytes whose copy runs, and does not end before `stalled` is 0 again.
    fn stall(&mut self, bytes: &[u8]) {
        self.fakes[0].fill(self.here, bytes);
        self.fakes[0].set("stalled", 1);
        assert_eq!(self.initiator.submit(&[slice(1, Op::Write, 0, 0, BYTES as u32)]), Ok(1));
    }

    fn poll(&mut self) -> Vec<Completion> {
        poll(&mut self.owner);
        poll(&mut self.initiator)
    }
}

#[test]
fn a_region_is_busy_while_a_copy_runs_and_until_its_mapping_is_closed() {
    let mut two = Two::new();
    two.stall(&bytes(1, BYTES));
    for _ in 0..300 {
        assert_eq!(two.owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
        assert!(two.poll().is_empty());
    }
    assert_eq!(two.fakes[0].calls("cuIpcCloseMemHandle"), 0, "a mapping that a copy uses is not closed");
    two.fakes[0].set("stalled", 0);
    let mut ended = Vec::new();
    until("the copy has ended", || {
        // The owner is not polled: it does not see the release.
        ended.extend(poll(&mut two.initiator));
        !ended.is_empty()
    });
    assert_eq!(ended[0], Completion::applied(Token(1)), "a slice that was accepted before is carried out");
    until("the owner has its memory", || {
        two.poll();
        two.owner.deregister(REGION).is_ok()
    });
    assert_eq!(two.fakes[0].calls("cuIpcCloseMemHandle"), 1);
    two.fakes[1].free(two.there);
    assert_eq!(two.fakes[1].freed_while_open(), 0);
    assert_eq!(two.run(Op::Write).unwrap_err().kind, ErrorKind::Stale);
}

#[test]
fn an_expulsion_is_not_complete_while_a_copy_of_the_peer_runs() {
    let mut two = Two::new();
    two.stall(&bytes(1, BYTES));
    for _ in 0..300 {
        assert_eq!(two.owner.expel(INITIATOR, ExpelMode::Force), Ok(false));
        two.poll();
    }
    two.fakes[0].set("stalled", 0);
    until("the expulsion is complete", || {
        two.poll();
        two.owner.expel(INITIATOR, ExpelMode::Force) == Ok(true)
    });
    // The range has another owner now.
    two.fakes[1].fill(two.there, &bytes(2, BYTES));
    for _ in 0..300 {
        two.poll();
    }
    assert!(two.fakes[1].bytes(two.there) == bytes(2, BYTES), "a late write");
    assert_eq!(two.run(Op::Write).unwrap_err().kind, ErrorKind::Expelled);
    until("the region is free", || {
        two.poll();
        two.owner.deregister(REGION).is_ok()
    });
}

#[test]
fn a_slice_that_runs_keeps_its_own_region_and_the_remote_one() {
    let mut two = Two::new();
    two.stall(&bytes(1, BYTES));
    two.initiator.cancel(Token(1)).unwrap();
    for _ in 0..100 {
        assert!(two.poll().is_empty(), "a copy that runs is not ended by a cancel");
    }
    assert_eq!(two.initiator.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    assert_eq!(two.initiator.detach(REMOTE).unwrap_err().kind, ErrorKind::Busy);
    two.fakes[0].set("stalled", 0);
    let mut ended = Vec::new();
    until("it ends", || {
        ended.extend(two.poll());
        !ended.is_empty()
    });
    assert_eq!((ended[0].token, two.poll().len()), (Token(1), 0));
    assert!(two.fakes[1].bytes(two.there) == bytes(1, BYTES));
    assert_eq!((two.initiator.detach(REMOTE), two.initiator.deregister(REGION)), (Ok(()), Ok(())));
}

#[test]
fn memory_that_was_freed_while_it_was_registered_is_granted_to_no_peer() {
    let mut two = Two::new();
    let again = RemoteRegionId::new(1, 1);
    // No caller may do that; what can be noticed is.
    two.initiator.detach(REMOTE).unwrap();
    until("the mapping is closed", || {
        two.poll();
        two.fakes[0].calls("cuIpcCloseMemHandle") == 1
    });
    two.fakes[1].free(two.there);
    let other = two.fakes[1].allocate(BYTES);
    assert_eq!(other.as_ptr(), two.there.as_ptr());
    let blob = export(&two.owner, REGION);
    two.initiator.attach(again, &blob).unwrap();
    let mut stale = slice(1, Op::Write, 0, 0, 4_096);
    stale.remote.region = again;
    let result = run(&mut two.initiator, Some(&mut two.owner), &[stale])[0];
    assert_eq!(result.unwrap_err().kind, ErrorKind::Stale);
}

#[test]
fn a_local_region_whose_memory_was_replaced_is_stale() {
    let mut two = Two::new();
    two.fakes[0].free(two.here);
    let other = two.fakes[0].allocate(BYTES);
    assert_eq!(other.as_ptr(), two.here.as_ptr());
    register(&mut two.initiator, RegionId::new(1, 1), other, Access::LOCAL);
    let refused = two.initiator.submit(&[slice(1, Op::Read, 0, 0, 4_096)]);
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Stale);
    let mut good = slice(2, Op::Read, 0, 0, 4_096);
    good.local.region = RegionId::new(1, 1);
    assert_eq!(run(&mut two.initiator, Some(&mut two.owner), &[good]), [Ok(())]);
}

#[test]
fn a_submit_after_another_registration_looks_at_the_memory_again_and_does_not_allocate() {
    let mut two = Two::new();
    let other = two.fakes[0].allocate(BYTES);
    for round in 0..3 {
        register(&mut two.initiator, RegionId::new(1 + round, 1), other, Access::LOCAL);
        assert!(is_counting());
        let looked = two.fakes[0].calls("cuPointerGetAttributes");
        let before = allocations();
        let submitted = two.initiator.submit(&[slice(1, Op::Write, 0, 0, 4_096)]);
        let allocated = allocations() - before;
        assert_eq!((submitted, allocated), (Ok(1), 0), "round {round}");
        assert!(two.fakes[0].calls("cuPointerGetAttributes") > looked);
        until("it ends", || !two.poll().is_empty());
    }
}

#[test]
fn two_sides_of_host_memory_are_left_to_other_fabrics() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
    let (ours, theirs) = (common::shared(BYTES), common::shared(BYTES));
    register(&mut here, REGION, ours.span(), Access::LOCAL);
    register(&mut there, REGION, theirs.span(), Access::all());
    here.attach(REMOTE, &export(&there, REGION)).unwrap();
    let refused = here.submit(&[slice(1, Op::Write, 0, 0, 4_096)]).unwrap_err();
    assert!(refused.kind == ErrorKind::Unreachable && refused.kind.is_retryable_elsewhere());
}

#[test]
fn memory_that_cannot_be_shared_says_why_and_is_still_a_local_side() {
    let mut two = Two::new();
    two.fakes[0].set("private", 1);
    let private = two.fakes[0].allocate(BYTES);
    let (id, host) = (RegionId::new(1, 1), RegionId::new(2, 1));
    register(&mut two.initiator, id, private, Access::all());
    let mut heap = vec![0_u8; 8_192];
    let heap = MemSpan::new(heap.as_mut_ptr(), heap.len());
    register(&mut two.initiator, host, heap, Access::all());
    let why = two.initiator.not_exported(id).unwrap().unwrap();
    assert!(why.to_string().contains("cudaMallocAsync") && why.to_string().contains("cudaMalloc,"), "{why}");
    assert_eq!(two.initiator.not_exported(host), Ok(Some(NotExported::NotSharedMemory)));
    assert_eq!(two.initiator.not_exported(REGION), Ok(Some(NotExported::Private)));
    for id in [id, host] {
        let refused = two.initiator.export(id, &mut [0; 256]).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unsupported);
    }
    let mut good = slice(2, Op::Read, 0, 0, 4_096);
    good.local.region = id;
    assert_eq!(run(&mut two.initiator, Some(&mut two.owner), &[good]), [Ok(())]);
    assert_eq!(two.initiator.deregister(id), Ok(()));
    assert_eq!(two.owner.not_exported(REGION), Ok(None));
}

#[test]
fn when_a_device_fails_slices_end_and_their_memory_stays_in_use() {
    let mut two = Two::new();
    two.stall(&bytes(1, BYTES));
    two.fakes[0].set("sticky", 700);
    two.fakes[0].set("stalled", 0);
    let mut ended = Vec::new();
    until("the slice ends", || {
        ended.extend(two.poll());
        !ended.is_empty()
    });
    let error = ended[0].result.unwrap_err();
    assert_eq!((error.kind, ended[0].outcome), (ErrorKind::Rail, Outcome::Unknown));
    assert_eq!(two.initiator.quarantined(), 1);
    // Its bytes may still land: no fence says that they have.
    two.initiator.fence(Token(7), REMOTE).unwrap();
    let fenced = two.poll();
    assert_eq!((fenced.len(), fenced[0].token, fenced[0].outcome), (1, Token(7), Outcome::Unknown));
    assert_eq!(fenced[0].result.unwrap_err().kind, ErrorKind::Rail);
    assert_eq!(two.initiator.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    assert_eq!(two.owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    let next = two.run(Op::Read);
    assert!(next.is_err(), "the device is not used again");
}

#[test]
fn an_owner_that_ends_is_known_before_a_slice_is_judged() {
    let Two { mut initiator, owner, fakes, .. } = Two::new();
    // It revokes its memory, and waits for this process, which does not poll.
    drop(owner);
    assert_eq!(initiator.submit(&[slice(1, Op::Write, 0, 0, 4_096)]), Ok(1), "a revoked row ends no submit");
    let mut ended = Vec::new();
    until("it ends", || {
        ended.extend(poll(&mut initiator));
        !ended.is_empty()
    });
    assert_eq!(ended[0].result.unwrap_err().kind, ErrorKind::PeerDead);
    drop(initiator);
    assert_eq!(fakes[0].wrong(), 0);
}

#[test]
fn a_key_that_is_wrong_opens_nothing() {
    let mut two = Two::new();
    let good = Export::parse(&export(&two.owner, REGION)).unwrap();
    for (nth, bit) in [0_usize, 7, 64, 127].into_iter().enumerate() {
        let mut forged = good.clone();
        forged.key[bit / 8] ^= 1 << (bit % 8);
        let id = RemoteRegionId::new(1 + nth as u32, 1);
        two.initiator.attach(id, &forged.to_bytes()).unwrap();
        let mut wrong = slice(1, Op::Write, 0, 0, 4_096);
        wrong.remote.region = id;
        let result = run(&mut two.initiator, Some(&mut two.owner), &[wrong])[0];
        assert_eq!(result.unwrap_err().kind, ErrorKind::AccessDenied);
    }
    // An export that claims more than there is.
    for forged in [Export { len: good.len + 1, ..good.clone() }, Export { gpu: None, ..good.clone() }] {
        let id = RemoteRegionId::new(9, 1);
        two.initiator.attach(id, &forged.to_bytes()).unwrap();
        let mut wrong = slice(1, Op::Write, 0, 0, 4_096);
        wrong.remote.region = id;
        let result = run(&mut two.initiator, Some(&mut two.owner), &[wrong])[0];
        assert!(result.is_err(), "{forged:?}");
        two.initiator.detach(id).unwrap();
    }
    // Another boot, and a GPU that is not here.
    for forged in [Export { host: [9; 16], ..good.clone() }, Export { gpu: Some([9; 16]), ..good.clone() }] {
        let refused = two.initiator.attach(RemoteRegionId::new(9, 1), &forged.to_bytes());
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Unreachable, "{forged:?}");
    }
    assert_eq!(two.run(Op::Write), Ok(()), "the connection survives");
}

#[test]
fn a_setting_that_is_out_of_its_limits_is_named() {
    let fake = Fake::cuda();
    let config = Config { grant_ms_max: 0, ..Config::default() };
    let error = NvlinkTransport::new(config, fake.gpu(fake.config())).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "setting grant_ms_max is 0: set it to a value from 1 to 3600000");
    // A process that moves host memory alone does not start the driver.
    let before = fake.calls("cuInit");
    let mut idle = with(&fake, Config::default());
    let memory = common::shared(8_192);
    register(&mut idle, REGION, memory.span(), Access::all());
    poll(&mut idle);
    idle.deregister(REGION).unwrap();
    assert_eq!(fake.calls("cuInit"), before);
}

#[test]
fn a_child_after_a_fork_does_not_use_its_parents_transport() {
    let mut two = Two::new();
    te_fabric::testkit::in_a_child("fork", || {
        let submitted = two.initiator.submit(&[slice(1, Op::Write, 0, 0, 4_096)]).map_err(|error| error.kind);
        let deregistered = two.owner.deregister(REGION).map_err(|error| error.kind);
        let detached = two.initiator.detach(REMOTE).map_err(|error| error.kind);
        let forked = Err(ErrorKind::Forked);
        let kind = |error: te_core::Error| error.kind;
        // SAFETY: it is refused before it is used.
        #[allow(unsafe_code, reason = "registers memory under test")]
        let registered = unsafe { two.initiator.register(RegionId::new(1, 1), two.here, Access::LOCAL) };
        let others = [
            registered.map_err(kind),
            two.owner.export(REGION, &mut [0; 256]).map(drop).map_err(kind),
            two.initiator.fence(Token(2), REMOTE).map_err(kind),
            two.initiator.cancel(Token(1)).map_err(kind),
            two.initiator.submit(&[]).map(drop).map_err(kind),
        ];
        if others != [forked; 5] {
            return Err(format!("{others:?}"));
        }
        if (submitted, deregistered, detached) != (Err(ErrorKind::Forked), forked, forked) {
            return Err(format!("{submitted:?} {deregistered:?} {detached:?}"));
        }
        // SAFETY: read once; the process ends without running the parent's drop.
        #[allow(unsafe_code, reason = "drops what the parent keeps")]
        unsafe {
            drop(std::ptr::read(&raw const two.initiator));
            drop(std::ptr::read(&raw const two.owner));
        }
        Ok(())
    });
    assert_eq!(two.run(Op::Write), Ok(()));
}

#[test]
fn memory_of_another_device_is_reached_with_and_without_a_direct_way() {
    for direct in [1, 0] {
        let fakes = [Fake::cuda(), Fake::cuda()];
        fakes.iter().for_each(|fake| _ = fake.set("devices", 2).set("peer_access", direct));
        let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
        let vendor = fakes[0].vendor();
        let [one, two] = [0, 1].map(|index| te_core::Location::Device(vendor, index));
        // The first device of the driver is the second on the bus.
        let (ours, theirs) = (fakes[0].allocate_at(1, BYTES, one), fakes[1].allocate_at(0, BYTES, two));
        register(&mut here, REGION, ours, Access::LOCAL);
        register(&mut there, REGION, theirs, Access::all());
        here.attach(REMOTE, &export(&there, REGION)).unwrap();
        fakes[0].fill(ours, &bytes(1, BYTES));
        let write = slice(1, Op::Write, 0, 0, BYTES as u32);
        assert_eq!(run(&mut here, Some(&mut there), &[write]), [Ok(())], "direct: {direct}");
        assert!(fakes[1].bytes(theirs) == bytes(1, BYTES));
        fakes[1].fill(theirs, &bytes(2, BYTES));
        let read = slice(1, Op::Read, 0, 0, BYTES as u32);
        assert_eq!(run(&mut here, Some(&mut there), &[read]), [Ok(())], "direct: {direct}");
        assert!(fakes[0].bytes(ours) == bytes(2, BYTES));
    }
}

#[test]
fn a_span_that_is_not_what_it_says_is_refused_and_leaves_no_trace() {
    let fake = Fake::cuda();
    let mut here = transport(&fake, INITIATOR);
    let memory = fake.allocate(BYTES);
    let elsewhere = memory.at(te_core::Location::Device(fake.vendor(), 1));
    let mut heap = [0_u8; 64];
    let heap = MemSpan::new(heap.as_mut_ptr(), 64).at(fake.location());
    let long = MemSpan::new(memory.as_ptr(), BYTES + 1).at(fake.location());
    let empty = memory.part(0, 0).unwrap();
    for (span, kind) in [
        (elsewhere, ErrorKind::InvalidArgument),
        (heap, ErrorKind::InvalidArgument),
        (long, ErrorKind::OutOfRange),
        (empty, ErrorKind::InvalidArgument),
        (memory.at(te_core::Location::Device(te_core::GpuVendor::Amd, 0)), ErrorKind::Unsupported),
    ] {
        #[allow(unsafe_code, reason = "registers memory under test")]
        // SAFETY: it is refused before it is used.
        let refused = unsafe { here.register(REGION, span, Access::all()) };
        assert_eq!(refused.unwrap_err().kind, kind, "{span:?}");
    }
    register(&mut here, REGION, memory, Access::all());
    assert_eq!(here.deregister(REGION), Ok(()));
}

#[test]
fn shared_memory_that_is_granted_for_reading_is_mapped_for_reading() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
    // The kernel refuses every writable mapping of it.
    let memory = te_host::SharedMemory::new(BYTES, te_host::AllocOptions::default()).unwrap();
    memory.view().write(0, &bytes(3, BYTES)).unwrap();
    let ours = fakes[0].allocate(BYTES);
    register(&mut here, REGION, ours, Access::LOCAL);
    register(&mut there, REGION, memory.span(), Access::REMOTE_READ);
    here.attach(REMOTE, &export(&there, REGION)).unwrap();
    let read = slice(1, Op::Read, 0, 0, BYTES as u32);
    assert_eq!(run(&mut here, Some(&mut there), &[read]), [Ok(())]);
    assert!(fakes[0].bytes(ours) == bytes(3, BYTES));
    let refused = here.submit(&[slice(1, Op::Write, 0, 0, 4_096)]).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::AccessDenied);
    assert_eq!(fakes[0].calls("cuMemHostRegister_v2"), 3, "the queue's page, and two ways for the memory");
    let both = RegionId::new(1, 1);
    register(&mut there, both, memory.span(), Access::all());
    assert_eq!(there.not_exported(both), Ok(Some(NotExported::NotWritable)));
}

#[test]
fn a_mapping_of_an_owner_that_is_gone_is_not_released_to_another_one() {
    let Two { mut initiator, owner, fakes, here, .. } = Two::new();
    fakes[0].fill(here, &bytes(1, BYTES));
    fakes[0].set("stalled", 1);
    assert_eq!(initiator.submit(&[slice(1, Op::Write, 0, 0, BYTES as u32)]), Ok(1));
    drop(owner);
    for _ in 0..100 {
        assert!(poll(&mut initiator).is_empty());
    }
    // Its connection takes the place of the first one.
    let (mut other, again) = (transport(&fakes[1], 0x3333), RemoteRegionId::new(1, 1));
    register(&mut other, REGION, fakes[1].allocate(BYTES), Access::all());
    initiator.attach(again, &export(&other, REGION)).unwrap();
    for _ in 0..300 {
        poll(&mut other);
        assert!(poll(&mut initiator).is_empty());
    }
    fakes[0].set("stalled", 0);
    until("the mapping of the first owner is closed", || {
        poll(&mut initiator);
        fakes[0].calls("cuIpcCloseMemHandle") == 1
    });
    for _ in 0..50 {
        poll(&mut initiator);
        // timing: a wrong release is sent soon after the close
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // This process still has the memory of the second owner mapped, and learns of nothing.
    for _ in 0..300 {
        poll(&mut other);
        assert_eq!(other.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    }
    assert_eq!(fakes[0].calls("cuIpcCloseMemHandle"), 1);
    until("the second owner has its memory", || {
        poll(&mut initiator);
        other.deregister(REGION).is_ok()
    });
    assert_eq!(fakes[0].calls("cuIpcCloseMemHandle"), 2);
}

/// Shared memory of the host that lasts as long as the process.
fn lasting(bytes: usize) -> MemSpan {
    let memory = common::shared(bytes);
    let span = memory.span();
    std::mem::forget(memory);
    span
}

/// Attaches the same shared memory so many times, without polling.
fn attached(count: u32) -> (NvlinkTransport, NvlinkTransport, [Fake; 2]) {
    let fakes = [Fake::cuda(), Fake::cuda()];
    let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
    register(&mut here, REGION, fakes[0].allocate(BYTES), Access::LOCAL);
    register(&mut there, REGION, lasting(4_096), Access::all());
    let blob = export(&there, REGION);
    for nth in 0..count {
        here.attach(RemoteRegionId::new(nth, 1), &blob).unwrap();
    }
    (here, there, fakes)
}

fn write_to_each(count: u32) -> Vec<te_core::Slice> {
    let to = |nth: u32| {
        let mut slice = slice(nth.into(), Op::Write, 0, 0, 64);
        slice.remote.region = RemoteRegionId::new(nth, 1);
        slice
    };
    (0..count).map(to).collect()
}

#[test]
fn many_regions_that_are_requested_at_once_are_granted() {
    const COUNT: u32 = 1_000;
    let (mut here, mut there, _fakes) = attached(COUNT);
    let ended = run(&mut here, Some(&mut there), &write_to_each(COUNT));
    let late = ended.iter().filter(|end| end.is_err()).count();
    assert_eq!((ended.len(), late), (COUNT as usize, 0));
}

#[test]
fn an_owner_grants_1024_regions_to_a_peer_and_the_next_is_refused_at_once() {
    let (mut here, mut there, _fakes) = attached(1_024);
    let blob = export(&there, REGION);
    let next = RemoteRegionId::new(1_024, 1);
    assert_eq!(here.attach(next, &blob).unwrap_err().kind, ErrorKind::Full);
    assert!(run(&mut here, Some(&mut there), &write_to_each(1_024)).iter().all(Result::is_ok));
    assert_eq!(here.attach(next, &blob).unwrap_err().kind, ErrorKind::Full);
    here.detach(RemoteRegionId::new(0, 1)).unwrap();
    until("there is room for another", || {
        poll(&mut here);
        poll(&mut there);
        here.attach(next, &blob).is_ok()
    });
    let last = write_to_each(1_025)[1_024];
    assert_eq!(run(&mut here, Some(&mut there), &[last]), [Ok(())]);
}

#[test]
fn a_request_that_is_given_up_before_its_answer_leaves_the_region_free() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    for dropped in [false, true] {
        let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
        register(&mut here, REGION, fakes[0].allocate(BYTES), Access::LOCAL);
        register(&mut there, REGION, fakes[1].allocate(BYTES), Access::all());
        here.attach(REMOTE, &export(&there, REGION)).unwrap();
        if dropped {
            // The owner answers while the peer ends.
            std::thread::scope(|scope| {
                let owner = scope.spawn(|| {
                    for _ in 0..300 {
                        poll(&mut there);
                        // timing: the peer waits up to a second for its answer
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                });
                drop(here);
                owner.join().unwrap();
            });
            until("the region is free", || {
                poll(&mut there);
                there.deregister(REGION).is_ok()
            });
            continue;
        }
        here.detach(REMOTE).unwrap();
        for _ in 0..300 {
            poll(&mut there);
            poll(&mut here);
        }
        assert_eq!(there.deregister(REGION), Ok(()), "no peer has it mapped");
    }
}

#[test]
fn pages_that_a_copy_uses_stay_locked_when_the_transport_is_dropped() {
    for ends in [true, false] {
        let fakes = [Fake::cuda(), Fake::cuda()];
        let gpu = fakes[0].gpu(te_gpu::Config { drain_ms_max: 100, ..fakes[0].config() });
        let mut here = NvlinkTransport::new(Config::default(), gpu).unwrap();
        let mut there = transport(&fakes[1], TARGET);
        register(&mut here, REGION, lasting(BYTES), Access::LOCAL);
        register(&mut there, REGION, fakes[1].allocate(BYTES), Access::all());
        here.attach(REMOTE, &export(&there, REGION)).unwrap();
        let write = slice(1, Op::Write, 0, 0, BYTES as u32);
        assert_eq!(run(&mut here, Some(&mut there), &[write]), [Ok(())]);
        fakes[0].set("stalled", i64::from(!ends));
        assert_eq!(here.submit(&[write]), Ok(1));
        drop(here);
        let unlocked = fakes[0].calls("cuMemHostUnregister");
        assert_eq!(unlocked > 0, ends, "{unlocked} times");
        fakes[0].set("stalled", 0);
    }
}

#[test]
fn memory_that_could_not_be_unmapped_again_is_not_released() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    for stays_mapped in [false, true] {
        let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
        register(&mut here, REGION, fakes[0].allocate(BYTES), Access::LOCAL);
        register(&mut there, REGION, fakes[1].allocate(BYTES), Access::all());
        here.attach(REMOTE, &export(&there, REGION)).unwrap();
        fakes[0].fail("cuMemGetAddressRange_v2", 0, 2);
        fakes[0].fail("cuIpcCloseMemHandle", 0, if stays_mapped { 2 } else { 0 });
        let ended = run(&mut here, Some(&mut there), &[slice(1, Op::Write, 0, 0, 4_096)]);
        assert_eq!(ended[0].unwrap_err().kind, ErrorKind::Unreachable, "the device has no memory left");
        here.detach(REMOTE).unwrap();
        for _ in 0..300 {
            poll(&mut here);
            poll(&mut there);
        }
        let freed = there.deregister(REGION).map_err(|error| error.kind);
        assert_eq!(freed, if stays_mapped { Err(ErrorKind::Busy) } else { Ok(()) });
    }
}

#[test]
fn pages_that_cannot_be_locked_are_left_to_other_fabrics() {
    let mut two = Two::new();
    let host = RegionId::new(1, 1);
    register(&mut two.initiator, host, lasting(BYTES), Access::LOCAL);
    two.fakes[0].fail("cuMemHostRegister_v2", 0, 2);
    let mut write = slice(1, Op::Write, 0, 0, 4_096);
    write.local.region = host;
    let ended = run(&mut two.initiator, Some(&mut two.owner), &[write]);
    assert_eq!(ended[0].unwrap_err().kind, ErrorKind::Unreachable);
    assert_eq!(two.run(Op::Write), Ok(()), "memory of devices is still served");
}

#[test]
fn memory_that_cannot_be_mapped_is_released_to_an_owner_that_has_expelled_the_peer_meanwhile() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    fakes[0].fail("cuMemGetAddressRange_v2", 0, 2);
    for round in 0..30 {
        let (mut here, mut there) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
        register(&mut there, REGION, fakes[1].allocate(BYTES), Access::all());
        here.attach(REMOTE, &export(&there, REGION)).unwrap();
        // The grant, the expulsion and the end of the mapping come in any order.
        for _ in 0..3 {
            poll(&mut there);
        }
        if round % 2 == 0 {
            poll(&mut here);
        }
        there.expel(INITIATOR, ExpelMode::Force).unwrap();
        until("the region is free", || {
            poll(&mut here);
            poll(&mut there);
            there.deregister(REGION).is_ok()
        });
    }
}
