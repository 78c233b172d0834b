//! The file that keeps the index over a restart.
//!
//! ```text
//!   magic (8) │ bytes of the names (4) │ names: JSON │ XXH3 of all before (8) │ the index, as conductor-core writes it
//! ```
//!
//! Numbers are little-endian. The index has a checksum of its own: nothing of a damaged part is used.
//!
//! The file is written beside the former one and then takes its name, so that there is always a whole one.
//! The index in it is taken together with the positions of all streams. After a restart, a publisher's blocks
//! are served once its replay has shown that it is the same run; what it said meanwhile comes with that
//! replay.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::config::EngineConfig;
use crate::shared::Shared;

/// What every file begins with; the last digit is the version.
const MAGIC: [u8; 8] = *b"SNOWCND2";
/// Longest part of names that is read, bytes.
const NAMES_BYTES_MAX: usize = 64 << 20;
/// Longest file that is read, bytes.
const FILE_BYTES_MAX: u64 = 8 << 30;

/// What a file holds.
#[derive(Debug)]
pub(crate) struct Stored {
    /// Every rank that was registered.
    pub(crate) engines: Vec<EngineConfig>,
    bytes: Vec<u8>,
    /// Where the index begins.
    index: usize,
}

impl Stored {
    /// The index.
    pub(crate) fn knowledge(&self) -> &[u8] {
        &self.bytes[self.index..]
    }
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
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = File::create(&beside)?;
    file.write_all(&head(shared)?)?;
    file.write_all(knowledge)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&beside, path)
}

/// What a file has before its index.
///
/// # Errors
/// The names cannot be written.
pub(crate) fn head(shared: &Shared) -> io::Result<Vec<u8>> {
    let directory = shared.directory();
    let engines: Vec<&EngineConfig> = directory.publishers.values().map(|it| &it.engine).collect();
    let names = serde_json::to_vec(&Names { engines })?;
    Ok(sealed(&names))
}

fn sealed(names: &[u8]) -> Vec<u8> {
    let len = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let mut head = [&MAGIC[..], &len.to_le_bytes(), names].concat();
    head.extend(xxh3_64(&head).to_le_bytes());
    head
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
    let len = file.metadata()?.len();
    let mut bytes = Vec::with_capacity(usize::try_from(len.min(FILE_BYTES_MAX)).unwrap_or_default());
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    parse(bytes).map(Some)
}

fn parse(bytes: Vec<u8>) -> io::Result<Stored> {
    let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what.to_owned()));
    let Some(rest) = bytes.strip_prefix(&MAGIC) else {
        return wrong(match bytes.starts_with(&MAGIC[..7]) {
            true => "another version wrote it",
            false => "it is not a snapshot of a Conductor",
        });
    };
    let Some((len, rest)) = rest.split_first_chunk() else { return wrong("it ends early") };
    let len = u32::from_le_bytes(*len) as usize;
    if len > NAMES_BYTES_MAX {
        return wrong("its part of names is too long, or damaged");
    }
    let Some((names, rest)) = rest.split_at_checked(len) else { return wrong("it ends early") };
    let Some((checksum, _)) = rest.split_first_chunk() else { return wrong("it ends early") };
    let head = MAGIC.len() + 4 + len;
    if xxh3_64(&bytes[..head]) != u64::from_le_bytes(*checksum) {
        return wrong("its part of names is damaged");
    }
    let names: Names<Vec<EngineConfig>> = serde_json::from_slice(names)?;
    Ok(Stored { engines: names.engines, index: head + 8, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_or_of_another_version_is_refused() {
        let head = sealed(b"{\"engines\":[]}");
        let whole = [&head[..], b"index"].concat();
        assert_eq!(parse(whole.clone()).unwrap().knowledge(), b"index");
        for end in 0..head.len() {
            assert!(parse(whole[..end].to_vec()).is_err(), "{end}");
        }
        for at in 0..head.len() {
            for bit in 0..8 {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << bit;
                assert!(parse(flipped).is_err(), "byte {at}, bit {bit}");
            }
        }
        let text = |bytes: &[u8]| parse(bytes.to_vec()).unwrap_err().to_string();
        assert_eq!(text(b"SNOWCND1\0\0\0\0"), "another version wrote it");
        assert_eq!(text(b"an ELF"), "it is not a snapshot of a Conductor");
        for len in [0, u32::MAX, NAMES_BYTES_MAX as u32] {
            let mut other = whole.clone();
            other[MAGIC.len()..MAGIC.len() + 4].copy_from_slice(&len.to_le_bytes());
            assert!(parse(other).is_err(), "names of {len} bytes");
        }
        assert!(parse(sealed(b"{\"engines\":{}}")).is_err());
        assert!(parse(sealed(b"")).is_err());
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index");
        assert!(read(&path).unwrap().is_none());
        let shared = Shared::new(crate::Config::default());
        write(&path, &shared, b"one").unwrap();
        write(&path, &shared, b"two").unwrap();
        assert_eq!(read(&path).unwrap().unwrap().knowledge(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
