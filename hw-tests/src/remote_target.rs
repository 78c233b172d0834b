//! A target in another process, on another machine, behind the interface of a local one: the conformance
//! suite runs between two hosts.
//!
//! ```text
//!   suite ── SyncedInitiator ── transport ════ the fabric under test ════ transport ── serve
//!     │             │                                                         │          │
//!     └─ RemoteTarget ── Link ────────── management: one TCP connection ──────┴──────────┘
//!                        └ mirrors of the target's memory
//! ```
//!
//! The suite writes and reads the target's memory directly, so each of its buffers has a mirror in the
//! target's process, and a change of one is copied to the other: changes here before a batch is submitted and
//! before the target is polled, changes there before the clock of the test advances and after completions
//! here. Nothing allocates while a transport is polled, because the suite counts allocations.
#![allow(unsafe_code, reason = "passes on what the caller of `Memory::register` promises")]

mod pair;

pub(crate) use pair::{RemotePair, TargetProcess};

use crate::sys::{Mirror, Pages};
use anyhow::{Context as _, Result, ensure};
use std::cell::RefCell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::rc::Rc;
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Instant, MemSpan, Memory,
    MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};

/// Longest payload in either direction, bytes.
const PAYLOAD_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of buffers per target.
const MIRRORS_MAX: usize = 64;

/// A transport that can be made to lose its connections.
pub(crate) trait Severable: Transport {
    /// Closes every connection.
    fn sever(&mut self);
}

impl<V: te_rdma::verbs::Verbs> Severable for te_rdma::RdmaTransport<V> {
    fn sever(&mut self) {
        self.close_connections();
    }
}

/// The kind of a request, sent as its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Request {
    /// Allocates a buffer: its length in bytes.
    Mirror,
    /// Registers a buffer: region, mirror and access rights.
    Register,
    /// Deregisters a region.
    Deregister,
    /// Exports a region: region and longest export in bytes.
    Export,
    /// Polls the transport once.
    Poll,
    /// Bytes that changed at the suite: mirror and offset; the payload is the bytes.
    Poke,
    /// Requests the bytes that changed at the target: mirror.
    Pull,
    /// `Transport::is_connected`: peer.
    IsConnected,
    /// `Transport::expel`: peer, and 1 for `ExpelMode::Force`.
    Expel,
    /// Closes every connection.
    Sever,
}

const REQUESTS: [Request; 10] = [
    Request::Mirror,
    Request::Register,
    Request::Deregister,
    Request::Export,
    Request::Poll,
    Request::Poke,
    Request::Pull,
    Request::IsConnected,
    Request::Expel,
    Request::Sever,
];

/// Error kinds in the order of their numbers in an answer, which count from 1. A kind that is not in this
/// list arrives as `System`.
const KINDS: [ErrorKind; 9] = [
    ErrorKind::InvalidArgument,
    ErrorKind::NotFound,
    ErrorKind::Stale,
    ErrorKind::OutOfRange,
    ErrorKind::AccessDenied,
    ErrorKind::Busy,
    ErrorKind::Full,
    ErrorKind::Unsupported,
    ErrorKind::System,
];

/// The head of a message: four numbers and the length of the payload that follows.
fn words(bytes: &[u8; 40]) -> [u64; 5] {
    let mut words = [0; 5];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut whole = [0; 8];
        whole.copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    words
}

fn send(stream: &mut TcpStream, words: [u64; 4], payload: &[u8]) -> std::io::Result<()> {
    let mut head = [0; 40];
    let all = words.into_iter().chain([payload.len() as u64]);
    for (bytes, word) in head.chunks_exact_mut(8).zip(all) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    stream.write_all(&head)?;
    stream.write_all(payload)
}

fn receive(stream: &mut TcpStream) -> std::io::Result<[u64; 5]> {
    let mut head = [0; 40];
    stream.read_exact(&mut head)?;
    Ok(words(&head))
}

/// The connection to a target in another process, and the mirrors of its memory.
pub(crate) struct Link {
    stream: TcpStream,
    mirrors: Vec<Mirror>,
}

impl Link {
    /// A link over `stream`, at whose other end [`serve`] runs.
    ///
    /// # Errors
    /// When the stream does not accept its options.
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, mirrors: Vec::new() })
    }

    /// Replaces the connection after the target has been started again, with nothing registered.
    ///
    /// # Errors
    /// When the new process does not answer.
    pub(crate) fn renew(&mut self, stream: TcpStream) -> Result<()> {
        stream.set_nodelay(true)?;
        self.stream = stream;
        for index in 0..self.mirrors.len() {
            self.mirrors[index].forget();
            let bytes = self.mirrors[index].span().len() as u64;
            self.request(Request::Mirror, [bytes, 0, 0], &[], &mut [])
                .ok()
                .context("the mirror of a buffer")?;
        }
        self.push();
        Ok(())
    }

    /// Copies what changed here to the target.
    fn push(&mut self) {
        for (index, mirror) in self.mirrors.iter_mut().enumerate() {
            if let Some((at, bytes)) = mirror.changed() {
                let sent = send(&mut self.stream, [Request::Poke as u64, index as u64, at as u64, 0], bytes);
                let answer = sent.and_then(|()| receive(&mut self.stream));
                assert!(answer.is_ok_and(|answer| answer[0] == 0), "the target's process is gone");
            }
        }
    }

    /// Copies what changed here to the target, and what changed there to here.
    pub(crate) fn sync(&mut self) {
        self.push();
        for (index, mirror) in self.mirrors.iter_mut().enumerate() {
            let sent = send(&mut self.stream, [Request::Pull as u64, index as u64, 0, 0], &[]);
            let answer = sent.and_then(|()| receive(&mut self.stream));
            let Ok([0, at, _, _, len]) = answer else { panic!("the target's process is gone") };
            let range = at as usize..(at + len) as usize;
            if len > 0 {
                let room = mirror.room(range.clone()).map(|room| self.stream.read_exact(room));
                assert!(
                    matches!(room, Some(Ok(()))),
                    "the target's process is gone or violates the protocol"
                );
                mirror.apply(range);
            }
        }
    }

    /// Sends a request and waits for its answer: the value, and how many bytes of `out` were filled.
    fn request(
        &mut self,
        kind: Request,
        words: [u64; 3],
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(u64, usize), Error> {
        let gone = |_| Error::new(ErrorKind::PeerDead);
        let [a, b, c] = words;
        send(&mut self.stream, [kind as u64, a, b, c], payload).map_err(gone)?;
        let [status, value, .., len] = receive(&mut self.stream).map_err(gone)?;
        let room = out.get_mut(..len as usize).ok_or(ErrorKind::Protocol)?;
        self.stream.read_exact(room).map_err(gone)?;
        match status {
            0 => Ok((value, len as usize)),
            number => {
                let kind = KINDS.get(number as usize - 1).copied();
                Err(Error::with_code(kind.unwrap_or(ErrorKind::System), value as i32))
            }
        }
    }

    /// Closes the connection, which ends [`serve`]. A process on another machine is killed instead.
    #[cfg(test)]
    pub(crate) fn close(&self) {
        // The target may have closed it already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Makes the target close its connections.
    pub(crate) fn sever(&mut self) {
        let severed = self.request(Request::Sever, [0; 3], &[], &mut []);
        assert!(severed.is_ok(), "the target's process is gone");
    }
}

/// The target, as the suite sees it.
pub(crate) struct RemoteTarget {
    link: Rc<RefCell<Link>>,
    capabilities: Capabilities,
}

impl RemoteTarget {
    /// The target at the other end of `link`.
    pub(crate) fn new(link: Rc<RefCell<Link>>, capabilities: Capabilities) -> Self {
        Self { link, capabilities }
    }

    fn request(&self, kind: Request, words: [u64; 3]) -> Result<u64, Error> {
        let mut link = self.link.borrow_mut();
        link.push();
        let (value, _) = link.request(kind, words, &[], &mut [])?;
        link.sync();
        Ok(value)
    }
}

const fn name_of(id: RegionId) -> u64 {
    (id.index as u64) << 32 | id.generation as u64
}

const fn region_of(name: u64) -> RegionId {
    RegionId::new((name >> 32) as u32, name as u32)
}

impl Memory for RemoteTarget {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // The CPU reads what is mirrored.
        span.require(MemoryKinds::HOST)?;
        let mirror = {
            let mut link = self.link.borrow_mut();
            let known = link
                .mirrors
                .iter()
                .position(|known| known.span().as_ptr() == span.as_ptr() && known.span().len() == span.len());
            match known {
                Some(known) => known,
                None => {
                    link.request(Request::Mirror, [span.len() as u64, 0, 0], &[], &mut [])?;
                    // SAFETY: the suite keeps its buffers until the pair is gone, and accesses them by
                    // volatile copies alone.
                    link.mirrors.push(unsafe { Mirror::new(span) });
                    link.mirrors.len() - 1
                }
            }
        };
        self.request(Request::Register, [name_of(id), mirror as u64, u64::from(access.bits())]).map(|_| ())
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.request(Request::Deregister, [name_of(id), 0, 0]).map(|_| ())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let room = out.len() as u64;
        let (_, len) = self.link.borrow_mut().request(Request::Export, [name_of(id), room, 0], &[], out)?;
        Ok(len)
    }

    fn attach(&mut self, _id: RemoteRegionId, _blob: &[u8]) -> Result<(), Error> {
        Err(ErrorKind::Unsupported.into())
    }

    fn detach(&mut self, _id: RemoteRegionId) -> Result<(), Error> {
        Err(ErrorKind::Unsupported.into())
    }
}

impl Transport for RemoteTarget {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn submit(&mut self, _batch: &[Slice]) -> Result<usize, Error> {
        Err(ErrorKind::Unsupported.into())
    }

    fn poll(&mut self, _now: Instant, _out: &mut [Completion]) -> usize {
        let polled = self.request(Request::Poll, [0; 3]);
        assert!(polled.is_ok(), "the target's process is gone");
        0
    }

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn event_source(&self) -> Option<EventSource> {
        None
    }

    fn cancel(&mut self, _token: Token) -> Result<(), Error> {
        Err(ErrorKind::NotFound.into())
    }

    fn fence(&mut self, _token: Token, _region: RemoteRegionId) -> Result<(), Error> {
        Err(ErrorKind::Unsupported.into())
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.request(Request::IsConnected, [peer, 0, 0]).is_ok_and(|value| value == 1)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.request(Request::Expel, [peer, u64::from(mode == ExpelMode::Force), 0]).map(|value| value == 1)
    }
}

/// The initiator, which keeps the mirrors up to date.
pub(crate) struct SyncedInitiator<T> {
    pub(crate) transport: T,
    link: Rc<RefCell<Link>>,
    /// Whether the target's process runs.
    pub(crate) linked: bool,
}

impl<T: Transport> SyncedInitiator<T> {
    /// `transport`, whose target is at the other end of `link`.
    pub(crate) fn new(transport: T, link: Rc<RefCell<Link>>) -> Self {
        Self { transport, link, linked: true }
    }
}

impl<T: Transport> Memory for SyncedInitiator<T> {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.transport.register(id, span, access) }
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.transport.deregister(id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.transport.export(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.transport.attach(id, blob)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.transport.detach(id)
    }
}

impl<T: Transport> Transport for SyncedInitiator<T> {
    fn name(&self) -> &'static str {
        self.transport.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.transport.capabilities()
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        if self.linked {
            self.link.borrow_mut().push();
        }
        self.transport.submit(batch)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        let count = self.transport.poll(now, out);
        if count > 0 && self.linked {
            self.link.borrow_mut().sync();
        }
        count
    }

    fn poll_at(&self) -> Option<Instant> {
        self.transport.poll_at()
    }

    fn event_source(&self) -> Option<EventSource> {
        self.transport.event_source()
    }

    fn activity(&self) -> u64 {
        self.transport.activity()
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.transport.cancel(token)
    }

    fn fence(&mut self, token: Token, region: RemoteRegionId) -> Result<(), Error> {
        self.transport.fence(token, region)
    }
}

/// The state of a target's process: the transport, and the mirrors of the suite's buffers.
struct Served<T> {
    // Dropped before the memory that it refers to.
    transport: T,
    mirrors: Vec<Mirror>,
    pages: Vec<Pages>,
    start: std::time::Instant,
}

/// Carries out the requests of the suite's process until it closes the connection.
///
/// # Errors
/// When a request is malformed.
pub(crate) fn serve(mut stream: TcpStream, transport: impl Severable) -> Result<()> {
    stream.set_nodelay(true)?;
    let start = std::time::Instant::now();
    let mut served = Served { transport, mirrors: Vec::new(), pages: Vec::new(), start };
    let mut export = Vec::new();
    loop {
        let Ok([number, a, b, c, len]) = receive(&mut stream) else { return Ok(()) };
        ensure!(len <= PAYLOAD_BYTES_MAX, "a payload of {len} bytes is longer than {PAYLOAD_BYTES_MAX}");
        let kind = REQUESTS.get(number as usize);
        let kind = *kind.with_context(|| format!("no request has the number {number}"))?;
        match kind {
            Request::Poke => {
                let mirror = served.mirrors.get_mut(a as usize).with_context(|| format!("no buffer {a}"))?;
                let range = b as usize..(b + len) as usize;
                stream.read_exact(
                    mirror.room(range.clone()).context("a range beyond the end of the buffer")?,
                )?;
                mirror.apply(range);
                send(&mut stream, [0; 4], &[])?;
            }
            Request::Pull => {
                let mirror = served.mirrors.get_mut(a as usize).with_context(|| format!("no buffer {a}"))?;
                let (at, bytes) = mirror.changed().unwrap_or_default();
                send(&mut stream, [0, at as u64, 0, 0], bytes)?;
            }
            Request::Export => {
                export.resize((b as usize).min(PAYLOAD_BYTES_MAX as usize), 0);
                match served.transport.export(region_of(a), &mut export) {
                    Ok(bytes) => send(&mut stream, [0; 4], &export[..bytes])?,
                    Err(error) => send(&mut stream, [number_of(error), error.code as u64, 0, 0], &[])?,
                }
            }
            _ => match served.answer(kind, a, b, c) {
                Ok(value) => send(&mut stream, [0, value, 0, 0], &[])?,
                Err(error) => send(&mut stream, [number_of(error), error.code as u64, 0, 0], &[])?,
            },
        }
    }
}

fn number_of(error: Error) -> u64 {
    KINDS.iter().position(|kind| *kind == error.kind).unwrap_or(KINDS.len() - 1) as u64 + 1
}

impl<T: Severable> Served<T> {
    fn answer(&mut self, kind: Request, a: u64, b: u64, c: u64) -> Result<u64, Error> {
        match kind {
            Request::Mirror => {
                let fits = a <= PAYLOAD_BYTES_MAX && self.mirrors.len() < MIRRORS_MAX;
                let pages = Pages::new(a as usize).filter(|_| fits).ok_or(ErrorKind::InvalidArgument)?;
                // SAFETY: the pages live in the same struct as the mirror, and are accessed by volatile
                // copies alone.
                self.mirrors.push(unsafe { Mirror::new(pages.span()) });
                self.pages.push(pages);
                Ok(0)
            }
            Request::Register => {
                let span = self.pages.get(b as usize).ok_or(ErrorKind::NotFound)?.span();
                let access = Access::from_bits_truncate(c as u8);
                // SAFETY: the pages outlive the transport (field order), and no reference to them exists.
                unsafe { self.transport.register(region_of(a), span, access) }.map(|()| 0)
            }
            Request::Deregister => self.transport.deregister(region_of(a)).map(|()| 0),
            Request::Poll => {
                let now = Instant::ZERO + self.start.elapsed();
                Ok(self.transport.poll(now, &mut []) as u64)
            }
            Request::IsConnected => Ok(u64::from(self.transport.is_connected(a))),
            Request::Expel => {
                let mode = if b == 1 { ExpelMode::Force } else { ExpelMode::SpareConnected };
                self.transport.expel(a, mode).map(u64::from)
            }
            Request::Sever => {
                self.transport.sever();
                Ok(0)
            }
            Request::Poke | Request::Pull | Request::Export => Err(ErrorKind::Unsupported.into()),
        }
    }
}

#[cfg(test)]
mod unit {
    use super::*;
    use std::net::{SocketAddr, TcpListener};
    use std::thread::JoinHandle;
    use std::time::Duration;
    use te_core::testkit::{Harness, Pair, Verdict, cases, run_case};
    use te_fabric::testkit::EndsConfig;
    use te_tcp::{Config, TcpTransport};

    impl Severable for TcpTransport {
        fn sever(&mut self) {
            self.close_connections();
        }
    }

    fn config() -> Config {
        Config {
            peer_silence_ms_max: 2_000,
            connect_ms_max: 2_000,
            slice_bytes_max: 16 << 20,
            ..Config::default()
        }
    }

    /// A target on another thread.
    struct Thread {
        bind: SocketAddr,
        process: Option<JoinHandle<Result<()>>>,
    }

    impl TargetProcess for Thread {
        type Transport = TcpTransport;

        fn start(&mut self) -> Result<TcpStream> {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let stream = TcpStream::connect(listener.local_addr()?)?;
            let (theirs, _) = listener.accept()?;
            let transport = TcpTransport::new(Config { bind: self.bind, ..config() })?;
            self.bind = transport.local_address();
            self.process = Some(std::thread::spawn(move || serve(theirs, transport)));
            Ok(stream)
        }

        fn kill(&mut self, link: &Link) -> Result<()> {
            // `serve` returns at the end of the stream.
            link.close();
            self.process.take().map_or(Ok(()), |process| process.join().expect("no panic"))
        }

        fn identity(transport: &TcpTransport) -> u64 {
            transport.identity()
        }
    }

    /// Pairs whose target is accessible only through a link.
    struct Linked;

    impl Harness for Linked {
        fn pair(&mut self) -> Box<dyn Pair + '_> {
            let mut thread = Thread { bind: "127.0.0.1:0".parse().expect("an address"), process: None };
            let stream = thread.start().expect("a target");
            let initiator = TcpTransport::new(config()).expect("an initiator");
            let ends = EndsConfig { patience: Duration::from_secs(60), late_max: Duration::from_millis(20) };
            Box::new(RemotePair::new(initiator, stream, thread, ends).expect("a link"))
        }
    }

    #[test]
    fn the_suite_passes_with_a_target_in_another_process() {
        let mut run = 0;
        for case in cases() {
            let verdict = run_case(case.name, &mut Linked);
            if let Verdict::Skipped(reason) = verdict {
                println!("{}: skipped: {reason}", case.name);
            } else {
                run += 1;
            }
        }
        assert!(run > 40, "{run} cases ran");
    }

    #[test]
    fn a_malformed_request_ends_the_server() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let requests: [[u64; 5]; 4] =
            [[99, 0, 0, 0, 0], [5, 7, 0, 0, 0], [6, 7, 0, 0, 0], [0, 0, 0, 0, u64::MAX]];
        for request in requests {
            let mut stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
            let (theirs, _) = listener.accept().expect("connected");
            let transport = TcpTransport::new(config()).expect("a target");
            let bytes: Vec<u8> = request.iter().flat_map(|word| word.to_le_bytes()).collect();
            stream.write_all(&bytes).expect("sent");
            assert!(serve(theirs, transport).is_err(), "{request:?}");
        }
    }
}
