//! Two "hosts" of one process that share a pool in a file: the owner exports an extent, the peer writes into
//! it and reads it back. With devices: `cargo run -p te-cxl --example pool -- /dev/dax0.0`, which formats it.
#![allow(unsafe_code, reason = "registers memory that lives until the end")]

use std::path::PathBuf;

use te_core::*;
use te_cxl::{Claim, Config, CxlTransport, FormatOptions, Mount, Pool, Seat};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let named = std::env::args_os().nth(1).map(PathBuf::from);
    let path = named
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("snowskin-pool-{}", std::process::id())));
    if named.is_none() {
        std::fs::File::create(&path)?.set_len(64 << 20)?;
    }
    let block = Pool::format(&path, FormatOptions::default())?;
    println!("{} extents of {} MiB for {} peers", block.extents, block.extent_bytes >> 20, block.peers);

    let config = Config::default();
    let open = || Pool::open(&path, config.coherence, Some(block.uuid));
    let (ours, theirs) = (open()?, open()?);
    if named.is_none() {
        std::fs::remove_file(&path)?;
    }
    let claim = Claim { first: 0, count: 2, incarnation: 1, epoch: 1, key: [7; 16] };
    let memory = theirs.claim(claim)?;
    let seat = Some(Seat { slot: 0, epoch: 1 });
    let mut peer = CxlTransport::new(config.clone(), vec![Mount { pool: ours, seat }])?;
    let mut owner = CxlTransport::new(config, vec![Mount { pool: theirs, seat: None }])?;

    let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
    let mut buffer = vec![0x5a_u8; 1 << 20];
    // SAFETY: the pool is mapped and the buffer is kept until both transports are dropped.
    unsafe {
        owner.register(region, memory, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        peer.register(region, MemSpan::new(buffer.as_mut_ptr(), buffer.len()), Access::LOCAL)?;
    }
    let mut export = [0; 128];
    let len = owner.export(region, &mut export)?;
    peer.attach(remote, &export[..len])?;

    for (token, op) in [(1, Op::Write), (2, Op::Read)] {
        let (local, there) = (RegionOffset::new(region, 0), RemoteOffset::new(remote, 1 << 20));
        peer.submit(&[Slice { token: Token(token), local, remote: there, len: 1 << 20, op }])?;
        let mut ended = [Completion::applied(Token(0))];
        assert_eq!(peer.poll(Instant::ZERO, &mut ended), 1);
        println!("{op:?} of 1 MiB: {:?}", ended[0].outcome);
    }
    peer.deregister(region)?;
    owner.deregister(region)?;
    assert!(buffer.iter().all(|byte| *byte == 0x5a));
    Ok(())
}
