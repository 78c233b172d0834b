//! A local client's connection to its node: a handshake, then one request at a time.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use store_core::{FrameBuffer, WireError};
use te_host::BorrowedMemory;

use super::arena::Arena;
use super::client::LocalConfig;
use super::error::LocalError;
use super::protocol::{Answer, FRAME_BYTES_MAX, Request, VERSION, encode};

/// A connection to a node, and the memory that the node shares with it.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    input: FrameBuffer,
    pub(super) out: Vec<u8>,
    pub(super) arena: Arc<Arena>,
}

const READ_BYTES: usize = 16 << 10;

impl Connection {
    /// Connects, performs the handshake and maps the arena.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub(super) fn open(config: &LocalConfig) -> Result<Self, LocalError> {
        let failed = |source| LocalError::Connect { path: config.path.clone(), source };
        let mut stream = UnixStream::connect(&config.path).map_err(failed)?;
        check_peer(&stream, config)?;
        let deadline = Instant::now() + Duration::from_millis(config.connect_ms_max.into());
        let mut out = Vec::new();
        let hello =
            Request::Hello { version: VERSION, tenant: &config.tenant, arena_bytes: config.arena_bytes };
        encode(&mut out, 1, false, &hello)?;
        // A node that refuses this client sends the reason before it reads anything, and may have closed the
        // connection by now.
        let hung_up = match stream.write_all(&out) {
            Ok(()) => None,
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Some(error)
            }
            Err(error) => return Err(failed(error)),
        };
        let mut input = FrameBuffer::new();
        let (answer, lent) = match (greet(&stream, &mut input, deadline, config), hung_up) {
            (Err(LocalError::Lost { .. }), Some(error)) => return Err(failed(error)),
            (Err(LocalError::Lost { source }), None) => return Err(LocalError::Unanswered { source }),
            (greeted, _) => greeted?,
        };
        let arena_bytes = match answer {
            Answer::Welcome { arena_bytes } => arena_bytes,
            Answer::Refused(refusal) => return Err(LocalError::Refused(refusal)),
            _ => return Err(WireError::Body.into()),
        };
        let lent = lent.ok_or(LocalError::Wire(WireError::Body))?;
        let memory =
            BorrowedMemory::map(lent.as_fd(), arena_bytes).map_err(|source| LocalError::Map { source })?;
        stream.set_nonblocking(true).map_err(failed)?;
        out.clear();
        Ok(Self { stream, input, out, arena: Arc::new(Arena::new(memory)) })
    }

    /// Sends what is queued and waits for the answer to request `id`.
    pub(super) fn exchange(&mut self, id: u64, config: &LocalConfig) -> Result<Answer, LocalError> {
        let deadline = Instant::now() + Duration::from_millis(config.call_ms_max.into());
        self.send(deadline, config)?;
        let spin_end = Instant::now() + Duration::from_micros(config.spin_us.into());
        loop {
            if let Some(frame) = self.input.next_frame()? {
                // Only one request at a time is under way.
                if frame.header.request_id != id {
                    return Err(WireError::Body.into());
                }
                return Ok(Answer::decode(&frame)?);
            }
            if self.input.pending_bytes() > FRAME_BYTES_MAX {
                return Err(WireError::TooLong { bytes: self.input.pending_bytes() }.into());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(LocalError::TimedOut { call_ms_max: config.call_ms_max });
            }
            match self.stream.read(self.input.spare_mut(READ_BYTES)) {
                Ok(0) => return Err(lost(ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.input.filled(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if now < spin_end {
                        // The node may be waiting for this core.
                        thread::yield_now();
                    } else {
                        self.sleep(deadline - now)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
    }

    fn send(&mut self, deadline: Instant, config: &LocalConfig) -> Result<(), LocalError> {
        let mut written = 0;
        while written < self.out.len() {
            match self.stream.write(&self.out[written..]) {
                Ok(len) => written += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(LocalError::TimedOut { call_ms_max: config.call_ms_max });
                    }
                    thread::sleep(FULL_PAUSE);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
        self.out.clear();
        Ok(())
    }

    /// Sleeps until bytes arrive, at most `timeout`, and reads them.
    fn sleep(&mut self, timeout: Duration) -> Result<(), LocalError> {
        let stream = &mut self.stream;
        // A timeout of zero would wait without limit.
        stream.set_read_timeout(Some(timeout.max(Duration::from_micros(1)))).map_err(lost)?;
        stream.set_nonblocking(false).map_err(lost)?;
        let result = stream.read(self.input.spare_mut(READ_BYTES));
        stream.set_nonblocking(true).map_err(lost)?;
        match result {
            Ok(0) => Err(lost(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.filled(len);
                Ok(())
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(lost(error)),
        }
    }
}

/// Pause before the next try to write to a full socket.
const FULL_PAUSE: Duration = Duration::from_micros(50);

/// Refuses a node that runs as an untrusted user: it could read everything that this client stores.
fn check_peer(stream: &UnixStream, config: &LocalConfig) -> Result<(), LocalError> {
    let failed = |source| LocalError::Connect { path: config.path.clone(), source };
    let uid = te_host::peer_uid(stream.as_fd()).map_err(failed)?;
    if uid == 0 || uid == te_host::own_uid() || config.trusted_uids.contains(&uid) {
        return Ok(());
    }
    Err(LocalError::UntrustedUser { path: config.path.clone(), uid })
}

/// Waits for the answer to the hello. Returns it with the file descriptor that came with it.
fn greet(
    stream: &UnixStream,
    input: &mut FrameBuffer,
    deadline: Instant,
    config: &LocalConfig,
) -> Result<(Answer, Option<OwnedFd>), LocalError> {
    let mut lent = None;
    loop {
        if let Some(frame) = input.next_frame()? {
            return Ok((Answer::decode(&frame)?, lent));
        }
        if input.pending_bytes() > FRAME_BYTES_MAX {
            return Err(WireError::TooLong { bytes: input.pending_bytes() }.into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LocalError::TimedOut { call_ms_max: config.connect_ms_max });
        }
        stream.set_read_timeout(Some(left)).map_err(lost)?;
        match te_host::recv_with_fd(stream.as_fd(), input.spare_mut(READ_BYTES)) {
            Ok((0, _)) => return Err(lost(ErrorKind::UnexpectedEof.into())),
            Ok((len, fd)) => {
                input.filled(len);
                lent = lent.or(fd);
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(lost(error)),
        }
    }
}

pub(super) fn lost(source: io::Error) -> LocalError {
    LocalError::Lost { source }
}

/// Whether a process listens at this path.
pub(super) fn answers(path: &Path) -> bool {
    UnixStream::connect(path).is_ok()
}
