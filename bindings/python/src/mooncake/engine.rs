//! `TransferEngine`.
//!
//! Addresses are numbers, as in the interface that is replaced: the caller keeps the memory mapped, and does
//! not touch it while a transfer of it is under way. A call that waits has given the GIL back, and when it
//! returns, with whatever result, no transfer of it is under way any more.
#![allow(unsafe_code, reason = "callers pass memory by its address, and promise that it stays mapped")]

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyString, PyTuple};

use snowskin_compat::engine::{Copy, Engine, Notice, Session};
use te_core::Op;

use super::enums::{Enumeration as _, TransferOpcode};
use super::signature::{Arguments, Call, Parameter, Signature, default_of, python_methods};
use crate::gil;
use crate::lifecycle::{self, Registered};

/// What a failed submission is.
const NO_BATCH: u64 = 0;
const FAILED: i32 = -1;

/// A message that goes with a transfer, or that a peer has sent.
///
/// __init__(self) -> None
/// __init__(self, name: str, msg: str) -> None
#[pyclass(module = "mooncake.engine", get_all, set_all)]
#[derive(Clone, Debug, Default)]
pub(super) struct TransferNotify {
    /// The kind of message.
    name: String,
    /// Its body.
    msg: String,
}

#[pymethods]
impl TransferNotify {
    #[new]
    #[pyo3(signature = (*args, **kwargs), text_signature = "(name='', msg='')")]
    fn new(args: &Bound<'_, PyTuple>, kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        const EMPTY: Signature = Signature {
            name: "__init__",
            class: "mooncake.engine.TransferNotify",
            parameters: &[],
            rest_after: None,
            returns: "None",
        };
        const FULL: Signature = Signature {
            parameters: &[
                Parameter { name: "name", kind: "str", default: None },
                Parameter { name: "msg", kind: "str", default: None },
            ],
            ..EMPTY
        };
        if args.is_empty() && kwargs.is_none_or(|kwargs| kwargs.is_empty()) {
            return Ok(Self::default());
        }
        let call = Call { owner: args.as_any(), args, kwargs };
        let arguments = Arguments::bind(&[&EMPTY, &FULL], 1, call)?;
        Ok(Self { name: arguments.text(0)?, msg: arguments.text(1)? })
    }
}

/// The engine behind a `TransferEngine`, for the `engine` argument of a store's `setup`.
#[pyclass(module = "mooncake.engine", frozen)]
pub(super) struct InnerTransferEngine(pub(super) Kept);

/// A handle to an engine, which runs as long as there is one.
#[derive(Clone)]
pub(super) struct Kept(Option<Arc<Session>>);

impl Drop for Kept {
    fn drop(&mut self) {
        let session = self.0.take();
        // Dropping the last handle stops the engine, which waits for transfers: not with the GIL.
        gil::later(move || drop(session));
    }
}

/// Moves bytes between memory of this process and memory of peers.
///
/// An engine does nothing before `initialize`. Everything it has registered can be read and written by its
/// peers: `initialize` opens a port without authentication, which is the contract of this interface.
///
/// __init__(self) -> None
#[pyclass(module = "mooncake.engine", subclass, frozen)]
pub(super) struct TransferEngine {
    engine: Engine,
    /// Has the engine closed at the end of the process.
    exit: Mutex<Option<Registered>>,
}

impl TransferEngine {
    /// The engine, to pass to a store.
    pub(super) fn kept(&self) -> Option<Kept> {
        self.engine.session().map(|session| Kept(Some(session)))
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        // Python may free the memory next, so no peer reaches it any more when this returns. Stopping the
        // engine takes longer.
        let engine = &self.engine;
        if lifecycle::is_exiting() {
            // What was not closed in the time of the exit is left to the kernel: nothing waits for it here.
            return std::mem::forget(engine.clone());
        }
        if let Some(session) = Python::attach(|py| py.detach(|| engine.leave())) {
            gil::later(move || drop(session));
        }
    }
}

type Engines<'py> = Bound<'py, TransferEngine>;
type Given<'a, 'py> = Arguments<'a, 'py>;

/// Runs a call of the engine without the GIL.
fn detached<T: Send>(slf: &Engines<'_>, call: impl FnOnce(&Engine) -> T + Send) -> T {
    let engine = slf.get().engine.clone();
    slf.py().detach(move || call(&engine))
}

fn initialize(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (hostname, metadata) = (given.text(0)?, given.text(1)?);
    let (protocol, device) = (given.text(2)?, given.text(3)?);
    start(slf, move |engine| engine.initialize(&hostname, &metadata, &protocol, &device))
}

fn initialize_ext(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (hostname, metadata) = (given.text(0)?, given.text(1)?);
    let (protocol, device, kind) = (given.text(2)?, given.text(3)?, given.text(4)?);
    start(slf, move |engine| engine.initialize_ext(&hostname, &metadata, &protocol, &device, &kind))
}

fn start(slf: &Engines<'_>, call: impl FnOnce(&Engine) -> i32 + Send + 'static) -> PyResult<i32> {
    let engine = slf.get().engine.clone();
    let started = engine.clone();
    let code = gil::blocking(slf.py(), move || call(&started))?;
    if code == 0 {
        let registered = lifecycle::at_exit(move |_| engine.close());
        *slf.get().exit.lock().unwrap_or_else(PoisonError::into_inner) = Some(registered);
    }
    Ok(code)
}

fn get_rpc_port(slf: &Engines<'_>, _: &Given<'_, '_>) -> PyResult<u16> {
    Ok(slf.get().engine.rpc_port())
}

fn allocate_managed_buffer(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    let length = given.uint(0)?;
    Ok(detached(slf, |engine| engine.allocate_managed(length)))
}

fn free_managed_buffer(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (address, length) = (given.uint(0)?, given.uint(1)?);
    Ok(detached(slf, |engine| engine.free_managed(address, length)))
}

/// One transfer, or several to the same target: the arguments from `target_hostname` to `length(s)`.
struct Transfer {
    target: String,
    copies: Vec<Copy>,
}

impl Transfer {
    fn single(given: &Given<'_, '_>) -> PyResult<Self> {
        let copy = Copy { local: given.uint(1)?, remote: given.uint(2)?, len: given.uint(3)? };
        Ok(Self { target: given.text(0)?, copies: vec![copy] })
    }

    /// `None`: the lists have different lengths.
    fn batch(given: &Given<'_, '_>) -> PyResult<Option<Self>> {
        let target = given.text(0)?;
        let (locals, remotes, lens) = (given.uints(1)?, given.uints(2)?, given.uints(3)?);
        if locals.len() != remotes.len() || locals.len() != lens.len() {
            log::error!(
                "a batch of {} local addresses, {} remote addresses and {} lengths: one of each is needed",
                locals.len(),
                remotes.len(),
                lens.len()
            );
            return Ok(None);
        }
        let copies = locals.into_iter().zip(remotes).zip(lens);
        let copies = copies.map(|((local, remote), len)| Copy { local, remote, len }).collect();
        Ok(Some(Self { target, copies }))
    }

    /// Moves the bytes and waits.
    fn sync(self, slf: &Engines<'_>, op: Op, notice: Option<Notice>, hint: &str) -> i32 {
        let Self { target, copies } = self;
        // SAFETY: the caller of the Python method promises that the memory at the local addresses stays
        // mapped and is not used until the method returns, which this call precedes.
        detached(slf, |engine| unsafe { engine.transfer_sync(&target, op, &copies, notice.as_ref(), hint) })
    }

    /// Begins to move the bytes.
    fn submit(self, slf: &Engines<'_>, op: Op, hint: &str) -> u64 {
        let Self { target, copies } = self;
        // SAFETY: as in `sync`, until the batch has ended, which the caller learns from its status.
        detached(slf, |engine| unsafe { engine.submit(&target, op, &copies, hint) })
    }
}

fn opcode(given: &Given<'_, '_>, at: usize) -> PyResult<Op> {
    let value = given.required(at)?;
    let wanted = "mooncake.engine.TransferOpcode";
    let member = value.cast::<TransferOpcode>().map_err(|_| given.refuse(at, value, wanted))?;
    match member.get().number() {
        0 => Ok(Op::Read),
        1 => Ok(Op::Write),
        number => Err(given.error(format!("{}: {number} is no opcode", given.name(at)))),
    }
}

fn notice(given: &Given<'_, '_>, at: usize) -> PyResult<Option<Notice>> {
    let Some(value) = given.get(at).filter(|value| !value.is_none()) else { return Ok(None) };
    let wanted = "mooncake.engine.TransferNotify or None";
    let notify = value.cast::<TransferNotify>().map_err(|_| given.refuse(at, value, wanted))?;
    let TransferNotify { name, msg } = notify.try_borrow()?.clone();
    Ok(Some(Notice { name, message: msg.into_bytes() }))
}

/// The four methods of one direction, and those that take an opcode.
fn single_sync(slf: &Engines<'_>, given: &Given<'_, '_>, op: Op) -> PyResult<i32> {
    let hint = given.text_or(4, "")?;
    Ok(Transfer::single(given)?.sync(slf, op, None, &hint))
}

fn batch_sync(slf: &Engines<'_>, given: &Given<'_, '_>, op: Op) -> PyResult<i32> {
    let hint = given.text_or(4, "")?;
    Ok(Transfer::batch(given)?.map_or(FAILED, |transfer| transfer.sync(slf, op, None, &hint)))
}

fn batch_async(slf: &Engines<'_>, given: &Given<'_, '_>, op: Op, hint_at: usize) -> PyResult<u64> {
    let hint = given.text_or(hint_at, "")?;
    Ok(Transfer::batch(given)?.map_or(NO_BATCH, |transfer| transfer.submit(slf, op, &hint)))
}

fn transfer_sync_write(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    single_sync(slf, given, Op::Write)
}

fn transfer_sync_read(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    single_sync(slf, given, Op::Read)
}

fn batch_transfer_sync_write(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    batch_sync(slf, given, Op::Write)
}

fn batch_transfer_sync_read(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    batch_sync(slf, given, Op::Read)
}

fn batch_transfer_async_write(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    batch_async(slf, given, Op::Write, 4)
}

fn batch_transfer_async_read(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    batch_async(slf, given, Op::Read, 4)
}

fn transfer_sync(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (op, notice, hint) = (opcode(given, 4)?, notice(given, 5)?, given.text_or(6, "")?);
    Ok(Transfer::single(given)?.sync(slf, op, notice, &hint))
}

fn batch_transfer_sync(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (op, notice, hint) = (opcode(given, 4)?, notice(given, 5)?, given.text_or(6, "")?);
    Ok(Transfer::batch(given)?.map_or(FAILED, |transfer| transfer.sync(slf, op, notice, &hint)))
}

fn batch_transfer_async(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    batch_async(slf, given, opcode(given, 4)?, 5)
}

fn transfer_submit_write(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    let hint = given.text_or(4, "")?;
    Ok(Transfer::single(given)?.submit(slf, Op::Write, &hint))
}

fn get_batch_transfer_status(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let batches = given.uints(0)?;
    Ok(detached(slf, |engine| engine.wait_batches(&batches)))
}

fn transfer_check_status(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let batch = given.uint(0)?;
    Ok(detached(slf, |engine| engine.check(batch)))
}

fn register_memory(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (address, length, location) = (given.uint(0)?, given.uint(1)?, given.text_or(2, "*")?);
    // SAFETY: the caller of the Python method promises that the memory stays mapped until it is unregistered.
    Ok(detached(slf, |engine| unsafe { engine.register(address, length, &location) }))
}

fn unregister_memory(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let address = given.uint(0)?;
    Ok(detached(slf, |engine| engine.unregister(address)))
}

fn batch_register_memory(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (addresses, lengths, location) = (given.uints(0)?, given.uints(1)?, given.text_or(2, "*")?);
    // SAFETY: as in `register_memory`.
    Ok(detached(slf, |engine| unsafe { engine.batch_register(&addresses, &lengths, &location) }))
}

fn batch_unregister_memory(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let addresses = given.uints(0)?;
    Ok(detached(slf, |engine| engine.batch_unregister(&addresses)))
}

fn get_local_topology(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<String> {
    let device = match given.get(0) {
        Some(value) if !value.is_none() => Some(given.text(0)?),
        _ => None,
    };
    Ok(slf.py().detach(|| Engine::topology(device.as_deref())))
}

fn get_first_buffer_address(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<u64> {
    let segment = given.text(0)?;
    Ok(detached(slf, |engine| engine.first_buffer(&segment)))
}

fn warmup_efa_segment(_: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    // Connections are made in advance where the fabric needs that; there is nothing to warm up.
    given.text(0).map(|_| 0)
}

fn get_notifies(slf: &Engines<'_>, _: &Given<'_, '_>) -> PyResult<Vec<TransferNotify>> {
    let arrived = detached(slf, Engine::notifies);
    Ok(arrived.into_iter().map(|(name, msg)| TransferNotify { name, msg }).collect())
}

fn send_probe(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let peer = given.text(0)?;
    Ok(detached(slf, |engine| engine.probe(&peer)))
}

fn get_engine(slf: &Engines<'_>, _: &Given<'_, '_>) -> PyResult<Option<InnerTransferEngine>> {
    Ok(slf.get().kept().map(InnerTransferEngine))
}

fn get_engine_ptr(slf: &Engines<'_>, _: &Given<'_, '_>) -> PyResult<usize> {
    Ok(slf.get().engine.session().map_or(0, |session| Arc::as_ptr(&session) as usize))
}

fn write_bytes_to_buffer(slf: &Engines<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (address, length) = (given.uint(0)?, given.uint(2)?);
    let data = given.required(1)?;
    let is_bytes = data.is_instance_of::<PyBytes>() || data.is_instance_of::<PyByteArray>();
    if !is_bytes && !data.is_instance_of::<PyString>() {
        return Err(given.refuse(1, data, "bytes, bytearray or str"));
    }
    let data = given.key(1)?;
    let data: &[u8] = data.as_ref();
    let length = usize::try_from(length).ok().filter(|length| *length <= data.len());
    let Some(part) = length.map(|length| &data[..length]).filter(|_| address != 0) else {
        log::error!("write_bytes_to_buffer: {} bytes cannot be written to {address:#x}", data.len());
        return Ok(FAILED);
    };
    // SAFETY: the caller of the Python method promises that `length` bytes at the address are mapped and that
    // nothing else uses them now.
    detached(slf, |_| unsafe { snowskin_compat::write_bytes(address, part) });
    Ok(0)
}

fn read_bytes_from_buffer<'py>(slf: &Engines<'py>, given: &Given<'_, 'py>) -> PyResult<Bound<'py, PyBytes>> {
    let (address, length) = (given.uint(0)?, given.uint(1)?);
    let length = usize::try_from(length).ok().filter(|_| address != 0 || length == 0);
    let Some(length) = length else {
        return Err(PyValueError::new_err(format!("{address:#x} is no address of {length:?} bytes")));
    };
    // SAFETY: as in `write_bytes_to_buffer`.
    let bytes = detached(slf, |_| unsafe { snowskin_compat::read_bytes(address, length) });
    Ok(PyBytes::new(slf.py(), &bytes.unwrap_or_default()))
}

python_methods! {
    impl TransferEngine as "mooncake.engine.TransferEngine" {
        #[new]
        fn new() -> Self {
            Self { engine: Engine::new(), exit: Mutex::new(None) }
        }
    }

    /// Starts the engine. Returns 0, or -1; the log has the reason.
    ///
    /// `metadata_server` is "P2PHANDSHAKE", or "http://HOST:PORT/metadata", "etcd://HOST:PORT" or
    /// "redis://HOST:PORT"; a text without a scheme is an etcd server. Under "P2PHANDSHAKE" the name that
    /// peers use is the host of `local_hostname` with `get_rpc_port()`.
    fn initialize(local_hostname: "str", metadata_server: "str", protocol: "str", device_name: "str") -> "int"
        => initialize;

    /// As `initialize`, with the kind of the metadata server for a text without a scheme.
    fn initialize_ext(
        local_hostname: "str", metadata_server: "str", protocol: "str", device_name: "str",
        metadata_type: "str"
    ) -> "int" => initialize_ext;

    /// The port at which peers reach this engine, or 0 before `initialize`.
    fn get_rpc_port() -> "int" => get_rpc_port;

    /// Memory of the engine, registered. Returns its address, or 0.
    fn allocate_managed_buffer(length: "int") -> "int" => allocate_managed_buffer;

    /// Gives memory of `allocate_managed_buffer` back. Returns 0, or a negative code.
    fn free_managed_buffer(address: "int", length: "int") -> "int" => free_managed_buffer;

    /// Writes `length` bytes at `buffer` to the peer's memory at `peer_buffer_address`. Returns 0, or -1.
    fn transfer_sync_write(
        target_hostname: "str", buffer: "int", peer_buffer_address: "int", length: "int",
        transport_hint: "str" = "''"
    ) -> "int" => transfer_sync_write;

    /// Reads `length` bytes of the peer's memory at `peer_buffer_address` to `buffer`. Returns 0, or -1.
    fn transfer_sync_read(
        target_hostname: "str", buffer: "int", peer_buffer_address: "int", length: "int",
        transport_hint: "str" = "''"
    ) -> "int" => transfer_sync_read;

    /// Several writes to one peer. Returns 0 when all bytes have arrived, otherwise -1.
    fn batch_transfer_sync_write(
        target_hostname: "str", buffers: "list[int]", peer_buffer_addresses: "list[int]",
        lengths: "list[int]", transport_hint: "str" = "''"
    ) -> "int" => batch_transfer_sync_write;

    /// Several reads from one peer. Returns 0 when all bytes have arrived, otherwise -1.
    fn batch_transfer_sync_read(
        target_hostname: "str", buffers: "list[int]", peer_buffer_addresses: "list[int]",
        lengths: "list[int]", transport_hint: "str" = "''"
    ) -> "int" => batch_transfer_sync_read;

    /// Begins several writes to one peer. Returns the number of the batch, or 0.
    fn batch_transfer_async_write(
        target_hostname: "str", buffers: "list[int]", peer_buffer_addresses: "list[int]",
        lengths: "list[int]", transport_hint: "str" = "''"
    ) -> "int" => batch_transfer_async_write;

    /// Begins several reads from one peer. Returns the number of the batch, or 0.
    fn batch_transfer_async_read(
        target_hostname: "str", buffers: "list[int]", peer_buffer_addresses: "list[int]",
        lengths: "list[int]", transport_hint: "str" = "''"
    ) -> "int" => batch_transfer_async_read;

    /// A transfer in the direction of `opcode`. The peer gets `notify` when the bytes have arrived.
    fn transfer_sync(
        target_hostname: "str", buffer: "int", peer_buffer_address: "int", length: "int",
        opcode: "mooncake.engine.TransferOpcode", notify: "mooncake.engine.TransferNotify" = "None",
        transport_hint: "str" = "''"
    ) -> "int" => transfer_sync;

    /// Several transfers in the direction of `opcode`. The peer gets `notify` when all bytes have arrived.
    fn batch_transfer_sync(
        target_hostname: "str", buffers: "list[int]", peer_buffer_addresses: "list[int]",
        lengths: "list[int]", opcode: "mooncake.engine.TransferOpcode",
        notify: "mooncake.engine.TransferNotify" = "None", transport_hint: "str" = "''"
    ) -> "int" => batch_transfer_sync;

    /// Begins several transfers in the direction of `opcode`. Returns the number of the batch, or 0.
    fn batch_transfer_async(
        target_hostname: "str", buffers: "list[int]", peer_buffer_addresses: "list[int]",
        lengths: "list[int]", opcode: "mooncake.engine.TransferOpcode", transport_hint: "str" = "''"
    ) -> "int" => batch_transfer_async;

    /// Waits until all these batches have ended, and frees them. Returns 0 if all succeeded, otherwise -1.
    fn get_batch_transfer_status(batch_ids: "list[int]") -> "int" => get_batch_transfer_status;

    /// Begins a write. Returns the number of the batch, or 0.
    fn transfer_submit_write(
        target_hostname: "str", buffer: "int", peer_buffer_address: "int", length: "int",
        transport_hint: "str" = "''"
    ) -> "int" => transfer_submit_write;

    /// The state of a batch: 1 done, 0 running, -1 failed, -2 timed out. A batch that is done or has failed
    /// is freed.
    fn transfer_check_status(batch_id: "int") -> "int" => transfer_check_status;

    /// Copies `length` bytes of `data` to an address. Returns 0, or -1.
    fn write_bytes_to_buffer(dest_address: "int", data: "str", length: "int") -> "int"
        => write_bytes_to_buffer;

    /// The `length` bytes at an address.
    fn read_bytes_from_buffer(source_address: "int", length: "int") -> "bytes" => read_bytes_from_buffer;

    /// Registers memory, which peers can then read and write. Returns 0, or a negative code.
    fn register_memory(buffer_addr: "int", capacity: "int", location: "str" = "'*'") -> "int"
        => register_memory;

    /// Ends the registration of the memory at this address. Returns 0, or a negative code.
    fn unregister_memory(buffer_addr: "int") -> "int" => unregister_memory;

    /// Registers memory in several places: all of it, or none. Returns 0, or a negative code.
    fn batch_register_memory(
        buffer_addresses: "list[int]", capacities: "list[int]", location: "str" = "'*'"
    ) -> "int" => batch_register_memory;

    /// Ends the registrations of memory at these addresses. Returns 0, or a negative code.
    fn batch_unregister_memory(buffer_addresses: "list[int]") -> "int" => batch_unregister_memory;

    /// The devices of this host, as JSON.
    fn get_local_topology(device_name: "str" = "None") -> "str" => get_local_topology;

    /// The address of the memory that a peer registered first, or 0.
    fn get_first_buffer_address(segment_name: "str") -> "int" => get_first_buffer_address;

    /// Nothing: for another fabric. Returns 0.
    fn warmup_efa_segment(segment_name: "str") -> "int" => warmup_efa_segment;

    /// The messages that have arrived since the last call.
    fn get_notifies() -> "list[mooncake.engine.TransferNotify]" => get_notifies;

    /// Asks whether a peer is there. Returns 0 if it is, otherwise a negative code.
    fn send_probe(peer_server_name: "str") -> "int" => send_probe;

    /// The engine itself, for the `engine` argument of a store's `setup`; `None` before `initialize`.
    fn get_engine() -> "mooncake.engine.InnerTransferEngine" => get_engine;

    /// A number that tells engines apart; 0 before `initialize`.
    fn get_engine_ptr() -> "int" => get_engine_ptr;
}

/// Adds the classes to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TransferNotify>()?;
    module.add_class::<InnerTransferEngine>()?;
    module.add_class::<TransferEngine>()?;
    let py = module.py();
    py.get_type::<TransferEngine>().setattr("TransferOpcode", py.get_type::<TransferOpcode>())?;
    for name in ["CUDA", "EFA", "HIP", "INTRA_NVLINK", "MNNVL", "MUSA"] {
        module.add(format!("SUPPORT_{name}"), false)?;
    }
    Ok(())
}
