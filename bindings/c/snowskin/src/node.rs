//! Memory for the store: `snowskin_node_*`.
#![allow(unsafe_code, reason = "the functions of a C interface take addresses")]
#![allow(unreachable_pub, reason = "the functions are exported to C by their names")]
#![allow(clippy::missing_safety_doc, reason = "the header states what the caller has to promise")]

use std::ffi::c_char;
use std::net::TcpListener;
use std::ptr;

use store_client::{Node, NodeConfig};

use crate::fault::{Code, Fault, answer, fabrics, free, option, options, place};
use crate::store::listen;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct NodeOptions {
    size: usize,
    master: *const c_char,
    name: *const c_char,
    host: *const c_char,
    fabrics: *const c_char,
    cluster_secret: *const c_char,
    memory: u64,
    wait_master_ms: u32,
}

const _: () = {
    assert!(size_of::<NodeOptions>() == 64 && std::mem::offset_of!(NodeOptions, memory) == 48);
    assert!(std::mem::offset_of!(NodeOptions, wait_master_ms) == 56);
};

const DEFAULT: NodeOptions = NodeOptions {
    size: size_of::<NodeOptions>(),
    master: ptr::null(),
    name: ptr::null(),
    host: ptr::null(),
    fabrics: ptr::null(),
    cluster_secret: ptr::null(),
    memory: 0,
    wait_master_ms: 0,
};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_node_start(
    given: *const NodeOptions,
    node: *mut *mut Node,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a place for a handle, and for NULL or options with texts.
        let (out, config) = unsafe { (place(node), config_of(&options(given, DEFAULT)?)?) };
        let out = out.ok_or_else(|| Fault::null("node"))?;
        out.write(Box::into_raw(Box::new(Node::start(config)?)));
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_node_stop(node: *mut Node) {
    // SAFETY: the header asks for NULL or a handle that is not used any more. The drop unmounts the memory.
    unsafe { free(node) };
}

/// The settings of a node.
///
/// # Safety
/// The texts of `given` are NULL or end with a NUL.
unsafe fn config_of(given: &NodeOptions) -> Result<NodeConfig, Fault> {
    // SAFETY: the caller's promise.
    let (master, name, host, names, secret) = unsafe {
        (
            option(given.master, "master")?.unwrap_or("127.0.0.1:50051"),
            option(given.name, "name")?,
            option(given.host, "host")?.unwrap_or("127.0.0.1"),
            option(given.fabrics, "fabrics")?,
            option(given.cluster_secret, "cluster_secret")?.unwrap_or_default(),
        )
    };
    let master = master.parse().map_err(|error| Fault::argument(format!("`master`: {error}")))?;
    let (mut at, advertise) = listen(host, 0);
    let name = match name {
        Some(name) => name.to_owned(),
        None => {
            // A port that is free now; if another process takes it meanwhile, the start fails and says so.
            let free = TcpListener::bind(at).and_then(|listener| listener.local_addr());
            let free = free.map_err(|error| Fault::argument(format!("`host` {host}: {error}")))?;
            at.set_port(free.port());
            format!("{host}:{}", free.port())
        }
    };
    let mut config = NodeConfig::new(&name, master, given.memory).fabrics(fabrics(names)?);
    (config.engine.listen, config.engine.advertise_host) = (at, advertise);
    config.identity.cluster = secret.into();
    config.populate = false;
    config.wait_master_ms = given.wait_master_ms;
    Ok(config)
}
