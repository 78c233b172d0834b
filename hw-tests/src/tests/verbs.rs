//! RDMA without this project's code: programs of rdma-core over the same devices, and the devices' packet
//! counters.

use super::run;
use crate::facts::Rail;
use crate::host::{Host, Need};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::time::Duration;

pub(super) const TESTS: &[Test] = &[Test {
    name: "ping_pong_of_rdma_core_crosses_every_rail_and_the_devices_count_it",
    needs: &[Need::Rdma, Need::Peer, Need::Program("ibv_rc_pingpong")],
    run: ping_pong,
}];

const MESSAGES: u64 = 50;
const MESSAGE_BYTES: u64 = 16 << 10;
/// How long a server may take until it listens, and a pair until it has finished.
const PATIENCE: Duration = Duration::from_secs(60);

fn ping_pong(host: &Host) -> Result<()> {
    let joined = host.joined_rails()?;
    ensure!(!joined.is_empty(), "no rail is joined to one of the peer's");
    for (ours, theirs) in &joined {
        let before = packets(ours);
        over(host, ours, theirs).with_context(|| format!("{} to {}", ours.device, theirs.device))?;
        // Every message is sent once in each direction. A packet holds at most 4096 bytes, depending on the
        // path MTU.
        let least = MESSAGES * (MESSAGE_BYTES / 4096);
        if let (Some(before), Some(after)) = (before, packets(ours)) {
            let (sent, received) = (after.0 - before.0, after.1 - before.1);
            ensure!(sent >= least && received >= least, "{}: {sent} sent, {received} received", ours.device);
            println!("    {}{}: {sent} packets sent, {received} received", host.label(), ours.device);
        }
    }
    Ok(())
}

/// Packets sent and received; `None` if the device does not count them.
pub(super) fn packets(rail: &Rail) -> Option<(u64, u64)> {
    // Emulated devices name their counters differently; hardware uses the names of the InfiniBand
    // specification.
    let sent = ["sent_pkts", "port_xmit_packets"].iter().find_map(|name| rail.counter(name))?;
    let received = ["rcvd_pkts", "port_rcv_packets"].iter().find_map(|name| rail.counter(name))?;
    Some((sent, received))
}

fn over(host: &Host, ours: &Rail, theirs: &Rail) -> Result<()> {
    let (our_gid, _) = ours.address().context("this machine's rail has no address")?;
    let (their_gid, their_address) = theirs.address().context("the peer's rail has no address")?;
    let arguments = |rail: &Rail, gid: u32| -> Vec<String> {
        let words = format!(
            "ibv_rc_pingpong -d {} -i {} -g {gid} -n {MESSAGES} -s {MESSAGE_BYTES}",
            rail.device, rail.port
        );
        words.split_whitespace().map(str::to_owned).collect()
    };
    let server_line = arguments(theirs, their_gid);
    let server = host.peer()?.start(&server_line.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut client = arguments(ours, our_gid);
    client.push(their_address.to_string());
    let client: Vec<&str> = client.iter().map(String::as_str).collect();
    // The server does not report when it listens; a client that is too early is refused.
    let give_up = std::time::Instant::now() + PATIENCE;
    loop {
        match run(&client) {
            Ok(_) => break,
            Err(error)
                if error.to_string().contains("Couldn't connect") && std::time::Instant::now() < give_up =>
            {
                std::thread::sleep(Duration::from_millis(200));
            }
            Err(error) => return Err(error),
        }
    }
    server.finish(PATIENCE)?;
    Ok(())
}
