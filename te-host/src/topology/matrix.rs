//! The priority matrix as JSON: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": …}`.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::string::String;
use std::vec::Vec;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use te_core::topology::{MatrixError, MatrixRow, PriorityMatrix};

/// Longest file, bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a matrix from a file.
///
/// # Errors
/// When the file cannot be read, is longer than 1 MiB, or does not hold a matrix.
pub fn read_matrix(path: &Path) -> Result<PriorityMatrix, MatrixFileError> {
    let io = |source| MatrixFileError::Io { path: path.into(), source };
    let mut text = String::new();
    File::open(path).map_err(io)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(io)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(MatrixFileError::TooLong { path: path.into() });
    }
    parse_matrix(&text)
}

/// Parses a matrix: an object that gives each location an array of two lists, of preferred NICs and of
/// secondary ones.
///
/// # Errors
/// `Json` with the position where the text is not that; `Matrix` with what is wrong in its rows.
pub fn parse_matrix(text: &str) -> Result<PriorityMatrix, MatrixFileError> {
    let Rows(rows) = serde_json::from_str(text).map_err(MatrixFileError::Json)?;
    let row = |(location, (preferred, secondary)): (String, Lists)| {
        Ok::<_, MatrixError>(MatrixRow { location: location.parse()?, preferred, secondary })
    };
    let rows: Result<Vec<MatrixRow>, MatrixError> = rows.into_iter().map(row).collect();
    rows.and_then(PriorityMatrix::new).map_err(MatrixFileError::Matrix)
}

/// Writes the matrix in the form that [`parse_matrix`] reads, one location per line.
#[must_use]
pub fn matrix_to_json(matrix: &PriorityMatrix) -> String {
    // Names are printable ASCII: `Debug` escapes what JSON does, quotes and backslashes.
    let list = |names: &[String]| {
        let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
        format!("[{}]", names.join(", "))
    };
    let row = |row: &MatrixRow| {
        format!("  \"{}\": [{}, {}]", row.location, list(&row.preferred), list(&row.secondary))
    };
    let rows: Vec<String> = matrix.rows().iter().map(row).collect();
    if rows.is_empty() { "{}\n".into() } else { format!("{{\n{}\n}}\n", rows.join(",\n")) }
}

type Lists = (Vec<String>, Vec<String>);

/// Rows in the order of the file. A map would lose the order, and hide a location that occurs twice.
struct Rows(Vec<(String, Lists)>);

impl<'de> Deserialize<'de> for Rows {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Rows;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object such as {\"cpu:0\": [[\"mlx5_0\"], [\"mlx5_1\"]]}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Rows, A::Error> {
                let mut rows = Vec::new();
                while let Some(row) = map.next_entry()? {
                    rows.push(row);
                }
                Ok(Rows(rows))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Why a matrix could not be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum MatrixFileError {
    /// The file cannot be read.
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is longer than 1 MiB.
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The text is not the JSON of a matrix.
    Json(serde_json::Error),
    /// The rows are invalid.
    Matrix(MatrixError),
}

impl fmt::Display for MatrixFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, source } => {
                write!(f, "cannot read the priority matrix {}: {source}", path.display())
            }
            Self::TooLong { path } => {
                write!(
                    f,
                    "{} is longer than {FILE_BYTES_MAX} bytes: is it a priority matrix?",
                    path.display()
                )
            }
            Self::Json(error) => write!(
                f,
                "a priority matrix gives each location two lists, {{\"cpu:0\": [[\"mlx5_0\"], [\"mlx5_1\"]]}}: {error}"
            ),
            Self::Matrix(error) => write!(f, "priority matrix: {error}"),
        }
    }
}

impl std::error::Error for MatrixFileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::TooLong { .. } => None,
            Self::Json(error) => Some(error),
            Self::Matrix(error) => Some(error),
        }
    }
}
