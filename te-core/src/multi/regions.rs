//! Which rails have which region: at its registration, and later, when rails come back that were gone then.

use super::{MultiTransport, Region};
use crate::{Access, Error, ErrorKind, MemSpan, RAILS_MAX, RegionId, Route, Transport};

impl<C: Transport, R: Route> MultiTransport<C, R> {
    /// As [`register`](crate::Memory::register), by the caller's hand: `each` registers the region with all children (as it likes:
    /// several at a time) and says how each took it, in a row of results that are `Unsupported` before.
    ///
    /// # Errors
    /// As [`register`](crate::Memory::register).
    ///
    /// # Safety
    /// As [`register`](crate::Memory::register); and `each` says `Ok` of those children that have registered just this, and of no
    /// others.
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
                // Its own trouble: the others serve.
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
                debug_assert!(undone.is_ok(), "rail {rail} keeps a region that nothing used");
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

    /// Whether a region lacks a rail that [`rejoin`](Self::rejoin) could find back.
    #[must_use]
    pub const fn is_missing_rails(&self) -> bool {
        self.missing
    }

    /// Registers regions with rails that had [left them out](Self::left_out), as far as those take them now. Gives how many
    /// registrations that were, and tells `joined` which regions they are of: export those anew, or peers go on without the rail. A
    /// control path, as [`register`](crate::Memory::register) is: may allocate, may take long. The first error of a rail that still does
    /// not take a region is no error here.
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
                // SAFETY: whoever registered the region promised it for all rails, until `deregister` returns `Ok`; and that takes
                // it off this list first.
                match unsafe { child.register(id, region.span, region.access) } {
                    Ok(()) => {
                        region.missing &= !(1 << rail);
                        region.rails |= 1 << rail;
                        count += 1;
                    }
                    Err(Error { kind, .. }) if kind.is_rail_fault() => self.missing = true,
                    // It is back, and will not have it.
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
