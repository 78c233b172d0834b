//! The log at the default level. Alone in its binary, because the log is global to the process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fmt::{Debug, Write as _};
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{config, connect, mount_on, read_answer, segment, start_with};
use store_core::message::{
    Greeting, Hello, Mount, MountResponse, MountSegment, Operation, Unmount, UnmountSegment,
};
use store_core::{Incarnation, Key, MasterConfig, NodeId, SegmentNo};
use store_master::Config;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// Waits for a line that contains all of these.
    fn wait_for(&self, parts: &[&str]) {
        for _ in 0..1_000 {
            let lines = self.0.lock().unwrap().clone();
            if lines.iter().any(|line| parts.iter().all(|part| line.contains(part))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20)); // timing: a pause between two looks at the log
        }
        let lines = self.0.lock().unwrap().clone();
        panic!("no line has {parts:?}: {lines:#?}");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Line(String);
        impl Visit for Line {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                let _ = write!(self.0, " {field}={value:?}");
            }
        }
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn mount(stream: &mut TcpStream, node: u64, name: &str, endpoint: &str) -> Option<SegmentNo> {
    let segment = MountSegment { endpoint, key: node, ..segment(node, name, 1 << 20) };
    let mut out = Vec::new();
    Mount::encode_request(&mut out, 2, &segment, std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    let answer = read_answer(stream).unwrap();
    match Mount::decode_response(&answer.frame()).unwrap().0 {
        MountResponse::Mounted(mounted) => Some(mounted.segment),
        _ => None,
    }
}

#[test]
fn joins_leaves_and_refusals_are_logged_at_the_default_level() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let store = MasterConfig {
        epoch: 7,
        node_ttl_ms: 2_000,
        admin_secret: store_core::Secret::new(b"sesame"),
        ..MasterConfig::default()
    };
    let open = MasterConfig { admin_secret: Default::default(), ..store.clone() };
    let master = start_with(Config { store: open, ..config() });
    assert!(!log.0.lock().unwrap().iter().any(|line| line.contains("set a cluster secret")));
    let mut first = connect(master.rpc_addr());
    let mounted = mount(&mut first, 1, "n1", "10.0.0.1:7000").unwrap();
    log.wait_for(&["INFO", "node joined", "n1", "10.0.0.1:7000", "0000000000000001"]);
    // Another live node has the name.
    let mut second = connect(master.rpc_addr());
    assert_eq!(mount(&mut second, 2, "n1", "10.0.0.2:7000"), None);
    log.wait_for(&["WARN", "mount refused", "n1", "10.0.0.1:7000", "10.0.0.2:7000"]);
    let unmount =
        UnmountSegment { node: NodeId::new(1), incarnation: Incarnation::new(1), segment: mounted, key: 1 };
    let mut out = Vec::new();
    Unmount::encode_request(&mut out, 3, &unmount, std::iter::empty()).unwrap();
    first.write_all(&out).unwrap();
    assert_eq!(read_answer(&mut first).unwrap().header.status, 0);
    log.wait_for(&["INFO", "node left", "n1"]);
    // This node never sends a heartbeat.
    common::fill_on(&mut second, 3, "n3");
    mount_on(&mut second, 4, "n4");
    log.wait_for(&["WARN", "node given up", "name=n3", "endpoint=n:1", "objects_lost=10"]);
    log.wait_for(&["WARN", "node given up", "name=n4", "objects_lost=0"]);
    master.stop().unwrap();

    let master = start_with(Config { store, ..config() });
    let mut outsider = connect(master.rpc_addr());
    let greeting = Greeting { admin_proof: Key(&[7; 32]), ..Greeting::default() };
    let mut out = Vec::new();
    Hello::encode_request(&mut out, 1, &greeting, std::iter::empty()).unwrap();
    outsider.write_all(&out).unwrap();
    log.wait_for(&["WARN", "wrong secret", "127.0.0.1", "Admin"]);
    let mut outsider = connect(master.rpc_addr());
    let mut out = Vec::new();
    let segment = MountSegment { endpoint: "10.0.0.9:7000", ..common::segment(9, "evil", 1 << 20) };
    Mount::encode_request(&mut out, 2, &segment, std::iter::empty()).unwrap();
    outsider.write_all(&out).unwrap();
    log.wait_for(&["WARN", "mount refused", "evil", "10.0.0.9:7000", "127.0.0.1"]);
    master.stop().unwrap();

    // Reachable from other hosts, and without a secret.
    let master = start_with(Config { rpc_listen: "0.0.0.0:0".parse().unwrap(), ..config() });
    log.wait_for(&["WARN", "0.0.0.0", "set a cluster secret"]);
    master.stop().unwrap();
}
