//! One client for many tasks: simultaneous operations go in one batch.
//!
//! ```text
//! cargo run -p store-client --example tasks
//! ```

use store_client::{AsyncClient, Client, ClientConfig, Node, NodeConfig, PutOptions, SharedPart, Store as _};
use store_master::{Config, MasterServer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Usually these are other processes: `snowskin master` and `snowskin node`.
    let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
    let master = MasterServer::bind(config)?.spawn()?;
    let node = Node::start(NodeConfig::new("node-1", master.rpc_addr().into(), 64 << 20))?;

    let client = AsyncClient::start(Client::connect(ClientConfig::new(master.rpc_addr().into()))?)?;
    let options = PutOptions::default();
    let tasks: Vec<_> = (0..16)
        .map(|number| {
            let client = client.clone();
            tokio::spawn(async move {
                let key = format!("task/{number}");
                client.put(key.as_str(), vec![number; 1000], &options).await?;
                client.get_range(key, 10..20).await
            })
        })
        .collect();
    for task in tasks {
        println!("{:?}", task.await??);
    }

    // The operation holds its registered memory until it has ended.
    let region = client.alloc(4096).await?;
    client.put("block", SharedPart::all(&region), &options).await?;
    println!("{:?}", client.get_into("block", .., vec![SharedPart::part(&region, 0, 4096)]).await?);

    // Threads share the same client.
    let mut blocking = client.blocking();
    println!("{:?}", std::thread::spawn(move || blocking.exists(b"task/3")).join());
    client.stop();
    node.stop();
    master.stop()?;
    Ok(())
}

#[test]
fn it_runs_to_its_end() -> Result<(), Box<dyn std::error::Error>> {
    main()
}
