//! `mooncake_client`: a process that lends memory and serves other processes of its machine. Its flags:
//! `mooncake-store/src/real_client_main.cpp` of Mooncake at commit 3b5a5941.
//!
//! It is a node whose local server has a socket that follows from `--port`: where Mooncake's dummy clients
//! name `HOST:PORT`, clients of this program use [`store_client::local::default_path`] of `127.0.0.1:PORT`.

use std::net::SocketAddr;

use store_client::Address;
use store_client::local::make_default_path;

use super::gflags::{Flag, Values};
use super::master::{CLUSTER, etcd_servers};
use super::{Native, address, parsed, port, size, towards};
use crate::commands::available_memory;
use crate::exit::Failure;

pub(super) const FLAGS: &[Flag] = &[
    Flag::used("host"),
    Flag::used("device_names"),
    Flag::used("master_server_address"),
    Flag::used("protocol"),
    Flag::used("port"),
    Flag::used("global_segment_size"),
    // Engines find each other through the master, and one thread serves.
    Flag::moot("metadata_server"),
    Flag::moot("local_buffer_size"),
    Flag::moot("threads"),
    Flag::used("tenant_id"),
    Flag::switch("enable_offload"),
    Flag::moot_switch("start_offload_rpc_server"),
    Flag::used("http_port"),
];

/// What `--global_segment_size` is without that flag, bytes.
const MEMORY_DEFAULT: u64 = 4 << 30;

pub(super) fn translate(values: &Values) -> Result<Native, Failure> {
    let master = values.text("master_server_address").unwrap_or("127.0.0.1:50051");
    let cluster = std::env::var("MC_STORE_CLUSTER_ID").ok().filter(|name| !name.is_empty());
    let master = &match master.split_once("://") {
        None => master.to_owned(),
        Some(("etcd", servers)) => {
            format!("etcd://{}/{}", etcd_servers(servers), cluster.as_deref().unwrap_or(CLUSTER))
        }
        Some(_) => {
            return Err(Failure::usage(format!(
                "--master_server_address={master}: only etcd says who leads"
            ))
            .hint("write HOST:PORT[,HOST:PORT…] of the masters, or etcd://HOST:PORT"));
        }
    };
    let port = port(values, "port", 50052)?;
    let host = match values.text("host") {
        Some(host) if host != "0.0.0.0" && host != "[::]" => address(host, port)?,
        // The address under which others reach this machine is the one that reaches the master.
        _ => {
            let first = master.trim_start_matches("etcd://").split([',', '/']).next();
            SocketAddr::new(towards(first.unwrap_or_default()), port)
        }
    };
    let mut native = vec![
        "node".to_owned(),
        format!("--master={master}"),
        format!("--listen={host}"),
        format!("--name={host}"),
        format!("--memory={}", memory(values)?),
        format!("--local={}", socket(port)?),
        // As Mooncake's, it serves at once: pages of its memory are used from their first use on.
        "--populate=false".to_owned(),
    ];
    if values.is_on("enable_offload") {
        native.push(format!("--disk={}", disk(host, |name| std::env::var(name).ok())?));
    }
    native.extend(values.verbosity());
    native.extend(values.text("tenant_id").map(|tenant| format!("--tenant={tenant}")));
    match values.text("protocol").unwrap_or("tcp") {
        "rdma" => {
            native.push("--fabric=auto,rdma".to_owned());
            if let Some(devices) = values.text("device_names") {
                let list: Vec<String> = devices.split(',').map(|name| format!("{:?}", name.trim())).collect();
                native.push(format!("--engine-rdma-devices=[{}]", list.join(", ")));
            }
        }
        "tcp" => {}
        other => {
            return Err(Failure::usage(format!("--protocol={other}: write tcp or rdma")));
        }
    }
    if let Some(http) = values.text("http_port") {
        let port: u16 =
            http.parse().map_err(|_| Failure::usage(format!("--http_port={http}: write a port")))?;
        native.push(format!("--http={}", SocketAddr::new(host.ip(), port)));
    }
    Ok(Native::Arguments(native))
}

/// The memory to lend. Without the flag, half of what the machine has available if that is less than
/// Mooncake's default, so that the command starts on a small machine.
fn memory(values: &Values) -> Result<u64, Failure> {
    let given = parsed(
        values,
        "global_segment_size",
        None,
        "a size such as 4GB, \"512 MB\" or a number of bytes",
        |text| size(text).filter(|bytes| *bytes > 0).map(Some),
    )?;
    Ok(given.unwrap_or_else(|| match available_memory() {
        Some(available) if available / 2 < MEMORY_DEFAULT => {
            let bytes = (available / 2).next_multiple_of(4096);
            eprintln!(
                "mooncake_client: warning: lends {} MiB, half of what this machine has available: --global_segment_size \
                 chooses another size",
                bytes >> 20
            );
            bytes
        }
        _ => MEMORY_DEFAULT,
    }))
}

/// The disk that Mooncake's variables choose: a file of that size, which is allocated at once.
fn disk(host: SocketAddr, variable: impl Fn(&str) -> Option<String>) -> Result<String, Failure> {
    const PATH: &str = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH";
    const SIZE: &str = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES";
    let given = |name: &str| variable(name).filter(|text| !text.is_empty());
    let dir = given(PATH).unwrap_or_else(|| "/data/file_storage".to_owned());
    let bytes = given(SIZE).ok_or_else(|| {
        Failure::usage(format!("--enable_offload: {SIZE} is not set"))
            .hint("a disk is allocated whole when the node starts: say how many bytes it is to have")
    })?;
    let bytes: u64 = bytes.parse().map_err(|_| Failure::usage(format!("{SIZE}={bytes}: write a number")))?;
    // Several clients of a machine have the same directory.
    let name = host.to_string().replace([':', '[', ']'], "_");
    Ok(format!("{dir}/{name}.snowskin:{bytes}"))
}

/// The path of the local server's socket.
fn socket(port: u16) -> Result<String, Failure> {
    let at = Address::Tcp(format!("127.0.0.1:{port}"));
    let path = make_default_path(&at).map_err(|error| Failure::failed(format!("local clients: {error}")))?;
    Ok(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_the_place_and_the_size_of_mooncakes_variables() {
        let host: SocketAddr = "10.0.0.7:50052".parse().expect("an address");
        let with = |path: &'static str, size: &'static str| {
            move |name: &str| {
                let value = if name.ends_with("STORAGE_PATH") { path } else { size };
                Some(value.to_owned())
            }
        };
        assert_eq!(disk(host, with("/mnt", "64")).ok().as_deref(), Some("/mnt/10.0.0.7_50052.snowskin:64"));
        let without = disk(host, |_| None).map_err(|error| error.to_string());
        assert!(without.is_err_and(|error| error.contains("TOTAL_SIZE_LIMIT_BYTES is not set")));
        assert!(disk(host, with("", "much")).is_err());
    }
}
