//! `transfer_engine_bench`. Its flags: `mooncake-transfer-engine/example/transfer_engine_bench.cpp` of
//! Mooncake at commit 3b5a5941. Both ends are this program's: the other end of `--segment_id` is the same
//! command with `--mode=target`, or `snowskin bench target`.

use super::gflags::{Flag, Values};
use super::{Native, address, parsed};
use crate::exit::Failure;

pub(super) const FLAGS: &[Flag] = &[
    Flag::used("mode"),
    Flag::used("local_server_name"),
    Flag::used("metadata_server"),
    Flag::used("operation"),
    Flag::used("protocol"),
    Flag::used("device_name"),
    Flag::used("segment_id"),
    Flag::used("buffer_size"),
    Flag::used("batch_size"),
    Flag::used("block_size"),
    Flag::used("duration"),
    Flag::used("threads"),
    Flag::lacking("nic_priority_matrix"),
    Flag::moot_switch("auto_discovery"),
    Flag::moot("report_unit"),
    Flag::moot("report_precision"),
    Flag::moot("backend"),
    Flag::lacking_switch("use_vram"),
    Flag::moot_switch("init_mem"),
    Flag::moot("gpu_id"),
];

pub(super) fn translate(values: &Values) -> Result<Native, Failure> {
    let whole = |name: &str, default: u64, max: u64| {
        let need = format!("a whole number, 1 to {max}");
        parsed(values, name, default, &need, |text| {
            text.parse().ok().filter(|count| (1..=max).contains(count))
        })
    };
    let fabric = match values.text("protocol").unwrap_or("tcp") {
        protocol @ ("tcp" | "rdma") => protocol,
        other => return Err(Failure::usage(format!("--protocol={other}: write tcp or rdma"))),
    };
    let metadata = metadata(values)?;
    let device = values.text("device_name").filter(|_| fabric == "rdma");
    let mut native = match values.text("mode").unwrap_or("initiator") {
        "target" => {
            let memory = whole("buffer_size", 1 << 30, 1 << 50)?;
            let mut native = vec!["bench".into(), "target".into(), format!("--memory={memory}")];
            if let Some(name) = values.text("local_server_name") {
                native.extend(listen(name, metadata.is_some())?);
            }
            native.push(format!("--fabric={fabric}"));
            native
        }
        "initiator" => {
            let operation = values.text("operation").unwrap_or("read");
            if !matches!(operation, "read" | "write") {
                return Err(Failure::usage(format!("--operation={operation}: write read or write")));
            }
            let target = values.text("segment_id").ok_or_else(|| {
                Failure::usage("--segment_id is missing: write the address that the target prints, HOST:PORT")
            })?;
            vec![
                "bench".into(),
                "transfer".into(),
                format!("--target={target}"),
                format!("--fabric={fabric}"),
                format!("--op={operation}"),
                format!("--block={}", whole("block_size", 65_536, 1 << 40)?),
                format!("--batch={}", whole("batch_size", 128, 4096)?),
                format!("--threads={}", whole("threads", 12, 256)?),
                format!("--duration={}", whole("duration", 10, 86_400)?),
            ]
        }
        other => return Err(Failure::usage(format!("--mode={other}: write initiator or target"))),
    };
    native.extend(device.map(|device| format!("--device={device}")));
    native.extend(metadata.map(|url| format!("--metadata={url}")));
    native.extend(values.verbosity());
    Ok(Native::Arguments(native))
}

/// The directory of names; `None`: names are addresses.
fn metadata(values: &Values) -> Result<Option<String>, Failure> {
    match values.text("metadata_server") {
        None | Some("P2PHANDSHAKE") => Ok(None),
        Some(url) if url.contains("://") => Ok(Some(url.to_owned())),
        // Mooncake takes an address for etcd.
        Some(address) if address.contains(':') => Ok(Some(format!("etcd://{address}"))),
        Some(other) => Err(Failure::usage(format!("--metadata_server={other}: write P2PHANDSHAKE or a URL"))),
    }
}

/// Where the target listens: at its name, if that is an address; else its name is registered.
fn listen(name: &str, has_directory: bool) -> Result<Vec<String>, Failure> {
    let (host, port) = match name.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().ok()),
        None if has_directory => return Ok(vec![format!("--segment={name}")]),
        None => (name, Some(0)),
    };
    let port = port.ok_or_else(|| Failure::usage(format!("--local_server_name={name}: write HOST:PORT")))?;
    Ok(vec![format!("--listen={}", address(host, port)?)])
}
