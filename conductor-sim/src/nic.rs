//! The nodes' network: what is sent waits for the sender's egress and for the receiver's ingress.

/// One direction of one node's network, or both of all of them, as times until which they are booked.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    bytes_per_s: f64,
    egress_free_ns: Vec<u64>,
    ingress_free_ns: Vec<u64>,
    busy_ns: u64,
}

impl Network {
    /// An idle network of `nodes`, each of which sends and receives `bytes_per_s` at once.
    pub(crate) fn new(nodes: usize, bytes_per_s: f64) -> Self {
        Self { bytes_per_s, egress_free_ns: vec![0; nodes], ingress_free_ns: vec![0; nodes], busy_ns: 0 }
    }

    /// The time that `bytes` take on an idle network, nanoseconds.
    pub(crate) fn time_ns(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.bytes_per_s * 1e9) as u64
    }

    /// Sends `bytes` as soon as both ends are free; returns when the last byte arrives. The sender is free
    /// for others while the receiver still waits for its turn.
    pub(crate) fn send(&mut self, now_ns: u64, from: usize, to: usize, bytes: u64) -> u64 {
        let time = self.time_ns(bytes);
        let sent = now_ns.max(self.egress_free_ns[from]);
        let received = sent.max(self.ingress_free_ns[to]);
        self.egress_free_ns[from] = sent + time;
        self.ingress_free_ns[to] = received + time;
        self.busy_ns += time;
        received + time
    }

    /// The time for which senders were busy, over all of them, nanoseconds.
    pub(crate) const fn busy_ns(&self) -> u64 {
        self.busy_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_are_waited_for_and_the_sender_is_free_while_its_receiver_is_busy() {
        let mut network = Network::new(4, 1e9);
        assert_eq!(network.send(0, 0, 1, 100), 100);
        assert_eq!(network.send(0, 2, 1, 100), 200, "the receiver takes one after the other");
        assert_eq!(network.send(0, 2, 3, 100), 200, "the sender was free from 100 on");
        assert_eq!(network.send(500, 0, 1, 0), 500);
        assert_eq!(network.busy_ns(), 300);
    }
}
