//! Checking requests, before the first of a batch counts.

use std::vec::Vec;

use te_core::{RegionOffset, RemoteOffset, Slicer, Transport};
use te_host::rights;

use super::Engine;
use crate::error::{RequestProblem, SegmentError, TransferError};
use crate::request::TransferRequest;

impl Engine {
    /// The rails of a fabric, as a mask.
    pub(super) fn rails_of(&self, fabric: &str) -> u32 {
        let rails = self.rails.rails().iter().enumerate().filter(|(_, rail)| rail.name() == fabric);
        rails.fold(0, |mask, (rail, _)| mask | 1 << rail)
    }

    /// Checks requests, which only `rails` may carry, puts them into `out` as the rails take them, and
    /// returns the slicer for them.
    pub(super) fn check(
        &self,
        requests: &[TransferRequest],
        rails: u32,
        owned: Option<te_core::MemSpan>,
        out: &mut Vec<te_core::TransferRequest>,
    ) -> Result<Slicer, TransferError> {
        let mut nearest = None;
        let mut one_rail = true;
        for (index, request) in requests.iter().enumerate() {
            let core = self.resolve(index, request, owned)?;
            let all = self.rails.rails_between(core.local.region, core.remote.region) & rails;
            let reach = self.rails.on_granule(all, core.remote.offset, core.len);
            match (all, reach) {
                (0, _) if rails != u32::MAX => {
                    return Err(TransferError::Request { index, problem: RequestProblem::Fabric });
                }
                (1.., 0) => {
                    return Err(TransferError::Request { index, problem: RequestProblem::Granule });
                }
                _ => {}
            }
            let rail = reach.trailing_zeros();
            one_rail &= *nearest.get_or_insert(rail) == rail;
            out.push(core);
        }
        Ok(self.slicer(nearest.filter(|_| one_rail)))
    }

    /// Checks one request and returns it as the rails take it.
    fn resolve(
        &self,
        index: usize,
        request: &TransferRequest,
        owned: Option<te_core::MemSpan>,
    ) -> Result<te_core::TransferRequest, TransferError> {
        let problem = |problem| Err(TransferError::Request { index, problem });
        if request.len == 0 {
            return problem(RequestProblem::Empty);
        }
        let Some((region_id, offset, region)) = self.regions.resolve(request.local, request.len) else {
            return problem(RequestProblem::LocalRange);
        };
        // Ids alone do not distinguish buffers of different engines; spans do.
        if region.owned && owned.is_none_or(|span| span != region.span) {
            return problem(RequestProblem::Owned);
        }
        let segment = self.segments.segment(request.segment);
        let segment = segment.ok_or(TransferError::Segment { index, source: SegmentError::NotFound })?;
        if let Some(source) = segment.restart_error() {
            return Err(TransferError::Segment { index, source });
        }
        let Some((remote, remote_offset)) = segment.resolve(request.remote_addr, request.len) else {
            return problem(RequestProblem::RemoteRange);
        };
        let (local_right, remote_right) = rights(request.op);
        if !region.access.contains(local_right) {
            return problem(RequestProblem::LocalAccess);
        }
        if !remote.access.contains(remote_right) {
            return problem(RequestProblem::RemoteAccess);
        }
        Ok(te_core::TransferRequest {
            op: request.op,
            local: RegionOffset::new(region_id, offset),
            remote: RemoteOffset::new(remote.id, remote_offset),
            len: request.len,
        })
    }

    /// The slicer for requests whose nearest rail is `rail`; `None`: their rails differ.
    fn slicer(&self, rail: Option<u32>) -> Slicer {
        let preferred = rail.and_then(|rail| self.rails.rails().get(rail as usize));
        let preferred = preferred.map_or(0, |rail| rail.capabilities().slice_bytes_preferred);
        // A tail of up to a quarter of a slice is moved with the last slice.
        let rails = self.rails.capabilities();
        let longest = rails.slice_bytes_max / 5 * 4;
        let bytes = self.config.slice_bytes.max(preferred).min(longest);
        // Cuts of a request that fits the granule of a rail fit it, too.
        let cut = bytes - bytes % rails.granule_bytes;
        Slicer::new(if cut == 0 { bytes } else { cut })
    }
}
