//! A store whose segment is a range of a namespace of the kernel's target.

use super::{Connection, kernels_target};
use crate::host::{Host, Need};
use crate::nvmeof::{find, read_direct};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::time::Instant;
use store_client::{
    Client, ClientConfig, Fabrics, NamespacePlace, Nguid, Node, NodeConfig, PutOptions, RemoveMode,
    RpcConfig, RpcConnection, Store as _,
};
use store_core::message::Segments;
use te_core::testkit::pattern;

pub(super) const TESTS: &[Test] = &[Test {
    name: "objects_on_the_kernels_target_are_put_read_and_their_places_used_again",
    needs: &[Need::Nvmeof, Need::Program("nvme")],
    run: put_and_read,
}];

/// The range of the node.
const BYTES: u64 = 24 << 20;
const ROUNDS: u64 = 200;
/// Objects that are there at a time.
const KEPT: u64 = 9;

fn put_and_read(host: &Host) -> Result<()> {
    let (address, nqn) = kernels_target(host)?;
    let namespace = find(address, &nqn, 1)?;
    let config = store_master::Config {
        rpc_listen: "127.0.0.1:0".parse()?,
        http_listen: None,
        ..store_master::Config::default()
    };
    let master = store_master::MasterServer::bind(config)?.spawn()?;
    let fabrics: Fabrics = "nvmeof,tcp".parse()?;
    let mut config = NodeConfig::new("kernel", master.rpc_addr().into(), BYTES).fabrics(fabrics);
    config.storage.namespace = Some(NamespacePlace { address, nqn: nqn.clone(), nsid: 1, offset: 0 });
    (config.storage.bytes, config.storage.nguid) = (BYTES, Some(Nguid(namespace.nguid)));
    let node = Node::start(config)?;
    let mut client = Client::connect(ClientConfig::new(master.rpc_addr().into()).fabrics(fabrics))?;
    let value = |round: u64| pattern(round, 1 + (round * 104_729 % 900_000) as usize);
    let began = Instant::now();
    let mut bytes = 0;
    for round in 0..ROUNDS {
        let key = format!("k{}", round % KEPT);
        if round >= KEPT {
            let before = client.get(key.as_bytes())?;
            ensure!(before == Some(value(round - KEPT)), "round {round}: the object of before");
            client.remove(key.as_bytes(), RemoveMode::Force)?;
        }
        let value = value(round);
        ensure!(client.put(key.as_bytes(), &value, &PutOptions::DEFAULT)?, "round {round}: it exists");
        ensure!(client.get(key.as_bytes())?.as_ref() == Some(&value), "round {round}");
        bytes += value.len();
    }
    let took = began.elapsed().as_secs_f64();
    ensure!(client.counters().checksum_mismatches == 0, "{:?}", client.counters());
    of_the_kernels_host(&mut client, master.rpc_addr(), (&address, &nqn), &value)?;
    node.stop();
    println!(
        "    {}{ROUNDS} objects, {} MiB, on a namespace of the kernel's target: put, read, removed and read by the \
         kernel's host, 0 wrong bytes, {took:.1} s",
        host.label(),
        bytes >> 20
    );
    Ok(())
}

/// The kernel's host reads the objects where the master says that they are.
fn of_the_kernels_host(
    client: &mut Client,
    master: std::net::SocketAddr,
    (address, nqn): (&std::net::SocketAddr, &str),
    value: &impl Fn(u64) -> Vec<u8>,
) -> Result<()> {
    let mut rpc = RpcConnection::connect(master.into(), RpcConfig::default())?;
    let (_, mut infos) = rpc.call::<Segments>(&(), std::iter::empty())?;
    let info = infos.next().context("no segment is mounted")?;
    let (base, granule) = info.map(|info| (info.base, u64::from(info.location.granule_bytes())))?;
    let (ip, port) = (address.ip().to_string(), address.port().to_string());
    let kernels = Connection::open("tcp", &ip, &port, nqn, &[])?;
    for round in ROUNDS - KEPT..ROUNDS {
        let (key, value) = (format!("k{}", round % KEPT), value(round));
        let replicas = client.master().replicas(key.as_bytes())?;
        let at = replicas.first().context("it has no replica")?.addr - base + granule;
        let device = kernels.device.display().to_string();
        let found = read_direct(&device, at, value.len().next_multiple_of(granule as usize))?;
        ensure!(found[..value.len()] == value, "{key} at {at}");
    }
    kernels.close()
}
