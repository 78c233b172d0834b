//! Stand-ins for the masters of one store: each listens, and either forwards to a real master as the one that
//! leads, or behaves as one that does not lead, hangs, or is dead.
//!
//! Several that forward to the same master have the same state, as the masters of one lineage do.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use store_core::message::{Hello, Kind, NotLeader, Operation, Welcome, encode_not_leader};
use store_core::{Frame, FrameBuffer};

/// What a front does with requests.
#[derive(Clone, Debug)]
pub(crate) enum Mode {
    /// Forwards to this master, and welcomes with this term.
    Leads { master: SocketAddr, term: u64 },
    /// Answers that it does not lead.
    Follows { lineage: u64, term: u64, leader: Option<String> },
    /// Reads, and answers nothing.
    Silent,
    /// Closes every connection.
    Dead,
}

/// When a front dies by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dies {
    /// When it has read a request of this kind, which it does not forward.
    Before(Kind),
    /// When the master has carried out a request of this kind, before the answer is sent.
    After(Kind),
}

/// A stand-in for a master.
pub(crate) struct Front {
    pub(crate) addr: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    mode: Mutex<Mode>,
    dies: Mutex<Option<Dies>>,
    /// Closes new connections, and keeps those that there are.
    refuses: AtomicBool,
    /// Requests that were read, by kind.
    seen: Mutex<BTreeMap<u8, u64>>,
}

impl Front {
    pub(crate) fn new(mode: Mode) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            mode: Mutex::new(mode),
            dies: Mutex::default(),
            refuses: AtomicBool::new(false),
            seen: Mutex::default(),
        });
        let of = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, of) = (stream.unwrap(), Arc::clone(&of));
                if !of.refuses.load(Ordering::Acquire) && !matches!(of.mode(), Mode::Dead) {
                    thread::spawn(move || serve(stream, &of));
                }
            }
        });
        Self { addr, shared }
    }

    pub(crate) fn leads(master: SocketAddr, term: u64) -> Self {
        Self::new(Mode::Leads { master, term })
    }

    pub(crate) fn set(&self, mode: Mode) {
        *self.shared.mode.lock().unwrap() = mode;
    }

    pub(crate) fn dies(&self, dies: Dies) {
        *self.shared.dies.lock().unwrap() = Some(dies);
    }

    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.shared.mode(), Mode::Dead)
    }

    pub(crate) fn refuse_new_connections(&self) {
        self.shared.refuses.store(true, Ordering::Release);
    }

    /// Number of requests of a kind that it has read.
    pub(crate) fn seen(&self, kind: Kind) -> u64 {
        self.shared.seen.lock().unwrap().get(&(kind as u8)).copied().unwrap_or(0)
    }
}

impl Shared {
    fn mode(&self) -> Mode {
        self.mode.lock().unwrap().clone()
    }

    fn dies(&self, now: impl Fn(Dies) -> bool) -> bool {
        let due = self.dies.lock().unwrap().is_some_and(now);
        if due {
            *self.mode.lock().unwrap() = Mode::Dead;
        }
        due
    }
}

/// Serves one connection. `None`: it ended.
fn serve(mut client: TcpStream, of: &Shared) -> Option<()> {
    client.set_read_timeout(Some(Duration::from_millis(5))).ok()?;
    client.set_nodelay(true).ok()?;
    let mut master: Option<TcpStream> = None;
    let (mut requests, mut answers) = (FrameBuffer::new(), FrameBuffer::new());
    loop {
        let mode = of.mode();
        if matches!(mode, Mode::Dead) {
            return None;
        }
        let Some((frame, len)) = requests.peek_frame().ok()? else {
            match client.read(requests.spare_mut(64 << 10)) {
                Ok(0) => return None,
                Ok(len) => requests.filled(len),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return None,
            }
            continue;
        };
        let kind = Kind::from_byte(frame.header.kind)?;
        *of.seen.lock().unwrap().entry(kind as u8).or_default() += 1;
        let mut out = Vec::new();
        match mode {
            Mode::Leads { master: addr, term } => {
                if of.dies(|dies| dies == Dies::Before(kind)) {
                    return None;
                }
                let master = match &mut master {
                    Some(master) => master,
                    None => master.insert(TcpStream::connect(addr).ok()?),
                };
                let mut request = Vec::new();
                copy(&frame, false, &mut request);
                master.write_all(&request).ok()?;
                if kind != Kind::ReturnLeases {
                    answer(master, &mut answers, term, &mut out)?;
                }
                if of.dies(|dies| dies == Dies::After(kind)) {
                    return None;
                }
            }
            Mode::Follows { lineage, term, leader } => {
                let says = NotLeader { lineage, term, leader: leader.as_deref(), ..NotLeader::default() };
                if kind != Kind::ReturnLeases {
                    encode_not_leader(&mut out, kind as u8, frame.header.request_id, &says);
                }
            }
            Mode::Silent | Mode::Dead => {}
        }
        requests.consume(len);
        client.write_all(&out).ok()?;
    }
}

/// Reads one answer of the master, and gives welcomes this term.
fn answer(master: &mut TcpStream, answers: &mut FrameBuffer, term: u64, out: &mut Vec<u8>) -> Option<()> {
    loop {
        if let Some((frame, len)) = answers.peek_frame().ok()? {
            match Hello::decode_response(&frame) {
                Ok((welcome, _)) => {
                    let welcome = Welcome { term, ..welcome };
                    Hello::encode_response(out, frame.header.request_id, &welcome, std::iter::empty())
                        .ok()?;
                }
                Err(_) => copy(&frame, true, out),
            }
            answers.consume(len);
            return Some(());
        }
        match master.read(answers.spare_mut(64 << 10)).ok()? {
            0 => return None,
            len => answers.filled(len),
        }
    }
}

fn copy(frame: &Frame<'_>, response: bool, out: &mut Vec<u8>) {
    let mut writer = store_core::FrameWriter::begin(out, &store_core::Header { response, ..frame.header });
    writer.body().extend_from_slice(frame.body);
    writer.finish().unwrap();
}
