//! One opened port of a real device.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Weak};

use te_core::Error;

use super::abi::{
    IBV_QPT_RC, ibv_async_event, ibv_comp_channel, ibv_cq, ibv_device_attr, ibv_gid_entry, ibv_port_attr,
    ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_send_wr, ibv_wc,
};
use super::context::Context;
use super::convert::{self, check, driver_error, last_errno};
use super::load::Library;
use super::open_error::OpenError;
use super::sysfs;
use crate::sys::verbs::{
    AsyncEvent, Connecting, DeviceFeatures, DeviceInfo, Gid, MrAccess, PortInfo, Qp, QpConfig, QpHandle,
    QpStep, Registrar, Registration, Sge, Verbs, WorkCompletion, WorkRequest,
};

/// Entries of the completion queue, if the device allows as many.
const CQ_DEPTH: i32 = 1 << 14;
/// The most work requests that share one doorbell.
const CHAIN_MAX: usize = 256;
/// The most completions taken with one call.
const POLL_MAX: usize = 64;

/// An opened port of a device, reached through libibverbs. Dropping it destroys its queue pairs and
/// registrations and closes the device.
pub struct SystemVerbs {
    info: DeviceInfo,
    infiniband: bool,
    cq: NonNull<ibv_cq>,
    channel: NonNull<ibv_comp_channel>,
    /// How often the slot was used, and its queue pair. A handle is a slot's index and use: peers make and
    /// end queue pairs at will, and neither memory nor lookups may grow with that.
    qps: Vec<(u32, Option<NonNull<ibv_qp>>)>,
    /// Indexes of `qps` that are free.
    free: Vec<u32>,
    /// Queue pairs that another thread connects. A queue pair is not destroyed while its token exists.
    connecting: Vec<(QpHandle, Weak<()>)>,
    /// The process that opened the device. A fork shares the device's file with its parent, and must not
    /// destroy its parent's objects.
    process: u32,
    /// The work requests of one call of the driver; filled anew by each `post`.
    chain: Box<[ibv_send_wr]>,
    /// The completions of one call of the driver.
    completions: Box<[ibv_wc]>,
    /// Last: everything above is made on it. Dropped in `drop`.
    context: ManuallyDrop<Context>,
}

// SAFETY: all pointers are to objects that this value alone owns, of a library that may be called from any
// thread; no pointer that the chain holds between two calls is followed.
unsafe impl Send for SystemVerbs {}

impl SystemVerbs {
    pub(super) fn new(
        context: Context,
        name: &str,
        port: u8,
        numa_node: Option<u16>,
    ) -> Result<Self, OpenError> {
        let failed =
            |call| move |error: Error| OpenError::Failed { device: name.to_owned(), call, errno: error.code };
        let library = context.library;
        let device = query_device(&context).map_err(failed("ibv_query_device"))?;
        if port == 0 || port > device.phys_port_cnt {
            return Err(OpenError::NoSuchPort { device: name.to_owned(), port });
        }
        let port_attr = query_port(&context, port).map_err(failed("ibv_query_port"))?;

        // SAFETY: the context is open. A null result is handled.
        let channel = unsafe { (library.ibv_create_comp_channel)(context.context.as_ptr()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| failed("ibv_create_comp_channel")(driver_error(last_errno())))?;
        let depth = CQ_DEPTH.min(device.max_cqe.max(1));
        // SAFETY: context and channel are ours and outlive the queue. A null result is handled.
        let cq = unsafe {
            (library.ibv_create_cq)(context.context.as_ptr(), depth, null_mut(), channel.as_ptr(), 0)
        };
        let Some(cq) = NonNull::new(cq) else {
            let error = driver_error(last_errno());
            // SAFETY: made above, and used by nothing else.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(failed("ibv_create_cq")(error));
        };
        // From here on `Drop` cleans up.
        // SAFETY: the queue was just made; its length does not change.
        let cqe = unsafe { (*cq.as_ptr()).cqe };
        let info = device_info(&context, name, port, numa_node, &device, &port_attr, cqe);
        let verbs = Self {
            info,
            infiniband: convert::port(&port_attr).infiniband,
            cq,
            channel,
            qps: Vec::new(),
            free: Vec::new(),
            connecting: Vec::new(),
            process: std::process::id(),
            chain: vec![
                convert::send_wr(
                    &WorkRequest {
                        id: 0,
                        op: te_core::Op::Write,
                        signaled: false,
                        inline: false,
                        sges: 0,
                        remote_addr: 0,
                        remote_key: 0,
                    },
                    &[],
                );
                CHAIN_MAX
            ]
            .into(),
            completions: vec![ibv_wc::default(); POLL_MAX].into(),
            context: ManuallyDrop::new(context),
        };
        for fd in verbs.event_fds().into_iter().flatten() {
            set_nonblocking(fd).map_err(failed("fcntl"))?;
        }
        Ok(verbs)
    }

    fn library(&self) -> &'static Library {
        self.context.library
    }

    #[inline]
    fn qp(&self, handle: QpHandle) -> Result<NonNull<ibv_qp>, Error> {
        match self.qps.get(handle.0 as u32 as usize) {
            Some((uses, Some(qp))) if u64::from(*uses) == handle.0 >> 32 => Ok(*qp),
            _ => Err(driver_error(libc::EINVAL)),
        }
    }

    /// As [`qp`](Self::qp), for calls that must not run while another thread connects it.
    fn settled_qp(&mut self, handle: QpHandle) -> Result<NonNull<ibv_qp>, Error> {
        self.connecting.retain(|(_, token)| token.strong_count() > 0);
        if self.connecting.iter().any(|(connecting, _)| *connecting == handle) {
            return Err(driver_error(libc::EBUSY));
        }
        self.qp(handle)
    }

    /// The number of the queue pair that an event names, if it still exists.
    fn number_of(&self, element: *mut c_void) -> Option<u32> {
        let qp =
            self.qps.iter().filter_map(|(_, qp)| qp.as_ref()).find(|qp| qp.as_ptr().cast() == element)?;
        // SAFETY: it is in the table, so it exists; its number never changes.
        Some(unsafe { (*qp.as_ptr()).qp_num })
    }

    /// Empties the completion channel, so that its file descriptor is not readable any more.
    fn drain_channel(&mut self) {
        let (mut cq, mut cookie) = (null_mut(), null_mut());
        // SAFETY: the channel is ours and does not block; both results live for the call. Only our queue
        // sends to it. Each event that was taken is acknowledged, or destroying the queue would block
        // for ever.
        unsafe {
            while (self.library().ibv_get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut cookie) == 0
            {
                (self.library().ibv_ack_cq_events)(cq, 1);
            }
        }
    }
}

fn query_device(context: &Context) -> Result<ibv_device_attr, Error> {
    // SAFETY: a structure of integers, for which zero is a valid value.
    let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open, and the call fills `attr`.
    check(unsafe { (context.library.ibv_query_device)(context.context.as_ptr(), &raw mut attr) })?;
    Ok(attr)
}

fn query_port(context: &Context, port: u8) -> Result<ibv_port_attr, Error> {
    // The exported function fills the oldest part of the structure; the rest stays zero, as in verbs.h.
    let mut attr = ibv_port_attr::default();
    // SAFETY: the context is open, and `attr` is at least as long as the part that the call fills.
    check(unsafe { (context.library.ibv_query_port)(context.context.as_ptr(), port, &raw mut attr) })?;
    Ok(attr)
}

fn device_info(
    context: &Context,
    name: &str,
    port: u8,
    numa_node: Option<u16>,
    device: &ibv_device_attr,
    port_attr: &ibv_port_attr,
    cqe: i32,
) -> DeviceInfo {
    let count = |value: i32| u32::try_from(value).unwrap_or(0);
    // Some devices take fewer pieces in a READ; 0 means that the limit is not reported.
    let sge_read = if device.max_sge_rd > 0 { device.max_sge_rd } else { device.max_sge };
    let mut features = DeviceFeatures::empty();
    features.set(DeviceFeatures::RELAXED_ORDERING, context.library.reg_mr_iova2.is_some());
    features.set(DeviceFeatures::DMABUF, context.takes_dmabuf());
    DeviceInfo {
        name: name.to_owned(),
        port,
        numa_node,
        mr_bytes_max: device.max_mr_size,
        mr_count_max: count(device.max_mr),
        qp_count_max: count(device.max_qp),
        qp_depth_max: count(device.max_qp_wr),
        cq_depth: count(cqe),
        sge_max: count(device.max_sge.min(sge_read)),
        reads_max: device.max_qp_rd_atom.min(device.max_qp_init_rd_atom).clamp(0, 255) as u8,
        message_bytes_max: port_attr.max_msg_sz,
        features,
    }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Error> {
    let fd = fd.as_raw_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; only its flags change.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags < 0 || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
            return Err(driver_error(last_errno()));
        }
    }
    Ok(())
}

impl Verbs for SystemVerbs {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn port(&self) -> Result<PortInfo, Error> {
        query_port(&self.context, self.info.port).map(|attr| convert::port(&attr))
    }

    fn gid(&self, index: u32) -> Result<Option<Gid>, Error> {
        let (context, port) = (self.context.context.as_ptr(), self.info.port);
        if let Some(query) = self.library().query_gid_ex {
            let mut entry = ibv_gid_entry::default();
            // SAFETY: the context is open; `entry` has the size that is given.
            let result =
                unsafe { query(context, port.into(), index, &raw mut entry, 0, size_of::<ibv_gid_entry>()) };
            return match check(result) {
                Ok(()) => Ok(convert::gid_kind(entry.gid_type)
                    .filter(|_| entry.gid != [0; 16])
                    .map(|kind| Gid { index, raw: entry.gid, kind })),
                Err(error) if error.code == libc::ENODATA => Ok(None),
                Err(error) => Err(error),
            };
        }
        let signed = i32::try_from(index).map_err(|_| driver_error(libc::EINVAL))?;
        let mut raw = [0; 16];
        // SAFETY: the context is open; `raw` is the 16 bytes that the call fills.
        check(unsafe { (self.library().ibv_query_gid)(context, port, signed, &raw mut raw) })?;
        let kind = sysfs::gid_kind(Path::new("/sys"), &self.info.name, port, index, self.infiniband);
        Ok(kind.filter(|_| raw != [0; 16]).map(|kind| Gid { index, raw, kind }))
    }

    fn registrar(&self) -> &dyn Registrar {
        &*self.context
    }

    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        self.context.register_dmabuf(fd, offset, len, address, access)
    }

    fn deregister(&self, registration: Registration) -> Result<(), Error> {
        self.context.deregister(registration)
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qp, Error> {
        let mut inline_bytes = config.inline_bytes;
        loop {
            let cap = ibv_qp_cap {
                max_send_wr: config.depth,
                // Nothing is ever received, but some drivers refuse 0.
                max_recv_wr: 1,
                max_send_sge: config.sges.max(1),
                max_recv_sge: 1,
                max_inline_data: inline_bytes,
            };
            let mut attr = ibv_qp_init_attr {
                qp_context: null_mut(),
                send_cq: self.cq.as_ptr(),
                recv_cq: self.cq.as_ptr(),
                srq: null_mut(),
                cap,
                qp_type: IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: domain and queue are ours and outlive the queue pair; `attr` lives for the call.
            let qp = unsafe { (self.library().ibv_create_qp)(self.context.pd.as_ptr(), &raw mut attr) };
            if let Some(qp) = NonNull::new(qp) {
                let index = self.free.pop().unwrap_or_else(|| {
                    self.qps.push((0, None));
                    self.qps.len() as u32 - 1
                });
                let slot = &mut self.qps[index as usize];
                slot.1 = Some(qp);
                let handle = QpHandle(u64::from(slot.0) << 32 | u64::from(index));
                // SAFETY: just made; its number never changes.
                let number = unsafe { (*qp.as_ptr()).qp_num };
                let config = QpConfig {
                    depth: attr.cap.max_send_wr,
                    sges: attr.cap.max_send_sge,
                    inline_bytes: attr.cap.max_inline_data,
                };
                return Ok(Qp { handle, number, config });
            }
            let errno = last_errno();
            // A device does not report how many bytes it takes inline.
            if inline_bytes == 0 || ![libc::EINVAL, libc::ENOMEM].contains(&errno) {
                return Err(driver_error(errno));
            }
            inline_bytes /= 2;
        }
    }

    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error> {
        let qp = self.settled_qp(qp)?;
        let (attrs, masks) = convert::steps(step, self.info.port, self.infiniband)?;
        for (mut attr, mask) in attrs.into_iter().flatten().zip(masks) {
            // SAFETY: the queue pair is in the table, so it exists; `attr` lives for the call.
            check(unsafe { (self.library().ibv_modify_qp)(qp.as_ptr(), &raw mut attr, mask) })?;
        }
        Ok(())
    }

    fn connect_qp(&mut self, qp: QpHandle, path: crate::sys::verbs::Path) -> Result<Connecting, Error> {
        // InfiniBand's subnet manager has the addresses: the call does not block.
        if self.infiniband {
            return self.modify_qp(qp, QpStep::Connect(path)).map(|()| Connecting::Done);
        }
        let pointer = Shared(self.settled_qp(qp)?);
        let (attrs, masks) = convert::steps(QpStep::Connect(path), self.info.port, self.infiniband)?;
        let (library, token) = (self.library(), Arc::new(()));
        self.connecting.push((qp, Arc::downgrade(&token)));
        Ok(Connecting::Later(Box::new(move || {
            // The token is dropped with the closure, when the queue pair is not used here any more.
            let (pointer, _token) = (pointer, token);
            for (mut attr, mask) in attrs.into_iter().flatten().zip(masks) {
                // SAFETY: while the token exists, the provider neither modifies nor destroys the queue pair,
                // and does not close the device; `attr` lives for the call.
                check(unsafe { (library.ibv_modify_qp)(pointer.0.as_ptr(), &raw mut attr, mask) })?;
            }
            Ok(())
        })))
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error> {
        let pointer = self.settled_qp(qp)?;
        // SAFETY: it is in the table, so it exists; it leaves the table below. All its events were
        // acknowledged.
        check(unsafe { (self.library().ibv_destroy_qp)(pointer.as_ptr()) })?;
        let index = qp.0 as u32;
        let slot = &mut self.qps[index as usize];
        *slot = (slot.0.wrapping_add(1), None);
        self.free.push(index);
        Ok(())
    }

    unsafe fn post(
        &mut self,
        qp: QpHandle,
        requests: &[WorkRequest],
        sges: &[Sge],
    ) -> (usize, Option<Error>) {
        let qp = match self.qp(qp) {
            Ok(qp) => qp,
            Err(error) => return (0, Some(error)),
        };
        // SAFETY: the queue pair and its context exist. A driver without the function is reported.
        let Some(post_send) = (unsafe { (*(*qp.as_ptr()).context).ops.post_send }) else {
            return (0, Some(driver_error(libc::ENOSYS)));
        };
        let (mut taken, mut rest) = (0, sges);
        for batch in requests.chunks(CHAIN_MAX) {
            let first = self.chain.as_mut_ptr();
            let mut length = 0;
            for request in batch {
                let Some((own, others)) = rest.split_at_checked(request.sges as usize) else { break };
                rest = others;
                // SAFETY: `length` stays below CHAIN_MAX, the chain's length.
                unsafe {
                    first.add(length).write(convert::send_wr(request, own));
                    if length != 0 {
                        (*first.add(length - 1)).next = first.add(length);
                    }
                }
                length += 1;
            }
            if length != 0 {
                let mut bad = null_mut();
                // SAFETY: a chain of `length` requests that ends with a null; their pieces are in the
                // caller's slice, and both live for the call. Inline pieces are readable by the caller's
                // promise; the device checks the others against registrations.
                let result = unsafe { post_send(qp.as_ptr(), first, &raw mut bad) };
                if let Err(error) = check(result) {
                    // The driver reports the first request that it did not take.
                    let accepted = (bad as usize)
                        .checked_sub(first as usize)
                        .map_or(0, |bytes| bytes / size_of::<ibv_send_wr>());
                    return (taken + accepted.min(length), Some(error));
                }
                taken += length;
            }
            if length < batch.len() {
                return (taken, Some(driver_error(libc::EINVAL)));
            }
        }
        (taken, None)
    }

    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        // SAFETY: the queue and its context exist. A driver without the function is reported.
        let Some(poll_cq) = (unsafe { (*(*self.cq.as_ptr()).context).ops.poll_cq }) else {
            return Err(driver_error(libc::ENOSYS));
        };
        let mut count = 0;
        while count < out.len() {
            let wanted = (out.len() - count).min(POLL_MAX);
            // SAFETY: the queue is ours; there is room for `wanted` completions.
            let got = unsafe { poll_cq(self.cq.as_ptr(), wanted as i32, self.completions.as_mut_ptr()) };
            let Ok(got) = usize::try_from(got) else {
                // Completions that were taken before are returned first.
                return if count == 0 {
                    Err(check(got).err().unwrap_or(driver_error(libc::EIO)))
                } else {
                    Ok(count)
                };
            };
            let got = got.min(wanted);
            for (out, wc) in out[count..].iter_mut().zip(&self.completions[..got]) {
                *out = convert::completion(wc);
            }
            count += got;
            if got < wanted {
                break;
            }
        }
        Ok(count)
    }

    fn arm(&mut self) -> Result<(), Error> {
        // SAFETY: the queue and its context exist. A driver without the function is reported.
        let Some(req_notify_cq) = (unsafe { (*(*self.cq.as_ptr()).context).ops.req_notify_cq }) else {
            return Err(driver_error(libc::ENOSYS));
        };
        // SAFETY: the queue is ours.
        check(unsafe { req_notify_cq(self.cq.as_ptr(), 0) })
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        // SAFETY: channel and context exist; neither descriptor changes.
        let fds = unsafe { [(*self.channel.as_ptr()).fd, (*self.context.context.as_ptr()).async_fd] };
        // SAFETY: the library closes both when channel and context are destroyed, after this borrow.
        fds.map(|fd| (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }))
    }

    fn next_event(&mut self) -> Option<AsyncEvent> {
        self.drain_channel();
        let mut event = ibv_async_event { element: null_mut(), event_type: 0 };
        // SAFETY: the context is open and its descriptor does not block; `event` lives for the call.
        if unsafe { (self.library().ibv_get_async_event)(self.context.context.as_ptr(), &raw mut event) } != 0
        {
            return None;
        }
        let found = if convert::is_qp_error(event.event_type) {
            self.number_of(event.element)
                .map_or(AsyncEvent::Other(event.event_type as i32), AsyncEvent::QpError)
        } else {
            convert::event(event.event_type)
        };
        // SAFETY: taken above, acknowledged once; the object that it names exists, because its destruction
        // waits for the acknowledgement.
        unsafe { (self.library().ibv_ack_async_event)(&raw mut event) };
        Some(found)
    }
}

impl std::fmt::Debug for SystemVerbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SystemVerbs").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drop for SystemVerbs {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        if self.connecting.iter().any(|(_, token)| token.strong_count() > 0) {
            // A thread uses one of our queue pairs in the driver, or will. The device's file is closed when
            // the process ends.
            log::error!("{}: left open, because queue pairs are still being connected", self.info.name);
            return;
        }
        // Events that were not taken would block the destructors.
        while self.next_event().is_some() {}
        let library = self.library();
        // SAFETY: children before parents, each once; the context is dropped after them. An object that
        // cannot be destroyed ends with the device's file.
        unsafe {
            for qp in self.qps.drain(..).filter_map(|(_, qp)| qp) {
                (library.ibv_destroy_qp)(qp.as_ptr());
            }
            (library.ibv_destroy_cq)(self.cq.as_ptr());
            (library.ibv_destroy_comp_channel)(self.channel.as_ptr());
            // Dropped here and nowhere else.
            ManuallyDrop::drop(&mut self.context);
        }
    }
}

/// A queue pair that is sent to the thread that connects it.
struct Shared(NonNull<ibv_qp>);

// SAFETY: libibverbs may be called from any thread; the token keeps the queue pair from being destroyed.
unsafe impl Send for Shared {}
