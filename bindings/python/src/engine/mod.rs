//! `snowskin.Engine`: memory to memory, without the store.
//!
//! ```text
//!   Engine ── register, alloc ──▶ Region ─┐
//!      │ ──── open ─────────────▶ Peer ───┴── read_from, write_to, Batch ──▶ te_engine::Transfer
//!      ▼                        └── export_mooncake ──▶ te_mooncake::Service, the ports for Mooncake peers
//!   Shared: the engine until close(); cancels batches, then releases the regions' memory
//! ```

mod batch;
mod mooncake;
mod peer;
mod region;
mod shared;

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyModule, PyTuple};
use te_core::Access;
use te_engine::{Config, MetadataSource, TransferEngine};

use crate::errors::Fault;
use crate::options::{deadline, refused, size};
use crate::store::{address, rails, secret};
use crate::{gil, logging};
use batch::Batch;
use peer::Peer;
use region::{Region, remote_access};
use shared::{Handle, Shared};

/// How long `close` waits by default, seconds; the same in its signature.
const CLOSE_S: f64 = 2.0;

/// A transfer engine: reads and writes the memory of other processes, one-sided, over the nearest rail that
/// both have.
///
/// ``listen`` is the address of the control port, at which peers open this engine; ``advertise`` is the host
/// that they use, if that differs. ``rails`` is ``"auto"`` or names such as ``"shm,tcp"``; a rail that is
/// named must start. With ``cluster_secret`` only peers that have the same secret reach the memory; without
/// one, every process that reaches the control port does. ``metadata`` is ``"p2p"`` (peers are opened by
/// ``host:port``), or the address of a directory in which this engine is registered as ``name``:
/// ``"http://host:port/path"``, ``"redis://…"``, ``"etcd://…"``.
///
/// ``mooncake_bind`` and ``mooncake_peers`` open ports for engines of Mooncake: the IP address to listen on,
/// and the networks (``"10.0.0.0/24"``, or several) whose hosts may connect. These ports have no
/// authentication. Peers reach the regions that were exported with :meth:`Region.export_mooncake`, and no
/// others, under :attr:`mooncake_name`.
///
/// >>> with snowskin.Engine() as here, snowskin.Engine() as there:
/// ...     target = there.alloc(4096, remote="readwrite")
/// ...     peer = here.open(there.name)
/// ...     source = here.register(bytearray(b"kv cache"))
/// ...     _ = source.write_to(peer, target.addr).wait()
/// ...     bytes(target.memoryview[:8])
/// b'kv cache'
#[pyclass(frozen, weakref, module = "snowskin")]
pub(crate) struct Engine {
    shared: Arc<Shared>,
    name: String,
    mooncake_name: Option<String>,
}

/// A message of a peer.
#[pyclass(frozen, module = "snowskin")]
pub(crate) struct Notification {
    /// The kind of message, by a name on which the peers agree.
    #[pyo3(get)]
    name: String,
    message: Vec<u8>,
}

#[pymethods]
impl Notification {
    /// The message.
    #[getter]
    fn message<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.message)
    }

    fn __repr__(&self) -> String {
        format!("<snowskin.Notification name={:?} of {} bytes>", self.name, self.message.len())
    }
}

impl Engine {
    fn engine(&self, py: Python<'_>) -> PyResult<Handle<TransferEngine>> {
        self.shared.engine().map_err(|fault| fault.into_err(py))
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(
        signature = (*, listen="127.0.0.1:0", advertise=None, rails=None, cluster_secret=None, metadata="p2p", name=None, mooncake_bind=None, mooncake_peers=None, gpu_library=None),
        text_signature = "(*, listen='127.0.0.1:0', advertise=None, rails='auto', cluster_secret=None, metadata='p2p', name=None, mooncake_bind=None, mooncake_peers=None, gpu_library=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        listen: &str,
        advertise: Option<String>,
        rails: Option<&Bound<'_, PyAny>>,
        cluster_secret: Option<&Bound<'_, PyAny>>,
        metadata: &str,
        name: Option<String>,
        mooncake_bind: Option<&str>,
        mooncake_peers: Option<&Bound<'_, PyAny>>,
        gpu_library: Option<PathBuf>,
    ) -> PyResult<Self> {
        let mut config = Config { listen: address("listen", listen, py)?, ..Config::default() };
        config.advertise_host = advertise;
        config.gpu.cuda_library.clone_from(&gpu_library);
        config.gpu.hip_library = gpu_library;
        if let Some(named) = rails {
            config.fabrics = self::rails(named)?;
        }
        config.cluster_secret = secret("cluster_secret", cluster_secret)?;
        config.metadata.source =
            metadata.parse::<MetadataSource>().map_err(|error| refused(py, format!("metadata: {error}")))?;
        config.metadata.name = name;
        config.validate().map_err(|error| Fault::from(error).into_err(py))?;
        let mooncake = mooncake::config(py, mooncake_bind, mooncake_peers, &config)?;
        logging::update_level(py)?;
        let start = move || -> Result<_, Fault> {
            let service = mooncake.map(mooncake::start).transpose()?;
            Ok((TransferEngine::start(config)?, service))
        };
        let (engine, service) = gil::blocking(py, start)?.map_err(|fault| fault.into_err(py))?;
        let name = engine.name().to_owned();
        let mooncake_name = service.as_ref().map(|service| service.name().to_owned());
        Ok(Self { shared: Shared::new(engine, service), name, mooncake_name })
    }

    /// The name by which peers open this engine: ``host:port``.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The name by which engines of Mooncake open this engine: ``host:port``. ``None`` without
    /// ``mooncake_bind``.
    #[getter]
    fn mooncake_name(&self) -> Option<&str> {
        self.mooncake_name.as_deref()
    }

    /// Registers the memory of an object: anything with the buffer protocol, ``__dlpack__`` or
    /// ``__cuda_array_interface__``. Memory of a GPU moves over the fabrics that reach it, such as TCP, and
    /// has to be ready when a transfer begins. ``remote`` says what peers may do with it: ``None``,
    /// ``"read"``, ``"write"`` or ``"readwrite"``.
    ///
    /// The object's memory stays exported until the registration has ended.
    #[pyo3(signature = (buffer, *, remote=None))]
    fn register(&self, buffer: &Bound<'_, PyAny>, remote: Option<&str>) -> PyResult<Region> {
        Region::of(&self.shared, buffer, remote_access(buffer.py(), remote)?)
    }

    /// Allocates and registers zeroed memory, which processes on this host reach without a socket. ``nbytes``
    /// is a number or a text such as ``"64MiB"``. The region has the buffer protocol.
    ///
    /// In a child process after a fork this memory is not mapped: views of it must not be used there.
    #[pyo3(signature = (nbytes, *, remote=None))]
    fn alloc(&self, nbytes: &Bound<'_, PyAny>, remote: Option<&str>) -> PyResult<Region> {
        let py = nbytes.py();
        let len = size("nbytes", nbytes)?;
        let len = usize::try_from(len).map_err(|_| refused(py, format!("nbytes is too large: {len}")))?;
        let access = Access::LOCAL | remote_access(py, remote)?;
        let engine = self.engine(py)?;
        let region = gil::blocking(py, move || engine.alloc_shared(len, access))?;
        region
            .map(|region| Region::own(&self.shared, region))
            .map_err(|error| Fault::from(error).into_err(py))
    }

    /// Opens the engine called ``name``: ``host:port`` as its ``Engine.name`` says, or a name in the
    /// directory.
    fn open(&self, py: Python<'_>, name: String) -> PyResult<Peer> {
        let engine = self.engine(py)?;
        let asked = name.clone();
        let handle = gil::blocking(py, move || engine.open_segment(&asked))?;
        let handle = handle.map_err(|error| Fault::from(error).into_err(py))?;
        Ok(Peer::new(Arc::clone(&self.shared), name, handle))
    }

    /// A batch, to which requests can be added.
    fn batch(&self) -> Batch {
        Batch::new(Arc::clone(&self.shared))
    }

    /// The messages that peers have sent since the last call, those of Mooncake's engines last.
    fn notifications(&self, py: Python<'_>) -> PyResult<Vec<Notification>> {
        let taken = self.engine(py)?.take_notifications();
        let ours = taken.into_iter().map(|taken| (taken.name, taken.message));
        let theirs = self.shared.mooncake().map(|service| service.take_notifications()).unwrap_or_default();
        let theirs = theirs.into_iter().map(|taken| (taken.name, taken.message.into_bytes()));
        Ok(ours.chain(theirs).map(|(name, message)| Notification { name, message }).collect())
    }

    /// Counters of the engine, and of each rail under ``"rails"``.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine(py)?;
        let stats = gil::detached(py, || engine.stats());
        let dict = PyDict::new(py);
        dict.set_item("regions", stats.regions)?;
        dict.set_item("registered_bytes", stats.registered_bytes)?;
        dict.set_item("peers", stats.segments)?;
        dict.set_item("batches", stats.batches)?;
        dict.set_item("batches_timed_out", stats.batches_timed_out)?;
        dict.set_item("quarantined_batches", stats.quarantined_batches)?;
        dict.set_item("quarantined_bytes", stats.quarantined_bytes)?;
        let rails = PyList::empty(py);
        for rail in &stats.rails {
            let row = PyDict::new(py);
            row.set_item("name", rail.name)?;
            row.set_item("device", &rail.device)?;
            row.set_item("nbytes", rail.bytes)?;
            row.set_item("slices", rail.slices)?;
            row.set_item("errors", rail.errors)?;
            row.set_item("inflight_bytes", rail.inflight_bytes)?;
            row.set_item("paused", rail.paused)?;
            rails.append(row)?;
        }
        dict.set_item("rails", rails)?;
        Ok(dict)
    }

    /// Whether the engine was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Closes the engine: batches in flight are cancelled, and peers reach its memory no more. Returns
    /// whether that was over within ``timeout`` seconds; otherwise the rest happens in the background, and
    /// buffers stay exported until then.
    #[pyo3(signature = (timeout=2.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let until = deadline(py, Some(timeout))?;
        let slot = self.shared.close();
        Ok(gil::wait(py, &slot, until)?.is_some())
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, CLOSE_S).map(drop)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { " closed" } else { "" };
        format!("<snowskin.Engine {}{state}>", self.name)
    }

    /// An engine is not pickled: a process starts its own.
    fn __reduce__(&self) -> PyResult<()> {
        Err(pyo3::exceptions::PyTypeError::new_err(
            "an Engine cannot be pickled: start one in the other process, and open this one by its name",
        ))
    }
}

/// Adds the classes to the module.
///
/// # Errors
/// No memory.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_class::<Region>()?;
    module.add_class::<Peer>()?;
    module.add_class::<peer::RemoteRegion>()?;
    module.add_class::<Batch>()?;
    module.add_class::<batch::Report>()?;
    module.add_class::<Notification>()
}
