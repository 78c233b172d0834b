//! What the master counts.

use serde::{Deserialize, Serialize};

/// Gauges (now) and counters (since the master was created). A counter ends in `_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Readable objects.
    pub objects: u64,
    /// Objects being written.
    pub objects_processing: u64,
    /// Readable objects that eviction leaves alone because readers may hold a lease.
    pub objects_leased: u64,
    /// Bytes of readable objects, each counted once.
    pub object_bytes: u64,
    /// Segments mounted.
    pub segments: u64,
    /// Nodes alive.
    pub nodes: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
    /// Bytes of them that are allocated, those held back included, rounded up to the allocator's grain.
    pub used_bytes: u64,
    /// Bytes of unfinished puts, each object counted once.
    pub unfinished_bytes: u64,
    /// Bytes held back because a writer may still write there.
    pub quarantined_bytes: u64,
    /// Bytes that come back as soon as their nodes have cut off a writer whose connection has ended, or that is too slow: as
    /// counted when the nodes were told. Some are of unfinished puts, the others held back.
    pub held_dead_writer_bytes: u64,
    /// Of what is held back, bytes whose writer did not say who it is: they come back when it says that it is quiet, or when
    /// the segment is mounted anew.
    pub held_unknown_writer_bytes: u64,
    /// Bytes held back because a reader's lease outlives the object.
    pub deferred_bytes: u64,
    /// Largest object for which there is room without eviction, bytes.
    pub free_bytes_largest: u64,
    /// Memory of the master itself, bytes, as estimated.
    pub memory_bytes: u64,
    /// Puts started.
    pub put_starts_total: u64,
    /// Puts committed.
    pub put_ends_total: u64,
    /// Puts revoked.
    pub put_revokes_total: u64,
    /// Puts that got fewer replicas than they asked for.
    pub puts_partial_total: u64,
    /// Puts that found no room, even after eviction.
    pub puts_no_room_total: u64,
    /// Puts refused because the key was taken.
    pub puts_exist_total: u64,
    /// Dead writers' puts that a newer put displaced, or that ran into the release timeout.
    pub zombies_total: u64,
    /// Keys looked up by get.
    pub gets_total: u64,
    /// Of these, found readable.
    pub get_hits_total: u64,
    /// Bytes of these: what readers were told where to find.
    pub get_bytes_total: u64,
    /// Bytes of puts committed, each object counted once.
    pub put_bytes_total: u64,
    /// Keys asked by exists.
    pub exists_total: u64,
    /// Of these, found readable.
    pub exists_hits_total: u64,
    /// Objects removed on request.
    pub removes_total: u64,
    /// Objects evicted.
    pub evictions_total: u64,
    /// Bytes of them, each object counted once.
    pub evicted_bytes_total: u64,
    /// Times that eviction was wanted and every object was leased or being written.
    pub evictions_starved_total: u64,
    /// Objects lost because their last segment went away.
    pub objects_lost_total: u64,
    /// Segments mounted.
    pub mounts_total: u64,
    /// Segments unmounted, whichever way.
    pub unmounts_total: u64,
    /// Nodes given up for silence.
    pub nodes_expired_total: u64,
    /// Writers that nodes have cut off.
    pub expulsions_total: u64,
    /// Leases that readers gave back before they ran out.
    pub leases_returned_total: u64,
    /// Segments that clients reported as out of reach and that no longer seem to be well.
    pub segments_unreachable: u64,
    /// Puts refused because the master's own memory was used up.
    pub puts_metadata_full_total: u64,
    /// Events that nobody took in time.
    pub events_dropped_total: u64,
}
