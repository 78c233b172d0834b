//! Memory that is granted and revoked: the protocol between the owner of a region and a peer that maps it,
//! for every fabric whose peers reach memory without its owner's help.
//!
//! ```text
//!      Owner                                              Peer
//!        │  ◄──────────────────────────── Hello{identity}   │ connected
//!        ├─ Welcome + rows ───────────────────────────────► │
//!        │  ◄──────────────────────── Ask{region, key}      │ attach
//!        ├─ Grant{row, offset, len} + memory ─────────────► │ mapped
//!        │                                                  │
//!        │            rows: revoked?  in use?               │ enter, copy, leave
//!        │                                                  │
//!  unshare: row revoked ────(rows)────► seen by each enter  │
//!        │     row not in use ◄─(rows)──┘                   │
//!        ├─ Revoked{row} ─────────────────────────────────► │ unmapped
//!        │  ◄───────────────────────────────── Release{row} │
//! ```
//!
//! Both halves are state machines that take messages and events and give [`OwnerEffect`]s and
//! [`PeerEffect`]s. They know no socket and no mapping: how a message travels, and how memory and rows are
//! handed over with one, is the fabric's business. `te-host` drives them over Unix sockets and memory files.
//!
//! What they hold:
//!
//! * **No late access** (L2, L6). [`Owner::unshare`] and [`Owner::expel`] give true only when every peer that
//!   was granted the memory has released it, is seen by its row to be out with the row revoked, or has
//!   [ended](Owner::ended). This is the target's word of L5: a fabric whose peers copy by themselves has no
//!   other fence.
//! * **Every revocation ends**, unless a peer stays in the middle of a use for ever without dying: a peer
//!   lets go as soon as it looks at its row, or hears of it.
//! * A row is not granted again before its holder has released it: what a peer still believes of a row is
//!   never true of another grant.
//! * A peer drops its mapping before it says so.
//! * A region is granted only for its key, and nothing is granted to a peer that is expelled or to be parted
//!   with.
//! * A peer that says nonsense is treated as one that is expelled, but may come again.
//!
//! What they need of a fabric:
//!
//! * Messages of one connection keep their order. Different connections need none.
//! * [`Owner::ended`] is called when nothing of a peer can touch memory any more: it has closed the
//!   connection, or its process is known to be gone.
//! * A peer uses a region only between [`Row::enter`] and the end of what that gave.
//!
//! ```
//! use core::time::Duration;
//! use te_core::grant::{Message, Offer, Owner, OwnerEffect, OwnerLimits, Revoked, Row, Rows};
//! use te_core::{Access, RegionId};
//!
//! struct Shared(std::rc::Rc<[Row]>);
//! impl Rows for Shared {
//!     fn reset(&self, row: u32) {
//!         self.0[row as usize].reset();
//!     }
//!     fn revoke(&self, row: u32, why: Revoked) -> bool {
//!         self.0[row as usize].revoke(why)
//!     }
//! }
//!
//! let rows: std::rc::Rc<[Row]> = (0..4).map(|_| Row::new()).collect();
//! let mut owner = Owner::new(OwnerLimits { peers_max: 8, idle_max: Duration::from_secs(2) });
//! let region = RegionId::new(0, 1);
//! owner.share(region, Offer { key: [7; 16], offset: 0, len: 4096, access: Access::REMOTE_WRITE });
//! let peer = owner.connected()?;
//! owner.received(peer, Message::Hello { protocol: te_core::grant::PROTOCOL, identity: 5 });
//! assert_eq!(owner.effect(), Some(OwnerEffect::MakeRows { peer }));
//! owner.welcomed(peer, Shared(rows.clone()));
//! owner.received(peer, Message::Ask { request: 1, region, key: [7; 16] });
//!
//! // The peer writes under row 0 when the owner wants its memory back.
//! let inside = rows[0].enter().expect("granted");
//! assert!(!owner.unshare(region));
//! drop(inside);
//! assert!(owner.unshare(region));
//! assert!(rows[0].enter().is_err(), "never again");
//! # Ok::<(), te_core::Error>(())
//! ```

mod message;
mod owner;
mod peer;
mod rows;
#[cfg(all(test, not(loom)))]
mod tests;

pub use message::{MESSAGE_BYTES_MAX, Message, PROTOCOL};
pub use owner::{Offer, Owner, OwnerEffect, OwnerLimits};
pub use peer::{Peer, PeerEffect, Want, Way};
pub use rows::{Inside, ROWS_MAX, Revoked, Row, Rows};
