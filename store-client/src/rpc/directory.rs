//! The masters of a cluster in etcd: under `snowskin/CLUSTER/masters` the record of our own arbiter, under
//! `mooncake-store/CLUSTER/master_view` the leader, as Mooncake publishes it.

use super::masters::Directory;
use super::search::LeaderHint;
use crate::error::RpcError;

/// Whether this build can ask etcd.
pub(super) const IS_BUILT_IN: bool = cfg!(feature = "etcd");

/// There is no etcd in this build.
///
/// # Errors
/// `NoEtcd`.
#[cfg(not(feature = "etcd"))]
pub(super) fn ask(_: &Directory) -> Result<LeaderHint, RpcError> {
    Err(RpcError::NoEtcd)
}

#[cfg(feature = "etcd")]
pub(super) use in_etcd::ask;

#[cfg(feature = "etcd")]
mod in_etcd {
    use std::time::Duration;

    use serde_json::Value;
    use store_core::ha::Reign;
    use store_core::message::{MASTERS_MAX, NAME_BYTES_MAX};
    use te_metadata::{KeyValue, MetadataSource};

    use super::super::Address;
    use super::{Directory, LeaderHint, RpcError};

    /// Longest wait for one server of etcd.
    const ANSWER: Duration = Duration::from_millis(500);
    /// Length limit of a value, bytes.
    const VALUE_BYTES_MAX: usize = 64 << 10;

    /// What etcd says of the masters.
    ///
    /// # Errors
    /// `Directory`: no server answers, or neither key has a value that can be read.
    pub(in super::super) fn ask(directory: &Directory) -> Result<LeaderHint, RpcError> {
        let servers = directory.servers.join(",");
        let failed = |reason: String| RpcError::Directory { servers: servers.clone(), reason };
        let source: MetadataSource =
            format!("etcd://{servers}").parse().map_err(|error| failed(format!("{error}")))?;
        let server = KeyValue::open(&source, ANSWER).map_err(|error| failed(error.to_string()))?;
        let mut why = Vec::new();
        let cluster = &directory.cluster;
        for (key, read) in [
            (format!("snowskin/{cluster}/masters"), record as fn(&[u8]) -> Option<LeaderHint>),
            (format!("mooncake-store/{cluster}/master_view"), view as fn(&[u8]) -> Option<LeaderHint>),
        ] {
            let value = server.get(&key, VALUE_BYTES_MAX).map_err(|error| failed(error.to_string()))?;
            match value {
                None => why.push(format!("there is no key `{key}`")),
                Some(value) => match read(&value) {
                    Some(hint) => return Ok(hint),
                    None => why.push(format!("the value of `{key}` names no master")),
                },
            }
        }
        Err(failed(format!("{}: check the cluster's name", why.join(", and "))))
    }

    fn address(text: &str) -> Option<Address> {
        let address = text.trim().parse().ok().filter(|_| text.len() <= NAME_BYTES_MAX)?;
        matches!(address, Address::Tcp(_)).then_some(address)
    }

    /// A number, also one that is written as a text.
    fn number(value: &Value) -> Option<u64> {
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    }

    /// Reads `{"lineage":…,"term":…,"leader_endpoint":"h:p","members":[{"id":…,"endpoint":"h:p"}],…}`. What
    /// it does not know is ignored, and so is a member without an address.
    fn record(bytes: &[u8]) -> Option<LeaderHint> {
        let record: Value = serde_json::from_slice(bytes).ok()?;
        let reign = Reign { lineage: number(&record["lineage"])?, term: number(&record["term"])? };
        let leader = record["leader_endpoint"].as_str().and_then(address);
        let members = record["members"].as_array().map(Vec::as_slice).unwrap_or_default();
        let endpoint = |member: &Value| member["endpoint"].as_str().and_then(address);
        let members: Vec<Address> = members.iter().filter_map(endpoint).take(MASTERS_MAX).collect();
        Some(LeaderHint { reign, leader, members }).filter(LeaderHint::helps)
    }

    /// Reads the address of the leader: the bare text, or the member `leader_address` of an object.
    fn view(bytes: &[u8]) -> Option<LeaderHint> {
        let text = std::str::from_utf8(bytes).ok()?;
        let leader = match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(view)) => address(view.get("leader_address")?.as_str()?),
            Ok(Value::String(text)) => address(&text),
            _ => address(text),
        };
        Some(LeaderHint { leader: Some(leader?), ..LeaderHint::default() })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn records_are_read_as_far_as_they_can_be() {
            let text = r#"{"lineage":7,"term":"3","leader":1,"leader_endpoint":"a:1","members":
                [{"id":1,"endpoint":"a:1"},{"id":2,"endpoint":"b:2"},{"id":3},{"endpoint":"unix:/x"},5],
                "in_sync":[1],"later":{}}"#;
            let hint = record(text.as_bytes()).unwrap();
            assert_eq!(hint.reign, Reign { lineage: 7, term: 3 });
            assert_eq!(hint.leader, "a:1".parse().ok());
            assert_eq!(hint.members.len(), 2);
            let many: Vec<String> = (1..99).map(|port| format!(r#"{{"endpoint":"h:{port}"}}"#)).collect();
            let many = format!(r#"{{"lineage":1,"term":1,"members":[{}]}}"#, many.join(","));
            assert_eq!(record(many.as_bytes()).unwrap().members.len(), MASTERS_MAX);
            for bad in [
                "",
                "[]",
                "null",
                r#"{"lineage":1,"term":1}"#,
                r#"{"lineage":-1,"term":1,"leader_endpoint":"a:1"}"#,
                r#"{"term":1,"leader_endpoint":"a:1"}"#,
                r#"{"lineage":1,"term":1,"leader_endpoint":7,"members":{"endpoint":"a:1"}}"#,
            ] {
                assert_eq!(record(bad.as_bytes()), None, "{bad}");
            }
        }

        #[test]
        fn views_are_texts_or_objects() {
            for text in ["10.0.0.1:50051", "\"10.0.0.1:50051\"", r#"{"leader_address":"10.0.0.1:50051"}"#] {
                assert_eq!(view(text.as_bytes()).unwrap().leader, "10.0.0.1:50051".parse().ok(), "{text}");
            }
            let long = format!("{}:1", "h".repeat(NAME_BYTES_MAX));
            for bad in ["", "host", "unix:/x", "{}", "[]", "7", r#"{"leader_address":7}"#, &long] {
                assert_eq!(view(bad.as_bytes()), None, "{bad}");
            }
            assert_eq!(view(&[0xff, 0xfe]), None);
        }
    }
}
