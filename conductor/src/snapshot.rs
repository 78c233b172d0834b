//! The file that keeps the index over a restart.
//!
//! ```text
//!   magic (8) │ bytes of the names (4, little-endian) │ names: JSON │ the index, as conductor-core writes it
//! ```
//!
//! The file is written beside the former one and then takes its name, so that there is always a whole one.
//! The index in it is taken together with the positions of all streams. After a restart, a publisher's blocks
//! are served once its replay has shown that it is the same run; what it said meanwhile comes with that
//! replay.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::EngineConfig;
use crate::shared::Shared;

/// What every file begins with; the last digit is the version.
const MAGIC: [u8; 8] = *b"SNOWCND1";
/// Longest part of names that is read, bytes.
const NAMES_BYTES_MAX: usize = 64 << 20;
/// Longest file that is read, bytes.
const FILE_BYTES_MAX: u64 = 8 << 30;

/// What a file holds.
#[derive(Debug)]
pub(crate) struct Stored {
    /// Every rank that was registered.
    pub(crate) engines: Vec<EngineConfig>,
    /// The index.
    pub(crate) knowledge: Vec<u8>,
}

#[derive(Deserialize, Serialize)]
struct Names<T> {
    engines: T,
}

/// Writes a file with these names and this index.
///
/// # Errors
/// The error of the operating system. The former file is as it was.
pub(crate) fn write(path: &Path, shared: &Shared, knowledge: &[u8]) -> io::Result<()> {
    let directory = shared.directory();
    let engines: Vec<&EngineConfig> = directory.publishers.values().map(|it| &it.engine).collect();
    let names = serde_json::to_vec(&Names { engines })?;
    drop(directory);
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = File::create(&beside)?;
    file.write_all(&MAGIC)?;
    file.write_all(&u32::try_from(names.len()).unwrap_or(u32::MAX).to_le_bytes())?;
    file.write_all(&names)?;
    file.write_all(knowledge)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&beside, path)
}

/// Reads a file. `None`: there is none.
///
/// # Errors
/// It cannot be read, or is not such a file.
pub(crate) fn read(path: &Path) -> io::Result<Option<Stored>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    parse(&bytes).map(Some)
}

fn parse(bytes: &[u8]) -> io::Result<Stored> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let rest = bytes.strip_prefix(&MAGIC).ok_or_else(|| wrong("it is not a snapshot of this version"))?;
    let (len, rest) = rest.split_first_chunk().ok_or_else(|| wrong("it ends early"))?;
    let len = u32::from_le_bytes(*len) as usize;
    if len > NAMES_BYTES_MAX {
        return Err(wrong("its part of names is too long"));
    }
    let (names, knowledge) = rest.split_at_checked(len).ok_or_else(|| wrong("it ends early"))?;
    let names: Names<Vec<EngineConfig>> = serde_json::from_slice(names)?;
    Ok(Stored { engines: names.engines, knowledge: knowledge.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(names: &[u8], knowledge: &[u8]) -> Vec<u8> {
        [&MAGIC[..], &(names.len() as u32).to_le_bytes(), names, knowledge].concat()
    }

    #[test]
    fn a_file_that_is_cut_or_of_another_version_is_refused() {
        let whole = file(b"{\"engines\":[]}", b"index");
        assert_eq!(parse(&whole).unwrap().knowledge, b"index");
        for end in 0..MAGIC.len() + 4 + 14 {
            assert!(parse(&whole[..end]).is_err(), "{end}");
        }
        let mut other = whole;
        other[7] = b'2';
        assert!(parse(&other).is_err());
        let mut long = MAGIC.to_vec();
        long.extend(u32::MAX.to_le_bytes());
        assert!(parse(&long).is_err());
        assert!(parse(&file(b"{\"engines\":{}}", b"")).is_err());
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index");
        assert!(read(&path).unwrap().is_none());
        let shared = Shared::new(crate::Config::default());
        write(&path, &shared, b"one").unwrap();
        write(&path, &shared, b"two").unwrap();
        assert_eq!(read(&path).unwrap().unwrap().knowledge, b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
