//! Identifiers: numbers that must not be mistaken for one another. On the wire and in JSON each is its plain
//! number.

use core::fmt;
use core::num::ParseIntError;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! identifiers {
    ($($(#[$doc:meta])* $name:ident($number:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name($number);

        impl $name {
            /// The largest number.
            pub const MAX: Self = Self(<$number>::MAX);

            /// The identifier with this number.
            #[must_use]
            pub const fn new(number: $number) -> Self {
                Self(number)
            }

            /// The plain number.
            #[must_use]
            pub const fn get(self) -> $number {
                self.0
            }

            /// The identifier with the next number. `None`: the numbers are used up.
            #[must_use]
            pub const fn next(self) -> Option<Self> {
                match self.0.checked_add(1) {
                    Some(number) => Some(Self(number)),
                    None => None,
                }
            }
        }

        impl From<$number> for $name {
            fn from(number: $number) -> Self {
                Self(number)
            }
        }

        impl From<$name> for $number {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl FromStr for $name {
            type Err = ParseIntError;

            fn from_str(text: &str) -> Result<Self, ParseIntError> {
                text.parse().map(Self)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    )*};
}

identifiers! {
    /// The number of a segment: counted up, never used twice, not even by a later epoch of the master. No
    /// segment has the number 0.
    SegmentNo(u32);
    /// The number of a tenant within its master's epoch. Chosen by the master; after a removal another tenant
    /// may get it.
    TenantNo(u16);
    /// The number of a node, chosen by the node.
    NodeId(u64);
    /// One life of a node's exports: a later one has a higher number.
    Incarnation(u64);
    /// The number of a task: counted up, never used twice.
    TaskId(u64);
}

impl SegmentNo {
    /// The number that no segment has.
    pub const NONE: Self = Self(0);
}

impl TenantNo {
    /// The tenant of keys and connections that name none.
    pub const DEFAULT: Self = Self(0);

    /// As the index of a list of tenants.
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}
