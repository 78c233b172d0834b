//! A store whose memory is in a pool, without coherent caches: a node, and clients on two machines that put,
//! get and remove in turns.

use crate::helper::print_line;
use anyhow::{Context as _, Result, ensure};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};
use store_client::{Client, ClientConfig, Masters, Node, NodeConfig, PutOptions, RemoveMode, Store as _};
use te_core::testkit::pattern;
use te_engine::cxl::Coherence;

/// Extents of the node.
const EXTENTS: u32 = 2;
/// How long a client waits for the other one. Each access to emulated memory takes a trap.
const PATIENCE: Duration = Duration::from_secs(120);

/// A node of the first extents of a pool. It prints `ready`, and ends with its stdin.
///
/// # Errors
/// When the node does not start.
pub(crate) fn store_node(path: &str, master: &str, host: &str) -> Result<()> {
    let mut config = NodeConfig::new("pool", master.parse::<Masters>()?, 1).fabrics("cxl".parse()?);
    config.engine.listen = SocketAddr::new(host.parse::<IpAddr>()?, 0);
    config.engine.cxl.coherence = Coherence::Flush;
    (config.cxl.pool, config.cxl.first, config.cxl.count) = (path.into(), 0, EXTENTS);
    let node = Node::start(config)?;
    print_line("ready")?;
    std::io::stdin().lines().for_each(drop);
    node.stop();
    Ok(())
}

/// The second client. It prints `done` after its last round.
///
/// # Errors
/// As [`store_rounds`].
pub(crate) fn store_peer(path: &str, master: &str, rounds: &str) -> Result<()> {
    store_rounds(Path::new(path), master, (1, rounds.parse()?))?;
    print_line("done")
}

/// In turns with another client: puts an object for that one, gets that one's, compares it and removes it.
/// `me`: 0 begins.
///
/// # Errors
/// A client that does not connect, an object that does not come in time, a wrong byte.
pub(crate) fn store_rounds(path: &Path, master: &str, (me, rounds): (u64, u64)) -> Result<()> {
    let mut config = ClientConfig::new(master.parse::<Masters>()?).fabrics("cxl".parse()?);
    config.engine.cxl.coherence = Coherence::Flush;
    config.engine.cxl.pools = vec![path.to_path_buf()];
    let mut client = Client::connect(config)?;
    for round in 0..rounds {
        let (key, value) = (format!("r{round}"), pattern(round, 1 + (round as usize * 7_919) % 3_000));
        let give_up = Instant::now() + PATIENCE;
        if round % 2 == me {
            let put = |client: &mut Client| client.put(key.as_bytes(), &value, &PutOptions::DEFAULT);
            while !put(&mut client).unwrap_or(false) {
                ensure!(Instant::now() < give_up, "round {round} cannot be put");
                std::thread::sleep(Duration::from_millis(10));
            }
            continue;
        }
        let found = loop {
            match client.get(key.as_bytes()).with_context(|| format!("round {round}"))? {
                Some(found) => break found,
                None => ensure!(Instant::now() < give_up, "the other client did not put round {round}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        ensure!(found == value, "round {round}: a wrong byte");
        client.remove(key.as_bytes(), RemoveMode::Force)?;
    }
    let mismatches = client.counters().checksum_mismatches;
    ensure!(mismatches == 0, "{mismatches} objects were read with a wrong checksum");
    Ok(())
}
