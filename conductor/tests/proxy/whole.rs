//! The proxy with the Conductor itself behind it.

use std::net::SocketAddr;

use conductor::PolicyName;
use conductor::demo::{Cluster, Demo, Ran};
use conductor::mock::{Flavor, MockConfig, Workload};

/// At this speed, what engines compute takes longer than what the machine does for it, so that placement is
/// about the engines.
const SPEED: f64 = 20.0;

fn demo(flavor: Flavor, policy: PolicyName) -> Demo {
    Demo {
        prefill: 3,
        decode: 2,
        engine: MockConfig { flavor, speed: SPEED, ..MockConfig::default() },
        policy,
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
    }
}

fn workload() -> Workload {
    Workload {
        // With a multiple of the prefill engines, turns that are placed in turn return to where they were.
        conversations: 7,
        system_tokens: 512,
        user_tokens: 128,
        output_tokens: 16,
        ..Workload::default()
    }
}

/// Runs a workload until the proxy has answered `requests`.
fn run(cluster: &Cluster, requests: u64) -> Ran {
    let wait = || {
        while cluster.figures().done < requests {
            std::thread::yield_now();
        }
    };
    cluster.run(workload(), wait).unwrap()
}

#[test]
fn the_conductor_places_turns_of_a_conversation_where_the_earlier_ones_are() {
    for flavor in [Flavor::Vllm, Flavor::VllmArrays, Flavor::Sglang] {
        let rates = [PolicyName::Cost, PolicyName::RoundRobin].map(|policy| {
            let cluster = Cluster::start(&demo(flavor, policy)).unwrap();
            let ran = run(&cluster, 80);
            assert_eq!((ran.seen.failed, ran.seen.refused), (0, 0), "{:?}", ran.seen.last_failure);
            // Prefill engines of all kinds leave the answer to the others.
            for (engine, requests) in cluster.engines().iter().zip(&ran.requests).take(3) {
                assert!(engine.output_tokens() <= *requests, "{flavor:?}");
            }
            ran.hit_rate
        });
        assert!(rates[0] > rates[1], "{flavor:?}: {rates:?}");
    }
}

#[test]
fn no_request_fails_when_engines_of_the_conductor_die() {
    let cluster = Cluster::start(&demo(Flavor::Vllm, PolicyName::Cost)).unwrap();
    let wait = || {
        for (dies, after) in [(0, 20), (3, 60)] {
            while cluster.figures().done < after {
                std::thread::yield_now();
            }
            cluster.engines()[dies].kill();
        }
        while cluster.figures().done < 120 {
            std::thread::yield_now();
        }
    };
    let ran = cluster.run(workload(), wait).unwrap();
    assert_eq!((ran.seen.failed, ran.seen.refused), (0, 0), "{:?}", ran.seen.last_failure);
    assert!(cluster.figures().retries > 0);
}
