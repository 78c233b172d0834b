//! `mooncake_http_metadata_server`. Its flags and answers:
//! `mooncake-wheel/mooncake/http_metadata_server.py` of Mooncake at commit 3b5a5941.

use std::net::SocketAddr;
use std::time::Duration;

use store_master::{HttpLimits, HttpServer, MetadataLimits, SameRpcMeta, mooncake_metadata};

use super::gflags::{Flag, Values};
use super::{Native, address, port};
use crate::commands::master::wait_for_signal;
use crate::exit::{Exit, Failure};
use crate::{Outcome, fail, output, sys};

pub(super) const FLAGS: &[Flag] = &[Flag::used("port"), Flag::used("host"), Flag::moot("log_level")];

pub(super) fn translate(values: &Values) -> Result<Native, Failure> {
    let host = values.text("host").unwrap_or("0.0.0.0");
    Ok(Native::Metadata(address(host, port(values, "port", 8080)?)?))
}

/// Serves until Ctrl-C or SIGTERM.
pub(super) fn run(addr: SocketAddr) -> Outcome {
    sys::catch_interrupts();
    let mut server = match HttpServer::bind(addr) {
        Ok(server) => server,
        Err(error) => {
            return fail(
                Failure::failed(format!("{addr}: {error}"))
                    .hint("choose another --port, or stop the process that listens there"),
            );
        }
    };
    let routes = mooncake_metadata(MetadataLimits::default(), SameRpcMeta::Refused);
    server.serve(routes, HttpLimits::default(), Duration::ZERO)?;
    // A closed stdout does not end the server.
    let _ = output::print(&format!("metadata server ready: http://{}/metadata\n", server.addr()));
    wait_for_signal();
    Ok(Exit::Ok)
}
