//! Memory that is granted and revoked: the protocol between the owner of a region and a peer that maps it,
//! for every fabric whose peers reach memory without the help of its owner.
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
//! Both halves are state machines that take messages and events and return [`OwnerEffect`]s and
//! [`PeerEffect`]s. They know no socket and no mapping: the fabric transports messages, and hands over memory
//! and rows with them. `te-host` drives them over Unix sockets and memory files.
//!
//! What they guarantee:
//!
//! * **No late access** (L2, L6). [`Owner::unshare`] and [`Owner::expel`] return true only when every peer
//!   that was granted the memory has released it, is known to be outside, because its row is revoked and not
//!   in use, or has [ended](Owner::ended). That is the target's confirmation of L5: a fabric whose peers copy
//!   by themselves has no other fence.
//! * **Every revocation ends**, unless a peer stays in the middle of a use for ever without dying: a peer
//!   releases a region as soon as it looks at its row or receives the message.
//! * A row is not granted again before its holder has released it: what a peer knows about a row never
//!   applies to another grant.
//! * A peer unmaps memory before it reports that.
//! * Of an owner whose memory must not even be mapped when it is freed ([`Owner::until_released`]), the first
//!   point holds for the release alone.
//! * A region is granted only for its key, and nothing is granted to a peer that is expelled or being
//!   disconnected.
//! * A peer that sends an invalid message is disconnected like one that is expelled, but may connect again.
//!
//! What they need of a fabric:
//!
//! * Messages of one connection keep their order. Messages of different connections need no order.
//! * [`Owner::ended`] is called when a peer can no longer touch memory: it has closed the connection, or its
//!   process is known to have ended.
//! * A peer uses a region only between [`Row::enter`] and the drop of the value that it returned.
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
pub use peer::{LinkState, Peer, PeerEffect, Want};
pub use rows::{Inside, ROWS_MAX, Revoked, Row, Rows};
