//! The caller's plain memory, registered for the duration of one operation.
//!
//! Where every rail is caller-driven ([`Engine::is_caller_driven`](te_engine::Engine::is_caller_driven)),
//! registration costs about as much as copying a few KiB, and a cancelled transfer releases its memory at
//! once. Long values are then moved directly from or into the caller's memory. Over other rails, which pin
//! memory or work between calls, plain memory is copied through the bounce buffer.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use te_engine::RegisterError;

use super::Client;
use crate::memory::{BufferRange, Held};
use crate::mover::Buffers;
use crate::sys;

/// Shorter values are copied.
const LENT_BYTES_MIN: usize = 32 << 10;

/// A client in the middle of an operation, with memory that stays registered until this guard is dropped. If
/// a panic drops the guard before the operation has [finished](Self::finish), everything under way is given
/// up first, and the client loses no memory.
pub(super) struct Lending<'c, 'b> {
    client: &'c mut Client,
    finished: bool,
    _borrowed: PhantomData<&'b mut [u8]>,
}

impl<'c, 'b> Lending<'c, 'b> {
    /// Registers the plain memory of long items of an operation that the mover has
    /// [begun](crate::mover::Mover::begin).
    pub(super) fn new(client: &'c mut Client, items: usize, buffers: &mut Buffers<'_, 'b>) -> Self {
        let this = Self { client, finished: false, _borrowed: PhantomData };
        if !this.client.engine.is_caller_driven() {
            return this;
        }
        for item in 0..items {
            let Some((span, access)) =
                buffers.lendable(item).filter(|(span, _)| span.len() >= LENT_BYTES_MIN)
            else {
                continue;
            };
            #[allow(unsafe_code, reason = "registers what is borrowed for longer than this lives")]
            // SAFETY: `buffers` borrows the memory for 'b, which outlives this guard, and dropping the guard
            // unregisters it. Until then the mover uses the range that it is given here, not `buffers`.
            let registered = unsafe { sys::lend(&mut this.client.engine, span, access) };
            // Registration fails, for example, when the memory overlaps a registered region. The item is then
            // copied.
            let Ok(region) = registered else { continue };
            // Recorded first: whatever is recorded here is unregistered on drop.
            this.client.mover.lend(item, BufferRange { region, offset: 0, len: span.len() as u64 });
            this.client.memory.insert(region, Held::Raw(span));
        }
        this
    }

    /// Marks the operation as finished: nothing of it is under way any more.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Lending<'_, '_> {
    fn drop(&mut self) {
        let client = &mut *self.client;
        let mut abandoned = false;
        if !self.finished {
            abandoned = true;
            client.abandon_operation();
        }
        while let Some(BufferRange { region, .. }) = client.mover.take_back() {
            client.memory.remove(region);
            loop {
                match client.engine.unregister(region) {
                    Ok(()) | Err(RegisterError::NotFound) => break,
                    Err(RegisterError::Busy { .. }) => {
                        // Only a panic should leave a transfer under way. If one is found nevertheless, it is
                        // given up.
                        if !std::mem::replace(&mut abandoned, true) {
                            client.mover.abandon(&mut client.engine);
                        }
                        client.engine.poll();
                    }
                    Err(error) => {
                        // Continuing would leave a fabric with access to memory that the caller is about to
                        // reuse.
                        log::error!(
                            "borrowed memory cannot be unregistered: {error}: the process aborts to protect the memory"
                        );
                        std::process::abort();
                    }
                }
            }
        }
    }
}

impl Deref for Lending<'_, '_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.client
    }
}

impl DerefMut for Lending<'_, '_> {
    fn deref_mut(&mut self) -> &mut Client {
        self.client
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use store_master::{Config, MasterHandle, MasterServer};
    use te_engine::Fabrics;

    use crate::engine::PanicAt;
    use crate::{BufferRange, Client, ClientConfig, Node, NodeConfig, PutOptions, RemoveMode, Store as _};

    fn store(fabrics: Fabrics) -> (MasterHandle, Node, Client) {
        let config =
            Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
        let master = MasterServer::bind(config).unwrap().spawn().unwrap();
        let address = master.rpc_addr();
        let node = Node::start(NodeConfig::new("a", address.into(), 8 << 20).fabrics(fabrics)).unwrap();
        let config =
            ClientConfig { bounce_bytes: 128 << 10, ..ClientConfig::new(address.into()).fabrics(fabrics) };
        (master, node, Client::connect(config).unwrap())
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 / 3) as u8).collect()
    }

    #[test]
    fn an_operation_that_panics_costs_the_client_no_memory() {
        for fabrics in [Fabrics::TCP, Fabrics::SHM] {
            let (_master, _node, mut client) = store(fabrics);
            let options = PutOptions::default();
            // Items with several parts are not registered: they pass through the bounce buffer, which holds a
            // dozen of them.
            let (value, long) = (bytes(20_000), bytes(50_000));
            let parts = value.split_at(7);
            client.put(b"there", &long, &options).unwrap();
            let before = client.engine_stats().regions;
            for round in 0..60 {
                let key = format!("k{round}");
                let at = if round % 2 == 0 { PanicAt::Submit } else { PanicAt::Poll };
                client.engine_mut().panic_next(at);
                let panicked = catch_unwind(AssertUnwindSafe(|| match round % 3 {
                    0 => client.put(key.as_bytes(), &[parts.0, parts.1], &options).map(drop),
                    1 => client.put(key.as_bytes(), &long, &options).map(drop),
                    _ => client.get(b"there").map(drop),
                }));
                assert!(panicked.is_err(), "{fabrics} {round}");
                let key = format!("after-{round}");
                let stored = client.put(key.as_bytes(), &[parts.0, parts.1], &options);
                assert!(stored.unwrap(), "{fabrics} {round}");
                assert_eq!(client.get(key.as_bytes()).unwrap().as_ref(), Some(&value), "{fabrics} {round}");
            }
            assert_eq!(client.engine_stats().regions, before, "borrowed memory is unregistered");
            assert_eq!(client.get(b"there").unwrap(), Some(long));
            assert_eq!(client.counters().checksum_mismatches, 0);
        }
    }

    #[test]
    fn what_a_rail_sums_while_it_copies_is_not_summed_again() {
        let (_master, _node, mut client) = store(Fabrics::SHM);
        // Parts of half a checksum chunk: the shortest for which the rail computes checksums.
        let value = bytes(30 << 15);
        let memory = client.alloc(value.len()).unwrap();
        memory.write(0, &value).unwrap();
        let parts: Vec<BufferRange> =
            (0..30).map(|part| BufferRange::part(&memory, part << 15, 1 << 15)).collect();
        // A rail that has just started may copy later than usual, and its checksums then arrive too late.
        let summed_by_rail = (0..50).any(|_| {
            client.mover.summed_bytes = 0;
            assert!(client.put(b"k", &parts, &PutOptions::default()).unwrap());
            assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value));
            assert!(client.remove(b"k", RemoveMode::Force).unwrap());
            client.mover.summed_bytes == 0
        });
        assert!(summed_by_rail);
    }
}
