//! Which rails have which region: at its registration, and later, when rails come back that had failed then.

use super::{MultiTransport, Region};
use crate::{Access, Error, ErrorKind, MemSpan, RAILS_MAX, RegionId, Route, Transport};

impl<C: Transport, R: Route> MultiTransport<C, R> {
    /// As [`register`](crate::Memory::register), but the caller registers the region with the children:
    /// `each` does so in any way (several at a time, for example) and sets the result of each child in a row
    /// of results that are `Unsupported` before.
    ///
    /// # Errors
    /// As [`register`](crate::Memory::register).
    ///
    /// # Safety
    /// As [`register`](crate::Memory::register); and `each` sets `Ok` for exactly those children that have
    /// registered this span under this id.
    pub unsafe fn register_with(
        &mut self,
        id: RegionId,
        span: MemSpan,
        access: Access,
        each: impl FnOnce(&mut [C], &mut [Result<(), Error>]),
    ) -> Result<(), Error> {
        let index = id.index as usize;
        if self.regions.get(index).is_some_and(|region| region.live) {
            return Err(Error::new(ErrorKind::Busy));
        }
        let mut results = [Err(Error::new(ErrorKind::Unsupported)); RAILS_MAX];
        let results = &mut results[..self.rails.len()];
        each(&mut self.rails, results);
        let (mut mask, mut missing) = (0, 0);
        let mut first_error = None;
        let mut left_out = None;
        for (rail, result) in results.iter().enumerate() {
            match *result {
                Ok(()) => mask |= 1 << rail,
                Err(error) if error.kind == ErrorKind::Unsupported => {}
                // The rail failed for its own reason: the others serve the region.
                Err(error) if error.kind.is_rail_fault() => {
                    missing |= 1 << rail;
                    left_out.get_or_insert((rail, error));
                }
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        self.left_out = left_out;
        if mask == 0 {
            let error = left_out.map_or(Error::new(ErrorKind::Unsupported), |(_, error)| error);
            first_error.get_or_insert(error);
        }
        if let Some(error) = first_error {
            for (rail, child) in self.rails.iter_mut().enumerate().filter(|(rail, _)| mask & 1 << rail != 0) {
                let undone = child.deregister(id);
                debug_assert!(undone.is_ok(), "rail {rail} did not deregister a region that nothing used");
            }
            return Err(error);
        }
        if self.regions.len() <= index {
            self.regions.resize(index + 1, Region::NONE);
        }
        self.regions[index] =
            Region { generation: id.generation, rails: mask, missing, span, access, live: true };
        self.missing |= missing != 0;
        Ok(())
    }

    /// Whether a region lacks a rail that [`rejoin`](Self::rejoin) could add.
    #[must_use]
    pub const fn is_missing_rails(&self) -> bool {
        self.missing
    }

    /// Registers regions with rails that had [refused them](Self::left_out), as far as those accept them now.
    /// Returns the number of such registrations, and calls `joined` with the region of each: export those
    /// again, or peers go on without the rail. Control path, as [`register`](crate::Memory::register): may
    /// allocate, may take long. An error of a rail that still does not accept a region is not reported.
    pub fn rejoin(&mut self, mut joined: impl FnMut(RegionId)) -> usize {
        if !self.missing {
            return 0;
        }
        self.missing = false;
        let mut count = 0;
        for (index, region) in self.regions.iter_mut().enumerate().filter(|(_, region)| region.live) {
            let id = RegionId::new(index as u32, region.generation);
            let before = count;
            for (rail, child) in self.rails.iter_mut().enumerate() {
                if region.missing & 1 << rail == 0 {
                    continue;
                }
                // SAFETY: the caller of `register` gave its promise for all rails, until `deregister` returns
                // `Ok`; `deregister` removes the region from this list first.
                match unsafe { child.register(id, region.span, region.access) } {
                    Ok(()) => {
                        region.missing &= !(1 << rail);
                        region.rails |= 1 << rail;
                        count += 1;
                    }
                    Err(Error { kind, .. }) if kind.is_rail_fault() => self.missing = true,
                    // The rail is back, and does not accept the region.
                    Err(_) => region.missing &= !(1 << rail),
                }
            }
            if count > before {
                joined(id);
            }
        }
        count
    }
}
