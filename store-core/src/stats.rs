//! The master's gauges and counters.

use serde::{Deserialize, Serialize};

/// Gauges (now) and counters (since the master was created). The name of a counter ends in `_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Stats {
    /// Readable objects.
    pub objects: u64,
    /// Objects that are being written.
    pub objects_processing: u64,
    /// Of these, upserts: they have no key yet.
    pub upserts_unfinished: u64,
    /// Readable objects under a lease.
    pub objects_leased: u64,
    /// Bytes of readable objects, each object counted once.
    pub object_bytes: u64,
    /// Segments mounted.
    pub segments: u64,
    /// Nodes that are alive.
    pub nodes: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
    /// Bytes of all segments that are allocated or pending release, rounded up to the allocator's grain.
    pub used_bytes: u64,
    /// Bytes of unfinished puts, each object counted once.
    pub unfinished_bytes: u64,
    /// Bytes pending release because a writer may still write to them.
    pub quarantined_bytes: u64,
    /// Bytes that are released as soon as their nodes have cut off a writer whose connection has ended or
    /// that is too slow, as counted when the nodes were told. Some belong to unfinished puts, the others are
    /// pending release.
    pub held_dead_writer_bytes: u64,
    /// Of the bytes pending release, those whose writer is unknown: they are released when the writer reports
    /// that it is quiet, or when the segment is mounted anew.
    pub held_unknown_writer_bytes: u64,
    /// Bytes pending release because a reader's lease outlives the object.
    pub deferred_bytes: u64,
    /// Largest object for which there is room without eviction, bytes.
    pub free_bytes_largest: u64,
    /// Memory of the master itself, estimated, bytes.
    pub memory_bytes: u64,
    /// Puts started.
    pub put_starts_total: u64,
    /// Puts committed.
    pub put_ends_total: u64,
    /// Upserts committed; puts as well.
    pub upserts_total: u64,
    /// Objects that an upsert replaced.
    pub objects_replaced_total: u64,
    /// Puts revoked.
    pub put_revokes_total: u64,
    /// Puts that got fewer replicas than they requested.
    pub puts_partial_total: u64,
    /// Puts that found no room, even after eviction.
    pub puts_no_room_total: u64,
    /// Puts refused because the key was taken.
    pub puts_exist_total: u64,
    /// Puts whose writer was given up: a newer put or an upsert displaced them, or they reached the release
    /// timeout.
    pub puts_abandoned_total: u64,
    /// Keys that gets looked up.
    pub gets_total: u64,
    /// Keys that gets looked up and found readable.
    pub get_hits_total: u64,
    /// Bytes of the objects that gets found readable.
    pub get_bytes_total: u64,
    /// Bytes of committed puts, each object counted once.
    pub put_bytes_total: u64,
    /// Keys that `exists` looked up.
    pub exists_total: u64,
    /// Keys that `exists` looked up and found readable.
    pub exists_hits_total: u64,
    /// Objects removed on request.
    pub removes_total: u64,
    /// Objects evicted.
    pub evictions_total: u64,
    /// Bytes of evicted objects, each object counted once.
    pub evicted_bytes_total: u64,
    /// Times that eviction was wanted and every object was leased or being written.
    pub evictions_starved_total: u64,
    /// Objects lost because their last segment was unmounted.
    pub objects_lost_total: u64,
    /// Mounts of segments.
    pub mounts_total: u64,
    /// Unmounts of segments, for any reason.
    pub unmounts_total: u64,
    /// Nodes given up because they were silent for too long.
    pub nodes_expired_total: u64,
    /// Writers that nodes have cut off.
    pub expulsions_total: u64,
    /// Leases that readers returned before they ran out.
    pub leases_returned_total: u64,
    /// Segments that clients reported as out of reach and whose nodes have not been heard of since.
    pub segments_unreachable: u64,
    /// Puts refused because the master's own memory was used up.
    pub puts_metadata_full_total: u64,
    /// Events that were discarded because they were not taken in time.
    pub events_dropped_total: u64,
    /// Disks of nodes that are alive.
    pub disks: u64,
    /// Disks whose nodes are gone, and that are remembered.
    pub disks_away: u64,
    /// Bytes of the disks of nodes that are alive.
    pub disk_capacity_bytes: u64,
    /// Objects on disks, whether or not they are in memory as well, those on disks that are away included.
    pub disk_objects: u64,
    /// Bytes of these, as they are stored.
    pub disk_object_bytes: u64,
    /// Removed objects that nodes have not yet been confirmed to forget.
    pub disk_tombstones: u64,
    /// Objects that were chosen to be evicted soon, bytes.
    pub leaving_bytes: u64,
    /// How far the disks are behind: objects that are to be copied to them and wait, or have not even been
    /// chosen yet, bytes.
    pub disk_backlog_bytes: u64,
    /// Keys that gets looked up and found on a disk alone.
    pub disk_hits_total: u64,
    /// Objects copied to disks.
    pub demotions_total: u64,
    /// Bytes of these, each object counted once.
    pub demoted_bytes_total: u64,
    /// Copies to disks that failed, or whose object was gone when they ended.
    pub demotions_failed_total: u64,
    /// Objects that were read from disks and got a replica in memory again, or that this was tried for.
    pub promotions_total: u64,
    /// Evicted objects that stay readable, because they are on a disk.
    pub evictions_to_disk_total: u64,
    /// Objects that disks brought with them when they were mounted.
    pub disk_adopted_total: u64,
    /// Objects whose extents were given up by their disks.
    pub disk_reclaimed_total: u64,
    /// Objects that disks could not read, or were reported to be damaged there.
    pub disk_lost_total: u64,
}
