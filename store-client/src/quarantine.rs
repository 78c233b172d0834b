//! The quarantine: memory that a fabric may still touch although the operation that used it is over.
//!
//! A batch that could not be drained in time is given up by the engine: it is *quarantined*. Until it has
//! drained, the fabric may still write the destination of a READ. Its pieces of the bounce buffer are not
//! handed out again, and a caller's range is refused. Both become usable again when the batch has drained.

use te_core::BatchHandle;

use crate::bounce::Piece;
use crate::engine::{self, Engine};
use crate::memory::BufferRange;
use crate::mover::SlotPiece;

#[derive(Default)]
pub(crate) struct Quarantine {
    held: Vec<Held>,
    total: u64,
}

struct Held {
    batch: BatchHandle,
    memory: Pieces,
}

/// The memory that one batch may still touch.
#[derive(Default)]
pub(crate) struct Pieces {
    /// Pieces of the bounce buffer.
    pub(crate) bounced: Vec<Piece>,
    /// Pieces of the slots through which device memory is copied.
    pub(crate) in_slots: Vec<SlotPiece>,
    /// Ranges of callers that are read into.
    pub(crate) ranges: Vec<BufferRange>,
}

impl Quarantine {
    /// Adds the memory of a batch. The batch is kept, because its state shows when it has drained.
    pub(crate) fn hold(&mut self, batch: BatchHandle, memory: Pieces, pieces: u64) {
        self.total += pieces;
        self.held.push(Held { batch, memory });
    }

    /// Releases everything that has drained; `give_back` receives the pieces.
    pub(crate) fn settle(&mut self, engine: &mut Engine, mut give_back: impl FnMut(&Pieces)) {
        if self.held.is_empty() {
            return;
        }
        engine.poll();
        self.held.retain_mut(|held| {
            if !engine::is_over(engine, held.batch) || engine::is_quarantined(engine, held.batch) {
                return true;
            }
            engine::free(engine, held.batch);
            give_back(&held.memory);
            false
        });
    }

    /// Whether nothing is held.
    pub(crate) const fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether a fabric may still write a part of the range.
    pub(crate) fn covers(&self, range: BufferRange) -> bool {
        self.held.iter().flat_map(|held| &held.memory.ranges).any(|held| held.overlaps(range))
    }

    /// The pieces of the bounce buffer that are held here.
    pub(crate) fn bounced(&self) -> impl Iterator<Item = Piece> {
        self.held.iter().flat_map(|held| &held.memory.bounced).copied()
    }

    /// The pieces of slots that are held here.
    pub(crate) fn in_slots(&self) -> impl Iterator<Item = SlotPiece> {
        self.held.iter().flat_map(|held| &held.memory.in_slots).copied()
    }

    /// Number of pieces that were ever added.
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
            "a miss would allow the caller to use the memory again"
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
            // Plain memory is copied through the bounce buffer, so another replica may be tried.
            assert!(client.get(b"k").unwrap().is_some());
            client.engine_mut().unstick();
        }
    }

    #[test]
    fn a_writer_with_a_stuck_write_does_not_report_that_it_has_ended() {
        let (_master, _nodes, mut client) = store();
        let memory = client.alloc(LEN as usize).unwrap();
        client.engine_mut().stick_next(Op::Write);
        let put = client.put(b"k", BufferRange::all(&memory), &PutOptions::default());
        assert!(put.unwrap(), "it was stored on the other node");
        assert!(client.master().stats().unwrap().quarantined_bytes >= LEN, "the space is pending release");

        // After the stuck write has drained, puts succeed as before.
        client.engine_mut().unstick();
        assert!(client.put(b"l", BufferRange::all(&memory), &PutOptions::default()).unwrap());
    }
}
