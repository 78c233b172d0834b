//! The priority matrix: for each location, the NICs to use and those to fall back on.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::LocationError;

use super::{GPUS_MAX, Location, NAME_BYTES_MAX, NICS_MAX, NODES_MAX, is_name};

/// Rows of a matrix, at most.
pub const LOCATIONS_MAX: usize = NODES_MAX + GPUS_MAX + 1;

/// Which NICs serve memory where. Its JSON form is `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], …}`: preferred, then secondary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriorityMatrix {
    rows: Vec<MatrixRow>,
}

/// One location and its NICs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixRow {
    /// Where the memory is.
    pub location: Location,
    /// NICs to use.
    pub preferred: Vec<String>,
    /// NICs to use when those are busy or broken, the better ones first.
    pub secondary: Vec<String>,
}

impl PriorityMatrix {
    /// What a secondary NIC costs, in percent of a preferred one.
    pub const SECONDARY_PERCENT: u32 = 300;
    /// What a NIC costs that the location's row does not name: the last resort.
    pub const UNNAMED_PERCENT: u32 = 2000;

    /// Checks the rows. A location may stand there once, a NIC once a row.
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

    /// Rows of which the checks are known to hold.
    pub(super) fn from_checked(rows: Vec<MatrixRow>) -> Self {
        Self { rows }
    }

    /// Its rows, in the order given.
    #[must_use]
    pub fn rows(&self) -> &[MatrixRow] {
        &self.rows
    }

    /// What `nic` costs for memory at `location`, in percent. A location without a row goes by the row of `*`, and without that
    /// every NIC is as good as the other.
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

/// Why rows do not make a [`PriorityMatrix`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatrixError {
    /// The name of a row is not that of a location.
    Location(LocationError),
    /// A location with two rows.
    LocationTwice(Location),
    /// A NIC twice in one row.
    NicTwice {
        /// Whose row.
        location: Location,
        /// Which NIC.
        name: String,
    },
    /// A NIC whose name is empty, too long or not printable.
    Nic {
        /// Whose row.
        location: Location,
        /// The name, cut.
        name: String,
    },
    /// More rows than there can be locations.
    TooManyLocations(usize),
    /// More NICs in a row than a host may have.
    TooManyNics {
        /// Whose row.
        location: Location,
        /// How many.
        count: usize,
    },
}

impl fmt::Display for MatrixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Location(error) => error.fmt(f),
            Self::LocationTwice(location) => write!(f, "{location} has two rows: merge them"),
            Self::NicTwice { location, name } => {
                write!(f, "{location}: NIC {name:?} is named twice: leave one out")
            }
            Self::Nic { location, name } => {
                write!(
                    f,
                    "{location}: {name:?} is no NIC's name: 1 to {NAME_BYTES_MAX} printable ASCII characters"
                )
            }
            Self::TooManyLocations(count) => write!(f, "{count} rows, and {LOCATIONS_MAX} is the limit"),
            Self::TooManyNics { location, count } => {
                write!(f, "{location}: {count} NICs, and {NICS_MAX} is the limit")
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
