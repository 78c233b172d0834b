//! Connections through this process, which a test can hold up or cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::HERE;

/// How often a held connection looks whether it may go on.
const LOOK: Duration = Duration::from_millis(1);

/// Forwards every connection to a port of this host.
pub(crate) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    held: AtomicBool,
    gone: AtomicBool,
    /// Both ends of each connection.
    streams: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub(crate) fn start(to: u16) -> Self {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let own = shared.clone();
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.unwrap();
                if own.gone.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(far) = TcpStream::connect((HERE, to)) else { continue };
                near.set_nodelay(true).and(far.set_nodelay(true)).unwrap();
                let mut streams = own.streams.lock().unwrap();
                streams.extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                for (from, to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                    let shared = own.clone();
                    std::thread::spawn(move || shared.forward(from, to));
                }
            }
        });
        Self { address, shared }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Holds up everything that is sent from here on, or lets it go on.
    pub(crate) fn hold(&self, held: bool) {
        self.shared.held.store(held, Ordering::SeqCst);
    }

    /// Cuts all connections. Others may be opened.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            // It may have ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.gone.store(true, Ordering::SeqCst);
        // Wakes the thread, which closes the listener.
        let _ = TcpStream::connect(self.address);
        self.cut();
    }
}

impl Shared {
    fn forward(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = [0; 64 << 10];
        loop {
            let count = match from.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            while self.held.load(Ordering::SeqCst) && !self.gone.load(Ordering::SeqCst) {
                std::thread::sleep(LOOK);
            }
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    }
}
