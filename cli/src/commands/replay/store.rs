//! stub
use super::driver::{BlockStore, Got, Put};
use crate::commands::FabricChoice;
pub(super) struct ClusterStore {}
impl ClusterStore {
    pub(super) fn open(_: &str, _: FabricChoice, _: usize, _: usize) -> anyhow::Result<Self> {
        Ok(Self {})
    }
    pub(super) fn stats(&mut self) -> anyhow::Result<store_core::Stats> {
        Ok(Default::default())
    }
}
impl BlockStore for ClusterStore {
    fn slots(&self) -> usize {
        1
    }
    fn block_bytes(&self) -> usize {
        1
    }
    fn read_slot(&self, _: usize, _: &mut [u8]) -> anyhow::Result<()> {
        Ok(())
    }
    fn write_slot(&mut self, _: usize, _: &[u8]) -> anyhow::Result<()> {
        Ok(())
    }
    fn exists(&mut self, _: &[u64], _: &mut Vec<bool>) -> anyhow::Result<()> {
        Ok(())
    }
    fn get(&mut self, _: &[u64], _: &mut Vec<Got>) -> anyhow::Result<()> {
        Ok(())
    }
    fn put(&mut self, _: &[u64], _: &mut Vec<Put>) -> anyhow::Result<()> {
        Ok(())
    }
}
