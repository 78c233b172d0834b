//! Sockets of control connections.

use std::io;
use std::net::{SocketAddr, TcpStream};

use te_fabric::net::{set_liveness, socket, start_connect};

/// Starts to connect. The socket is writable when that has ended, and `take_error` returns the result.
pub(crate) fn dial(address: SocketAddr, silence_ms: u32) -> io::Result<TcpStream> {
    let stream = socket(address)?;
    start_connect(&stream, address)?;
    tune(&stream, silence_ms)?;
    Ok(stream)
}

/// Sends small frames at once, and has the kernel close a connection whose host does not answer: our queue
/// pairs for a host that is gone are then destroyed.
pub(crate) fn tune(stream: &TcpStream, silence_ms: u32) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_liveness(stream, silence_ms)
}
