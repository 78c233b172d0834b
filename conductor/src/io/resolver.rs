//! Host names become addresses on a thread of their own: the system's resolver may take seconds.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use crate::config::Endpoint;

/// A question, with what tells its answer from others.
#[derive(Debug)]
pub(super) struct Question<T> {
    pub(super) of: T,
    pub(super) endpoint: Endpoint,
}

/// The thread. Dropping it ends it, after the question that it is busy with.
#[derive(Debug)]
pub(super) struct Resolver<T> {
    questions: Option<Sender<Question<T>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Resolver<T> {
    /// `answer` is called on the thread: `None` when the name has no address.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub(super) fn start(
        mut answer: impl FnMut(T, Option<SocketAddr>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (questions, received): (_, Receiver<Question<T>>) = channel();
        let thread = thread::Builder::new().name("snowskin-names".into()).spawn(move || {
            for Question { of, endpoint } in received {
                let found = (endpoint.host.as_str(), endpoint.port).to_socket_addrs();
                answer(of, found.ok().and_then(|mut addresses| addresses.next()));
            }
        })?;
        Ok(Self { questions: Some(questions), thread: Some(thread) })
    }

    /// Asks for the address of an endpoint. At most one question per publisher waits.
    pub(super) fn ask(&self, question: Question<T>) {
        if let Some(questions) = &self.questions {
            let _ = questions.send(question);
        }
    }
}

impl<T> Drop for Resolver<T> {
    fn drop(&mut self) {
        drop(self.questions.take());
        // A question to a name server that does not answer must not delay the end of the process.
        drop(self.thread.take());
    }
}
