//! Our NVMe/TCP transport, driven on the real clock, and a host whose every command a test chooses.

mod disk;
mod raw;
mod serve;
mod write_read;

pub(crate) use disk::{disk, read_direct, write_direct};
pub(crate) use raw::RawHost;
pub(crate) use serve::serve;
pub(crate) use write_read::{stoppable, write_read};

use anyhow::{Context as _, Result, bail, ensure};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use te_core::testkit::pattern;
use te_core::{Access, Completion, ErrorKind, Memory as _, Op, RegionId, Token, Transport as _};
use te_fabric::testkit::{Node, REMOTE, slice};
use te_nvmeof::{Config, Namespace, NvmeofTransport};

/// The region of an adopted range.
const ADOPTED: RegionId = RegionId::new(1, 1);
/// How long one operation may take where everything is emulated.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause after a poll that did nothing.
const PAUSE: Duration = Duration::from_micros(200);

/// The settings that tests begin with: short time limits.
pub(crate) fn config() -> Config {
    Config {
        peer_silence_ms_max: 2_000,
        keep_alive_ms: 1_000,
        quiesce_ms: 1_000,
        reconnect_ms_max: 500,
        ..Config::default()
    }
}

/// Settings for a test that does something else for seconds, in which nothing polls the transport.
pub(crate) fn patient() -> Config {
    Config { peer_silence_ms_max: 20_000, keep_alive_ms: 30_000, ..config() }
}

/// The namespace `nsid` of the subsystem `nqn` at `address`, with the identity that the target states.
///
/// # Errors
/// When the target does not answer, or has no such namespace.
pub(crate) fn find(address: SocketAddr, nqn: &str, nsid: u32) -> Result<Namespace> {
    let nguid = RawHost::connect(address, nqn)?.identity(nsid)?;
    let addresses = vec![address.ip()];
    Ok(Namespace { addresses, port: address.port(), nqn: nqn.to_owned(), nsid, nguid })
}

/// An initiator with memory of its own, and the remote region that it has attached.
pub(crate) struct Initiator {
    /// The transport and its memory.
    pub(crate) node: Node<NvmeofTransport>,
    token: u64,
}

impl Initiator {
    /// With `bytes` of local memory.
    ///
    /// # Errors
    /// When the transport does not open.
    pub(crate) fn open(config: Config, bytes: usize) -> Result<Self> {
        let transport = NvmeofTransport::new(config)?;
        Ok(Self { node: Node::with(transport, bytes, Access::LOCAL), token: 0 })
    }

    /// Adopts a range of a namespace, and attaches it; returns its export.
    ///
    /// # Errors
    /// When the adoption fails.
    pub(crate) fn adopt(&mut self, namespace: &Namespace, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
        self.begin_adoption(namespace, range)?;
        let give_up = Instant::now() + PATIENCE;
        while !self.end_adoption()? {
            ensure!(Instant::now() < give_up, "not within {PATIENCE:?}: the range is adopted");
            self.poll();
        }
        Ok(self.node.export_of(ADOPTED))
    }

    /// Begins to adopt a range.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) fn begin_adoption(
        &mut self,
        namespace: &Namespace,
        range: std::ops::Range<u64>,
    ) -> Result<()> {
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        Ok(self.node.transport.adopt(ADOPTED, namespace, range, access, 1)?)
    }

    /// Attaches the range once it is adopted; returns whether it is.
    ///
    /// # Errors
    /// When the adoption has failed.
    pub(crate) fn end_adoption(&mut self) -> Result<bool> {
        let mut blob = vec![0; 1_024];
        match self.node.transport.export(ADOPTED, &mut blob) {
            Ok(len) => {
                self.attach(&blob[..len])?;
                Ok(true)
            }
            Err(error) if error.kind == ErrorKind::Busy => Ok(false),
            Err(error) => Err(error).context("the adoption"),
        }
    }

    /// Attaches a region.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) fn attach(&mut self, blob: &[u8]) -> Result<()> {
        Ok(self.node.transport.attach(REMOTE, blob)?)
    }

    /// Polls until `holds` returns true.
    ///
    /// # Errors
    /// After `patience`.
    pub(crate) fn until(
        &mut self,
        what: &str,
        patience: Duration,
        mut holds: impl FnMut(&mut Node<NvmeofTransport>) -> bool,
    ) -> Result<()> {
        let give_up = Instant::now() + patience;
        while !holds(&mut self.node) {
            ensure!(Instant::now() < give_up, "not within {patience:?}: {what}; {:?}", self.node.transport);
            self.poll();
        }
        Ok(())
    }

    /// Polls for `time`.
    pub(crate) fn linger(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.poll();
        }
    }

    fn poll(&mut self) {
        let before = self.node.transport.activity();
        if self.node.poll() == 0 && self.node.transport.activity() == before {
            std::thread::sleep(PAUSE);
        }
    }

    /// Submits one slice; returns its token.
    ///
    /// # Errors
    /// When it is refused.
    pub(crate) fn begin(&mut self, op: Op, local: u64, remote: u64, len: u32) -> Result<u64> {
        self.token += 1;
        let accepted = self.node.transport.submit(&[slice(self.token, op, local, remote, len)])?;
        ensure!(accepted == 1, "the transport has no room");
        Ok(self.token)
    }

    /// Carries one slice out.
    ///
    /// # Errors
    /// When it is refused, or does not end. That it failed is in the completion.
    pub(crate) fn run(&mut self, op: Op, local: u64, remote: u64, len: u32) -> Result<Completion> {
        let token = self.begin(op, local, remote, len)?;
        self.ended(token)
    }

    /// Waits for the end of a slice or a fence.
    ///
    /// # Errors
    /// When it does not end.
    pub(crate) fn ended(&mut self, token: u64) -> Result<Completion> {
        self.until("a slice ends", PATIENCE, |node| node.ended(token).is_some())?;
        self.node.ended(token).context("it has ended")
    }

    /// Begins a fence; returns its token.
    ///
    /// # Errors
    /// The transport's.
    pub(crate) fn fence(&mut self) -> Result<u64> {
        self.token += 1;
        self.node.transport.fence(Token(self.token), REMOTE)?;
        Ok(self.token)
    }

    /// Writes the pattern of `seed`.
    ///
    /// # Errors
    /// When the slice fails.
    pub(crate) fn write(&mut self, seed: u64, remote: u64, len: u32) -> Result<()> {
        self.node.memory.set(0, &pattern(seed, len as usize));
        let ended = self.run(Op::Write, 0, remote, len)?;
        ended.result.with_context(|| format!("the write of {len} bytes at {remote}"))?;
        Ok(())
    }

    /// Reads, and compares with the pattern of `seed`.
    ///
    /// # Errors
    /// When the slice fails, or a byte differs.
    pub(crate) fn expect(&mut self, seed: u64, remote: u64, len: u32) -> Result<()> {
        self.node.memory.set(0, &vec![0; len as usize]);
        let ended = self.run(Op::Read, 0, remote, len)?;
        ended.result.with_context(|| format!("the read of {len} bytes at {remote}"))?;
        same(&self.node.memory.get(0, len as usize), seed)
    }
}

/// Compares bytes with the pattern of `seed`.
///
/// # Errors
/// When they differ.
pub(crate) fn same(bytes: &[u8], seed: u64) -> Result<()> {
    match bytes.iter().zip(pattern(seed, bytes.len())).position(|(found, expected)| *found != expected) {
        None => Ok(()),
        Some(at) => bail!("{} bytes differ from the pattern of seed {seed} from byte {at} on", bytes.len()),
    }
}
