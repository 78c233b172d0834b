//! A network that holds bytes back: between an initiator and a target, it keeps what the initiator has sent
//! on connections that are already closed, and delivers it when the test wants.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

use te_fabric::{Export, ExportFormat};

use super::Node;

const FORMAT: ExportFormat = ExportFormat { magic: *b"nvmo", version: 3 };

/// One connection through the network.
struct Link {
    host: Option<TcpStream>,
    target: Option<TcpStream>,
    /// Bytes for the target, and for the host.
    up: Vec<u8>,
    down: Vec<u8>,
    holds: bool,
    /// It was held once: its end at the target stays open, as if the network had lost the host's end.
    lost: bool,
}

pub(crate) struct Proxy {
    listener: TcpListener,
    target: std::net::SocketAddr,
    links: Vec<Link>,
}

impl Proxy {
    pub(crate) fn new(target: &Node) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { listener, target: target.transport.local_address(), links: Vec::new() }
    }

    /// The export of the target's region, with the address of this network.
    pub(crate) fn export(&self, target: &Node) -> Vec<u8> {
        let mut export = Export::parse(FORMAT, &target.export()).unwrap();
        export.port = self.listener.local_addr().unwrap().port();
        let mut blob = [0; 256];
        let len = export.write(&mut blob).unwrap();
        blob[..len].to_vec()
    }

    /// Holds what the host sends from now on, on the connections that there are.
    pub(crate) fn hold(&mut self) {
        self.links.iter_mut().for_each(|link| (link.holds, link.lost) = (true, true));
    }

    /// Delivers what is held.
    pub(crate) fn release(&mut self) {
        self.links.iter_mut().for_each(|link| link.holds = false);
    }

    /// Bytes that are held.
    pub(crate) fn held(&self) -> usize {
        self.links.iter().filter(|link| link.holds).map(|link| link.up.len()).sum()
    }

    pub(crate) fn poll(&mut self) {
        while let Ok((host, _)) = self.listener.accept() {
            let target = TcpStream::connect(self.target).unwrap();
            for stream in [&host, &target] {
                stream.set_nonblocking(true).unwrap();
                stream.set_nodelay(true).unwrap();
            }
            let link = Link {
                host: Some(host),
                target: Some(target),
                up: Vec::new(),
                down: Vec::new(),
                holds: false,
                lost: false,
            };
            self.links.push(link);
        }
        for link in &mut self.links {
            receive(&mut link.host, &mut link.up);
            receive(&mut link.target, &mut link.down);
            send(&mut link.host, &mut link.down);
            if !link.holds {
                send(&mut link.target, &mut link.up);
                // The end of the host's stream travels behind its bytes.
                if link.host.is_none() && link.up.is_empty() && !link.lost {
                    link.target = None;
                }
            }
            if link.target.is_none() && link.down.is_empty() && !link.holds {
                link.host = None;
            }
        }
    }
}

fn receive(from: &mut Option<TcpStream>, into: &mut Vec<u8>) {
    let Some(stream) = from else { return };
    let mut more = [0; 65_536];
    loop {
        match stream.read(&mut more) {
            Ok(0) => break,
            Ok(count) => into.extend_from_slice(&more[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(_) => break,
        }
    }
    *from = None;
}

fn send(to: &mut Option<TcpStream>, bytes: &mut Vec<u8>) {
    let Some(stream) = to else { return };
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => drop(bytes.drain(..count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(_) => {
                *to = None;
                return;
            }
        }
    }
}
