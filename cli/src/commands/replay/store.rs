//! The cluster as a `BlockStore`: blocks by id, through one registered buffer.

use store_client::{
    BufferRange, Client, ClientConfig, Counters, ErrorCode, Get, Put as Item, PutOptions, SharedRegion,
    Stats, Store as _, StoreError,
};
use te_engine::Fabrics;

use super::driver::{BlockStore, Got, Put};
use crate::exit::Failure;

/// A client and its buffer.
pub(super) struct ClusterStore {
    client: Client,
    buffer: SharedRegion,
    block_bytes: usize,
    slots: usize,
    keys: Vec<[u8; KEY_BYTES]>,
}

/// Bytes of a key: `kv/` and the id in hexadecimal.
const KEY_BYTES: usize = 3 + 16;

impl ClusterStore {
    /// Connects to the master at `address`.
    pub(super) fn open(
        address: &str,
        fabric: Fabrics,
        slots: usize,
        block_bytes: usize,
    ) -> anyhow::Result<Self> {
        let config = ClientConfig::new(address.parse()?).fabrics(fabric);
        let mut client = Client::connect(config)?;
        let bytes = slots.checked_mul(block_bytes).filter(|&bytes| bytes as u64 <= BUFFER_BYTES_MAX);
        let Some(bytes) = bytes else {
            return Err(Failure::usage(
                "--batch times --block-bytes is more than 4 GiB: choose a smaller --batch",
            )
            .into());
        };
        let buffer = client.alloc(bytes)?;
        Ok(Self { client, buffer, block_bytes, slots, keys: Vec::new() })
    }

    /// The master's counters.
    pub(super) fn stats(&mut self) -> anyhow::Result<Stats> {
        Ok(self.client.master().stats()?)
    }

    /// The client's counters.
    pub(super) fn counters(&self) -> Counters {
        self.client.counters()
    }

    fn ranges(&mut self, ids: &[u64]) -> Vec<BufferRange> {
        self.name(ids);
        let len = self.block_bytes as u64;
        (0..ids.len() as u64).map(|slot| BufferRange::part(&self.buffer, slot * len, len)).collect()
    }

    fn name(&mut self, ids: &[u64]) {
        self.keys.clear();
        self.keys.extend(ids.iter().map(|&id| key_of(id)));
    }
}

/// Largest buffer, bytes.
const BUFFER_BYTES_MAX: u64 = 4 << 30;

impl BlockStore for ClusterStore {
    fn slots(&self) -> usize {
        self.slots
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read_slot(&self, index: usize, out: &mut [u8]) -> anyhow::Result<()> {
        Ok(self.buffer.read((index * self.block_bytes) as u64, out)?)
    }

    fn write_slot(&mut self, index: usize, block: &[u8]) -> anyhow::Result<()> {
        Ok(self.buffer.write((index * self.block_bytes) as u64, block)?)
    }

    fn exists(&mut self, ids: &[u64], found: &mut Vec<bool>) -> anyhow::Result<()> {
        self.name(ids);
        let keys: Vec<&[u8]> = self.keys.iter().map(|key| &key[..]).collect();
        found.clear();
        found.extend(self.client.batch_exists(&keys)?);
        Ok(())
    }

    fn get(&mut self, ids: &[u64], results: &mut Vec<Got>) -> anyhow::Result<()> {
        let ranges = self.ranges(ids);
        let mut items: Vec<_> =
            self.keys.iter().zip(ranges).map(|(key, range)| Get::new(key, range)).collect();
        results.clear();
        let _ = self.client.batch_get(&mut items);
        for item in items {
            results.push(match item.into_result() {
                Ok(Some(len)) => Got::Bytes(usize::try_from(len)?),
                Ok(None) => Got::Miss,
                Err(error) => master_is_there(error).map(|()| Got::Failed)?,
            });
        }
        Ok(())
    }

    fn put(&mut self, ids: &[u64], results: &mut Vec<Put>) -> anyhow::Result<()> {
        let ranges = self.ranges(ids);
        let mut items: Vec<_> =
            self.keys.iter().zip(ranges).map(|(key, range)| Item::new(key, range)).collect();
        results.clear();
        let _ = self.client.batch_put(&mut items, &PutOptions::default());
        for item in items {
            results.push(match item.into_result() {
                Ok(true) => Put::Stored,
                Ok(false) => Put::Exists,
                Err(error) if error.code().is_no_room() => Put::NoRoom,
                Err(error) => master_is_there(error).map(|()| Put::Failed)?,
            });
        }
        Ok(())
    }
}

/// A missing master is an error; every other error concerns one block only.
fn master_is_there(error: StoreError) -> anyhow::Result<()> {
    match error.code() {
        ErrorCode::RpcFail | ErrorCode::RpcTimeout => Err(error.into()),
        _ => Ok(()),
    }
}

fn key_of(id: u64) -> [u8; KEY_BYTES] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut key = *b"kv/----------------";
    for (i, digit) in key[3..].iter_mut().enumerate() {
        *digit = DIGITS[(id >> (60 - 4 * i)) as usize & 15];
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_id_in_hexadecimal() {
        assert_eq!(&key_of(0xfeed_0042), b"kv/00000000feed0042");
        assert_eq!(&key_of(u64::MAX), b"kv/ffffffffffffffff");
    }
}
