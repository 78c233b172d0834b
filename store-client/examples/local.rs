//! A client without an engine: the node on its machine moves the bytes. For many small processes.
//!
//! ```text
//! cargo run -p store-client --example local
//! ```

use store_client::local::{LocalConfig, LocalServerConfig};
use store_client::{ClientConfig, Get, LocalClient, LocalServer, Node, NodeConfig, PutOptions, Store as _};
use store_master::{Config, MasterServer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Usually these are other processes: `snowskin master` and `snowskin node --local PATH`.
    let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
    let master = MasterServer::bind(config)?.spawn()?;
    let node = Node::start(NodeConfig::new("node-1", master.rpc_addr().into(), 64 << 20))?;
    let path = std::env::temp_dir().join(format!("snowskin-example-{}.sock", std::process::id()));
    let server =
        LocalServer::start(LocalServerConfig::new(&path, ClientConfig::new(master.rpc_addr().into())))?;

    let mut client = LocalClient::connect(LocalConfig::new(&path))?;
    let options = PutOptions::default();
    client.put(b"greeting", b"hello", &options)?;
    println!("{:?}", client.get(b"greeting")?);

    // The arena is shared with the node: values in it move without a copy in this process.
    let buffer = client.alloc(1 << 20)?;
    buffer.write(0, &[7; 4096])?;
    client.put(b"block", buffer.part(0, 4096), &options)?;
    println!("{:?}", client.get_with(Get::new("block", buffer.part(8192, 4096)))?);
    println!("{:?}", client.get_with(Get::new("block", buffer.part(8192, 1000)).range(96..1096))?);

    drop((buffer, client));
    server.stop();
    node.stop();
    master.stop()?;
    Ok(())
}

#[test]
fn it_runs_to_its_end() -> Result<(), Box<dyn std::error::Error>> {
    main()
}
