//! Regions on rails that were gone when the regions were registered, and are back.

use super::MultiTransport;
use crate::{Error, RegionId, Route, Transport};

impl<C: Transport, R: Route> MultiTransport<C, R> {
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
