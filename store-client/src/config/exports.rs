//! How it is written in settings that disks of a node are namespaces of a target as well:
//! `/dev/nvme1n1=nvme://10.0.0.1:4420/nqn.2014-08.org.example:box/1`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::storage::NamespacePlace;

/// What separates the path from the namespace, with how that begins.
const BETWEEN: &str = "=nvme://";

/// A disk of a node that is also a namespace of a target of NVMe over TCP, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskExport {
    /// The disk, as [`NodeConfig::disks`](crate::NodeConfig::disks) names it.
    pub path: PathBuf,
    /// Where the disk begins in the namespace.
    pub place: NamespacePlace,
}

/// The disks of a node that are namespaces, too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct DiskExportList(pub Vec<DiskExport>);

/// A list as a settings file may have it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    List(Vec<String>),
}

/// A text is not the export of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownExport(String);

impl fmt::Display for UnknownExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not the export of a disk: write PATH=nvme://ADDR:PORT/NQN/NSID, and +OFFSET behind it if \
             the disk does not begin where the namespace does, in multiples of 4096 bytes",
            self.0
        )
    }
}

impl std::error::Error for UnknownExport {}

impl FromStr for DiskExport {
    type Err = UnknownExport;

    fn from_str(text: &str) -> Result<Self, UnknownExport> {
        let text = text.trim();
        let parts = || {
            let at = text.find(BETWEEN).filter(|at| *at > 0)?;
            Some(Self { path: text[..at].into(), place: text[at + 1..].parse().ok()? })
        };
        parts().ok_or_else(|| UnknownExport(text.into()))
    }
}

impl fmt::Display for DiskExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.path.display(), self.place)
    }
}

impl FromStr for DiskExportList {
    type Err = UnknownExport;

    fn from_str(text: &str) -> Result<Self, UnknownExport> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl TryFrom<Written> for DiskExportList {
    type Error = UnknownExport;

    fn try_from(written: Written) -> Result<Self, UnknownExport> {
        match written {
            Written::Text(text) => text.parse(),
            Written::List(list) => list.iter().map(|text| text.parse()).collect::<Result<_, _>>().map(Self),
        }
    }
}

impl From<DiskExportList> for String {
    fn from(list: DiskExportList) -> Self {
        list.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn exports_are_read_as_they_are_written() {
        let text = "/dev/nvme1n1=nvme://10.0.0.1:4420/nqn.2014-08.org.example:box/1, \
                    /a=b/kv=nvme://[fd00::1]:4420/nqn.2026-11.x:y/z/7+1MiB";
        let list: DiskExportList = text.parse().unwrap();
        let [first, second] = &list.0[..] else { panic!("{list:?}") };
        let at = &first.place;
        assert_eq!((first.path.to_str(), at.nsid, at.offset), (Some("/dev/nvme1n1"), 1, 0));
        assert_eq!(
            (at.address.to_string(), &*at.nqn),
            ("10.0.0.1:4420".into(), "nqn.2014-08.org.example:box")
        );
        let at = &second.place;
        assert_eq!((second.path.to_str(), &*at.nqn), (Some("/a=b/kv"), "nqn.2026-11.x:y/z"));
        assert_eq!((at.nsid, at.offset), (7, 1 << 20));
        assert_eq!(String::from(list.clone()).parse::<DiskExportList>().unwrap(), list);
        assert_eq!("".parse::<DiskExportList>().unwrap(), DiskExportList::default());
    }

    #[test]
    fn what_is_no_export_is_refused_with_its_text() {
        for wrong in [
            "/a",
            "=nvme://10.0.0.1:4420/nqn.x/1",
            "/a=nvme://box:4420/nqn.x/1",
            "/a=nvme://10.0.0.1:0/nqn.x/1",
            "/a=nvme://10.0.0.1:4420/x/1",
            "/a=nvme://10.0.0.1:4420/nqn.x/0",
            "/a=nvme://10.0.0.1:4420/nqn.x",
            "/a=nvme://10.0.0.1:4420/nqn.x/1+512",
            "/a=nvme://10.0.0.1:4420/nqn.x/1+",
        ] {
            let error = wrong.parse::<DiskExportList>().unwrap_err().to_string();
            assert!(error.contains("nvme://ADDR:PORT/NQN/NSID") && error.contains(wrong), "{error}");
        }
    }
}
