//! A connection to the master for raw frames.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use store_core::message::{Greeting, Hello, Operation};
use store_core::wire::HEADER_BYTES;
use store_core::{Frame, WireError};

const PATIENCE: Duration = Duration::from_secs(10);
/// Longest answer that is read, bytes.
const ANSWER_BYTES_MAX: usize = 8 << 20;

pub(crate) struct Raw {
    stream: TcpStream,
    id: u64,
}

/// A whole frame, as it was received.
pub(crate) struct Answer(Vec<u8>);

impl Raw {
    /// Connects and sends a greeting without any proof.
    pub(crate) fn dial(master: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&master, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut this = Self { stream, id: 0 };
        this.ask::<Hello>(&Greeting::default(), std::iter::empty())?;
        Ok(this)
    }

    pub(crate) fn ask<'a, O: Operation>(
        &mut self,
        request: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'a>>,
    ) -> io::Result<Answer> {
        let mut out = Vec::new();
        self.id += 1;
        O::encode_request(&mut out, self.id, request, items).map_err(no_frame)?;
        self.send(&out)?;
        self.receive()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    pub(crate) fn receive(&mut self) -> io::Result<Answer> {
        let mut bytes = vec![0; HEADER_BYTES];
        self.stream.read_exact(&mut bytes)?;
        let mut length = [0; 4];
        length.copy_from_slice(&bytes[HEADER_BYTES - 4..]);
        let length = u32::from_le_bytes(length) as usize;
        if length > ANSWER_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        bytes.resize(HEADER_BYTES + length, 0);
        self.stream.read_exact(&mut bytes[HEADER_BYTES..])?;
        Ok(Answer(bytes))
    }
}

impl Answer {
    pub(crate) fn frame(&self) -> io::Result<Frame<'_>> {
        let parsed = Frame::parse(&self.0).map_err(no_frame)?;
        parsed.map(|(frame, _)| frame).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

fn no_frame(error: WireError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{error:?}"))
}
