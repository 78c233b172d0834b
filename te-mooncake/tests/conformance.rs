//! The contract's conformance suite: the rail against a real data port, through a proxy that can hold up and
//! cut connections.
//!
//! The cases that need a fence after a WRITE has ended in doubt cannot run with WRITEs: the protocol has no
//! fence. They run with READs alone.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "registers and exports memory")]

mod common;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use common::proxy::Proxy;
use common::{HERE, config};
use te_core::testkit::{CountingAlloc, Harness, Hook, Pair, WallClock};
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Features, Instant, MemSpan, Memory,
    MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_mooncake::export::{EXPORT_BYTES_MAX, Export};
use te_mooncake::header::Version;
use te_mooncake::{Client, Config, MetadataString, MooncakeTransport, Service};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// A service as the suite's target: what is registered with remote rights is exported.
struct TargetEnd {
    service: Service,
    proxy: Proxy,
    regions: HashMap<u32, (u32, MemSpan, Access)>,
}

impl TargetEnd {
    fn start(config: Config) -> Self {
        let service = common::service_with(config);
        let proxy = Proxy::start(service.data_port());
        Self { service, proxy, regions: HashMap::new() }
    }

    fn find(&self, id: RegionId) -> Result<(MemSpan, Access), Error> {
        match self.regions.get(&id.index) {
            None => Err(ErrorKind::NotFound.into()),
            Some((generation, ..)) if *generation != id.generation => Err(ErrorKind::Stale.into()),
            Some((_, span, access)) => Ok((*span, *access)),
        }
    }
}

impl Memory for TargetEnd {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        if self.regions.contains_key(&id.index) {
            return Err(ErrorKind::Busy.into());
        }
        span.require(MemoryKinds::HOST)?;
        if access.is_remote() {
            // SAFETY: the caller's promise, until `deregister`.
            unsafe { self.service.export(span, access) }.unwrap();
        }
        self.regions.insert(id.index, (id.generation, span, access));
        Ok(())
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        let (span, access) = self.find(id)?;
        if access.is_remote() {
            self.service.withdraw(span.as_ptr().addr() as u64).unwrap();
        }
        self.regions.remove(&id.index);
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let (span, access) = self.find(id)?;
        if !access.is_remote() {
            return Err(ErrorKind::AccessDenied.into());
        }
        let segment = self.service.client().descriptor(self.service.name()).unwrap();
        let export = Export {
            access,
            addresses: vec![HERE],
            port: self.proxy.port(),
            version: Version::V2,
            addr: span.as_ptr().addr() as u64,
            len: span.len() as u64,
            life: segment.life(),
            segment: self.service.name().into(),
        };
        let bytes = export.to_bytes().unwrap();
        out.get_mut(..bytes.len()).ok_or(ErrorKind::OutOfRange)?.copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn attach(&mut self, _: RemoteRegionId, _: &[u8]) -> Result<(), Error> {
        Err(ErrorKind::Unsupported.into())
    }

    fn detach(&mut self, _: RemoteRegionId) -> Result<(), Error> {
        Err(ErrorKind::Unsupported.into())
    }
}

impl Transport for TargetEnd {
    fn name(&self) -> &'static str {
        "target"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::empty()).with_export_bytes_max(EXPORT_BYTES_MAX as u32)
    }

    fn submit(&mut self, _: &[Slice]) -> Result<usize, Error> {
        Err(ErrorKind::Unsupported.into())
    }

    /// It has a thread of its own.
    fn poll(&mut self, _: Instant, _: &mut [Completion]) -> usize {
        0
    }

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn cancel(&mut self, _: Token) -> Result<(), Error> {
        Err(ErrorKind::NotFound.into())
    }

    fn fence(&mut self, _: Token, _: RemoteRegionId) -> Result<(), Error> {
        Err(ErrorKind::Unsupported.into())
    }
}

/// A rail that offers READs alone.
struct ReadsOnly(MooncakeTransport);

impl Memory for ReadsOnly {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.register(id, span, access) }
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.0.deregister(id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.0.export(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.0.attach(id, blob)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.0.detach(id)
    }
}

impl Transport for ReadsOnly {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.features.remove(Features::WRITE);
        capabilities
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        self.0.submit(batch)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.0.poll(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.0.poll_at()
    }

    fn event_source(&self) -> Option<EventSource> {
        self.0.event_source()
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.0.cancel(token)
    }

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        self.0.fence(token, remote)
    }
}

struct Ends {
    initiator: Box<dyn Transport>,
    target: Option<TargetEnd>,
    rpc_port: u16,
    clock: WallClock,
}

impl Pair for Ends {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut *self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.target.as_mut().expect("the suite does not use a target that it has killed")
    }

    fn tick(&mut self) -> Instant {
        self.clock.tick()
    }

    fn late_max(&self) -> Duration {
        Duration::from_millis(30)
    }

    /// None are left out: an export is made and read in one process, and every bit of it counts.
    fn address_bytes(&self, _: &[u8]) -> Range<usize> {
        0..0
    }

    fn kill_target(&mut self) -> Hook {
        self.target = None;
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        // As a Mooncake engine does: the same name, another data port.
        self.target = Some(TargetEnd::start(Config { rpc_port: self.rpc_port, ..config() }));
        Hook::Done
    }

    fn stall_target(&mut self, stalled: bool) -> Hook {
        self.target.iter().for_each(|target| target.proxy.hold(stalled));
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        self.target.iter().for_each(|target| target.proxy.cut());
        Hook::Done
    }
}

struct Loopback {
    connections: u32,
    reads_only: bool,
}

impl Harness for Loopback {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let config = Config { connections: self.connections, inflight_max: 512, ..config() };
        let client = Arc::new(Client::new(&config, &MetadataString::peer_to_peer()).unwrap());
        let rail = MooncakeTransport::new(&config, Some(client)).unwrap();
        let initiator: Box<dyn Transport> =
            if self.reads_only { Box::new(ReadsOnly(rail)) } else { Box::new(rail) };
        let target = TargetEnd::start(common::config());
        let rpc_port = target.service.rpc_port();
        Box::new(Ends { initiator, target: Some(target), rpc_port, clock: WallClock::new(Duration::ZERO) })
    }

    fn skip(&self, case: &str) -> Option<&'static str> {
        if NEEDS_GENERATIONS.contains(&case) {
            return Some("a range that is exported again is the same range: the protocol has no generations");
        }
        let in_doubt = !self.reads_only && NEEDS_A_FENCE.contains(&case);
        in_doubt.then_some("a WRITE that was cut short stays in doubt: the protocol has no fence")
    }
}

const NEEDS_GENERATIONS: &[&str] = &["a_registered_again_region_does_not_answer_to_its_old_export"];
/// They cut WRITEs short, and go on with other bytes in the same range.
const NEEDS_A_FENCE: &[&str] = &[
    "a_caller_driven_transport_releases_memory_in_the_next_poll",
    "a_cancel_does_not_disturb_its_neighbours",
    "a_cancel_ends_the_slice_even_when_the_target_is_stalled",
    "a_cut_connection_ends_every_slice_and_heals",
    "after_a_fence_nothing_lands",
    "after_a_fence_nothing_lands_that_a_stalled_target_held_back",
    "cancel_in_mid_flight_ends_every_slice_once",
    "outcomes_are_honest_under_cancels",
    "the_source_of_a_finished_write_is_free_for_reuse",
];

mod reads_and_writes_on_four_connections {
    te_core::conformance_tests!(
        super::Loopback { connections: 4, reads_only: false },
        skips [
            // See `NEEDS_A_FENCE`.
            a_caller_driven_transport_releases_memory_in_the_next_poll,
            a_cancel_does_not_disturb_its_neighbours,
            a_cancel_ends_the_slice_even_when_the_target_is_stalled,
            a_cut_connection_ends_every_slice_and_heals,
            a_fence_to_a_dead_target_ends,
            after_a_fence_nothing_lands,
            after_a_fence_nothing_lands_that_a_stalled_target_held_back,
            cancel_in_mid_flight_ends_every_slice_once,
            outcomes_are_honest_under_cancels,
            the_source_of_a_finished_write_is_free_for_reuse,
            // The protocol has no keys, generations and identities, and takes any offset.
            a_connected_initiator_is_left_alone_without_force,
            a_registered_again_region_does_not_answer_to_its_old_export,
            a_slice_off_the_granule_is_refused_before_a_byte_moves,
            a_wrong_key_opens_nothing,
            an_expelled_initiator_is_refused_with_the_reason,
            expelling_one_initiator_does_not_disturb_another,
            nothing_lands_of_an_initiator_that_was_expelled_while_it_was_stopped,
            nothing_of_an_expelled_initiator_lands,
            the_identity_0_is_refused,
        ]
    );
}

/// What the cases above need a fence for runs here.
mod reads_on_one_connection {
    te_core::conformance_tests!(
        super::Loopback { connections: 1, reads_only: true },
        skips [
            a_fence_after_a_restart_ends_and_holds,
            a_fence_to_a_dead_target_ends,
            a_read_only_export_cannot_be_written,
            a_write_puts_the_bytes_there_at_odd_offsets_and_lengths,
            after_a_fence_nothing_lands,
            after_a_fence_nothing_lands_that_a_stalled_target_held_back,
            the_source_of_a_finished_write_is_free_for_reuse,
            what_a_peer_writes_shows_through_a_volatile_span,
            what_was_written_is_read_back,
            a_connected_initiator_is_left_alone_without_force,
            a_registered_again_region_does_not_answer_to_its_old_export,
            a_slice_off_the_granule_is_refused_before_a_byte_moves,
            a_wrong_key_opens_nothing,
            an_expelled_initiator_is_refused_with_the_reason,
            expelling_one_initiator_does_not_disturb_another,
            nothing_lands_of_an_initiator_that_was_expelled_while_it_was_stopped,
            nothing_of_an_expelled_initiator_lands,
            the_identity_0_is_refused,
        ]
    );
}
