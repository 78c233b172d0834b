//! A provider of verbs that moves no bytes, to measure the cost of te-rdma alone.
#![allow(unsafe_code, reason = "implements verbs whose promises the caller makes")]

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use te_core::{Error, MemSpan};
use te_rdma::sim::SimDevice;
use te_rdma::verbs::{
    AsyncEvent, DeviceInfo, Gid, MrAccess, PortInfo, Qp, QpConfig, QpHandle, QpStep, Registrar, Registration,
    Sge, Verbs, WcStatus, WorkCompletion, WorkRequest,
};

/// A simulated device on whose queue pairs every work request completes when it is posted, and moves no
/// bytes.
#[derive(Debug)]
pub struct InstantVerbs {
    device: SimDevice,
    numbers: Vec<(QpHandle, u32)>,
    done: VecDeque<WorkCompletion>,
}

impl InstantVerbs {
    /// A provider over `device`, which holds the registrations and the queue pairs.
    #[must_use]
    pub fn new(device: SimDevice) -> Self {
        let done = VecDeque::with_capacity(device.info().cq_depth as usize);
        Self { device, numbers: Vec::new(), done }
    }
}

impl Verbs for InstantVerbs {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    fn port(&self) -> Result<PortInfo, Error> {
        self.device.port()
    }

    fn gid(&self, index: u32) -> Result<Option<Gid>, Error> {
        self.device.gid(index)
    }

    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error> {
        // SAFETY: the caller's promise, passed on.
        unsafe { Verbs::register(&self.device, span, access) }
    }

    fn registrar(&self) -> &dyn Registrar {
        self.device.registrar()
    }

    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        self.device.register_dmabuf(fd, offset, len, address, access)
    }

    fn deregister(&self, registration: Registration) -> Result<(), Error> {
        self.device.deregister(registration)
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qp, Error> {
        let qp = self.device.create_qp(config)?;
        self.numbers.push((qp.handle, qp.number));
        Ok(qp)
    }

    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error> {
        self.device.modify_qp(qp, step)
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error> {
        self.device.destroy_qp(qp)
    }

    unsafe fn post(&mut self, qp: QpHandle, requests: &[WorkRequest], _: &[Sge]) -> (usize, Option<Error>) {
        let number = self.numbers.iter().find(|(handle, _)| *handle == qp).map_or(0, |(_, number)| *number);
        let signaled = requests.iter().filter(|request| request.signaled);
        self.done.extend(signaled.map(|request| WorkCompletion {
            id: request.id,
            qp_number: number,
            status: WcStatus::Success,
            code: 0,
        }));
        (requests.len(), None)
    }

    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        let count = out.len().min(self.done.len());
        for (place, completion) in out.iter_mut().zip(self.done.drain(..count)) {
            *place = completion;
        }
        Ok(count)
    }

    fn arm(&mut self) -> Result<(), Error> {
        self.device.arm()
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.device.event_fds()
    }

    fn next_event(&mut self) -> Option<AsyncEvent> {
        self.device.next_event()
    }
}
