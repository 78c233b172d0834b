//! [`Core`]: an open store, shared by its Python objects.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use store_client::{Node, PutOptions, RemoveMode};
use te_host::fork::Mark;

use super::backend::Backend;
use super::jobs::{Answer, Fetched, Given, Job, Key, Queue, Reply, Stored, Wanted, refused};
use super::worker::Worker;
use crate::errors::{Fault, Kind};
use crate::gil;
use crate::lifecycle::{self, Registered};
use crate::pool::Pool;
use crate::slot::Slot;

/// An open store: the queue of its thread, the memory of its leases, and the node that lends memory.
pub(crate) struct Core {
    queue: Arc<Queue>,
    pub(crate) pool: Arc<Pool>,
    ending: Arc<Ending>,
    /// Closes the store at exit, unless it has been closed.
    exit: Mutex<Option<Registered>>,
    mark: Mark,
}

/// What closing a store waits for.
struct Ending {
    thread: Mutex<Option<JoinHandle<()>>>,
    node: Mutex<Option<Node>>,
}

impl Core {
    /// Starts the thread of a client.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub(crate) fn start(backend: Backend, pool: Arc<Pool>, node: Option<Node>) -> Result<Arc<Self>, Fault> {
        let queue = Queue::new();
        let worker = Worker::new(backend, Arc::clone(&queue));
        let thread = thread::Builder::new()
            .name("snowskin-client".into())
            .spawn(move || worker.run())
            .map_err(|error| {
                Fault::new(
                    Kind::Other,
                    "system",
                    format!("the operating system did not create a thread: {error}"),
                )
            })?;
        let ending = Arc::new(Ending { thread: Mutex::new(Some(thread)), node: Mutex::new(node) });
        let exit = {
            let (queue, ending) = (Arc::clone(&queue), Arc::clone(&ending));
            lifecycle::at_exit(move |_time| {
                queue.close();
                ending.end();
            })
        };
        Ok(Arc::new(Self { queue, pool, ending, exit: Mutex::new(Some(exit)), mark: Mark::new() }))
    }

    /// Whether it was closed, or belongs to the parent process.
    pub(crate) fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    pub(crate) fn get(&self, items: Vec<Wanted>) -> Answer<Vec<Fetched>> {
        self.ask(|reply| Job::Get(items, reply))
    }

    pub(crate) fn put(&self, items: Vec<Given>, options: PutOptions) -> Answer<Vec<Stored>> {
        self.ask(|reply| Job::Put(items, options, reply))
    }

    pub(crate) fn exists(&self, keys: Vec<Key>) -> Answer<Vec<bool>> {
        self.ask(|reply| Job::Exists(keys, reply))
    }

    pub(crate) fn remove(&self, keys: Vec<Key>, force: bool) -> Answer<Vec<Result<bool, Fault>>> {
        self.ask(|reply| Job::Remove(keys, RemoveMode::forced(force), reply))
    }

    /// Runs anything else on the client's thread.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Worker) -> Result<T, Fault> + Send + 'static,
    ) -> Answer<T> {
        self.ask(|reply| {
            Job::Call(Box::new(move |worker| {
                if reply.is_wanted() {
                    reply.send(run(worker));
                }
            }))
        })
    }

    /// The status of the node in this process, if there is one.
    pub(crate) fn node_endpoint(&self) -> Option<String> {
        if self.mark.is_forked() {
            return None;
        }
        let node = self.ending.node.lock().unwrap_or_else(PoisonError::into_inner);
        node.as_ref().map(|node| node.endpoint().to_owned())
    }

    /// Closes the store: operations that wait are carried out, the memory that it lends is withdrawn. The
    /// slot is filled when that is over.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub(crate) fn close(&self) -> Arc<Slot<()>> {
        let slot = Slot::new();
        if self.mark.is_forked() {
            slot.set(());
            return slot;
        }
        self.queue.close();
        if lifecycle::is_exiting() {
            // It was closed with the interpreter.
            slot.set(());
            return slot;
        }
        let exit = self.exit.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(exit);
        let (ending, filled) = (Arc::clone(&self.ending), Arc::clone(&slot));
        gil::apart(move || {
            ending.end();
            filled.set(());
        });
        slot
    }

    fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Answer<T> {
        let (reply, answer) = Reply::new();
        match self.queue.push(job(reply)) {
            Ok(()) => answer,
            Err(fault) => refused(fault),
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.mark.is_forked() {
            // The thread and the jobs belong to the parent.
            std::mem::forget((Arc::clone(&self.queue), Arc::clone(&self.ending)));
        } else {
            // Never blocks: another thread waits for the end.
            let _ = self.close();
        }
    }
}

impl Ending {
    /// Waits for the end of the client's thread, then withdraws the memory of the node.
    fn end(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that panicked has answered every caller.
        thread.into_iter().for_each(|thread| drop(thread.join()));
        let node = self.node.lock().unwrap_or_else(PoisonError::into_inner).take();
        node.into_iter().for_each(Node::stop);
    }
}
