//! [`ProxyServer`]: a proxy on threads of its own.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::watch;

use super::listener::{ConnectionLimits, serve};
use super::{Figures, Limits, Place, Proxy};

/// A running proxy. Dropping it stops it; requests under way get a short time to end.
#[derive(Debug)]
pub struct ProxyServer<P: Place> {
    addr: SocketAddr,
    proxy: Proxy<P>,
    stop: watch::Sender<bool>,
    threads: Vec<JoinHandle<()>>,
}

impl<P: Place> ProxyServer<P> {
    /// Listens and serves on `threads` threads; with port 0 the system chooses a port.
    ///
    /// # Errors
    /// The address cannot be bound, or the system refuses a thread.
    pub fn start(
        addr: SocketAddr,
        place: Arc<P>,
        limits: Limits,
        connections: ConnectionLimits,
        threads: usize,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(addr)?;
        let (stop, _) = watch::channel(false);
        let proxy = Proxy::new(place, limits);
        let mut server = Self { addr: listener.local_addr()?, proxy, stop, threads: Vec::new() };
        for _ in 0..threads.max(1) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let (listener, stopped) = (listener.try_clone()?, server.stop.subscribe());
            let proxy = server.proxy.clone();
            let work = move || {
                let answer = move |request, _| {
                    let proxy = proxy.clone();
                    async move { proxy.answer(request).await }
                };
                if let Err(error) = runtime.block_on(serve(listener, connections, stopped, answer)) {
                    tracing::error!(%error, "the proxy cannot serve");
                }
                runtime.shutdown_background();
            };
            let thread = std::thread::Builder::new().name("snowskin-proxy".into()).spawn(work)?;
            server.threads.push(thread);
        }
        Ok(server)
    }

    /// The address at which it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What it has done so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.proxy.figures()
    }

    /// Whether a thread has ended by itself.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
    }
}

impl<P: Place> Drop for ProxyServer<P> {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the proxy panicked");
            }
        }
    }
}
