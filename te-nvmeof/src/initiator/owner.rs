//! Ranges of namespaces of other targets, of which this node is the owner: checked, reserved, marked with a
//! superblock, exported. And the fence against a client (F2): Preempt and Abort.
//!
//! ```text
//!   adopt ─▶ identity ─▶ blocks ─▶ register key ─▶ acquire ─▶ superblock ─▶ exported
//!                           └─────── without reservations ───────┘              │ expel
//!                                                                          preempt and abort
//! ```
//!
//! Who takes a range over preempts all others before `acquire`, for the former owner may hold the
//! reservation, and once more behind `superblock`: a client may have registered meanwhile and found the
//! former superblock. Those that register later find the new one.

use te_core::{Error, ErrorKind};
use te_fabric::peer::Contact;
use te_fabric::{Export, Table};
use zerocopy::IntoBytes;

use super::peer::{Checking, Peer};
use super::{Answer, Initiator};
use crate::command::{Place as DataPlace, Sqe, Status, io};
use crate::context::Context;
use crate::controller::{self, Admin, Expected};
use crate::export::{AdoptedExport, Place};
use crate::identify::{IDENTIFY_BYTES, Namespace as Identified};
use crate::namespace::{RESERVES_REGISTRANTS, Superblock};
use crate::pdu;
use crate::queue::Command;

/// Exclusive Access – Registrants Only.
const EXCLUSIVE_REGISTRANTS: u32 = 4 << 8;
/// Reservation Register: a new registrant; it changes nothing where the same key is registered.
const REGISTER: u32 = 0;
/// Reservation Register: replace the key, whichever it was. Some targets refuse it for a host without a key.
const REPLACE_ANY: u32 = 2 | 1 << 3;
/// Reservation Acquire: preempt and abort.
const PREEMPT_AND_ABORT: u32 = 2;
/// Clients that one range can be fenced from at a time.
const PREEMPTS_MAX: usize = 1_024;
/// How often others are looked for that are to be preempted: some come back, or more than a report lists.
const REPORTS_MAX: u32 = 64;

/// How far an adoption is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Identity,
    Blocks,
    Register,
    /// Another key of ours is registered, that of a former life: it is replaced.
    Replace,
    /// Who else is registered is asked, to be preempted.
    Report,
    Evict,
    Acquire,
    Mark,
    Done,
    Failed(Error),
}

/// A client that is fenced, or is to be.
#[derive(Clone, Copy, Debug)]
struct Preempt {
    identity: u64,
    proof: Proof,
}

/// What is known about a client that is to be fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// Nothing yet.
    Open,
    /// Its registration was removed, and its commands were aborted.
    Fenced,
    /// It was not registered. It may register later, so nothing is proved.
    Unregistered,
}

/// An adopted range.
#[derive(Debug)]
pub(crate) struct Owned {
    peer: u32,
    /// Tells it apart from others that had its index before.
    sequence: u64,
    export: AdoptedExport,
    step: Step,
    /// The association on which the current step was sent.
    sent: Option<u64>,
    block: u32,
    /// All others that are registered are to be preempted.
    alone: bool,
    marked: bool,
    /// How often the others were asked for.
    reports: u32,
    preempts: Vec<Preempt>,
    /// After a refused preempt: the association on which our own key and the reservation are renewed, and how
    /// far that is. The target may have restarted without them.
    renewal: Option<(u64, Step)>,
}

pub(crate) type Adopted = Table<Owned>;

impl Initiator {
    /// Adopts a range as region `region`.
    pub(crate) fn adopt(
        &mut self,
        region: u32,
        export: AdoptedExport,
        alone: bool,
        cx: &mut Context<'_>,
    ) -> Result<(), Error> {
        self.owned.vacant(region)?;
        let place = export.place();
        let contact = export.contact();
        let peer = self.peer_of(&place, &contact)?;
        let step = Step::Identity;
        self.sequences += 1;
        let sequence = self.sequences;
        let owned = Owned {
            peer,
            sequence,
            export,
            step,
            sent: None,
            block: 0,
            alone,
            marked: false,
            reports: 0,
            preempts: Vec::new(),
            renewal: None,
        };
        self.owned.insert(region, owned)?;
        if let Some(of) = self.peers.get_mut(peer) {
            of.regions += 1;
        }
        self.list(peer);
        cx.timers.wake();
        Ok(())
    }

    /// Gives an adopted range up. Its reservation and its superblock stay.
    pub(crate) fn disown(&mut self, region: u32, cx: &mut Context<'_>) {
        let Some(owned) = self.owned.remove(region) else { return };
        if let Some(peer) = self.peers.get_mut(owned.peer) {
            peer.regions -= 1;
            if let Some(association) = &mut peer.association
                && association.checking == Some(Checking::Owner(region))
            {
                association.checking = Some(Checking::Orphan(owned.sequence));
            }
        }
        self.drop_if_unused(owned.peer, cx);
    }

    /// The export of an adopted range.
    ///
    /// # Errors
    /// `Busy` while it is being adopted; why that has failed; `NotFound`.
    pub(crate) fn export_adopted(&self, region: u32) -> Result<&AdoptedExport, Error> {
        let owned = self.owned.get(region).ok_or(ErrorKind::NotFound)?;
        match owned.step {
            Step::Done => Ok(&owned.export),
            Step::Failed(error) => Err(error),
            _ => Err(ErrorKind::Busy.into()),
        }
    }

    /// Fences a client from all adopted ranges. True once all targets have confirmed it.
    ///
    /// # Errors
    /// `Unsupported` when a range has no reservation, or when the client is not registered there: nothing
    /// proves then that it is fenced. `Full` with too many clients.
    pub(crate) fn preempt(&mut self, identity: u64, cx: &mut Context<'_>) -> Result<bool, Error> {
        let (mut all, mut unproved) = (true, false);
        for region in 0..self.owned.bound() {
            let Some(owned) = self.owned.get_mut(region).filter(|owned| owned.step == Step::Done) else {
                continue;
            };
            if !owned.export.reserved {
                unproved = true;
                continue;
            }
            let known = owned.preempts.iter().position(|preempt| preempt.identity == identity);
            match known.map(|at| (at, owned.preempts[at].proof)) {
                Some((_, Proof::Fenced)) => {}
                Some((_, Proof::Open)) => all = false,
                // The next call asks the target once more.
                Some((at, Proof::Unregistered)) => {
                    owned.preempts.remove(at);
                    unproved = true;
                }
                None if owned.preempts.len() >= PREEMPTS_MAX => return Err(ErrorKind::Full.into()),
                None => {
                    owned.preempts.push(Preempt { identity, proof: Proof::Open });
                    all = false;
                }
            }
            let peer = owned.peer;
            if !all {
                self.list(peer);
                cx.timers.wake();
            }
        }
        if unproved { Err(ErrorKind::Unsupported.into()) } else { Ok(all) }
    }

    /// The peer of a place, which is made when there is none.
    pub(super) fn peer_of(&mut self, place: &Place, export: &Export) -> Result<u32, Error> {
        let same = |peer: &Peer| peer.nqn == place.nqn && peer.ours == place.ours;
        let found = self.peers.iter().find(|(_, peer)| same(peer)).map(|(index, _)| index);
        match found {
            Some(index) => Ok(index),
            None => self.peers.add(Peer::new(place, Contact::new(export))),
        }
    }

    /// Whether a range of this peer has a step to do.
    pub(super) fn has_owner_work(&self, index: u32) -> bool {
        self.owned.iter().any(|(_, owned)| {
            owned.peer == index
                && match owned.step {
                    Step::Done => owned.to_preempt().is_some(),
                    Step::Failed(_) => false,
                    _ => true,
                }
        })
    }

    /// Sends the next step of each range of this peer.
    pub(super) fn begin_owner(&mut self, index: u32, cx: &mut Context<'_>) {
        for region in 0..self.owned.bound() {
            let Some(number) = self.peers.get(index).and_then(Peer::up) else { return };
            let Some(owned) = self.owned.get(region).filter(|owned| owned.peer == index) else { continue };
            if owned.sent != Some(number) {
                self.send_owner(index, region, number, cx);
            }
        }
    }

    fn send_owner(&mut self, index: u32, region: u32, number: u64, cx: &mut Context<'_>) {
        let Some(owned) = self.owned.get(region) else { return };
        let (nsid, step, own) = (owned.export.nsid, owned.step_on(number), self.identity);
        let what = Admin::Owner(region);
        let sent = match step {
            Step::Identity | Step::Blocks | Step::Report => {
                let association = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut());
                let Some(association) = association
                    .filter(|of| of.checking.is_none() || of.checking == Some(Checking::Owner(region)))
                else {
                    return;
                };
                association.checking = Some(Checking::Owner(region));
                let like = if step == Step::Identity { Admin::Descriptors(0) } else { Admin::Namespace(0) };
                let sqe = |cid| {
                    let mut sqe = controller::sqe_of(like, cid, 0);
                    sqe.nsid.set(nsid);
                    sqe
                };
                let sent = match step {
                    Step::Report => {
                        self.send_collecting(index, what, |cid| controller::report_sqe(cid, nsid), cx)
                    }
                    _ => self.send_admin(index, what, sqe, cx),
                };
                let association = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut());
                if let Some(association) = association.filter(|_| !sent) {
                    association.checking = None;
                }
                sent
            }
            Step::Register | Step::Replace => {
                let sqe = register_client(nsid, step == Step::Replace);
                self.send_io(index, what, &keys(0, own), sqe, cx)
            }
            Step::Acquire => {
                let data = keys(own, 0);
                let action = EXCLUSIVE_REGISTRANTS;
                self.send_io(index, what, &data, reservation(io::RESERVATION_ACQUIRE, nsid, action), cx)
            }
            Step::Mark if self.peers.get(index).is_some_and(|peer| !peer.doubts.is_empty()) => {
                // A lost write, of the superblock of before perhaps, could land on top of this one.
                return self.marks_later(index, region);
            }
            Step::Mark => {
                let block = owned.block.max(512);
                let mut data = vec![0; block as usize];
                data[..Superblock::BYTES].copy_from_slice(owned.export.superblock().as_bytes());
                let (lba, blocks) = (owned.export.first / u64::from(block), data.len() as u32 / block);
                let sqe = move |cid| Sqe::blocks(io::WRITE, cid, nsid, lba, blocks);
                self.send_io(index, Admin::Mark(region), &data, sqe, cx)
            }
            Step::Evict | Step::Done => {
                let Some(next) = owned.to_preempt() else { return };
                let (data, action) = (keys(own, next.identity), EXCLUSIVE_REGISTRANTS | PREEMPT_AND_ABORT);
                self.send_io(index, what, &data, reservation(io::RESERVATION_ACQUIRE, nsid, action), cx)
            }
            Step::Failed(_) => return,
        };
        if let Some(owned) = self.owned.get_mut(region).filter(|_| sent) {
            owned.sent = Some(number);
        }
    }

    /// A superblock waits until nothing else may land. Where nothing can prove that, the adoption has failed.
    fn marks_later(&mut self, index: u32, region: u32) {
        let Some(peer) = self.peers.get(index) else { return };
        if peer.doubts.to_reset().is_some() || peer.doubts.may_pass() {
            return;
        }
        if let Some(owned) = self.owned.get_mut(region) {
            owned.step = Step::Failed(ErrorKind::Unsupported.into());
        }
    }

    /// The number of an adopted range.
    pub(super) fn sequence_of_owned(&self, region: u32) -> u64 {
        self.owned.get(region).map_or(u64::MAX, |owned| owned.sequence)
    }

    /// Sends a command with data on an I/O queue; the data is copied. False when the queue is full: the peer
    /// is worked on again later.
    pub(super) fn send_io(
        &mut self,
        index: u32,
        what: Admin,
        data: &[u8],
        sqe: impl FnOnce(u16) -> Sqe,
        cx: &mut Context<'_>,
    ) -> bool {
        self.begins_to_owe(index, cx);
        let Some(association) = self.peers.get(index).and_then(|peer| peer.association.as_ref()) else {
            return false;
        };
        let in_capsule = association.life.identity.in_capsule_bytes;
        let Some(at) = association.queues.get(1).copied() else {
            return false;
        };
        let len = data.len() as u32;
        let new = Command::of_association(what, self.sequence_of(what), len);
        let queue = self.queues.get_mut(at).filter(|queue| queue.stream.has_room(2));
        let Some((queue, (command, cid))) =
            queue.and_then(|queue| queue.commands.insert(new).map(|names| (queue, names)))
        else {
            self.starve(index);
            return false;
        };
        let agreed = queue.stream.agreed;
        if len <= in_capsule {
            let sqe = sqe(cid).with_data(DataPlace::InCapsule(len));
            queue.stream.push(pdu::command(sqe, len, agreed).bytes());
            queue.stream.push_bytes(data);
        } else {
            let sqe = sqe(cid).with_data(DataPlace::Transport(len));
            queue.commands.keep_copy(command, 0, data.into());
            queue.stream.push(pdu::command(sqe, 0, agreed).bytes());
        }
        if let Err(error) = self.flush_index(at, cx) {
            self.fail_association(index, error, cx);
        }
        true
    }

    /// A step has its response.
    pub(super) fn owner_answered(&mut self, region: u32, answer: Answer, cx: &mut Context<'_>) {
        let (index, identity) = (answer.peer, self.identity);
        let Some(association) = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut()) else {
            return;
        };
        let Some(owned) = self.owned.get_mut(region).filter(|owned| owned.peer == index) else { return };
        owned.sent = None;
        let error = answer.status.error();
        if owned.step == Step::Done {
            owned.preempt_answered(answer.status, answer.number);
        } else if owned.step == Step::Evict {
            owned.evicted(answer.status);
        } else if owned.step == Step::Register && answer.status == Status::RESERVATION_CONFLICT {
            owned.step = Step::Replace;
        } else if let Some(error) = error {
            owned.step = Step::Failed(error);
        } else {
            owned.step = match owned.step {
                Step::Identity => {
                    let same = owned.expected(cx).check_identity(&association.collected);
                    same.map_or_else(Step::Failed, |()| Step::Blocks)
                }
                Step::Blocks => match owned.expected(cx).check_blocks(&association.collected) {
                    Err(error) => Step::Failed(error),
                    Ok(block) => {
                        owned.block = block;
                        let types = Identified::parse(&association.collected).map_or(0, |of| of.reservations);
                        owned.export.reserved =
                            types & RESERVES_REGISTRANTS != 0 && association.life.identity.reservations;
                        match (owned.export.reserved, owned.alone) {
                            (true, _) => Step::Register,
                            (false, false) => Step::Mark,
                            (false, true) => Step::Failed(ErrorKind::Unsupported.into()),
                        }
                    }
                },
                Step::Register | Step::Replace if owned.alone => Step::Report,
                Step::Register | Step::Replace => Step::Acquire,
                Step::Report => owned.reported(&others(&association.collected, identity)),
                Step::Acquire => Step::Mark,
                Step::Mark if owned.alone => {
                    owned.marked = true;
                    Step::Report
                }
                Step::Mark => Step::Done,
                done => done,
            };
        }
        if !matches!(owned.step, Step::Blocks | Step::Report)
            && association.checking == Some(Checking::Owner(region))
        {
            association.checking = None;
        }
        if let Step::Failed(error) = owned.step {
            log::warn!("a range of namespace {} could not be adopted: {error}", owned.export.nsid);
        }
        cx.timers.wake();
        self.list(index);
    }
}

impl Owned {
    /// The next client to fence.
    fn to_preempt(&self) -> Option<Preempt> {
        self.preempts.iter().find(|preempt| preempt.proof == Proof::Open).copied()
    }

    /// Others are registered with these keys.
    fn reported(&mut self, others: &[u64]) -> Step {
        self.reports += 1;
        if self.reports > REPORTS_MAX {
            return Step::Failed(ErrorKind::Busy.into());
        }
        self.preempts.retain(|preempt| !others.contains(&preempt.identity));
        self.preempts.extend(others.iter().map(|key| Preempt { identity: *key, proof: Proof::Open }));
        match (others.is_empty(), self.marked) {
            (false, _) => Step::Evict,
            (true, false) => Step::Acquire,
            (true, true) => Step::Done,
        }
    }

    /// Another host was preempted, or is not registered any more; the next report tells.
    fn evicted(&mut self, status: Status) {
        let next = self.preempts.iter_mut().find(|preempt| preempt.proof == Proof::Open);
        match (status, next) {
            (Status::SUCCESS, Some(preempt)) => preempt.proof = Proof::Fenced,
            (Status::RESERVATION_CONFLICT, Some(preempt)) => preempt.proof = Proof::Unregistered,
            (status, _) => {
                let error = status.error().unwrap_or(ErrorKind::Protocol.into());
                self.step = Step::Failed(error);
                return;
            }
        }
        if self.to_preempt().is_none() {
            self.step = Step::Report;
        }
    }

    /// What is to be sent on an association: once the range is adopted, preempts and what they need.
    fn step_on(&self, number: u64) -> Step {
        match self.renewal {
            Some((of, step)) if of == number && self.step == Step::Done => step,
            _ => self.step,
        }
    }

    /// The response to a preempt, or to a step of the renewal. A conflict means that a key is not registered:
    /// it may be our own, so that is renewed first; then it is the client's, which proves nothing.
    fn preempt_answered(&mut self, status: Status, number: u64) {
        let proof = match (self.step_on(number), status) {
            (Step::Done, Status::SUCCESS) => Proof::Fenced,
            (Step::Done, Status::RESERVATION_CONFLICT) if self.renewal == Some((number, Step::Done)) => {
                Proof::Unregistered
            }
            (step, status) => {
                let next = match (step, status) {
                    (Step::Done, Status::RESERVATION_CONFLICT) => Some(Step::Register),
                    (Step::Register, Status::RESERVATION_CONFLICT) => Some(Step::Replace),
                    (Step::Register | Step::Replace, Status::SUCCESS) => Some(Step::Acquire),
                    (Step::Acquire, Status::SUCCESS) => Some(Step::Done),
                    _ => None,
                };
                match next {
                    Some(next) => self.renewal = Some((number, next)),
                    // Another status is tried again by the next association.
                    None => self.sent = Some(number),
                }
                return;
            }
        };
        let next = self.preempts.iter_mut().find(|preempt| preempt.proof == Proof::Open);
        next.into_iter().for_each(|preempt| preempt.proof = proof);
    }

    fn expected(&self, cx: &Context<'_>) -> Expected {
        Expected {
            nguid: self.export.nguid,
            first: self.export.first,
            bytes: self.export.bytes,
            whole: false,
            granule: cx.config.granule_bytes,
        }
    }
}

/// The keys of others that a report of a reservation lists.
fn others(report: &[u8; IDENTIFY_BYTES], own: u64) -> Vec<u64> {
    controller::registrants(report).filter(|(_, key)| *key != own).map(|(_, key)| key).collect()
}

/// The data of a reservation command.
pub(super) fn keys(current: u64, second: u64) -> [u8; 16] {
    let mut data = [0; 16];
    data[..8].copy_from_slice(&current.to_le_bytes());
    data[8..].copy_from_slice(&second.to_le_bytes());
    data
}

/// A reservation command.
pub(super) fn reservation(opcode: u8, nsid: u32, action: u32) -> impl FnOnce(u16) -> Sqe {
    move |cid| Sqe::new(opcode, cid, nsid).with_dwords(&[action])
}

/// Registers a key, or replaces the one that is registered.
pub(super) fn register_client(nsid: u32, replace: bool) -> impl FnOnce(u16) -> Sqe {
    reservation(io::RESERVATION_REGISTER, nsid, if replace { REPLACE_ANY } else { REGISTER })
}
