//! The rows of the table: Mooncake's scripts, what each needs, and how many tests each has.

use super::count::Count;

/// A process that runs while a script does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    /// A master on the default ports, with a metadata server, and leases of this many milliseconds.
    Master { lease_ms: u32 },
    /// A process that owns memory and serves clients on this host.
    Client,
    /// A metadata server without a master.
    Metadata,
}

/// What a script needs beside a Python environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Torch,
    Safetensors,
    /// An environment with Mooncake's own wheel.
    Peer,
}

/// Whose modules a process of a pairing uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Ours,
    Peer,
}

/// How a script is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// As a program; it prints what unittest prints.
    Unittest,
    /// By pytest.
    Pytest,
    /// As a program; only its exit status counts.
    Program,
    /// Two processes: initiator (this script) and target.
    Pair { initiator: Side, target: Side, metadata: &'static str },
    /// Twice at the same time, with another argument.
    Twice([&'static str; 2]),
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Script {
    pub(super) name: &'static str,
    /// Relative to the checkout.
    pub(super) path: &'static str,
    pub(super) args: &'static [&'static str],
    pub(super) how: How,
    pub(super) services: &'static [Service],
    pub(super) needs: &'static [Need],
    pub(super) wanted: Count,
    pub(super) limit_s: u64,
}

impl Script {
    const fn new(name: &'static str, path: &'static str, passed: u32) -> Self {
        Self {
            name,
            path,
            args: &[],
            how: How::Unittest,
            services: &[],
            needs: &[],
            wanted: Count::of(passed, 0),
            limit_s: 300,
        }
    }

    const fn how(mut self, how: How) -> Self {
        self.how = how;
        self
    }

    const fn args(mut self, args: &'static [&'static str]) -> Self {
        self.args = args;
        self
    }

    const fn services(mut self, services: &'static [Service]) -> Self {
        self.services = services;
        self
    }

    const fn needs(mut self, needs: &'static [Need]) -> Self {
        self.needs = needs;
        self
    }

    const fn skips(mut self, skipped: u32) -> Self {
        self.wanted.skipped = skipped;
        self
    }

    const fn limit_s(mut self, limit_s: u64) -> Self {
        self.limit_s = limit_s;
        self
    }
}

const MASTER: &[Service] = &[Service::Master { lease_ms: 500 }];
/// Scripts of `scripts/` wait longer than this for leases to end.
const MASTER_LONG: &[Service] = &[Service::Master { lease_ms: 5_000 }];
const WITH_CLIENT: &[Service] = &[Service::Master { lease_ms: 500 }, Service::Client];
pub(super) const P2P: &str = "P2PHANDSHAKE";
const HTTP: &str = "http://127.0.0.1:8080/metadata";

const fn pair(name: &'static str, initiator: Side, target: Side, metadata: &'static str) -> Script {
    let needs: &[Need] = match (initiator, target) {
        (Side::Ours, Side::Ours) => &[],
        _ => &[Need::Peer],
    };
    let script = Script::new(name, "mooncake-wheel/tests/transfer_engine_initiator_test.py", 6);
    let script = script.how(How::Pair { initiator, target, metadata }).needs(needs);
    // A string cannot be compared in a constant: the length tells the two apart.
    if metadata.len() == P2P.len() { script } else { script.services(&[Service::Metadata]) }
}

/// All rows, in the order in which they build on each other.
pub(super) const SCRIPTS: &[Script] = &[
    Script::new("import", "mooncake-wheel/tests/test_import_structure.py", 3),
    Script::new("config", "mooncake-wheel/tests/test_mooncake_config.py", 35),
    Script::new("http-metadata", "mooncake-wheel/tests/test_http_metadata_server.py", 5),
    pair("pair-ours-ours", Side::Ours, Side::Ours, P2P),
    pair("pair-ours-peer", Side::Ours, Side::Peer, P2P),
    pair("pair-peer-ours", Side::Peer, Side::Ours, P2P),
    pair("pair-peer-peer", Side::Peer, Side::Peer, P2P),
    pair("pair-http-ours-ours", Side::Ours, Side::Ours, HTTP),
    pair("pair-http-ours-peer", Side::Ours, Side::Peer, HTTP),
    pair("pair-http-peer-ours", Side::Peer, Side::Ours, HTTP),
    pair("pair-http-peer-peer", Side::Peer, Side::Peer, HTTP),
    Script::new("store", "mooncake-wheel/tests/test_distributed_object_store.py", 16)
        .services(MASTER)
        .limit_s(600),
    Script::new("replicated", "mooncake-wheel/tests/test_replicated_distributed_object_store.py", 5)
        .services(MASTER)
        .limit_s(600),
    Script::new("replica-clear", "mooncake-wheel/tests/test_batch_replica_clear.py", 12).services(MASTER),
    // 14 functions, one of which has three parameters.
    Script::new("buffer-pool", "mooncake-wheel/tests/test_buffer_pool_native.py", 16)
        .how(How::Pytest)
        .services(MASTER),
    Script::new("async", "scripts/test_async_store.py", 14).services(MASTER_LONG).needs(&[Need::Torch]),
    Script::new("upsert", "scripts/test_upsert_api.py", 41).services(MASTER).needs(&[Need::Torch]),
    Script::new("copy-move", "scripts/test_copy_move_api.py", 10).services(MASTER),
    Script::new("sessions", "mooncake-store/tests/e2e/session_ranges_tcp_e2e.py", 1)
        .how(How::Program)
        .services(MASTER),
    Script::new("cli", "mooncake-wheel/tests/test_cli.py", 2).how(How::Program),
    Script::new("dummy", "mooncake-wheel/tests/test_dummy_client.py", 8)
        .skips(2)
        .services(WITH_CLIENT)
        .needs(&[Need::Torch]),
    Script::new("dummy-pair", "mooncake-wheel/tests/test_multi_dummy_clients.py", 2)
        .how(How::Twice(["client1", "client2"]))
        .args(&["--client-id"])
        .services(WITH_CLIENT),
    Script::new("tensors", "mooncake-wheel/tests/test_put_get_tensor.py", 31)
        .skips(1)
        .services(MASTER)
        .needs(&[Need::Torch]),
    Script::new("tensor-api", "scripts/test_tensor_api.py", 59)
        .args(&["-n", "1"])
        .services(MASTER)
        .needs(&[Need::Torch])
        .limit_s(900),
    Script::new("safetensors", "mooncake-wheel/tests/test_safetensor_functions.py", 6)
        .services(MASTER)
        .needs(&[Need::Torch, Need::Safetensors]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_can_be_typed() {
        let names: HashSet<&str> = SCRIPTS.iter().map(|script| script.name).collect();
        assert_eq!(names.len(), SCRIPTS.len());
        let is_plain = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
        assert!(names.iter().all(|name| is_plain(name)), "{names:?}");
    }

    #[test]
    fn a_pairing_over_a_metadata_server_has_one() {
        for script in SCRIPTS {
            if let How::Pair { metadata, .. } = script.how {
                assert_eq!(script.services.is_empty(), metadata == P2P, "{}", script.name);
            }
        }
    }
}
