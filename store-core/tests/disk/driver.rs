//! The driver: carries out orders of the disk's core on a simulated disk, with faults.

use std::ops::Range;

use store_core::disk::format::{BatchHeader, DiskUuid, Geometry};
use store_core::disk::{End, IoError, Order, Piece, Target, Work};
use te_core::Instant;
use te_core::testkit::Rng;

use crate::judge::{Held, Violation, image};
use crate::scenario::{Lies, Report, Scenario};
use crate::sim_disk::{SECTOR_BYTES, SimDisk};
use crate::world::Objects;

/// What happens to an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Whole,
    /// So many bytes.
    Short(u32),
    Fails(IoError),
    /// A sync that does nothing.
    Nothing,
    /// A read or write at another place.
    Elsewhere(u64),
}

/// An order that is being carried out.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) order: Order,
    pub(crate) fate: Fate,
    /// For syncs: the last write when it was ordered.
    write: u64,
}

impl std::fmt::Display for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Order { op, offset, work } = &self.order;
        let kind = match work {
            Work::Write(_) => "write",
            Work::Read { .. } => "read",
            Work::Sync => "sync",
        };
        write!(f, "order {op}: {kind} of {} at {offset}: {:?}", work.bytes(), self.fate)
    }
}

/// The end of an order, as the core is told.
pub(crate) struct Told {
    pub(crate) end: Result<u32, IoError>,
    pub(crate) data: Vec<u8>,
    /// For reads into buffers: token, offset in the buffer.
    pub(crate) buffer: Option<(u64, u32)>,
}

impl Told {
    pub(crate) fn end(&self) -> End<'_> {
        match self.end {
            Ok(bytes) => End::Done { bytes, data: &self.data },
            Err(error) => End::Failed(error),
        }
    }
}

/// The bytes of a write.
pub(crate) fn bytes_of(pieces: &[Piece], objects: &Objects) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Bytes(bytes, from) => out.extend_from_slice(&bytes[*from as usize..]),
            Piece::Zeros(bytes) => out.resize(out.len() + *bytes as usize, 0),
            Piece::Source { token, offset, bytes } => {
                let image = image(*token, objects[token].len);
                out.extend_from_slice(&image[*offset as usize..][..*bytes as usize]);
            }
        }
    }
    out
}

/// The slot and the sequence of the extent that a batch is written to.
pub(crate) fn extent_of(order: &Order, uuid: &DiskUuid, geometry: &Geometry) -> Option<(u64, u32)> {
    let Work::Write(pieces) = &order.work else { return None };
    let Some(Piece::Bytes(header, 0)) = pieces.first() else { return None };
    let slot = order.offset.checked_sub(geometry.extent_at(0))? / u64::from(geometry.extent_bytes());
    let offset = order.offset - geometry.extent_at(slot as u32);
    let header = BatchHeader::decode(header, uuid, geometry, slot as u32, offset as u32)?;
    Some((header.extent.sequence, slot as u32))
}

/// Decides what happens to an order, and how long it takes.
pub(crate) fn begin(scenario: &Scenario, rng: &mut Rng, disk: &SimDisk, order: Order) -> (Running, u64) {
    let bytes = order.work.bytes();
    let [read, write, no_space] = scenario.errors_ppm;
    let block = u64::from(bytes.next_multiple_of(4_096));
    let elsewhere = |rng: &mut Rng| {
        let blocks = (disk.bytes() - block) / 4_096;
        Fate::Elsewhere(rng.below(blocks) * 4_096)
    };
    let fate = match &order.work {
        Work::Sync if rng.chance_ppm(scenario.sync_errors_ppm) => Fate::Fails(IoError::Device),
        Work::Sync if rng.chance_ppm(scenario.lost_syncs_ppm) => Fate::Nothing,
        Work::Sync => Fate::Whole,
        Work::Read { .. } if rng.chance_ppm(read) => Fate::Fails(IoError::Device),
        Work::Write(_) if rng.chance_ppm(write) => Fate::Fails(IoError::Device),
        Work::Write(_) if rng.chance_ppm(no_space) => Fate::Fails(IoError::NoSpace),
        _ if rng.chance_ppm(scenario.short_ppm) => Fate::Short(rng.below(u64::from(bytes)) as u32),
        _ if rng.chance_ppm(scenario.misdirected_ppm) => elsewhere(rng),
        _ => Fate::Whole,
    };
    let micros = if rng.chance_ppm(scenario.stalled_ppm) {
        100_000 + rng.below(200_000)
    } else if rng.chance_ppm(scenario.slow_ppm) {
        5_000 + rng.below(15_000)
    } else {
        20 + rng.below(400)
    };
    (Running { order, fate, write: disk.last_write() }, micros)
}

/// Carries an order out.
pub(crate) fn end(
    (now, lies): (Instant, Lies),
    running: Running,
    disk: &mut SimDisk,
    rng: &mut Rng,
    (objects, held): (&Objects, &Held),
    report: &mut Report,
) -> Result<Told, Violation> {
    let Running { order, fate, write } = running;
    let mut told = Told { end: Ok(order.work.bytes()), data: Vec::new(), buffer: None };
    let whole = order.work.bytes();
    let done = match fate {
        Fate::Short(bytes) => bytes,
        _ => whole,
    };
    report.shorts += u64::from(done < whole);
    let offset = if let Fate::Elsewhere(at) = fate { at } else { order.offset };
    match &order.work {
        Work::Sync => match fate {
            Fate::Fails(error) => {
                report.sync_errors += 1;
                disk.fail_sync(rng);
                told.end = if lies.contains(Lies::SYNC) { Ok(0) } else { Err(error) };
            }
            Fate::Nothing => {}
            _ => disk.sync(now, write),
        },
        Work::Write(pieces) => {
            if fate == Fate::Whole {
                held.written(Range { start: offset, end: offset + u64::from(whole) })?;
            }
            let bytes = bytes_of(pieces, objects);
            // A batch, and not a footer.
            let is_data = pieces.iter().any(|piece| matches!(piece, Piece::Source { .. }));
            let late = lies.contains(Lies::FOOTER) && is_data;
            let held_until = if late { now + std::time::Duration::from_millis(200) } else { Instant::ZERO };
            match fate {
                Fate::Fails(error) => {
                    let some = if error == IoError::NoSpace { 0 } else { 2 };
                    disk.write(offset, &bytes, held_until, || rng.below(3) < some);
                    told.end = Err(error);
                }
                _ => {
                    let sectors = done as usize / SECTOR_BYTES * SECTOR_BYTES;
                    disk.write(offset, &bytes[..sectors], held_until, || true);
                    let lie = lies.contains(Lies::SHORT);
                    told.end = Ok(if lie { whole } else { done });
                }
            }
        }
        Work::Read { into, .. } => {
            if let Target::Buffer { token, offset } = into {
                told.buffer = Some((*token, *offset));
            }
            match fate {
                Fate::Fails(error) => told.end = Err(error),
                _ => {
                    told.data = disk.read(offset, done as usize);
                    told.end = Ok(done);
                }
            }
        }
    }
    Ok(told)
}

/// The process dies while an order is carried out.
pub(crate) fn interrupt(running: &Running, disk: &mut SimDisk, rng: &mut Rng, objects: &Objects) {
    if let Work::Write(pieces) = &running.order.work {
        let bytes = bytes_of(pieces, objects);
        let thirds = rng.below(4);
        disk.write(running.order.offset, &bytes, Instant::ZERO, || rng.below(3) < thirds);
    }
}
