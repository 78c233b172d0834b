//! How the disks of a node are written in settings: `/mnt/nvme0/kv:500GiB,/dev/nvme1n1`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A disk of a node: a file, or a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDiskConfig {
    /// Where it is.
    pub path: PathBuf,
    /// The size of a file that does not exist yet, bytes: it is made and formatted. `None`: the disk exists,
    /// and is formatted.
    pub bytes: Option<u64>,
}

/// The disks of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct DiskList(pub Vec<NodeDiskConfig>);

/// A list as a settings file may have it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    List(Vec<String>),
}

/// A text is not a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDisk(String);

impl fmt::Display for UnknownDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a disk: write PATH, or PATH:SIZE with a size such as 500GiB", self.0)
    }
}

impl std::error::Error for UnknownDisk {}

impl FromStr for NodeDiskConfig {
    type Err = UnknownDisk;

    fn from_str(text: &str) -> Result<Self, UnknownDisk> {
        let text = text.trim();
        let (path, bytes) = match text.rsplit_once(':') {
            // A path may contain a colon, but not end like a size.
            Some((path, size)) if size.starts_with(|first: char| first.is_ascii_digit()) => {
                (path, Some(size_of(size).ok_or_else(|| UnknownDisk(text.into()))?))
            }
            _ => (text, None),
        };
        if path.is_empty() || bytes == Some(0) {
            return Err(UnknownDisk(text.into()));
        }
        Ok(Self { path: path.into(), bytes })
    }
}

impl fmt::Display for NodeDiskConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)?;
        self.bytes.map_or(Ok(()), |bytes| write!(f, ":{bytes}"))
    }
}

impl FromStr for DiskList {
    type Err = UnknownDisk;

    fn from_str(text: &str) -> Result<Self, UnknownDisk> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl TryFrom<Written> for DiskList {
    type Error = UnknownDisk;

    fn try_from(written: Written) -> Result<Self, UnknownDisk> {
        match written {
            Written::Text(text) => text.parse(),
            Written::List(list) => list.iter().map(|text| text.parse()).collect::<Result<_, _>>().map(Self),
        }
    }
}

impl From<DiskList> for String {
    fn from(list: DiskList) -> Self {
        list.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
}

/// `500GiB`, `2T`, `1073741824`: binary units, as everywhere.
pub(super) fn size_of(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    text[..digits].parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn disk(path: &str, bytes: Option<u64>) -> NodeDiskConfig {
        NodeDiskConfig { path: path.into(), bytes }
    }

    #[test]
    fn disks_are_read_as_they_are_written() {
        let list: DiskList = "/mnt/a/kv:500GiB, /dev/nvme1n1,/odd:name,x:64m".parse().unwrap();
        let expected = [
            disk("/mnt/a/kv", Some(500 << 30)),
            disk("/dev/nvme1n1", None),
            disk("/odd:name", None),
            disk("x", Some(64 << 20)),
        ];
        assert_eq!(list.0, expected);
        let text = String::from(list.clone());
        assert_eq!(text.parse::<DiskList>().unwrap(), list);
        assert_eq!("".parse::<DiskList>().unwrap(), DiskList::default());
    }

    #[test]
    fn what_is_no_disk_is_refused_with_its_text() {
        for wrong in ["/a:5Q", ":5G", "/a:0", "/a,", "/a:99999999999T"] {
            let error = wrong.parse::<DiskList>().unwrap_err().to_string();
            assert!(error.contains("PATH:SIZE"), "{error}");
        }
    }
}
