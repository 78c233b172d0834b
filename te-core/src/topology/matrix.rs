//! The priority matrix: for each place, the NICs to use and those to fall back on.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::{GPUS_MAX, NAME_BYTES_MAX, NICS_MAX, NODES_MAX, Place, is_name};

/// Rows of a matrix, at most.
pub const PLACES_MAX: usize = NODES_MAX + GPUS_MAX + 1;

/// Which NICs serve memory where. Its JSON form is `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], …}`: preferred, then secondary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriorityMatrix {
    rows: Vec<MatrixRow>,
}

/// One place and its NICs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixRow {
    /// Where the memory is.
    pub place: Place,
    /// NICs to use.
    pub preferred: Vec<String>,
    /// NICs to use when those are busy or broken, the better ones first.
    pub secondary: Vec<String>,
}

impl PriorityMatrix {
    /// What a secondary NIC costs, in percent of a preferred one.
    pub const SECONDARY_PERCENT: u32 = 300;
    /// What a NIC costs that the place's row does not name: the last resort.
    pub const UNNAMED_PERCENT: u32 = 2000;

    /// Checks the rows. A place may stand there once, a NIC once a row.
    ///
    /// # Errors
    /// See [`MatrixError`].
    pub fn new(rows: Vec<MatrixRow>) -> Result<Self, MatrixError> {
        if rows.len() > PLACES_MAX {
            return Err(MatrixError::TooManyPlaces(rows.len()));
        }
        for (at, row) in rows.iter().enumerate() {
            if rows[..at].iter().any(|earlier| earlier.place == row.place) {
                return Err(MatrixError::PlaceTwice(row.place));
            }
            let names: Vec<&String> = row.preferred.iter().chain(&row.secondary).collect();
            if names.len() > NICS_MAX {
                return Err(MatrixError::TooManyNics { place: row.place, count: names.len() });
            }
            for (at, name) in names.iter().enumerate() {
                if !is_name(name) {
                    let name = name.chars().take(NAME_BYTES_MAX).collect();
                    return Err(MatrixError::Nic { place: row.place, name });
                }
                if names[..at].contains(name) {
                    return Err(MatrixError::NicTwice { place: row.place, name: (*name).clone() });
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

    /// What `nic` costs for memory at `place`, in percent. A place without a row goes by the row of `*`, and without that
    /// every NIC is as good as the other.
    #[must_use]
    pub fn penalty_percent(&self, place: Place, nic: &str) -> u32 {
        let row = |place| self.rows.iter().find(|row| row.place == place);
        let Some(row) = row(place).or_else(|| row(Place::Anywhere)) else { return 100 };
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
    /// No name of a place.
    Place(String),
    /// A place with two rows.
    PlaceTwice(Place),
    /// A NIC twice in one row.
    NicTwice {
        /// Whose row.
        place: Place,
        /// Which NIC.
        name: String,
    },
    /// A NIC whose name is empty, too long or not printable.
    Nic {
        /// Whose row.
        place: Place,
        /// The name, cut.
        name: String,
    },
    /// More rows than there can be places.
    TooManyPlaces(usize),
    /// More NICs in a row than a host may have.
    TooManyNics {
        /// Whose row.
        place: Place,
        /// How many.
        count: usize,
    },
}

impl fmt::Display for MatrixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place(name) => {
                write!(
                    f,
                    "{name:?} is no place: write cpu:0, cuda:0, hip:0 or xpu:0 with its number, or * for all others"
                )
            }
            Self::PlaceTwice(place) => write!(f, "{place} has two rows: merge them"),
            Self::NicTwice { place, name } => {
                write!(f, "{place}: NIC {name:?} is named twice: leave one out")
            }
            Self::Nic { place, name } => {
                write!(
                    f,
                    "{place}: {name:?} is no NIC's name: 1 to {NAME_BYTES_MAX} printable ASCII characters"
                )
            }
            Self::TooManyPlaces(count) => write!(f, "{count} rows, and {PLACES_MAX} is the limit"),
            Self::TooManyNics { place, count } => {
                write!(f, "{place}: {count} NICs, and {NICS_MAX} is the limit")
            }
        }
    }
}

impl core::error::Error for MatrixError {}
