//! An index as bytes.
//!
//! ```text
//!   magic 8 ┃ version u32 ┃ owners u32 ┃ sets u32 ┃ forks u32 ┃ blocks u64
//!   owner   : id u32, holey u32
//!   set     : members n u32, then n owners u32 when n * 32 <= owners, otherwise a bitmap of the owners (u64 words)
//!   segment : blocks n u32, then n times hash u64, set u32 (0: no owner, then 1..), depth and flags u32, child u32
//!   fork    : hash u64, children n u32, then n times u32
//!   checksum: XXH3-64 of everything before, u64
//! ```
//! Numbers are little endian; owners are named in sets by their place in the list of owners. There are 256
//! segments. What is assumed is not part of it.

use alloc::vec;
use alloc::vec::Vec;

use xxhash_rust::xxh3::xxh3_64;

use super::holders::{EMPTY, SetId, each_seat};
use super::seats::digest_of;
use super::table::Slot as _;
use super::{BUCKETS, Digest, Entry, FORK, Index, IndexLimits, PARENT, SnapshotError};
use crate::OwnerId;

const MAGIC: &[u8; 8] = b"SNOWIDX\n";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 8;
const ENTRY_BYTES: usize = 20;

/// Bytes that are read from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize, part: &'static str) -> Result<&'a [u8], SnapshotError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(SnapshotError::Truncated(part))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, part: &'static str) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SnapshotError::Truncated(part))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self, part: &'static str) -> Result<u32, SnapshotError> {
        self.array(part).map(u32::from_le_bytes)
    }

    fn u64(&mut self, part: &'static str) -> Result<u64, SnapshotError> {
        self.array(part).map(u64::from_le_bytes)
    }

    /// `count` things of `bytes` each follow, at the least: nothing is allocated for more than can be there.
    fn expect(&self, count: usize, bytes: usize, part: &'static str) -> Result<(), SnapshotError> {
        if self.0.len() / bytes < count { Err(SnapshotError::Truncated(part)) } else { Ok(()) }
    }
}

fn within(what: &'static str, found: u64, max: u64) -> Result<(), SnapshotError> {
    if found > max { Err(SnapshotError::TooLarge { what, found, max }) } else { Ok(()) }
}

fn is_list(members: u32, owners: usize) -> bool {
    members as usize * 32 <= owners
}

impl Index {
    /// Appends the index to `sink`, about 20 bytes per block. Owners keep their ids.
    pub fn snapshot(&self, sink: &mut Vec<u8>) {
        let start = sink.len();
        let owners: Vec<(u32, OwnerId)> = self
            .seats
            .owners()
            .filter(|(_, seat)| seat.digest.blocks > 0)
            .map(|(at, seat)| (at, seat.owner))
            .collect();
        let (numbers, sets) = self.number_sets();
        sink.reserve(
            HEADER_BYTES + owners.len() * 8 + self.table.len() * ENTRY_BYTES + BUCKETS * 4 + CHECKSUM_BYTES,
        );
        sink.extend_from_slice(MAGIC);
        for number in [VERSION, owners.len() as u32, sets.len() as u32, self.forks.len() as u32] {
            sink.extend_from_slice(&number.to_le_bytes());
        }
        sink.extend_from_slice(&(self.table.len() as u64).to_le_bytes());
        for (seat, owner) in &owners {
            sink.extend_from_slice(&owner.0.to_le_bytes());
            sink.extend_from_slice(&u32::from(self.seats.is_holey(*seat)).to_le_bytes());
        }
        self.write_sets(&owners, &sets, sink);
        for segment in 0..BUCKETS {
            sink.extend_from_slice(&(self.table.segment_len(segment) as u32).to_le_bytes());
            for entry in self.table.segment(segment) {
                let mut bytes = [0; ENTRY_BYTES];
                bytes[..8].copy_from_slice(&{ entry.hash }.to_le_bytes());
                bytes[8..12].copy_from_slice(&numbers[entry.set as usize].to_le_bytes());
                bytes[12..16].copy_from_slice(&{ entry.meta }.to_le_bytes());
                bytes[16..].copy_from_slice(&{ entry.child }.to_le_bytes());
                sink.extend_from_slice(&bytes);
            }
        }
        for (hash, more) in &self.forks {
            sink.extend_from_slice(&hash.to_le_bytes());
            sink.extend_from_slice(&(more.len() as u32).to_le_bytes());
            more.iter().for_each(|child| sink.extend_from_slice(&child.to_le_bytes()));
        }
        let checksum = xxh3_64(&sink[start..]);
        sink.extend_from_slice(&checksum.to_le_bytes());
    }

    /// Numbers for the sets that entries have and that have an owner: by id, and in order.
    fn number_sets(&self) -> (Vec<u32>, Vec<SetId>) {
        let mut numbers = vec![0; self.holders.end() as usize];
        let mut sets = Vec::new();
        for segment in 0..BUCKETS {
            for entry in self.table.segment(segment) {
                let number = &mut numbers[entry.set as usize];
                if *number == 0 && self.is_held(entry.set) {
                    sets.push(entry.set);
                    *number = sets.len() as u32;
                }
            }
        }
        (numbers, sets)
    }

    fn write_sets(&self, owners: &[(u32, OwnerId)], sets: &[SetId], sink: &mut Vec<u8>) {
        let mut places = vec![0; self.seats.live().len() * 64];
        for (place, (seat, _)) in (0u32..).zip(owners) {
            places[*seat as usize] = place;
        }
        let mut members = Vec::new();
        for set in sets {
            members.clear();
            self.holders.each(*set, self.seats.live(), |seat| members.push(places[seat as usize]));
            sink.extend_from_slice(&(members.len() as u32).to_le_bytes());
            if is_list(members.len() as u32, owners.len()) {
                members.iter().for_each(|place| sink.extend_from_slice(&place.to_le_bytes()));
            } else {
                let mut words = vec![0u64; owners.len().div_ceil(64)];
                for place in &members {
                    words[*place as usize / 64] |= 1 << (place % 64);
                }
                words.iter().for_each(|word| sink.extend_from_slice(&word.to_le_bytes()));
            }
        }
    }

    /// The index whose [`snapshot`](Index::snapshot) is `bytes`.
    ///
    /// # Errors
    ///
    /// The bytes are not a snapshot, are damaged, or hold more than `limits` allow. Nothing larger than the
    /// bytes is allocated before that is known.
    pub fn restore(bytes: &[u8], limits: IndexLimits) -> Result<Self, SnapshotError> {
        within("bytes", bytes.len() as u64, limits.snapshot_bytes_max as u64)?;
        let mut reader = Reader(bytes);
        if reader.array("header")? != *MAGIC {
            return Err(SnapshotError::NotASnapshot);
        }
        let version = reader.u32("header")?;
        if version != VERSION {
            return Err(SnapshotError::Version { found: version, reads: VERSION });
        }
        let (content, checksum) = bytes.split_last_chunk().ok_or(SnapshotError::Truncated("header"))?;
        if content.len() < HEADER_BYTES {
            return Err(SnapshotError::Truncated("header"));
        }
        if xxh3_64(content) != u64::from_le_bytes(*checksum) {
            return Err(SnapshotError::Checksum);
        }
        let mut reader = Reader(&content[MAGIC.len() + 4..]);
        let (owners, sets, forks) = (reader.u32("header")?, reader.u32("header")?, reader.u32("header")?);
        let blocks = reader.u64("header")?;
        within("owners", u64::from(owners), u64::from(limits.owners_max))?;
        within("blocks", blocks, limits.blocks_max as u64)?;
        let mut index = Self::new(limits);
        index.read_owners(owners, &mut reader)?;
        let sets = index.read_sets(owners as usize, sets as usize, &mut reader)?;
        index.read_blocks(blocks, &sets, &mut reader)?;
        for set in sets {
            index.holders.forget_unused(set);
        }
        index.read_forks(forks, &mut reader)?;
        if !reader.0.is_empty() {
            return Err(SnapshotError::Invalid("bytes follow its end"));
        }
        Ok(index)
    }

    fn read_owners(&mut self, owners: u32, reader: &mut Reader<'_>) -> Result<(), SnapshotError> {
        reader.expect(owners as usize, 8, "owners")?;
        for place in 0..owners {
            let owner = OwnerId(reader.u32("owners")?);
            let holey = reader.u32("owners")?;
            // A seat per owner, in their order: a seat is a place.
            if self.seats.of_or_new(owner) != Some(place) {
                return Err(SnapshotError::Invalid("an owner is named twice"));
            }
            if holey > 1 {
                return Err(SnapshotError::Invalid("an owner is neither holey nor not"));
            }
            if holey == 1 {
                self.seats.puncture(place);
            }
        }
        Ok(())
    }

    /// The sets by their numbers; number 0 is no owner.
    fn read_sets(
        &mut self,
        owners: usize,
        sets: usize,
        reader: &mut Reader<'_>,
    ) -> Result<Vec<SetId>, SnapshotError> {
        reader.expect(sets, 4, "sets")?;
        let mut numbered = Vec::with_capacity(sets + 1);
        numbered.push(EMPTY);
        let mut seats = Vec::new();
        for _ in 0..sets {
            let members = reader.u32("sets")?;
            if members == 0 || members as usize > owners {
                return Err(SnapshotError::Invalid("a set has no members, or more than there are owners"));
            }
            seats.clear();
            if is_list(members, owners) {
                for _ in 0..members {
                    seats.push(reader.u32("sets")?);
                }
            } else {
                for at in 0..owners.div_ceil(64) {
                    each_seat(at, reader.u64("sets")?, |seat| seats.push(seat));
                }
            }
            let ascending = seats.windows(2).all(|pair| pair[0] < pair[1]);
            let known = seats.last().is_some_and(|last| (*last as usize) < owners);
            if seats.len() != members as usize || !ascending || !known {
                return Err(SnapshotError::Invalid("a set's members are not owners"));
            }
            numbered.push(self.holders.of(&seats));
            within(
                "bytes of holder sets",
                self.holders.bytes() as u64,
                self.limits.holders_bytes_max as u64,
            )?;
        }
        Ok(numbered)
    }

    fn read_blocks(
        &mut self,
        blocks: u64,
        sets: &[SetId],
        reader: &mut Reader<'_>,
    ) -> Result<(), SnapshotError> {
        let mut of_set = vec![Digest::default(); sets.len()];
        let mut segment_entries = Vec::new();
        let mut left = blocks;
        for segment in 0..BUCKETS {
            let count = reader.u32("blocks")?;
            left = left
                .checked_sub(u64::from(count))
                .ok_or(SnapshotError::Invalid("it has more blocks than it says"))?;
            reader.expect(count as usize, ENTRY_BYTES, "blocks")?;
            segment_entries.clear();
            segment_entries.reserve(count as usize);
            let bytes = reader.take(count as usize * ENTRY_BYTES, "blocks")?;
            for mut entry in bytes.chunks_exact(ENTRY_BYTES).map(Reader) {
                let hash = entry.u64("blocks")?;
                let (number, meta) = (entry.u32("blocks")? as usize, entry.u32("blocks")?);
                let block = Entry { hash, set: EMPTY, meta, child: entry.u32("blocks")? };
                let set =
                    *sets.get(number).ok_or(SnapshotError::Invalid("a block has a set that is not there"))?;
                if block.depth() >= self.limits.depth_max || (meta & FORK != 0 && meta & PARENT == 0) {
                    return Err(SnapshotError::Invalid("a block is too deep, or has flags that cannot be"));
                }
                of_set[number].blocks += 1;
                of_set[number].sum = of_set[number].sum.wrapping_add(digest_of(hash));
                segment_entries.push(Entry { set, ..block });
            }
            let is_ascending = segment_entries.windows(2).all(|pair| pair[0].hash() < pair[1].hash());
            if !is_ascending || !self.table.fill(segment, &segment_entries) {
                return Err(SnapshotError::Invalid("blocks are not in the order of their hashes"));
            }
        }
        if left != 0 {
            return Err(SnapshotError::Invalid("it has fewer blocks than it says"));
        }
        self.ghosts = of_set[0].blocks as usize;
        if self.ghosts > 0 {
            self.sweep.note_ghost();
        }
        let live = self.seats.live().to_vec();
        for (set, sum) in sets.iter().zip(&of_set).skip(1) {
            self.holders.retain_many(*set, sum.blocks as u32);
            let seats = &mut self.seats;
            self.holders.each(*set, &live, |seat| seats.add_many(seat, *sum));
        }
        Ok(())
    }

    fn read_forks(&mut self, forks: u32, reader: &mut Reader<'_>) -> Result<(), SnapshotError> {
        reader.expect(forks as usize, 12, "forks")?;
        for _ in 0..forks {
            let hash = reader.u64("forks")?;
            let count = reader.u32("forks")? as usize;
            reader.expect(count, 4, "forks")?;
            let entry = self.table.find(hash).map(|at| self.table.get(at));
            if entry.is_none_or(|entry| entry.meta & FORK == 0) {
                return Err(SnapshotError::Invalid("a fork is not at a block that has one"));
            }
            let more = (0..count).map(|_| reader.u32("forks")).collect::<Result<Vec<_>, _>>()?;
            if self.forks.insert(hash, more).is_some() {
                return Err(SnapshotError::Invalid("a fork is named twice"));
            }
        }
        Ok(())
    }
}
