//! The bridge from Rust futures to asyncio.
//!
//! ```text
//!   the loop's thread                                     any thread, without the GIL
//!   future(f): polls f once, keeps it, returns an asyncio.Future
//!        │                                                     │ f is ready
//!        ▼                                                     ▼
//!   ┌─ Reactor ────────────┐     tokens, one eventfd      ┌─ Ring ────────────┐
//!   │ futures by token     │ ◄─────────────────────────── │ wake(token)       │
//!   └──────────────────────┘   add_reader: drain()        └───────────────────┘
//! ```
//!
//! There is no thread pool, and the thread that completes an operation does not need the GIL: it appends a
//! number and, if no other number waits, writes to an eventfd that the loop watches. So a burst of
//! completions wakes the loop once. [`DRAIN_MAX`] bounds what the loop does for them in one turn, so that a
//! thousand results do not keep its other tasks waiting.
//!
//! An operation whose `asyncio.Future` is cancelled is not awaited any more. If it has begun, it continues to
//! its end and keeps its buffers until then.

use std::collections::HashMap;
use std::future::Future;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use nix::sys::eventfd::{EfdFlags, EventFd};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyWeakrefReference;

/// Most futures that are completed in one turn of the loop.
const DRAIN_MAX: usize = 64;

/// What wakes the loop.
struct Ring {
    bell: EventFd,
    /// Tokens of futures that are ready.
    ready: Mutex<Vec<u64>>,
}

impl Ring {
    fn push(&self, token: u64) {
        let mut ready = self.lock();
        let is_first = ready.is_empty();
        ready.push(token);
        drop(ready);
        if is_first {
            // Fails only when the counter is full, and then the loop wakes anyway.
            let _ = self.bell.write(1);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Token {
    ring: Arc<Ring>,
    number: u64,
}

impl Wake for Token {
    fn wake(self: Arc<Self>) {
        self.ring.push(self.number);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring.push(self.number);
    }
}

/// A future whose output becomes a Python object.
trait Running: Send {
    fn poll(&mut self, py: Python<'_>, context: &mut Context<'_>) -> Poll<PyResult<Py<PyAny>>>;
}

struct Converting<F, C> {
    future: Pin<Box<F>>,
    convert: Option<C>,
}

impl<F, C> Running for Converting<F, C>
where
    F: Future + Send,
    C: FnOnce(Python<'_>, F::Output) -> PyResult<Py<PyAny>> + Send,
{
    fn poll(&mut self, py: Python<'_>, context: &mut Context<'_>) -> Poll<PyResult<Py<PyAny>>> {
        match self.future.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(output) => Poll::Ready(match self.convert.take() {
                Some(convert) => convert(py, output),
                None => Err(PyRuntimeError::new_err("a future was polled after its end")),
            }),
        }
    }
}

/// A future that the loop waits for.
struct Task {
    running: Box<dyn Running>,
    /// The `asyncio.Future`.
    future: Py<PyAny>,
    waker: Waker,
}

/// The futures of one event loop.
#[pyclass(frozen, weakref, module = "snowskin._native")]
pub(crate) struct Reactor {
    /// A weak reference: the loop holds the reactor.
    event_loop: Py<PyAny>,
    ring: Arc<Ring>,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    next: u64,
    by_token: HashMap<u64, Task>,
}

#[pymethods]
impl Reactor {
    /// Called by the loop when futures are ready.
    fn drain(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        // Nothing to read: called again for the rest of an earlier turn.
        let _ = this.ring.bell.read();
        let (tokens, is_rest) = {
            let mut ready = this.ring.lock();
            let count = ready.len().min(DRAIN_MAX);
            (ready.drain(..count).collect::<Vec<u64>>(), !ready.is_empty())
        };
        if is_rest {
            let again = slf.getattr(intern!(py, "drain"))?;
            let event_loop = this.event_loop.bind(py).call0()?;
            if !event_loop.is_none() {
                event_loop.call_method1(intern!(py, "call_soon"), (again,))?;
            }
        }
        for token in tokens {
            let task = this.lock().by_token.remove(&token);
            // What one future raises does not keep the others from being completed.
            if let Some(Err(error)) = task.map(|task| this.advance(py, token, task)) {
                error.write_unraisable(py, None);
            }
        }
        Ok(())
    }
}

impl Reactor {
    /// Polls a future, and completes its `asyncio.Future` if it is ready.
    fn advance(&self, py: Python<'_>, token: u64, mut task: Task) -> PyResult<()> {
        let future = task.future.clone_ref(py).into_bound(py);
        if future.call_method0(intern!(py, "done"))?.is_truthy()? {
            // It was cancelled.
            return Ok(());
        }
        let waker = task.waker.clone();
        match task.running.poll(py, &mut Context::from_waker(&waker)) {
            Poll::Pending => {
                self.lock().by_token.insert(token, task);
                Ok(())
            }
            Poll::Ready(Ok(value)) => future.call_method1(intern!(py, "set_result"), (value,)).map(drop),
            Poll::Ready(Err(error)) => {
                future.call_method1(intern!(py, "set_exception"), (error.into_value(py),)).map(drop)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An `asyncio.Future` of the running loop that completes with `running`. `convert` makes its value, on the
/// loop's thread.
///
/// # Errors
/// `RuntimeError` when no loop is running in this thread, or when the loop cannot watch a file descriptor;
/// what asyncio raises.
pub(crate) fn future<'py, F, C>(py: Python<'py>, running: F, convert: C) -> PyResult<Bound<'py, PyAny>>
where
    F: Future + Send + 'static,
    C: FnOnce(Python<'_>, F::Output) -> PyResult<Py<PyAny>> + Send + 'static,
{
    let event_loop = running_loop(py)?;
    let reactor = reactor_of(&event_loop)?;
    let this = reactor.get();
    let future = event_loop.call_method0(intern!(py, "create_future"))?;
    let token = {
        let mut tasks = this.lock();
        tasks.next += 1;
        tasks.next
    };
    let waker = Waker::from(Arc::new(Token { ring: Arc::clone(&this.ring), number: token }));
    let running = Box::new(Converting { future: Box::pin(running), convert: Some(convert) });
    this.advance(py, token, Task { running, future: future.clone().unbind(), waker })?;
    Ok(future)
}

/// Gives up a future that [`future`] made: an operation that has not begun does not begin. Does nothing for
/// other objects.
///
/// # Errors
/// As [`future`].
#[pyfunction]
pub(crate) fn abandon(future: &Bound<'_, PyAny>) -> PyResult<()> {
    let reactor = reactor_of(&running_loop(future.py())?)?;
    let task = {
        let mut tasks = reactor.get().lock();
        let found = tasks.by_token.iter().find(|(_, task)| task.future.is(future)).map(|(token, _)| *token);
        found.and_then(|token| tasks.by_token.remove(&token))
    };
    // Without the lock: what it holds is dropped here.
    drop(task);
    Ok(())
}

fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    RUNNING.import(py, "asyncio", "get_running_loop")?.call0()
}

/// The reactor of a loop; made, and watched by the loop, on first use.
fn reactor_of<'py>(event_loop: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Reactor>> {
    static REACTORS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = event_loop.py();
    let reactors = REACTORS
        .get_or_try_init(py, || {
            py.import("weakref")?.getattr("WeakKeyDictionary")?.call0().map(Bound::unbind)
        })?
        .bind(py);
    let known = reactors.call_method1(intern!(py, "get"), (event_loop,))?;
    if !known.is_none() {
        return Ok(known.cast_into::<Reactor>()?);
    }
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let bell = EventFd::from_flags(flags).map_err(std::io::Error::from)?;
    let descriptor = bell.as_fd().as_raw_fd();
    let reactor = Reactor {
        event_loop: PyWeakrefReference::new(event_loop)?.into_any().unbind(),
        ring: Arc::new(Ring { bell, ready: Mutex::new(Vec::new()) }),
        tasks: Mutex::default(),
    };
    let reactor = Bound::new(py, reactor)?;
    let drain = reactor.getattr(intern!(py, "drain"))?;
    event_loop.call_method1("add_reader", (descriptor, drain)).map_err(|error| {
        let refused = PyRuntimeError::new_err(
            "snowskin.aio needs an event loop with add_reader: asyncio's selector loop or uvloop",
        );
        refused.set_cause(py, Some(error));
        refused
    })?;
    reactors.set_item(event_loop, &reactor)?;
    Ok(reactor)
}
