//! Local memory of a session: what was registered, and what is registered only for a transfer.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use te_core::{Access, Location, MemSpan, RegionId};
use te_engine::{RegisterError, TransferEngine};

use super::{EngineError, RegionSpan};
use crate::sys;

/// Access of memory that peers may reach.
pub(super) const SHARED: Access = Access::all();

/// The local memory of a session, by address. No two rows overlap.
///
/// Mooncake's TCP transport moves any memory of the process, its RDMA transport only registered memory. Here
/// the rule is the same on every fabric: memory that is not registered is [borrowed](Self::borrow), that is,
/// registered without remote rights until the transfer has ended.
#[derive(Default)]
pub(super) struct Regions {
    rows: RwLock<BTreeMap<u64, Row>>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    len: u64,
    id: RegionId,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Registered by the caller, for peers as well or not.
    User { remote: bool },
    /// Allocated by the session.
    Managed,
    /// Registered for transfers, as many as stated.
    Borrowed(u32),
}

impl Row {
    /// Whether the caller registered it.
    fn is_users(&self) -> bool {
        matches!(self.kind, Kind::User { .. })
    }
}

/// Local ranges that are registered until this is given back.
#[derive(Debug, Default)]
#[must_use = "borrowed memory stays registered until it is given back"]
pub(super) struct Borrowed {
    rows: Vec<u64>,
}

impl Borrowed {
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl Regions {
    /// Registers memory of the caller: all of the spans, or none.
    ///
    /// # Errors
    /// `Argument` for no memory, for address 0, and for memory that the CPU cannot read; `Overlap`; `Memory`.
    ///
    /// # Safety
    /// As [`TransferEngine::register`], until [`remove`](Self::remove) returned `Ok` for each.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub(super) unsafe fn add(
        &self,
        engine: &TransferEngine,
        spans: &[RegionSpan],
        location: Location,
        access: Access,
    ) -> Result<Vec<MemSpan>, EngineError> {
        let of = |span: &RegionSpan| span_of(span.addr, span.len).map(|span| span.at(location));
        let memory = spans.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        let with_access: Vec<(MemSpan, Access)> = memory.iter().map(|span| (*span, access)).collect();
        let mut rows = self.write();
        // SAFETY: the caller's promise.
        let ids = unsafe { engine.register_many(&with_access) }.map_err(|refused| refused.error)?;
        for (span, id) in spans.iter().zip(ids) {
            let kind = Kind::User { remote: access.is_remote() };
            rows.insert(span.addr, Row { len: span.len, id, kind });
        }
        Ok(memory)
    }

    /// Records memory that the engine allocated.
    pub(super) fn add_managed(&self, addr: u64, len: u64, id: RegionId) {
        self.write().insert(addr, Row { len, id, kind: Kind::Managed });
    }

    /// Forgets memory that the engine allocated.
    pub(super) fn remove_managed(&self, addr: u64) {
        let mut rows = self.write();
        if rows.get(&addr).is_some_and(|row| row.kind == Kind::Managed) {
            rows.remove(&addr);
        }
    }

    /// Ends the registration of the caller's memory that begins at `addr`.
    ///
    /// # Errors
    /// `NotRegistered`; `Memory` with `Busy` while a transfer uses it. It is then still registered.
    pub(super) fn remove(&self, engine: &TransferEngine, addr: u64) -> Result<(), EngineError> {
        let mut rows = self.write();
        let row = rows.get(&addr).filter(|row| row.is_users()).copied();
        let row = row.ok_or(EngineError::NotRegistered { addr })?;
        match engine.unregister(row.id) {
            Ok(()) | Err(RegisterError::NotFound) => {
                rows.remove(&addr);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The length of the caller's memory that begins at `addr`, and whether peers may reach it.
    pub(super) fn at(&self, addr: u64) -> Option<(u64, bool)> {
        match self.read().get(&addr)? {
            Row { len, kind: Kind::User { remote }, .. } => Some((*len, *remote)),
            _ => None,
        }
    }

    /// The first addresses of the caller's memory.
    pub(super) fn users(&self) -> Vec<u64> {
        let rows = self.read();
        rows.iter().filter(|(_, row)| row.is_users()).map(|(addr, _)| *addr).collect()
    }

    /// Divides `len` bytes at `addr` into parts of which each lies in one registered region, and passes them
    /// to `part`. Returns `false`, and passes nothing, if some of the bytes are not registered, or only for
    /// other transfers: those registrations may end at any time.
    pub(super) fn divide(&self, addr: u64, len: u64, mut part: impl FnMut(u64, u64)) -> bool {
        let rows = self.read();
        let stays = |row: u64| rows.get(&row).is_some_and(|row| !matches!(row.kind, Kind::Borrowed(_)));
        if !pieces(&rows, addr, len).all(|piece| matches!(piece, Piece::In { row, .. } if stays(row))) {
            return false;
        }
        for piece in pieces(&rows, addr, len) {
            if let Piece::In { addr, len, .. } = piece {
                part(addr, len);
            }
        }
        true
    }

    /// As [`divide`](Self::divide); what is not registered is registered until `borrowed` is
    /// [given back](Self::give_back).
    ///
    /// # Errors
    /// `Argument` for memory that the CPU cannot read; `Memory`, with `Busy` while an earlier transfer that
    /// was given up may still touch the bytes. What `borrowed` has by then is to be given back as well.
    ///
    /// # Safety
    /// The bytes stay mapped until `borrowed` was given back, and no `&` or `&mut` exists to bytes that a
    /// transfer may write.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub(super) unsafe fn borrow(
        &self,
        engine: &TransferEngine,
        addr: u64,
        len: u64,
        borrowed: &mut Borrowed,
        mut part: impl FnMut(u64, u64),
    ) -> Result<(), EngineError> {
        let mut rows = self.write();
        // What an earlier transfer has left behind may be of memory that was mapped here before.
        let end = addr.saturating_add(len);
        let left: Vec<(u64, RegionId)> = rows
            .range(..end)
            .filter(|(at, row)| row.kind == Kind::Borrowed(0) && **at + row.len > addr)
            .map(|(at, row)| (*at, row.id))
            .collect();
        for (at, id) in left {
            match engine.unregister(id) {
                Ok(()) | Err(RegisterError::NotFound) => drop(rows.remove(&at)),
                Err(error) => return Err(error.into()),
            }
        }
        let pieces: Vec<Piece> = pieces(&rows, addr, len).collect();
        for piece in pieces {
            let (addr, len, row) = match piece {
                Piece::In { addr, len, row } => (addr, len, row),
                Piece::Gap { addr, len } => {
                    let span = span_of(addr, len)?;
                    // SAFETY: the caller's promise; the row is removed before the registration ends.
                    let id = unsafe { engine.register(span, Access::LOCAL)? };
                    rows.insert(addr, Row { len, id, kind: Kind::Borrowed(0) });
                    (addr, len, addr)
                }
            };
            if let Some(Row { kind: Kind::Borrowed(users), .. }) = rows.get_mut(&row) {
                *users += 1;
                borrowed.rows.push(row);
            }
            part(addr, len);
        }
        Ok(())
    }

    /// Ends what [`borrow`](Self::borrow) began. A region that a fabric may still touch stays registered.
    pub(super) fn give_back(&self, engine: &TransferEngine, borrowed: Borrowed) {
        if borrowed.rows.is_empty() {
            return;
        }
        let mut rows = self.write();
        for addr in borrowed.rows {
            if let Some(Row { kind: Kind::Borrowed(users), .. }) = rows.get_mut(&addr) {
                *users = users.saturating_sub(1);
            }
        }
        // Those that were busy at an earlier time are tried again.
        rows.retain(|addr, row| {
            if row.kind != Kind::Borrowed(0) {
                return true;
            }
            match engine.unregister(row.id) {
                Ok(()) | Err(RegisterError::NotFound) => false,
                Err(error) => {
                    log::warn!(
                        "memory of {} bytes at {addr:#x} that was registered for a transfer: {error}",
                        row.len
                    );
                    true
                }
            }
        });
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Row>> {
        self.rows.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, Row>> {
        self.rows.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a range.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Piece {
    /// It lies in the row that begins at `row`.
    In { addr: u64, len: u64, row: u64 },
    /// It lies in no row.
    Gap { addr: u64, len: u64 },
}

/// The parts of `len` bytes at `addr`, in their order.
fn pieces(rows: &BTreeMap<u64, Row>, addr: u64, len: u64) -> impl Iterator<Item = Piece> {
    let end = addr.saturating_add(len);
    let mut at = addr;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let begins = at;
        let inside = rows.range(..=at).next_back().filter(|(base, row)| **base + row.len > at);
        let piece = match inside {
            Some((&row, of)) => {
                at = end.min(row + of.len);
                Piece::In { addr: begins, len: at - begins, row }
            }
            None => {
                at = rows.range(begins..end).next().map_or(end, |(next, _)| *next);
                Piece::Gap { addr: begins, len: at - begins }
            }
        };
        Some(piece)
    })
}

fn span_of(addr: u64, len: u64) -> Result<MemSpan, EngineError> {
    if addr == 0 || len == 0 {
        return Err(EngineError::argument(format!(
            "{len} bytes at {addr:#x} are no memory: give an address other than 0 and at least one byte"
        )));
    }
    let Some(size) = usize::try_from(len).ok().filter(|_| addr.checked_add(len).is_some()) else {
        return Err(EngineError::argument(format!("{len} bytes at {addr:#x} go beyond the last address")));
    };
    if !sys::is_readable(addr, len) {
        return Err(EngineError::argument(format!(
            "the {len} bytes at {addr:#x} are not memory that the CPU can read: check address and length (memory of a \
             GPU is not supported)"
        )));
    }
    Ok(MemSpan::new(addr as *mut u8, size))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(of: &[(u64, u64)]) -> BTreeMap<u64, Row> {
        let row = |len| Row { len, id: RegionId::new(0, 0), kind: Kind::User { remote: true } };
        of.iter().map(|&(addr, len)| (addr, row(len))).collect()
    }

    #[test]
    fn a_range_is_divided_at_the_borders_of_regions() {
        let rows = rows(&[(100, 50), (150, 50), (300, 10)]);
        let all = |addr, len| pieces(&rows, addr, len).collect::<Vec<_>>();
        assert_eq!(all(110, 10), [Piece::In { addr: 110, len: 10, row: 100 }]);
        assert_eq!(
            all(140, 20),
            [Piece::In { addr: 140, len: 10, row: 100 }, Piece::In { addr: 150, len: 10, row: 150 }]
        );
        assert_eq!(
            all(90, 220),
            [
                Piece::Gap { addr: 90, len: 10 },
                Piece::In { addr: 100, len: 50, row: 100 },
                Piece::In { addr: 150, len: 50, row: 150 },
                Piece::Gap { addr: 200, len: 100 },
                Piece::In { addr: 300, len: 10, row: 300 },
            ]
        );
        assert_eq!(all(400, 5), [Piece::Gap { addr: 400, len: 5 }]);
        assert_eq!(all(100, 0), []);
    }

    #[test]
    fn what_is_registered_for_other_transfers_is_not_divided_but_borrowed() {
        let regions = Regions::default();
        let mut table = rows(&[(100, 50), (150, 50)]);
        let divided = |regions: &Regions| {
            let mut parts = Vec::new();
            regions.divide(140, 20, |addr, len| parts.push((addr, len))).then_some(parts)
        };
        *regions.write() = table.clone();
        assert_eq!(divided(&regions), Some(vec![(140, 10), (150, 10)]));
        table.insert(150, Row { kind: Kind::Borrowed(1), ..table[&150] });
        *regions.write() = table;
        assert_eq!(divided(&regions), None);
    }

    #[test]
    fn what_is_no_memory_is_refused_before_it_is_registered() {
        let bytes = [0_u8; 16];
        let addr = bytes.as_ptr().addr() as u64;
        for (addr, len) in [(0, 16), (addr, 0), (addr, u64::MAX), (u64::MAX, 1), (1 << 46, 4096)] {
            assert!(matches!(span_of(addr, len), Err(EngineError::Argument(_))), "{addr:#x} {len}");
        }
        assert!(span_of(addr, 16).is_ok());
    }

    proptest! {
        #[test]
        fn pieces_cover_the_range_exactly(
            starts in prop::collection::btree_set(0..100_u64, 0..20),
            addr in 0..1100_u64,
            len in 0..500_u64,
        ) {
            let rows = rows(&starts.iter().map(|start| (start * 10, 1 + start % 10)).collect::<Vec<_>>());
            let mut at = addr;
            for piece in pieces(&rows, addr, len) {
                let (from, bytes) = match piece {
                    Piece::In { addr, len, row } => {
                        prop_assert!(addr >= row && addr + len <= row + rows[&row].len);
                        (addr, len)
                    }
                    Piece::Gap { addr, len } => {
                        prop_assert!(rows.iter().all(|(at, row)| at + row.len <= addr || *at >= addr + len));
                        (addr, len)
                    }
                };
                prop_assert!(from == at && bytes > 0);
                at += bytes;
            }
            prop_assert_eq!(at, addr + len);
        }
    }
}
