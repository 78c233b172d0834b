//! Errors at the start of an engine, and their messages.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::error::Error as _;
use std::net::TcpListener;

use common::*;
use te_engine::{Config, Engine, Fabrics, StartError};

/// The message of an error and of its sources, as a chain of causes is printed.
fn chain(error: &StartError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[test]
fn a_fabric_that_is_not_named_is_left_out_when_it_does_not_start() {
    let mut config = config(Fabrics::default());
    config.tcp.congestion = Some("no-such-one".into());
    let engine = Engine::start(config).unwrap();
    assert!(engine.stats().rails.iter().all(|rail| rail.name != "tcp"));
}

#[test]
fn a_fabric_that_was_named_and_does_not_start_is_an_error() {
    for fabrics in [Fabrics::TCP, Fabrics::AUTO.and(Fabrics::TCP), Fabrics::LOCAL.and(Fabrics::TCP)] {
        let mut config = config(fabrics);
        config.tcp.congestion = Some("no-such-one".into());
        let refused = Engine::start(config);
        assert!(matches!(refused, Err(StartError::Fabric { name: "tcp", .. })), "{refused:?}");
    }
    // A fabric that is not used need not start, whatever its settings are.
    let mut off = config(Fabrics::LOCAL);
    off.tcp.congestion = Some("no-such-one".into());
    Engine::start(off).unwrap();
}

#[test]
fn a_port_that_was_named_and_is_in_use_is_an_error_whose_message_has_the_reason_once() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut data = config(Fabrics::default());
    data.tcp.port = taken.local_addr().unwrap().port();
    let error = Engine::start(data).unwrap_err();
    assert!(matches!(error, StartError::Fabric { name: "tcp", .. }), "{error}");
    assert_eq!(chain(&error).matches("Address already in use").count(), 1, "{}", chain(&error));
    let control = Config { listen: taken.local_addr().unwrap(), ..config(Fabrics::LOCAL) };
    let error = Engine::start(control).unwrap_err();
    assert!(matches!(error, StartError::Listen { .. }), "{error}");
    assert_eq!(chain(&error).matches("Address already in use").count(), 1, "{}", chain(&error));
}

#[test]
fn an_invalid_setting_of_a_fabric_is_an_error_even_if_other_fabrics_would_start() {
    for connections in [0, 17, 20] {
        let mut config = config(Fabrics::default());
        config.tcp.connections = connections;
        let error = Engine::start(config).unwrap_err();
        assert_eq!(error.to_string(), "configuration: tcp.connections must be 1 to 16");
    }
    let mut config = config(Fabrics::default());
    config.tcp.connections_max = 0;
    let error = Engine::start(config).unwrap_err();
    assert_eq!(error.to_string(), "configuration: tcp.connections_max must be 1 to 1048576");
}
