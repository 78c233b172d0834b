//! One handshake: request, answer, and the end of the connection, which the client closes first.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use te_fabric::{Interest, Step};

use super::Desk;
use crate::frame;
use crate::server::Turn;

/// Bytes that are received at once.
const RECEIVE_BYTES: usize = 16 << 10;

pub(super) struct Session {
    stream: TcpStream,
    phase: Phase,
    deadline: Instant,
}

enum Phase {
    /// The request, as far as it has arrived.
    Asking(Vec<u8>),
    /// The answer, and how much of it was sent.
    Answering(Vec<u8>, usize),
    /// The answer was sent. The client closes first, so that it does not lose the answer.
    Closing,
}

impl Session {
    pub(super) const fn new(stream: TcpStream, deadline: Instant) -> Self {
        Self { stream, phase: Phase::Asking(Vec::new()), deadline }
    }

    pub(super) const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(super) const fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(super) const fn is_asking(&self) -> bool {
        matches!(self.phase, Phase::Asking(_))
    }

    /// Bytes of the request that were counted.
    pub(super) const fn buffered(&self) -> usize {
        match &self.phase {
            Phase::Asking(input) => input.len(),
            _ => 0,
        }
    }

    pub(super) fn drive(&mut self, desk: &mut Desk, now: Instant) -> Turn {
        loop {
            let step = match &self.phase {
                Phase::Asking(_) => self.ask(desk, now),
                Phase::Answering(..) => self.send(desk, now),
                Phase::Closing => match (&self.stream).read(&mut [0]) {
                    Err(error) if is_temporary(&error) => return Turn::Wait(Interest::READ),
                    // Closed, or a second request, which no client sends.
                    _ => return Turn::Close,
                },
            };
            match step {
                Ok(()) => {}
                Err(turn) => return turn,
            }
        }
    }

    /// Receives a part of the request; answers it when it is complete.
    fn ask(&mut self, desk: &mut Desk, now: Instant) -> Result<(), Turn> {
        let Phase::Asking(input) = &mut self.phase else { return Ok(()) };
        let mut bytes = [0; RECEIVE_BYTES];
        match (&self.stream).read(&mut bytes) {
            Ok(0) => return Err(Turn::Close),
            Ok(count) => {
                input.extend_from_slice(&bytes[..count]);
                if !desk.buffer(count) {
                    log::warn!("a handshake is closed: too many incomplete requests are under way");
                    return Err(Turn::Close);
                }
            }
            Err(error) if is_temporary(&error) => return Err(Turn::Wait(Interest::READ)),
            Err(_) => return Err(Turn::Close),
        }
        match frame::parse(input, desk.frame_bytes_max) {
            Ok(Step::Need(_)) => Ok(()),
            Ok(Step::Frame(request, _)) => {
                let answer = desk.answer(request);
                desk.buffered -= input.len();
                self.phase = Phase::Answering(answer.unwrap_or_default(), 0);
                self.deadline = now + desk.patience;
                match &self.phase {
                    Phase::Answering(answer, _) if answer.is_empty() => Err(Turn::Close),
                    _ => Ok(()),
                }
            }
            Err(error) => {
                log::debug!("a handshake is closed: {error}");
                Err(Turn::Close)
            }
        }
    }

    fn send(&mut self, desk: &Desk, now: Instant) -> Result<(), Turn> {
        let Phase::Answering(answer, sent) = &mut self.phase else { return Ok(()) };
        match (&self.stream).write(&answer[*sent..]) {
            Ok(count) => *sent += count,
            Err(error) if is_temporary(&error) => {
                return Err(Turn::Wait(Interest { readable: false, writable: true }));
            }
            Err(_) => return Err(Turn::Close),
        }
        if *sent == answer.len() {
            // This fails only when the connection is gone, which the next read reports.
            let _ = self.stream.shutdown(Shutdown::Write);
            self.phase = Phase::Closing;
            self.deadline = now + desk.patience;
        }
        Ok(())
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
