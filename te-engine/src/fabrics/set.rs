//! [`Fabrics`]: the fabrics that an engine uses, and the text of that setting.

use std::fmt;
use std::str::FromStr;
use std::string::String;
use std::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{FabricEntry, TABLE, fabrics};

/// The fabrics that an engine uses. As text: `auto`, or names from [`fabrics`] with commas between them.
///
/// A fabric that is named must start: if it does not, or if this build lacks it, the engine does not start.
/// `auto` means every fabric of this build that is [`auto`](FabricEntry::auto), without those that do not
/// start. `auto,tcp` means every fabric
/// that starts, and TCP, which must.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fabrics {
    auto: bool,
    /// One bit per line of the registry.
    named: u32,
}

/// Whether an engine uses a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    No,
    /// If it starts.
    Auto,
    /// It must start.
    Must,
}

/// A name that is not the name of a fabric of this build.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnknownFabric {
    /// No fabric has this name.
    Unknown(String),
    /// The fabric of this name is not part of this build.
    NotBuilt(&'static str),
}

impl Fabrics {
    /// Every fabric of this build that starts.
    pub const AUTO: Self = Self { auto: true, named: 0 };
    /// No fabric; a start for [`and`](Self::and).
    pub const NONE: Self = Self { auto: false, named: 0 };
    /// Only copies within the process.
    pub const LOCAL: Self = Self::known("local");
    /// Only shared memory.
    pub const SHM: Self = Self::known("shm");
    /// Only RDMA.
    pub const RDMA: Self = Self::known("rdma");
    /// Only TCP.
    pub const TCP: Self = Self::known("tcp");
    /// Only CXL pools.
    pub const CXL: Self = Self::known("cxl");
    /// Only NVMe over TCP.
    pub const NVMEOF: Self = Self::known("nvmeof");

    /// The fabrics of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { auto: self.auto || other.auto, named: self.named | other.named }
    }

    /// Only the fabric of this entry of [`fabrics`]; [`NONE`](Self::NONE) for an entry that is not in the
    /// registry.
    #[must_use]
    pub fn of(entry: &FabricEntry<'_>) -> Self {
        let place = TABLE.iter().position(|known| known.name == entry.name);
        place.map_or(Self::NONE, |place| Self { auto: false, named: 1 << place })
    }

    /// The fabrics that are named, and must start, the nearest first.
    pub fn named(self) -> impl Iterator<Item = &'static FabricEntry<'static>> {
        fabrics()
            .iter()
            .enumerate()
            .filter(move |(place, _)| self.named >> place & 1 == 1)
            .map(|(_, entry)| entry)
    }

    /// Whether `auto` is among them: every fabric of this build that starts.
    #[must_use]
    pub const fn is_auto(self) -> bool {
        self.auto
    }

    /// Whether an engine would try to open the fabric of this entry whatever its settings: it is named, or it
    /// is part of this build and of `auto`, and [`is_auto`](Self::is_auto) holds.
    #[must_use]
    pub fn uses(self, entry: &FabricEntry<'_>) -> bool {
        self.wanted(entry) != Wanted::No
    }

    /// Whether there is neither `auto` nor a name.
    #[must_use]
    pub const fn is_none(self) -> bool {
        !self.auto && self.named == 0
    }

    /// Whether to open the fabric of this entry, and whether it must start.
    pub(crate) fn wanted(self, entry: &FabricEntry<'_>) -> Wanted {
        match Self::of(entry).named & self.named {
            0 if self.auto && entry.auto && entry.is_built() => Wanted::Auto,
            0 => Wanted::No,
            _ => Wanted::Must,
        }
    }

    /// For the constants: a name that is not in the registry does not compile.
    const fn known(name: &str) -> Self {
        let mut place = 0;
        while !same(TABLE[place].name.as_bytes(), name.as_bytes()) {
            place += 1;
        }
        Self { auto: false, named: 1 << place }
    }
}

impl Default for Fabrics {
    fn default() -> Self {
        Self::AUTO
    }
}

impl fmt::Display for Fabrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        let names = self.auto.then_some("auto").into_iter().chain(self.named().map(|entry| entry.name));
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl FromStr for Fabrics {
    type Err = UnknownFabric;

    fn from_str(text: &str) -> Result<Self, UnknownFabric> {
        let mut all = Self::NONE;
        for name in text.split(',').map(str::trim) {
            all = all.and(match (name, fabrics().iter().find(|entry| entry.name == name)) {
                ("auto", _) => Self::AUTO,
                ("none", _) => Self::NONE,
                (_, Some(entry)) if entry.is_built() => Self::of(entry),
                (_, Some(entry)) => return Err(UnknownFabric::NotBuilt(entry.name)),
                (_, None) => return Err(UnknownFabric::Unknown(name.into())),
            });
        }
        Ok(all)
    }
}

impl TryFrom<String> for Fabrics {
    type Error = UnknownFabric;

    fn try_from(text: String) -> Result<Self, UnknownFabric> {
        text.parse()
    }
}

impl From<Fabrics> for String {
    fn from(fabrics: Fabrics) -> Self {
        fabrics.to_string()
    }
}

impl fmt::Display for UnknownFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => {
                let built = fabrics().iter().filter(|entry| entry.is_built()).map(|entry| entry.name);
                let built = built.collect::<Vec<_>>().join(",");
                write!(f, "no such fabric: {name:?}: write auto, or one or more of {built}")
            }
            Self::NotBuilt(name) => write!(f, "this build lacks {name}: build with --features {name}"),
        }
    }
}

impl std::error::Error for UnknownFabric {}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}
