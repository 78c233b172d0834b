//! The life of an association, up to its I/O queues. No I/O, no clock.
//!
//! ```text
//!   Connect ─▶ CAP ─▶ CC.EN = 1 ─▶ CSTS.RDY? ─▶ Identify ─▶ number of queues ─▶ I/O queues ─▶ up
//!                                   ▲     │
//!                                   └─────┘ not yet
//! ```

use te_core::{Error, ErrorKind};

use crate::command::{
    CC_ENABLED, CSTS_READY, FEATURE_QUEUES, Place, RESET_AT_ONCE, Sqe, Status, admin, io, property,
};
use crate::identify::{Controller, IDENTIFY_BYTES, Namespace, cns, identity_of};

/// How often CSTS is read before the controller counts as broken.
const POLLS_MAX: u32 = 10_000;

/// Commands of the association itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admin {
    Connect,
    Capabilities,
    Enable,
    Status,
    Identify,
    Queues,
    KeepAlive,
    /// The steps of a check of a remote region, by its index.
    Key(u32),
    Descriptors(u32),
    Namespace(u32),
    /// Reset of a controller that was lost, by its number in the list of doubts.
    Reset(u32),
    /// Abort of an abandoned command; what comes of it does not matter.
    Abort,
    /// A client's reservation key, by the index of the remote region, and whether it replaces another.
    Register(u32, bool),
    /// What is registered with the namespace of an adopted range, by the index of the remote region.
    Report(u32),
    /// The superblock of an adopted range, by the index of the remote region.
    Superblock(u32),
    /// A step of the owner of an adopted range, by the index of its region.
    Owner(u32),
    /// The same, of the step that writes the superblock.
    Mark(u32),
}

/// What to do after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Send(Admin),
    /// Open this many I/O queues.
    Open(u16),
}

/// How far an association is, and what is known about its controller.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Life {
    pub(crate) id: u16,
    pub(crate) identity: Controller,
    page_bytes: u32,
    /// Entries of the longest queue.
    pub(crate) entries_max: u32,
    polls: u32,
}

impl Life {
    /// Takes in the response to a step towards the I/O queues; `data` is what was collected.
    ///
    /// # Errors
    /// The association has failed.
    pub(crate) fn answered(
        &mut self,
        what: Admin,
        result: u64,
        data: &[u8; IDENTIFY_BYTES],
        queues: u16,
    ) -> Result<Next, Error> {
        Ok(match what {
            Admin::Connect => {
                self.id = result as u16;
                if result >> 17 & 3 != 0 {
                    // The target wants DH-HMAC-CHAP, which this release does not have.
                    return Err(Error::with_code(ErrorKind::AccessDenied, 0x191));
                }
                Next::Send(Admin::Capabilities)
            }
            Admin::Capabilities => {
                self.entries_max = (result & 0xffff) as u32 + 1;
                self.page_bytes = 1 << (12 + (result >> 48 & 0xf));
                Next::Send(Admin::Enable)
            }
            Admin::Enable => Next::Send(Admin::Status),
            Admin::Status if result as u32 & CSTS_READY != 0 => Next::Send(Admin::Identify),
            Admin::Status if self.polls >= POLLS_MAX => return Err(ErrorKind::PeerDead.into()),
            Admin::Status => {
                self.polls += 1;
                Next::Send(Admin::Status)
            }
            Admin::Identify => {
                self.identity = Controller::parse(data, self.page_bytes);
                Next::Send(Admin::Queues)
            }
            Admin::Queues => {
                let granted = (result & 0xffff).min(result >> 16 & 0xffff) + 1;
                Next::Open(queues.min(u16::try_from(granted).unwrap_or(u16::MAX)).max(1))
            }
            _ => return Err(ErrorKind::Protocol.into()),
        })
    }
}

/// The command for a step that needs no other data.
pub(crate) fn sqe_of(what: Admin, cid: u16, queues: u16) -> Sqe {
    let identify = |nsid: u32, cns: u8| {
        Sqe::new(admin::IDENTIFY, cid, nsid)
            .with_data(Place::Transport(IDENTIFY_BYTES as u32))
            .with_dwords(&[cns.into()])
    };
    match what {
        Admin::Capabilities => Sqe::property_get(cid, property::CAP),
        Admin::Enable => Sqe::property_set(cid, property::CC, CC_ENABLED),
        Admin::Status => Sqe::property_get(cid, property::CSTS),
        Admin::Identify => identify(0, cns::CONTROLLER),
        Admin::Queues => {
            let number = u32::from(queues.saturating_sub(1));
            Sqe::new(admin::SET_FEATURES, cid, 0).with_dwords(&[FEATURE_QUEUES.into(), number | number << 16])
        }
        // The others get their namespace or their arguments from the caller.
        Admin::Descriptors(_) => identify(0, cns::DESCRIPTORS),
        Admin::Namespace(_) => identify(0, cns::NAMESPACE),
        _ => Sqe::new(admin::KEEP_ALIVE, cid, 0),
    }
}

/// Reset of a lost controller (TP8028).
pub(crate) fn reset_sqe(cid: u16, id: u16, instance: u8, random: u64) -> Sqe {
    Sqe::new(admin::CROSS_CONTROLLER_RESET, cid, 0).with_dwords(&[
        u32::from(id) | u32::from(instance) << 16,
        0,
        random as u32,
        (random >> 32) as u32,
    ])
}

/// Whether the response to a reset proves that the controller is gone. A reset that the target only has
/// begun proves nothing yet.
pub(crate) const fn proves_reset(status: Status, result: u64) -> bool {
    matches!(status, Status::SUCCESS) && result as u32 & RESET_AT_ONCE != 0
}

/// The key of a namespace of our own target.
pub(crate) fn key_sqe(cid: u16, nsid: u32, key: u64, incarnation: u64) -> Sqe {
    Sqe::new(admin::PRESENT_KEY, cid, nsid).with_dwords(&[
        key as u32,
        (key >> 32) as u32,
        incarnation as u32,
        (incarnation >> 32) as u32,
    ])
}

/// Read of the first granule of a range, where its superblock is.
pub(crate) fn superblock_sqe(cid: u16, nsid: u32, lba: u64, len: u32, block: u32) -> Sqe {
    Sqe::blocks(io::READ, cid, nsid, lba, len / block.max(1)).with_data(Place::Transport(len))
}

/// Bytes of a report of a reservation: the registrants beyond are not seen.
const REPORT_BYTES: u32 = IDENTIFY_BYTES as u32;

/// Report of a reservation, with long host identifiers.
pub(crate) fn report_sqe(cid: u16, nsid: u32) -> Sqe {
    Sqe::new(io::RESERVATION_REPORT, cid, nsid)
        .with_dwords(&[REPORT_BYTES / 4 - 1, 1])
        .with_data(Place::Transport(REPORT_BYTES))
}

/// The generation of a reported reservation, and the key of a host.
pub(crate) fn reported(data: &[u8; IDENTIFY_BYTES], host: &[u8; 16]) -> (u32, Option<u64>) {
    let own = registrants(data).find(|(of, _)| of == host);
    (number(&data[..4]) as u32, own.map(|(_, key)| key))
}

/// The hosts that a report of a reservation lists, and their keys.
pub(crate) fn registrants(data: &[u8; IDENTIFY_BYTES]) -> impl Iterator<Item = (&[u8], u64)> {
    let entries = data[64..].chunks_exact(64).take(number(&data[5..7]) as usize);
    entries.map(|entry| (&entry[16..32], number(&entry[8..16])))
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// What a remote region has to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// Zero: any.
    pub(crate) nguid: [u8; 16],
    /// Where the range begins in the namespace, in bytes.
    pub(crate) first: u64,
    pub(crate) bytes: u64,
    /// The range is the whole namespace.
    pub(crate) whole: bool,
    pub(crate) granule: u32,
}

impl Expected {
    /// Checks the identity of a namespace.
    ///
    /// # Errors
    /// `Stale`: it is another one.
    pub(crate) fn check_identity(&self, data: &[u8; IDENTIFY_BYTES]) -> Result<(), Error> {
        let is_it = self.nguid == [0; 16] || identity_of(data) == Some(self.nguid);
        if is_it { Ok(()) } else { Err(ErrorKind::Stale.into()) }
    }

    /// Checks the blocks of a namespace; returns their size.
    ///
    /// # Errors
    /// `Stale`: the range is not in it. `Unsupported`: blocks with metadata, or larger than the granule.
    pub(crate) fn check_blocks(&self, data: &[u8; IDENTIFY_BYTES]) -> Result<u32, Error> {
        let namespace = Namespace::parse(data).ok_or(ErrorKind::Unsupported)?;
        let block = namespace.block_bytes;
        if namespace.metadata_bytes > 0 || block > self.granule || !self.granule.is_multiple_of(block) {
            return Err(ErrorKind::Unsupported.into());
        }
        let end = self.first.checked_add(self.bytes).ok_or(ErrorKind::Stale)? / u64::from(block);
        if end > namespace.blocks || self.whole && end != namespace.blocks {
            return Err(ErrorKind::Stale.into());
        }
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::write_identity;

    const NOTHING: [u8; IDENTIFY_BYTES] = [0; IDENTIFY_BYTES];

    #[test]
    fn an_association_comes_up_step_by_step() {
        let mut life = Life::default();
        let mut step = |what, result| life.answered(what, result, &NOTHING, 4);
        assert_eq!(step(Admin::Connect, 7), Ok(Next::Send(Admin::Capabilities)));
        assert_eq!(step(Admin::Capabilities, 127), Ok(Next::Send(Admin::Enable)));
        assert_eq!(step(Admin::Enable, 0), Ok(Next::Send(Admin::Status)));
        assert_eq!(step(Admin::Status, 0), Ok(Next::Send(Admin::Status)), "not ready");
        assert_eq!(step(Admin::Status, 1), Ok(Next::Send(Admin::Identify)));
        assert_eq!(step(Admin::Identify, 0), Ok(Next::Send(Admin::Queues)));
        assert_eq!(step(Admin::Queues, 1 | 7 << 16), Ok(Next::Open(2)), "fewer than wanted");
        assert_eq!(step(Admin::Queues, 9 | 9 << 16), Ok(Next::Open(4)));
        assert!(step(Admin::KeepAlive, 0).is_err());
        assert_eq!((life.id, life.entries_max), (7, 128));
    }

    #[test]
    fn a_controller_that_never_is_ready_or_wants_a_secret_is_given_up() {
        let mut life = Life::default();
        let polls = (0..=POLLS_MAX + 1).find(|_| life.answered(Admin::Status, 0, &NOTHING, 1).is_err());
        assert_eq!(polls, Some(POLLS_MAX));
        let refused = life.answered(Admin::Connect, 1 << 17, &NOTHING, 1);
        assert_eq!(refused.map_err(|error| error.kind), Err(ErrorKind::AccessDenied));
    }

    #[test]
    fn a_report_tells_the_key_of_a_host() {
        let mut data = NOTHING;
        data[..4].copy_from_slice(&0x0102_0304_u32.to_le_bytes());
        assert_eq!(reported(&data, &[0; 16]), (0x0102_0304, None), "no registrants");
        data[5] = 2;
        data[128 + 8..128 + 16].copy_from_slice(&0xfedc_ba98_u64.to_le_bytes());
        data[128 + 16..128 + 32].copy_from_slice(&[9; 16]);
        assert_eq!(reported(&data, &[9; 16]).1, Some(0xfedc_ba98));
        assert_eq!(reported(&data, &[8; 16]).1, None);
        data[5..7].copy_from_slice(&[0xff; 2]);
        assert_eq!(reported(&data, &[8; 16]).1, None, "more than there is");
        data[5..7].copy_from_slice(&[1, 0]);
        assert_eq!(reported(&data, &[9; 16]).1, None, "behind the last");
    }

    #[test]
    fn only_a_reset_that_has_been_done_proves_something() {
        assert!(proves_reset(Status::SUCCESS, 1));
        assert!(!proves_reset(Status::SUCCESS, 0), "it was begun");
        assert!(!proves_reset(Status::INVALID_FIELD, 1) && !proves_reset(Status::INVALID_OPCODE, 1));
    }

    #[test]
    fn a_namespace_that_does_not_agree_with_the_export_is_refused() {
        let expected =
            Expected { nguid: [7; 16], first: 8 * 512, bytes: 8 * 512, whole: false, granule: 4096 };
        let mut data = NOTHING;
        write_identity([7; 16], &mut data);
        assert_eq!(expected.check_identity(&data), Ok(()));
        write_identity([8; 16], &mut data);
        assert_eq!(expected.check_identity(&data).map_err(|error| error.kind), Err(ErrorKind::Stale));
        let mut check = |expected: Expected, blocks, block_bytes, metadata_bytes| {
            Namespace { blocks, block_bytes, metadata_bytes, ..Namespace::default() }.write(&mut data);
            expected.check_blocks(&data).map_err(|error| error.kind)
        };
        assert_eq!(check(expected, 16, 512, 0), Ok(512));
        assert_eq!(check(expected, 15, 512, 0), Err(ErrorKind::Stale), "the range ends outside");
        assert_eq!(check(expected, 16, 512, 8), Err(ErrorKind::Unsupported), "metadata");
        assert_eq!(check(expected, 16, 8192, 0), Err(ErrorKind::Unsupported), "blocks above the granule");
        assert_eq!(check(Expected { whole: true, ..expected }, 17, 512, 0), Err(ErrorKind::Stale));
        let huge = Expected { first: u64::MAX, ..expected };
        assert_eq!(check(huge, u64::MAX, 512, 0), Err(ErrorKind::Stale));
    }
}
