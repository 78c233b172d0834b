//! Which fault is next, from a seed. No I/O.

use std::fmt;

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Fault {
    /// The master that leads gets SIGKILL. A master that is alone has a journal.
    KillLeader,
    /// Another master gets SIGKILL.
    KillStandby,
    /// A node gets SIGKILL; of its disk, if it has one, every third time some bits are flipped meanwhile.
    KillNode,
    /// The master that leads gets SIGSTOP, and SIGCONT when another one leads.
    StopLeader,
    /// Another master gets SIGSTOP, and SIGCONT later.
    StopStandby,
    /// etcd gets SIGSTOP, and SIGCONT some seconds later.
    PauseArbiter,
    /// `snowskin admin switchover`.
    Switchover,
    /// Bits of objects on disks are flipped while their nodes run.
    Flip,
}

/// Every fault, and how many there are of it among 20 if all are possible.
const WEIGHTS: [(Fault, usize); 8] = [
    (Fault::KillLeader, 6),
    (Fault::KillStandby, 2),
    (Fault::KillNode, 3),
    (Fault::StopLeader, 3),
    (Fault::StopStandby, 1),
    (Fault::PauseArbiter, 1),
    (Fault::Switchover, 3),
    (Fault::Flip, 1),
];

/// What there is to break.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) masters: usize,
    pub(crate) etcd: bool,
    pub(crate) disks: bool,
}

impl Fault {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::KillLeader => "kill-leader",
            Self::KillStandby => "kill-standby",
            Self::KillNode => "kill-node",
            Self::StopLeader => "stop-leader",
            Self::StopStandby => "stop-standby",
            Self::PauseArbiter => "pause-arbiter",
            Self::Switchover => "switchover",
            Self::Flip => "flip",
        }
    }

    /// Whether it is a `kill -9`.
    pub(crate) const fn is_kill(self) -> bool {
        matches!(self, Self::KillLeader | Self::KillStandby | Self::KillNode)
    }

    /// Whether only masters and their arbiter are affected, so that no object may be missing.
    pub(crate) const fn is_of_masters(self) -> bool {
        !matches!(self, Self::KillNode | Self::Flip)
    }

    /// Why it cannot happen; `None`: it can.
    pub(crate) const fn obstacle(self, setting: Setting) -> Option<&'static str> {
        match self {
            Self::KillStandby | Self::StopLeader | Self::StopStandby | Self::Switchover
                if setting.masters < 2 =>
            {
                Some("it needs --ha")
            }
            Self::PauseArbiter if !setting.etcd => Some("it needs --ha with etcd"),
            Self::Flip if !setting.disks => Some("it needs --disk"),
            _ => None,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An endless sequence of faults: a pack of them is shuffled, dealt, and shuffled again, so that each kind
/// has its share of a short soak, too.
pub(crate) struct Plan {
    rng: u64,
    pack: Vec<Fault>,
    dealt: usize,
}

impl Plan {
    /// Of these faults, or of all that are possible if none is named.
    ///
    /// # Errors
    /// A named fault that is not possible, and why.
    pub(crate) fn new(seed: u64, named: &[Fault], setting: Setting) -> Result<Self, String> {
        if let Some((fault, why)) = named.iter().find_map(|fault| Some((fault, fault.obstacle(setting)?))) {
            return Err(format!("--faults {fault}: {why}"));
        }
        let wanted = |fault: &Fault| {
            if named.is_empty() { fault.obstacle(setting).is_none() } else { named.contains(fault) }
        };
        let mut pack = Vec::new();
        for (fault, weight) in WEIGHTS.into_iter().filter(|(fault, _)| wanted(fault)) {
            pack.extend(std::iter::repeat_n(fault, weight));
        }
        Ok(Self { rng: seed, dealt: pack.len(), pack })
    }

    pub(crate) fn next(&mut self) -> Fault {
        if self.dealt >= self.pack.len() {
            self.dealt = 0;
            for at in (1..self.pack.len()).rev() {
                let other = self.below(at as u64 + 1) as usize;
                self.pack.swap(at, other);
            }
        }
        self.dealt += 1;
        self.pack[self.dealt - 1]
    }

    /// Whether kills are among them.
    pub(crate) fn has(&self, which: impl Fn(Fault) -> bool) -> bool {
        self.pack.iter().any(|fault| which(*fault))
    }

    /// A random number below `n` (SplitMix64).
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.rng;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Setting = Setting { masters: 2, etcd: true, disks: true };

    fn faults(seed: u64, named: &[Fault], setting: Setting, count: usize) -> Vec<Fault> {
        let mut plan = Plan::new(seed, named, setting).expect("all are possible");
        (0..count).map(|_| plan.next()).collect()
    }

    #[test]
    fn a_seed_gives_the_same_faults_again_and_another_one_others() {
        assert_eq!(faults(7, &[], ALL, 60), faults(7, &[], ALL, 60));
        assert_ne!(faults(7, &[], ALL, 60), faults(8, &[], ALL, 60));
    }

    #[test]
    fn every_kind_has_its_share_of_a_short_soak() {
        let dealt = faults(1, &[], ALL, 40);
        for (fault, weight) in WEIGHTS {
            assert_eq!(dealt.iter().filter(|one| **one == fault).count(), 2 * weight, "{fault}");
        }
    }

    #[test]
    fn what_is_not_there_is_not_broken() {
        let lone = Setting { masters: 1, etcd: false, disks: true };
        let dealt = faults(1, &[], lone, 30);
        assert!(
            dealt.iter().all(|fault| { matches!(fault, Fault::KillLeader | Fault::KillNode | Fault::Flip) })
        );
        let refused = Plan::new(1, &[Fault::Switchover], lone).err();
        assert_eq!(refused.as_deref(), Some("--faults switchover: it needs --ha"));
        let directory = Setting { etcd: false, ..ALL };
        assert!(!faults(1, &[], directory, 60).contains(&Fault::PauseArbiter));
    }

    #[test]
    fn only_named_faults_happen() {
        let dealt = faults(3, &[Fault::KillLeader], ALL, 20);
        assert!(dealt.iter().all(|fault| *fault == Fault::KillLeader));
    }
}
