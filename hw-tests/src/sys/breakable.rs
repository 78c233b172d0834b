//! A device whose queue pairs a test can put into the error state, as the device does after its retries are
//! exhausted.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use te_core::Error;
use te_rdma::SystemVerbs;
use te_rdma::verbs::{
    AsyncEvent, Connecting, DeviceInfo, Gid, MrAccess, Path, PortInfo, Qp, QpConfig, QpHandle, QpStep,
    Registrar, Registration, Sge, Verbs, WorkCompletion, WorkRequest,
};

/// A real device whose queue pairs break at the press of a button.
pub(crate) struct Breakable {
    device: SystemVerbs,
    alive: Vec<QpHandle>,
    pressed: Arc<AtomicU32>,
    obeyed: u32,
}

impl Breakable {
    /// Each time `pressed` increases, the next poll for completions puts every queue pair into the error
    /// state.
    pub(crate) fn new(device: SystemVerbs, pressed: Arc<AtomicU32>) -> Self {
        Self { device, alive: Vec::new(), pressed, obeyed: 0 }
    }
}

impl Verbs for Breakable {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    fn port(&self) -> Result<PortInfo, Error> {
        self.device.port()
    }

    fn gid(&self, index: u32) -> Result<Option<Gid>, Error> {
        self.device.gid(index)
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
        self.alive.push(qp.handle);
        Ok(qp)
    }

    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error> {
        self.device.modify_qp(qp, step)
    }

    fn connect_qp(&mut self, qp: QpHandle, path: Path) -> Result<Connecting, Error> {
        self.device.connect_qp(qp, path)
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error> {
        self.device.destroy_qp(qp)?;
        self.alive.retain(|alive| *alive != qp);
        Ok(())
    }

    unsafe fn post(
        &mut self,
        qp: QpHandle,
        requests: &[WorkRequest],
        sges: &[Sge],
    ) -> (usize, Option<Error>) {
        // SAFETY: the caller keeps the contract of `post`, which is the same for the device.
        unsafe { self.device.post(qp, requests, sges) }
    }

    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        let pressed = self.pressed.load(Ordering::Relaxed);
        if pressed != self.obeyed {
            self.obeyed = pressed;
            for qp in &self.alive {
                self.device.modify_qp(*qp, QpStep::Error)?;
            }
        }
        self.device.poll_cq(out)
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
