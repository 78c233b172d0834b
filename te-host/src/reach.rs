//! What distinguishes one host fabric from another: how it finds the memory behind an export.

use std::sync::Arc;

use te_core::{Access, Error, ErrorKind, EventSource, Instant, RegionId, Slice};

use crate::sys::{HeldSpan, Use};

/// Longest export of a host fabric, bytes.
pub const EXPORT_BYTES_MAX: usize = 128;

/// How a fabric within the host finds the memory behind an export. [`Copier`](crate::Copier) does the rest:
/// regions, remote regions, rights, ranges, the queue, cancellation and the copies.
///
/// A fabric needs only this trait when the processor can load from and store to the memory of its peers:
/// memory of the same process, files that several processes map, a pool behind CXL. Where memory is reached
/// only through a device, the fabric needs a transport of its own.
///
/// Three rules follow from the laws of [`te_core::Transport`]:
///
/// * [`unshare`](Self::unshare) returns true only when no peer is copying and none will (L2, L6). A peer of
///   the same process is inside the [`HeldSpan`], which `Copier` revokes afterwards; the fabric itself has to
///   know about peers elsewhere.
/// * [`copy`](Self::copy) copies all of a slice by [`carry_out`](crate::carry_out) or changes nothing. So no
///   outcome is ever unknown, and no fence has anything to wait for (L5).
/// * `copy`, [`poll`](Self::poll) and [`poll_at`](Self::poll_at) neither block nor allocate (L4).
///
/// # Example
///
/// A pool of memory that all its members can address. In this example it is plain memory of one process. A
/// pool on a CXL device would be mapped in `attach`, and `unshare` would ask its members to stop.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use te_core::{
///     Access, Completion, Error, ErrorKind, Instant, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice,
/// };
/// use te_core::{Token, Transport};
/// use te_fabric::testkit::Block;
/// use te_host::{Checksum, Copied, Copier, EXPORT_BYTES_MAX, HeldSpan, Reach, Use, carry_out};
///
/// #[derive(Clone, Default)]
/// struct Pool(Arc<Mutex<Vec<Arc<HeldSpan>>>>);
///
/// impl Reach for Pool {
///     const NAME: &'static str = "pool";
///     const EXPORT_BYTES: u32 = 17;
///     const OWNER_POLLS: bool = false;
///     /// Index of the region in the pool.
///     type Export = u64;
///     type Link = Arc<HeldSpan>;
///
///     fn share(&mut self, _: RegionId, held: &Arc<HeldSpan>, _: Access) -> Result<Option<u64>, Error> {
///         let mut pool = self.0.lock().unwrap();
///         pool.push(held.clone());
///         Ok(Some(pool.len() as u64 - 1))
///     }
///
///     fn unshare(&mut self, _: RegionId, _: &u64) -> bool {
///         true // Members copy inside the `HeldSpan`, which the caller revokes.
///     }
///
///     fn export(
///         &self,
///         _: RegionId,
///         index: &u64,
///         access: Access,
///         len: u64,
///         out: &mut [u8; EXPORT_BYTES_MAX],
///     ) -> usize {
///         out[..8].copy_from_slice(&index.to_le_bytes());
///         out[8..16].copy_from_slice(&len.to_le_bytes());
///         out[16] = access.bits();
///         17
///     }
///
///     fn attach(&mut self, blob: &[u8]) -> Result<(Arc<HeldSpan>, u64, Access), Error> {
///         let blob: &[u8; 17] = blob.try_into().map_err(|_| ErrorKind::InvalidArgument)?;
///         let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| blob[at + i]));
///         let held = self.0.lock().unwrap().get(number(0) as usize).cloned().ok_or(ErrorKind::Unreachable)?;
///         Ok((held, number(8), Access::from_bits_truncate(blob[16])))
///     }
///
///     fn copy(&self, link: &Arc<HeldSpan>, local: &Use<'_>, slice: &Slice, checksum: Checksum) -> Copied {
///         match link.enter() {
///             Some(remote) => carry_out(slice, local.window(), remote.window(), checksum),
///             None => Copied::Failed(ErrorKind::Stale.into()),
///         }
///     }
/// }
///
/// let (here, there) = (Block::new(4096), Block::new(4096));
/// here.set(0, b"kv cache");
/// let pool = Pool::default();
/// let (mut peer, mut owner) = (Copier::over(pool.clone()), Copier::over(pool));
/// let region = RegionId::new(0, 1);
/// // SAFETY: both blocks live until their regions are deregistered, and are accessed only by copies.
/// unsafe {
///     peer.register(region, here.span(), Access::LOCAL)?;
///     owner.register(region, there.span(), Access::REMOTE_WRITE)?;
/// }
/// let mut export = [0; EXPORT_BYTES_MAX];
/// let len = owner.export(region, &mut export)?;
/// let remote_region = RemoteRegionId::new(0, 1);
/// peer.attach(remote_region, &export[..len])?;
///
/// let write = |token| Slice {
///     token: Token(token),
///     local: RegionOffset::new(region, 0),
///     remote: RemoteOffset::new(remote_region, 100),
///     len: 8,
///     op: Op::Write,
/// };
/// peer.submit(&[write(7)])?;
/// let mut ended = [Completion::applied(Token(0))];
/// assert_eq!((peer.poll(Instant::ZERO, &mut ended), ended[0]), (1, Completion::applied(Token(7))));
/// assert_eq!(there.get(100, 8), b"kv cache");
///
/// // After the owner has deregistered its memory, nothing lands in it.
/// owner.deregister(region)?;
/// peer.submit(&[write(8)])?;
/// peer.poll(Instant::ZERO, &mut ended);
/// assert_eq!(ended[0].result, Err(ErrorKind::Stale.into()));
/// peer.deregister(region)?;
/// # Ok::<(), te_core::Error>(())
/// ```
pub trait Reach {
    /// The fabric's name: short, constant, lower case.
    const NAME: &'static str;
    /// Length of an export, bytes; [`EXPORT_BYTES_MAX`] at most.
    const EXPORT_BYTES: u32;
    /// Whether a region can be granted only while its owner polls.
    const OWNER_POLLS: bool;
    /// What the owner keeps of an exported region.
    type Export;
    /// What a peer keeps of an attached region: how to reach it.
    type Link;

    /// Prepares a region with remote rights for export. `None`: this fabric cannot export such memory, which
    /// can then only be the local side of slices.
    ///
    /// # Errors
    /// `System`, `Full`.
    fn share(
        &mut self,
        id: RegionId,
        held: &Arc<HeldSpan>,
        access: Access,
    ) -> Result<Option<Self::Export>, Error>;

    /// Ends an export. Returns true when no peer uses the memory any more; until then it is called again.
    fn unshare(&mut self, id: RegionId, export: &Self::Export) -> bool;

    /// Writes the export of a region of `len` bytes to `out`; returns its length, bytes.
    fn export(
        &self,
        id: RegionId,
        export: &Self::Export,
        access: Access,
        len: u64,
        out: &mut [u8; EXPORT_BYTES_MAX],
    ) -> usize;

    /// Parses an export: returns how to reach its memory, its length in bytes, and the rights that it claims.
    ///
    /// # Errors
    /// `InvalidArgument` for bytes that are not an export of this version, `Unreachable` for one of an owner
    /// that this fabric does not reach, `Full`, `System`.
    fn attach(&mut self, blob: &[u8]) -> Result<(Self::Link, u64, Access), Error>;

    /// Forgets how to reach an attached region.
    fn detach(&mut self, link: Self::Link) {
        drop(link);
    }

    /// Copies between local memory and the memory behind `link`, after it has made sure that the peer may.
    /// `checksum` says whether a checksum is wanted; it is passed to [`carry_out`](crate::carry_out).
    fn copy(&self, link: &Self::Link, local: &Use<'_>, slice: &Slice, checksum: Checksum) -> Copied;

    /// As [`te_core::Transport::is_connected`]; `peer` is not 0.
    fn is_connected(&self, peer: u64) -> bool {
        let _ = peer;
        false
    }

    /// As [`te_core::Transport::expel`], for a peer that is not 0 and may be expelled.
    ///
    /// # Errors
    /// `Full`; `Unsupported` for a fabric that cannot expel a peer.
    fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        let _ = peer;
        Err(ErrorKind::Unsupported.into())
    }

    /// Does the work of the fabric other than copying.
    fn poll(&mut self, now: Instant) {
        let _ = now;
    }

    /// When [`poll`](Self::poll) must be called even if no event arrives. `None`: never.
    fn poll_at(&self) -> Option<Instant> {
        None
    }

    /// A descriptor that becomes readable when [`poll`](Self::poll) has something to do.
    fn event_source(&self) -> Option<EventSource> {
        None
    }
}

/// Whether the CRC-32C of a slice is to be computed while it is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// It is not wanted.
    Skip,
    /// It is wanted. A fabric may still leave it out, see [`Copied::Done`].
    Compute,
}

/// Result of one attempt to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Copied {
    /// All bytes are in place. Contains the CRC-32C of the stored bytes, where it was computed.
    Done(Option<u32>),
    /// The memory cannot be reached yet; try again after [`Reach::poll`].
    NotYet,
    /// No byte was changed.
    Failed(Error),
}
