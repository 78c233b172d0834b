//! Fences of an initiator, towards a target that the test plays: it answers when the test decides.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

use common::raw::export_of;
use common::{Node, REMOTE, eventually, write};
use te_core::{Completion, Memory, Token, Transport};
use te_tcp::Config;
use te_tcp::frame::{self, Header, Kind, PROTOCOL, Request, Step};
use zerocopy::IntoBytes;

/// The target's end of one connection.
struct Connection {
    stream: TcpStream,
    bytes: Vec<u8>,
    greeted: bool,
    writes: usize,
    /// The ids of the FENCE frames that have arrived.
    fences: Vec<u64>,
}

impl Connection {
    fn send(&mut self, parts: &[&[u8]]) {
        self.stream.write_all(&parts.concat()).unwrap();
    }

    fn receive(&mut self) {
        let mut more = [0; 4_096];
        loop {
            match self.stream.read(&mut more) {
                Ok(0) => break,
                Ok(count) => self.bytes.extend_from_slice(&more[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        while let Some(used) = self.take() {
            self.bytes.drain(..used);
        }
    }

    /// Takes in one frame; returns its length.
    fn take(&mut self) -> Option<usize> {
        if !self.greeted {
            let Step::Frame(_, used) = frame::parse_hello(&self.bytes).unwrap() else { return None };
            self.greeted = true;
            self.send(&[PROTOCOL.welcome(0, 5, 1 << 30).as_bytes()]);
            return Some(used);
        }
        let Step::Frame(request, head) = frame::parse_request(&self.bytes).unwrap() else { return None };
        match request {
            Request::Write { operations, .. } => {
                let payload: u64 = operations.iter().map(|operation| operation.len.get()).sum();
                let all = head + payload as usize;
                let whole = self.bytes.len() >= all;
                self.writes += usize::from(whole);
                whole.then_some(all)
            }
            Request::Fence { id, .. } => {
                self.fences.push(id);
                Some(head)
            }
            other => panic!("{other:?}"),
        }
    }
}

struct Target {
    listener: TcpListener,
    connections: Vec<Connection>,
}

impl Target {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { listener, connections: Vec::new() }
    }

    /// Polls both sides until `done` returns true.
    fn drive(&mut self, a: &mut Node, what: &str, done: impl Fn(&Self, &Node) -> bool) {
        eventually(what, || {
            a.poll();
            if let Ok((stream, _)) = self.listener.accept() {
                stream.set_nonblocking(true).unwrap();
                let connection =
                    Connection { stream, bytes: Vec::new(), greeted: false, writes: 0, fences: Vec::new() };
                self.connections.push(connection);
            }
            self.connections.iter_mut().for_each(Connection::receive);
            done(self, a)
        });
    }
}

#[test]
fn an_answer_from_before_a_connection_was_lost_ends_no_fence() {
    let config = Config { connections: 2, window_bytes_max: Some(4_096), ..common::config() };
    let mut target = Target::new();
    let mut a = common::node(config, 8_192);
    a.transport.attach(REMOTE, &export_of(&target.listener)).unwrap();

    // The first WRITE fills the window of the first connection, so the second WRITE opens another.
    a.submit(&[write(1, 0, 0, 4_096)]);
    target.drive(&mut a, "the first connection has a WRITE", |target, _| {
        target.connections.first().is_some_and(|connection| connection.writes == 1)
    });
    a.submit(&[write(2, 4_096, 0, 4_096)]);
    target.drive(&mut a, "the second connection has one", |target, _| {
        target.connections.get(1).is_some_and(|connection| connection.writes == 1)
    });
    a.transport.fence(Token(3), REMOTE).unwrap();
    target.drive(&mut a, "both connections have a FENCE", |target, _| {
        target.connections.iter().all(|connection| connection.fences.len() == 1)
    });

    // The second connection is lost. What the target has of it unread is not covered by the first FENCE,
    // which lists that connection as one in use.
    drop(target.connections.pop());
    target.drive(&mut a, "the first connection has another FENCE", |target, _| {
        target.connections[0].fences.len() == 2
    });
    let connection = &mut target.connections[0];
    let (first, second) = (connection.fences[0], connection.fences[1]);
    connection.send(&[Header::new(Kind::FenceAck, 0, 0, first).as_bytes()]);
    connection.send(&[Header::new(Kind::Ack, 0, 1, 0).as_bytes(), &0_u32.to_le_bytes()]);
    target.drive(&mut a, "the WRITE behind the answer has ended", |_, a| a.ended(1).is_some());
    assert_eq!(a.ended(3), None, "the target has not dropped the lost connection");

    target.connections[0].send(&[Header::new(Kind::FenceAck, 0, 0, second).as_bytes()]);
    target.drive(&mut a, "the fence has ended", |_, a| a.ended(3).is_some());
    assert_eq!(a.ended(3), Some(Completion::applied(Token(3))));
}
