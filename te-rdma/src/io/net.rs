//! Sockets of control connections.

use std::io;
use std::net::{SocketAddr, TcpStream};

use te_fabric::net::{set_liveness, socket, start_connect};

/// Starts to connect; writability says when it has ended, `take_error` how.
pub(crate) fn dial(address: SocketAddr, silence_ms: u32) -> io::Result<TcpStream> {
    let stream = socket(address)?;
    start_connect(&stream, address)?;
    tune(&stream, silence_ms)?;
    Ok(stream)
}

/// Small frames leave at once, and the kernel looks after a silent connection: a host that is gone lets go of
/// its queue pairs here, and of ours there.
pub(crate) fn tune(stream: &TcpStream, silence_ms: u32) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_liveness(stream, silence_ms)
}
