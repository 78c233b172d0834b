//! The engine's configuration: limits, renamed settings, and settings of fabrics that a build lacks.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

use te_engine::{Config, Fabrics, StartError, fabrics};

#[test]
fn the_default_is_valid() {
    Config::default().validate().unwrap();
}

#[test]
fn an_unspecified_address_needs_a_name_to_advertise() {
    let mut config = Config { listen: "0.0.0.0:0".parse().unwrap(), ..Config::default() };
    assert!(matches!(config.validate(), Err(StartError::Config { field: "advertise_host", .. })));
    config.advertise_host = Some("node-7".into());
    config.validate().unwrap();
}

/// The setting that is refused, and its allowed values.
fn refused(config: &Config) -> (String, String) {
    let error = config.validate().expect_err("it is out of its limits");
    error.setting().unwrap_or_else(|| panic!("{error}"))
}

/// A change of a setting, and the name of the setting.
type Change = (&'static str, fn(&mut Config));

fn each_is_refused_by_name(changes: &[Change]) {
    for &(name, change) in changes {
        let mut config = Config::default();
        change(&mut config);
        assert_eq!(refused(&config).0, name);
    }
}

#[test]
fn shm_settings_out_of_their_limits_are_refused_by_name() {
    let mut config = Config::default();
    config.shm.peers_max = 0;
    assert_eq!(refused(&config), ("shm.peers_max".into(), "must be 1 to 65536".into()));
}

#[cfg(feature = "tcp")]
#[test]
fn tcp_settings_out_of_their_limits_are_refused_by_name() {
    each_is_refused_by_name(&[
        ("tcp.congestion", |config| config.tcp.congestion = Some(String::new())),
        ("tcp.congestion", |config| config.tcp.congestion = Some("a-name-that-is-too-long".into())),
        ("tcp.send_buffer_bytes", |config| config.tcp.send_buffer_bytes = Some(4095)),
        ("tcp.send_buffer_bytes", |config| config.tcp.send_buffer_bytes = Some((1 << 30) + 1)),
        ("tcp.receive_buffer_bytes", |config| config.tcp.receive_buffer_bytes = Some(4095)),
        ("tcp.receive_buffer_bytes", |config| config.tcp.receive_buffer_bytes = Some((1 << 30) + 1)),
    ]);
}

#[cfg(feature = "rdma")]
#[test]
fn rdma_settings_out_of_their_limits_are_refused_by_name() {
    each_is_refused_by_name(&[
        ("rdma.qps", |config| config.rdma.qps = 0),
        ("rdma.qps", |config| config.rdma.qps = 17),
        ("rdma.mtu_bytes_max", |config| config.rdma.mtu_bytes_max = 1500),
        ("rdma.service_level", |config| config.rdma.service_level = 16),
        ("rdma.timeout_exponent", |config| config.rdma.timeout_exponent = 0),
        ("rdma.retries", |config| config.rdma.retries = 8),
    ]);
}

#[test]
fn invalid_metadata_settings_are_refused_by_name() {
    each_is_refused_by_name(&[
        ("metadata.name", |config| config.metadata.name = Some("n".into())),
        ("metadata.ttl_ms", |config| config.metadata.ttl_ms = 999),
        ("metadata.timeout_ms", |config| config.metadata.timeout_ms = 0),
    ]);
    let mut config = Config::default();
    (config.metadata.source, config.metadata.name) = ("http://h:1".parse().unwrap(), Some("host:1".into()));
    assert_eq!(refused(&config).0, "metadata.name");
    config.metadata.name = Some("prefill/3".into());
    config.validate().unwrap();
}

#[test]
fn renamed_settings_are_read_under_their_old_names() {
    let old = r#"{ "segments_max": 7, "inline_bytes_max": 8 }"#;
    let config: Config = serde_json::from_str(old).unwrap();
    assert_eq!((config.remote_regions_max, config.caller_bytes_max), (7, 8));
    let written = serde_json::to_string(&config).unwrap();
    assert!(written.contains("remote_regions_max") && !written.contains("\"segments_max"), "{written}");
    assert_eq!(serde_json::from_str::<Config>(&written).unwrap(), config);
}

#[test]
fn settings_of_a_fabric_that_this_build_lacks_are_ignored_and_a_slip_in_others_is_not() {
    for fabric in ["rdma", "tcp"] {
        let read =
            serde_json::from_str::<Config>(&format!(r#"{{ "{fabric}": {{ "no_such_setting": 1 }} }}"#));
        let built = fabrics().iter().any(|entry| entry.name == fabric && entry.is_built());
        assert_eq!(read.is_err(), built, "{fabric}");
    }
    assert!(serde_json::from_str::<Config>(r#"{ "pigeon": {} }"#).is_err());
}

#[test]
fn an_engine_without_fabrics_is_refused() {
    let config = Config { fabrics: Fabrics::NONE, ..Config::default() };
    assert!(matches!(config.validate(), Err(StartError::Config { field: "fabrics", .. })));
}
