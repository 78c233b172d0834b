//! A thread for calls that may wait: opening and closing memory of owners, and locking pages. `submit` and
//! `poll` make none of them (L4).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use te_core::{Error, ErrorKind, Location};
use te_fabric::{Epoll, Interest};
use te_gpu::{Gpu, HostPin, NotImported};
use te_host::fork::Mark;

use crate::channel::{Tag, system};
use crate::memory::{Memory, Opening};
use crate::sys::{Lasting, pin};
use std::sync::Arc;

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Job {
    Open { import: u32, opening: Opening },
    Close { import: u32, memory: Memory },
    Pin { region: u32, device: Location, memory: Lasting, writable: bool },
}

/// What was done.
#[derive(Debug)]
pub(crate) enum Done {
    Opened {
        import: u32,
        memory: Result<Memory, NotImported>,
    },
    /// Whether the memory is unmapped.
    Closed {
        import: u32,
        is_closed: bool,
    },
    Pinned {
        region: u32,
        pin: Result<Arc<HostPin>, Error>,
    },
}

#[derive(Debug)]
pub(crate) struct Worker {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    wakes: UnixStream,
    thread: Option<JoinHandle<()>>,
    mark: Mark,
}

impl Worker {
    pub(crate) fn start(gpu: &Gpu, epoll: &Epoll) -> Result<Self, Error> {
        let (wakes, mut rings) = UnixStream::pair().map_err(system)?;
        wakes.set_nonblocking(true).and(rings.set_nonblocking(true)).map_err(system)?;
        epoll.add(&wakes, Tag::Worker.to_bits(), Interest::READ).map_err(system)?;
        let (jobs, todo) = channel();
        let (tell, done) = channel();
        let gpu = gpu.clone();
        let thread = std::thread::Builder::new().name("nvlink-memory".to_owned());
        let run = move || {
            for job in todo {
                if tell.send(carry_out(&gpu, job)).is_err() {
                    return;
                }
                // When there is no room, enough waits to be read.
                let _full = rings.write(&[1]);
            }
        };
        let thread = Some(thread.spawn(run).map_err(system)?);
        Ok(Self { jobs: Some(jobs), done, wakes, thread, mark: Mark::new() })
    }

    pub(crate) fn send(&self, job: Job) {
        // The thread ends after this sender is dropped.
        let _ended = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    /// What was done, if anything new was.
    pub(crate) fn next(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }

    /// Everything that rang so far is looked at by the caller, after this call.
    pub(crate) fn was_heard(&mut self) {
        while self.wakes.read(&mut [0; 64]).is_ok_and(|count| count > 0) {}
    }

    /// Waits until all jobs are done.
    pub(crate) fn finish(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A child after a fork does not have the thread.
            match self.mark.is_forked() {
                true => std::mem::forget(thread),
                false => _ = thread.join(),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.finish();
    }
}

fn carry_out(gpu: &Gpu, job: Job) -> Done {
    match job {
        Job::Open { import, opening } => {
            let memory = opening.open(gpu);
            Done::Opened {
                import,
                memory: memory.map_err(|why| NotImported { error: unreachable(why.error), ..why }),
            }
        }
        Job::Close { import, memory } => Done::Closed { import, is_closed: memory.close() },
        Job::Pin { region, device, memory, writable } => {
            Done::Pinned { region, pin: pin(gpu, device, memory, writable).map_err(unreachable) }
        }
    }
}

/// What cannot be reached by this fabric may be reached by another one.
fn unreachable(error: Error) -> Error {
    match error.kind {
        ErrorKind::Unsupported
        | ErrorKind::System
        | ErrorKind::NotFound
        | ErrorKind::Full
        | ErrorKind::OutOfRange => Error::with_code(ErrorKind::Unreachable, error.code),
        _ => error,
    }
}
