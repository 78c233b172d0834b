//! A client with its own engine: the fastest kind, for a process that moves many bytes.
//!
//! ```text
//! cargo run -p store-client --example embedded
//! ```

use store_client::{BufferRange, Client, ClientConfig, Get, Node, NodeConfig, Put, PutOptions, Store as _};
use store_master::{Config, MasterServer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Usually these are other processes: `snowskin master` and `snowskin node`.
    let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
    let master = MasterServer::bind(config)?.spawn()?;
    let node = Node::start(NodeConfig::new("node-1", master.rpc_addr().into(), 64 << 20))?;

    let mut client = Client::connect(ClientConfig::new(master.rpc_addr().into()))?;
    let options = PutOptions::default();
    client.put(b"greeting", b"hello", &options)?;
    println!("{:?}", client.get(b"greeting")?);

    // Blocks of a KV cache in registered memory move from and into it without a copy.
    const BLOCK: u64 = 16 << 10;
    let cache = client.alloc(16 * BLOCK as usize)?;
    let block = |index: u64| BufferRange::part(&cache, index * BLOCK, BLOCK);
    let keys: Vec<String> = (0..8).map(|index| format!("chat/7/{index}")).collect();
    let mut puts: Vec<_> = keys.iter().zip(0..).map(|(key, index)| Put::new(key, block(index))).collect();
    println!("{:?}", client.batch_put(&mut puts, &options));

    let mut gets: Vec<_> = keys.iter().zip(8..).map(|(key, index)| Get::new(key, block(index))).collect();
    let tally = client.batch_get(&mut gets);
    if !tally.is_complete() {
        for get in &gets {
            println!("{}: {:?}", String::from_utf8_lossy(get.key()), get.result());
        }
    }

    // Information from the master, without moving bytes.
    println!("{} objects", client.master().stats()?.objects);
    drop(client);
    node.stop();
    master.stop()?;
    Ok(())
}

#[test]
fn it_runs_to_its_end() -> Result<(), Box<dyn std::error::Error>> {
    main()
}
