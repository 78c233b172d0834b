//! A follower of KV events.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use conductor_core::events::{Batch, Decoder, Dialect, Event, Source};
use conductor_core::zmtp::{self, Connection, Kind, Limits};
use te_core::Instant;

use super::connect;

/// A ZeroMQ socket over one blocking connection.
pub(crate) struct Socket {
    pub(crate) stream: TcpStream,
    pub(crate) zmtp: Connection,
}

impl Socket {
    pub(crate) fn connect(addr: SocketAddr, kind: Kind) -> Self {
        let mut zmtp = Connection::new(kind, Limits::default(), b"", Instant::ZERO);
        if kind == Kind::Sub {
            zmtp.subscribe(b"");
        }
        let mut this = Self { stream: connect(addr), zmtp };
        while !this.zmtp.is_open() {
            this.flush();
            let len = this.stream.read(this.zmtp.space()).unwrap();
            assert!(len > 0, "the publisher closed the connection");
            this.zmtp.filled(Instant::ZERO, len);
            while this.zmtp.next().unwrap().is_some() {}
        }
        this.flush();
        this
    }

    pub(crate) fn flush(&mut self) {
        let output = self.zmtp.output().to_vec();
        self.stream.write_all(&output).unwrap();
        self.zmtp.wrote(output.len());
    }

    /// The last two parts of the next message: number and payload.
    pub(crate) fn receive(&mut self) -> (u64, Vec<u8>) {
        loop {
            while let Some(event) = self.zmtp.next().unwrap() {
                if let zmtp::Event::Message(message) = event {
                    let parts: Vec<&[u8]> = message.iter().collect();
                    let [.., number, payload] = *parts else { panic!("{parts:?}") };
                    return (u64::from_be_bytes(number.try_into().unwrap()), payload.to_vec());
                }
            }
            self.flush();
            let len = self.stream.read(self.zmtp.space()).unwrap();
            assert!(len > 0, "the publisher closed the connection");
            self.zmtp.filled(Instant::ZERO, len);
        }
    }

    /// Asks for everything from a number on, and returns it.
    pub(crate) fn replay(&mut self, from: u64) -> Vec<(u64, Vec<u8>)> {
        assert_eq!(self.zmtp.send(&[b"", &from.to_be_bytes()]), zmtp::Sent::Queued);
        self.flush();
        let mut messages = Vec::new();
        loop {
            let message = self.receive();
            if message.0 == u64::MAX {
                return messages;
            }
            messages.push(message);
        }
    }
}

/// What a follower knows.
#[derive(Default)]
pub(crate) struct Follower {
    pub(crate) found: BTreeSet<(String, String)>,
    pub(crate) next: Option<u64>,
    pub(crate) cleared: u32,
}

impl Follower {
    pub(crate) fn take(&mut self, (number, payload): &(u64, Vec<u8>)) {
        let (mut decoder, mut batch) = (Decoder::new(Dialect::Mooncake), Batch::new());
        decoder.decode(payload, &mut batch).unwrap();
        for event in batch.events() {
            let place =
                |source: Source<'_>| (source.object.unwrap().to_owned(), source.medium.unwrap().to_owned());
            match event {
                Event::Stored(stored) => assert!(self.found.insert(place(stored.source))),
                Event::Removed(removed) => assert!(self.found.remove(&place(removed.source))),
                Event::Cleared(_) => {
                    self.found.clear();
                    self.cleared += 1;
                    self.next = None;
                }
            }
        }
        assert!(self.next.is_none_or(|next| next == *number), "{:?}, {number}", self.next);
        self.next = Some(number + 1);
    }

    pub(crate) fn keys(&self) -> Vec<&str> {
        self.found.iter().map(|(key, _)| &**key).collect()
    }
}
