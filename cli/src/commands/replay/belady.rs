//! Belady's MIN: evict the block whose next use is furthest in the future. It needs knowledge of the future,
//! and is an upper bound for all policies.
//!
//! L. A. Belady, *A study of replacement algorithms for a virtual-storage computer* (IBM Systems Journal,
//! 1966). It is optimal for single references. The proof does not cover that a block counts only within a
//! complete cached prefix; none of the policies here has ever come near the bound, so it is plotted as the
//! bound for blocks.

use std::collections::BTreeSet;

/// Number of block references within the longest cached prefix of their request, with a cache of `capacity`
/// blocks, for requests over the blocks `0..distinct`.
pub(super) fn hits(
    requests: &[Vec<u32>],
    distinct: usize,
    capacity: usize,
    mut each: impl FnMut() -> bool,
) -> u64 {
    let next_uses = next_uses(requests, distinct);
    // The next use of each cached block, and the same in order. With equal next uses, the later block of a
    // request is evicted first.
    let mut cached: Vec<Option<(u32, u32)>> = vec![None; distinct];
    let mut order: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let mut hits = 0;
    for (request, next_uses) in requests.iter().zip(&next_uses) {
        hits += request.iter().take_while(|block| cached[**block as usize].is_some()).count() as u64;
        for (at, (&block, &next)) in (0u32..).zip(request.iter().zip(next_uses)) {
            if let Some((next, at)) = cached[block as usize].replace((next, at)) {
                order.remove(&(next, at, block));
            }
            order.insert((next, at, block));
            if order.len() > capacity
                && let Some((.., victim)) = order.pop_last()
            {
                cached[victim as usize] = None;
            }
        }
        if !each() {
            break;
        }
    }
    hits
}

/// For each reference, the next request that refers to the block; `u32::MAX` if there is none.
fn next_uses(requests: &[Vec<u32>], distinct: usize) -> Vec<Vec<u32>> {
    let mut next = vec![u32::MAX; distinct];
    let mut uses: Vec<Vec<u32>> = Vec::with_capacity(requests.len());
    for (number, request) in (0..requests.len() as u32).zip(requests).rev() {
        uses.push(request.iter().map(|block| next[*block as usize]).collect());
        request.iter().for_each(|block| next[*block as usize] = number);
    }
    uses.reverse();
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_last_goes_first() {
        // With room for two, 1 is kept for its second use and 2 is evicted for 3.
        let requests = [vec![0], vec![1], vec![2], vec![0], vec![1], vec![2]];
        assert_eq!(hits(&requests, 3, 2, || true), 2);
        assert_eq!(hits(&requests, 3, 3, || true), 3);
        assert_eq!(hits(&requests, 3, 1, || true), 1);
    }

    #[test]
    fn a_hole_ends_the_prefix() {
        let requests = [vec![0, 1, 2], vec![0, 9, 2], vec![0, 1, 2]];
        assert_eq!(hits(&requests, 10, 10, || true), 1 + 3);
    }
}
