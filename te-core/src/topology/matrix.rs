//! The priority matrix: for each location, the preferred NICs and the fallback NICs.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::LocationError;

use super::{GPUS_MAX, Location, NAME_BYTES_MAX, NICS_MAX, NODES_MAX, is_name};

/// The largest number of rows of a matrix.
pub const LOCATIONS_MAX: usize = NODES_MAX + GPUS_MAX + 1;

/// Which NICs serve which memory. Its JSON form is `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], …}`: preferred, then
/// secondary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriorityMatrix {
    rows: Vec<MatrixRow>,
}

/// One location and its NICs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixRow {
    /// Where the memory is.
    pub location: Location,
    /// The NICs to use.
    pub preferred: Vec<String>,
    /// The NICs to use when the preferred ones are busy or have failed, the better ones first.
    pub secondary: Vec<String>,
}

impl PriorityMatrix {
    /// The cost of a secondary NIC, in percent of a preferred one.
    pub const SECONDARY_PERCENT: u32 = 300;
    /// The cost of a NIC that is not in the location's row: the last resort.
    pub const UNNAMED_PERCENT: u32 = 2000;

    /// Checks the rows. A location may have one row, and a NIC may be in a row once.
    ///
    /// # Errors
    /// See [`MatrixError`].
    pub fn new(rows: Vec<MatrixRow>) -> Result<Self, MatrixError> {
        if rows.len() > LOCATIONS_MAX {
            return Err(MatrixError::TooManyLocations(rows.len()));
        }
        for (at, row) in rows.iter().enumerate() {
            if rows[..at].iter().any(|earlier| earlier.location == row.location) {
                return Err(MatrixError::LocationTwice(row.location));
            }
            let names: Vec<&String> = row.preferred.iter().chain(&row.secondary).collect();
            if names.len() > NICS_MAX {
                return Err(MatrixError::TooManyNics { location: row.location, count: names.len() });
            }
            for (at, name) in names.iter().enumerate() {
                if !is_name(name) {
                    let name = name.chars().take(NAME_BYTES_MAX).collect();
                    return Err(MatrixError::Nic { location: row.location, name });
                }
                if names[..at].contains(name) {
                    return Err(MatrixError::NicTwice { location: row.location, name: (*name).clone() });
                }
            }
        }
        Ok(Self { rows })
    }

    /// A matrix of rows that were checked.
    pub(super) fn from_checked(rows: Vec<MatrixRow>) -> Self {
        Self { rows }
    }

    /// Its rows, in the order in which they were given.
    #[must_use]
    pub fn rows(&self) -> &[MatrixRow] {
        &self.rows
    }

    /// The cost of `nic` for memory at `location`, in percent. A location without a row has the costs of the
    /// row `*`; without that row, all NICs are equal.
    #[must_use]
    pub fn penalty_percent(&self, location: Location, nic: &str) -> u32 {
        let row = |location| self.rows.iter().find(|row| row.location == location);
        let Some(row) = row(location).or_else(|| row(Location::Host)) else { return 100 };
        let among = |names: &[String]| names.iter().any(|name| name == nic);
        if among(&row.preferred) {
            100
        } else if among(&row.secondary) {
            Self::SECONDARY_PERCENT
        } else {
            Self::UNNAMED_PERCENT
        }
    }
}

/// Why rows do not form a [`PriorityMatrix`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatrixError {
    /// The name of a row is not a location.
    Location(LocationError),
    /// This location has two rows.
    LocationTwice(Location),
    /// A NIC is in one row twice.
    NicTwice {
        /// The location of the row.
        location: Location,
        /// The NIC.
        name: String,
    },
    /// The name of a NIC is empty, too long or not printable.
    Nic {
        /// The location of the row.
        location: Location,
        /// The beginning of the name.
        name: String,
    },
    /// There are more rows than there can be locations.
    TooManyLocations(usize),
    /// A row has more NICs than a host may have.
    TooManyNics {
        /// The location of the row.
        location: Location,
        /// The number of its NICs.
        count: usize,
    },
}

impl fmt::Display for MatrixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Location(error) => error.fmt(f),
            Self::LocationTwice(location) => write!(f, "{location} has two rows: merge them"),
            Self::NicTwice { location, name } => {
                write!(f, "{location}: NIC {name:?} is in the row twice: remove one")
            }
            Self::Nic { location, name } => {
                write!(
                    f,
                    "{location}: {name:?} cannot be the name of a NIC: write 1 to {NAME_BYTES_MAX} printable ASCII characters"
                )
            }
            Self::TooManyLocations(count) => {
                write!(f, "there are {count} rows, and the limit is {LOCATIONS_MAX}: remove some")
            }
            Self::TooManyNics { location, count } => {
                write!(f, "{location}: there are {count} NICs, and the limit is {NICS_MAX}: remove some")
            }
        }
    }
}

impl core::error::Error for MatrixError {}

impl From<LocationError> for MatrixError {
    fn from(error: LocationError) -> Self {
        Self::Location(error)
    }
}
