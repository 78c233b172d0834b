//! One opened port of the simulated fabric.
#![allow(unsafe_code, reason = "implements `register` and `post`, whose promises only the caller can make")]

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use nix::sys::eventfd::EventFd;
use te_core::{Error, ErrorKind, MemSpan};

use super::config::{Pace, PortId, errno};
use super::wire::length;
use super::world::{State, World, locked};
use crate::sys::dma::{Mapping, copy_inline};
use crate::sys::verbs::{
    AsyncEvent, Connecting, DeviceFeatures, DeviceInfo, Gid, MrAccess, Path, PortInfo, Qp, QpConfig,
    QpHandle, QpStep, Registrar, Registration, Sge, Verbs, WorkCompletion, WorkRequest,
};

/// A simulated device with one port. Dropping it simulates the end of its process: queue pairs and
/// registrations end, packets on the wire stay there.
pub struct SimDevice {
    world: Arc<Mutex<World>>,
    device: usize,
    info: DeviceInfo,
    /// Readable: of the completion channel, and of asynchronous events.
    fds: [Option<Arc<EventFd>>; 2],
    /// Queue pairs that another thread connects, until their tokens are dropped.
    connecting: Vec<(QpHandle, Weak<()>)>,
}

impl SimDevice {
    pub(super) fn new(world: Arc<Mutex<World>>, device: usize) -> Self {
        let (config, fds) = {
            let world = locked(&world);
            (world.devices[device].config.clone(), world.devices[device].fds.clone())
        };
        let info = DeviceInfo {
            name: config.name,
            port: 1,
            numa_node: config.numa_node,
            mr_bytes_max: config.mr_bytes_max,
            mr_count_max: config.mr_count_max,
            qp_count_max: config.qp_count_max,
            qp_depth_max: config.qp_depth_max,
            cq_depth: config.cq_depth,
            sge_max: config.sge_max,
            reads_max: config.reads_max,
            message_bytes_max: config.message_bytes_max,
            features: config.features,
        };
        Self { world, device, info, fds, connecting: Vec::new() }
    }

    fn check_settled(&mut self, qp: QpHandle) -> Result<(), Error> {
        self.connecting.retain(|(_, token)| token.strong_count() > 0);
        match self.connecting.iter().any(|(connecting, _)| *connecting == qp) {
            true => Err(errno(libc::EBUSY)),
            false => Ok(()),
        }
    }

    /// The fabric's name for its port.
    #[must_use]
    pub fn id(&self) -> PortId {
        PortId(self.device)
    }
}

impl std::fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimDevice").field("name", &self.info.name).finish_non_exhaustive()
    }
}

impl Verbs for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn port(&self) -> Result<PortInfo, Error> {
        let world = locked(&self.world);
        let device = &world.devices[self.device];
        device.check_alive()?;
        Ok(PortInfo {
            active: device.active,
            infiniband: device.config.infiniband,
            mtu_bytes: device.config.mtu_bytes,
            lid: world.lid(self.device),
            gids: device.config.gids.len() as u32,
            bits_per_s: 100_000_000_000,
        })
    }

    fn gid(&self, index: u32) -> Result<Option<Gid>, Error> {
        let world = locked(&self.world);
        let device = &world.devices[self.device];
        device.check_alive()?;
        device.config.gids.get(index as usize).copied().ok_or(errno(libc::EINVAL))
    }

    fn registrar(&self) -> &dyn Registrar {
        self
    }

    /// Any file that can be mapped stands in for a dma-buf.
    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        if !self.info.features.contains(DeviceFeatures::DMABUF) {
            return Err(Error::new(ErrorKind::Unsupported));
        }
        // As the kernel's verbs: the two have the same place in their pages.
        if (offset ^ address) & 0xfff != 0 {
            return Err(errno(libc::EINVAL));
        }
        let mapping = Mapping::new(fd, offset, len).map_err(errno)?;
        let memory = (mapping.span(), Some(mapping));
        locked(&self.world).register(self.device, memory, address, access)
    }

    fn deregister(&self, registration: Registration) -> Result<(), Error> {
        locked(&self.world).deregister(self.device, registration.handle)
    }

    fn create_qp(&mut self, config: QpConfig) -> Result<Qp, Error> {
        locked(&self.world).create_qp(self.device, config)
    }

    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error> {
        self.check_settled(qp)?;
        if let QpStep::Connect(_) = step {
            let neighbour = locked(&self.world).devices[self.device].neighbour.clone();
            neighbour.wait()?;
        }
        let mut world = locked(&self.world);
        let qp = world.qp(self.device, qp.0)?;
        world.modify_qp(qp, step)
    }

    fn connect_qp(&mut self, qp: QpHandle, path: Path) -> Result<Connecting, Error> {
        let neighbour = locked(&self.world).devices[self.device].neighbour.clone();
        if neighbour.answers() {
            return self.modify_qp(qp, QpStep::Connect(path)).map(|()| Connecting::Done);
        }
        self.check_settled(qp)?;
        let token = Arc::new(());
        self.connecting.push((qp, Arc::downgrade(&token)));
        let (world, device) = (Arc::clone(&self.world), self.device);
        Ok(Connecting::Later(Box::new(move || {
            let _token = token;
            neighbour.wait()?;
            let mut world = locked(&world);
            let qp = world.qp(device, qp.0)?;
            world.modify_qp(qp, QpStep::Connect(path))
        })))
    }

    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error> {
        self.check_settled(qp)?;
        let mut world = locked(&self.world);
        let qp = world.qp(self.device, qp.0)?;
        world.remove_qp(qp);
        Ok(())
    }

    unsafe fn post(
        &mut self,
        qp: QpHandle,
        requests: &[WorkRequest],
        sges: &[Sge],
    ) -> (usize, Option<Error>) {
        let mut world = locked(&self.world);
        let world = &mut *world;
        let qp = match world.devices[self.device].check_alive().and_then(|()| world.qp(self.device, qp.0)) {
            Ok(qp) => qp,
            Err(error) => return (0, Some(error)),
        };
        if !matches!(world.ends[qp].state, State::Ready | State::Error) {
            return (0, Some(errno(libc::EINVAL)));
        }
        let (mut taken, mut error, mut rest) = (0, None, sges);
        let config = world.senders[qp].queue.config();
        for request in requests {
            let Some((own, others)) = rest.split_at_checked(request.sges as usize) else {
                error = Some(errno(libc::EINVAL));
                break;
            };
            rest = others;
            if world.senders[qp].queue.is_full() {
                error = Some(errno(libc::ENOMEM));
                break;
            }
            let Some(len) = length(request, own, config) else {
                error = Some(errno(libc::EINVAL));
                break;
            };
            world.enqueue(qp, request, len, own);
            if request.inline {
                let mut filled = 0;
                for sge in own {
                    let out = &mut world.senders[qp].queue.newest_inline()[filled..];
                    // SAFETY: the caller's promise for inline requests.
                    unsafe { copy_inline(sge, out) };
                    filled += sge.len as usize;
                }
            }
            taken += 1;
        }
        world.counters.posted += taken as u64;
        if world.ends[qp].state == State::Error {
            world.flush(qp);
        } else if world.config.pace == Pace::Timed {
            // The doorbell: everything that may be sent has been sent when this returns.
            world.transmit(qp);
            world.schedule_next(qp);
        } else if taken != 0 {
            world.schedule(qp, world.now);
        }
        (taken, error)
    }

    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        locked(&self.world).poll(self.device, out)
    }

    fn arm(&mut self) -> Result<(), Error> {
        let mut world = locked(&self.world);
        let device = &mut world.devices[self.device];
        device.check_alive()?;
        device.arm();
        Ok(())
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.fds.each_ref().map(|fd| fd.as_deref().map(EventFd::as_fd))
    }

    fn next_event(&mut self) -> Option<AsyncEvent> {
        locked(&self.world).devices[self.device].next_event()
    }
}

impl Registrar for SimDevice {
    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error> {
        // Work requests and peers name memory by its address as a number; the pointer stays in the table.
        let address = span.as_ptr().expose_provenance() as u64;
        locked(&self.world).register(self.device, (span, None), address, access)
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        locked(&self.world).drop_device(self.device);
    }
}
