//! Memory that a fabric may still touch, though the operation it was for is over.
//!
//! A batch that could not be drained in time is given up by the engine: *quarantined*. Until it has drained after all, the
//! fabric may still write where a READ of it was to land. So what it used of the bounce buffer is not given out again, and a
//! caller's range is refused. Both come back by themselves.

use te_core::BatchHandle;

use crate::bounce::Piece;
use crate::engine::{self, Engine};
use crate::memory::BufferRange;

#[derive(Default)]
pub(crate) struct Quarantine {
    held: Vec<Held>,
    total: u64,
}

/// What one batch may still touch.
struct Held {
    batch: BatchHandle,
    /// Of the bounce buffer.
    bounced: Vec<Piece>,
    /// Of callers, to be read into.
    ranges: Vec<BufferRange>,
}

impl Quarantine {
    /// Takes the memory of a batch in. The batch is kept, because it tells when it has drained.
    pub(crate) fn hold(
        &mut self,
        batch: BatchHandle,
        bounced: Vec<Piece>,
        ranges: Vec<BufferRange>,
        pieces: u64,
    ) {
        self.total += pieces;
        self.held.push(Held { batch, bounced, ranges });
    }

    /// Lets go of what has drained; `give_back` gets its pieces of the bounce buffer.
    pub(crate) fn settle(&mut self, engine: &mut Engine, mut give_back: impl FnMut(Piece)) {
        if self.held.is_empty() {
            return;
        }
        engine.poll();
        self.held.retain_mut(|held| {
            if !engine::is_over(engine, held.batch) || engine::is_quarantined(engine, held.batch) {
                return true;
            }
            engine::free(engine, held.batch);
            held.bounced.drain(..).for_each(&mut give_back);
            false
        });
    }

    /// Whether a fabric may still write to some of the range.
    pub(crate) fn covers(&self, range: BufferRange) -> bool {
        self.held.iter().flat_map(|held| &held.ranges).any(|held| held.overlaps(range))
    }

    /// What it holds of the bounce buffer.
    pub(crate) fn bounced(&self) -> impl Iterator<Item = Piece> {
        self.held.iter().flat_map(|held| &held.bounced).copied()
    }

    /// Pieces that were ever taken in.
    pub(crate) const fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::{ErrorCode, MasterConfig};
    use store_master::{Config, MasterHandle, MasterServer};
    use te_core::Op;
    use te_engine::Fabrics;

    use crate::{
        BufferRange, Client, ClientConfig, Get, Node, NodeConfig, PutOptions, Store as _, StoreError,
    };

    const LEN: u64 = 300_000;
    const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };

    fn store() -> (MasterHandle, [Node; 2], Client) {
        let listen = "127.0.0.1:0".parse().unwrap();
        let config = Config {
            rpc_listen: listen,
            http_listen: None,
            store: MasterConfig::default(),
            ..Config::default()
        };
        let master = MasterServer::bind(config).unwrap().spawn().unwrap();
        let address = master.rpc_addr();
        let node = |name| {
            let config = NodeConfig::new(name, address.into(), 8 << 20).fabrics(Fabrics::TCP);
            Node::start(config).unwrap()
        };
        let nodes = [node("a"), node("b")];
        let client = Client::connect(ClientConfig::new(address.into()).fabrics(Fabrics::TCP)).unwrap();
        (master, nodes, client)
    }

    #[test]
    fn a_range_that_a_fabric_may_still_write_is_left_alone_until_that_is_over() {
        let (_master, _nodes, mut client) = store();
        let bytes: Vec<u8> = (0..LEN).map(|i| (i * 7 / 3) as u8).collect();
        client.put(b"k", &bytes, &TWO).unwrap();
        let memory = client.alloc(2 * LEN as usize).unwrap();
        let (range, other) = (BufferRange::part(&memory, 0, LEN), BufferRange::part(&memory, LEN, LEN));

        client.engine_mut().stick_next(Op::Read);
        let busy = |result: Result<Option<u64>, StoreError>| result.unwrap_err().code();
        let given_up = client.get_with(Get::new(b"k", range));
        assert_eq!(
            busy(given_up),
            ErrorCode::UnavailableInCurrentStatus,
            "a miss would give the memory back"
        );
        let after = client.counters();
        assert!(after.quarantined_pieces > 0);
        assert_eq!((after.hits, after.misses), (0, 1));
        assert_eq!(after.replica_failovers, 0, "no other replica was read into the same range");

        assert_eq!(busy(client.get_with(Get::new(b"k", range))), ErrorCode::UnavailableInCurrentStatus);
        let part = BufferRange { offset: LEN - 1, len: LEN, ..range };
        assert_eq!(busy(client.get_with(Get::new(b"k", part))), ErrorCode::UnavailableInCurrentStatus);
        let put = client.put(b"l", range, &TWO).unwrap_err();
        assert_eq!(put.code(), ErrorCode::UnavailableInCurrentStatus);
        assert!(put.to_string().contains("buffer"), "{put}");
        assert_eq!(
            client.get_with(Get::new(b"k", other)).unwrap(),
            Some(LEN),
            "the rest of the memory is not affected"
        );

        client.engine_mut().unstick();
        assert_eq!(client.get_with(Get::new(b"k", range)).unwrap(), Some(LEN));
        let mut found = vec![0; LEN as usize];
        memory.read(0, &mut found).unwrap();
        assert_eq!(found, bytes);
    }

    #[test]
    fn the_bounce_buffer_comes_back_when_a_stuck_read_has_drained() {
        let (_master, _nodes, mut client) = store();
        client.put(b"k", &vec![5; LEN as usize], &TWO).unwrap();
        for _ in 0..100 {
            client.engine_mut().stick_next(Op::Read);
            // Plain bytes pass through memory of ours, so another replica may be tried.
            assert!(client.get(b"k").unwrap().is_some());
            client.engine_mut().unstick();
        }
    }

    #[test]
    fn a_writer_with_a_stuck_write_does_not_say_that_it_is_quiet() {
        let (_master, _nodes, mut client) = store();
        let memory = client.alloc(LEN as usize).unwrap();
        client.engine_mut().stick_next(Op::Write);
        let put = client.put(b"k", BufferRange::all(&memory), &PutOptions::default());
        assert!(put.unwrap(), "it went to the other node");
        assert!(client.master().stats().unwrap().quarantined_bytes >= LEN, "the master holds the space back");

        // Without anything stuck, a put is none the worse.
        client.engine_mut().unstick();
        assert!(client.put(b"l", BufferRange::all(&memory), &PutOptions::default()).unwrap());
    }
}
