//! What tests may need, and whether this machine has it.

use crate::facts::{Facts, Rail};
use crate::remote::Peer;
use anyhow::{Context as _, Result, bail};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A requirement of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// An RDMA port that is up.
    Rdma,
    /// At least this many RDMA ports that are up.
    Rails(usize),
    /// A GPU with its driver.
    Gpu,
    /// An NVMe-over-Fabrics target whose contents may be overwritten.
    Nvmeof,
    /// A namespace of such a target that carries writes out late: `HW_TESTS_NVMEOF_LATE`.
    Late,
    /// CXL memory as device-DAX.
    Cxl,
    /// A device-DAX node whose contents may be lost, on memory of any kind: `HW_TESTS_DAX`.
    Dax,
    /// Permission to report memory as damaged: CAP_SYS_ADMIN.
    Poison,
    /// At least this many NUMA nodes.
    Numa(usize),
    /// A second machine with an agent.
    Peer,
    /// Permission to take links down: `HW_TESTS_FAULTS=1` and CAP_NET_ADMIN.
    Netadmin,
    /// An installed program.
    Program(&'static str),
    /// Time: `HW_TESTS_LONG=1`.
    Long,
    /// Test programs of other crates, in `HW_TESTS_SUITES`.
    Suites,
    /// The lab with one of these profiles: the test checks the devices of the profile.
    Lab(&'static [&'static str]),
}

/// This machine, and the peer if `HW_TESTS_PEER` names one.
pub(crate) struct Host {
    /// The devices of this machine.
    pub(crate) facts: Facts,
    /// The second machine.
    pub(crate) peer: Option<Peer>,
    /// `HW_TESTS_NVMEOF`.
    pub(crate) nvmeof: Vec<NvmeofTarget>,
    /// `HW_TESTS_NVMEOF_LATE`.
    pub(crate) late: Option<LateNamespace>,
    /// `HW_TESTS_DAX`.
    pub(crate) dax: Option<PathBuf>,
    /// `HW_TESTS_SUITES`.
    pub(crate) suites: Vec<PathBuf>,
    /// `HW_TESTS_LAB`.
    pub(crate) lab: Option<String>,
    may_break_links: bool,
    may_take_long: bool,
}

/// The address of an NVMe-over-Fabrics target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NvmeofTarget {
    /// `tcp` or `rdma`.
    pub(crate) transport: String,
    /// The address where it listens.
    pub(crate) address: String,
    /// The service id: a port number.
    pub(crate) port: String,
    /// The NVMe qualified name of the subsystem.
    pub(crate) nqn: String,
}

/// A namespace of the first target of `HW_TESTS_NVMEOF` whose writes reach its device late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LateNamespace {
    /// Its number.
    pub(crate) nsid: u32,
    /// The device behind the delay, on the peer.
    pub(crate) device: String,
    /// The delay.
    pub(crate) delay: Duration,
}

impl Host {
    /// Detects the devices of this machine and reads the environment.
    ///
    /// # Errors
    /// When the environment is malformed, or names a peer that does not answer.
    pub(crate) fn detect() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let list = |name: &str| -> Vec<String> {
            variable(name)
                .iter()
                .flat_map(|value| value.split(';'))
                .map(|item| item.trim().to_owned())
                .collect()
        };
        let nvmeof =
            list("HW_TESTS_NVMEOF").iter().map(|item| NvmeofTarget::parse(item)).collect::<Result<_>>()?;
        let peer = variable("HW_TESTS_PEER").map(|address| Peer::connect(&address)).transpose()?;
        Ok(Self {
            facts: Facts::gather(),
            peer,
            nvmeof,
            late: variable("HW_TESTS_NVMEOF_LATE").map(|text| LateNamespace::parse(&text)).transpose()?,
            dax: variable("HW_TESTS_DAX").map(PathBuf::from),
            suites: list("HW_TESTS_SUITES").into_iter().map(PathBuf::from).collect(),
            lab: variable("HW_TESTS_LAB"),
            may_break_links: variable("HW_TESTS_FAULTS").is_some_and(|value| value == "1"),
            may_take_long: variable("HW_TESTS_LONG").is_some_and(|value| value == "1"),
        })
    }

    /// Why a test with these needs cannot run here; `None` when it can.
    pub(crate) fn lacks(&self, needs: &[Need]) -> Option<String> {
        let missing: Vec<String> =
            needs.iter().filter_map(|need| Some(format!("needs {need}: {}", self.lack(*need)?))).collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }

    /// Whether the devices are those of a profile of the lab: no hardware.
    pub(crate) const fn emulated(&self) -> bool {
        self.lab.is_some()
    }

    /// Whether tests that take minutes run in full.
    pub(crate) const fn may_take_long(&self) -> bool {
        self.may_take_long
    }

    /// Printed before every result that was not measured on hardware.
    pub(crate) fn label(&self) -> &'static str {
        if self.emulated() { "emulated: " } else { "" }
    }

    /// RDMA ports that are up.
    pub(crate) fn rails(&self) -> impl Iterator<Item = &Rail> {
        self.facts.rails.iter().filter(|rail| rail.active)
    }

    /// The peer.
    ///
    /// # Errors
    /// When there is no peer: the test does not declare `Need::Peer`.
    pub(crate) fn peer(&self) -> Result<&Peer> {
        self.peer.as_ref().context("the test uses a peer without declaring Need::Peer")
    }

    /// Rails of this machine, each with the peer's rail in the same network.
    ///
    /// # Errors
    /// When the peer does not answer.
    pub(crate) fn joined_rails(&self) -> Result<Vec<(Rail, Rail)>> {
        let theirs = self.peer()?.facts()?.rails;
        let pair = |ours: &Rail| {
            let theirs = theirs.iter().find(|theirs| theirs.active && ours.is_joined_to(theirs))?;
            Some((ours.clone(), theirs.clone()))
        };
        Ok(self.rails().filter_map(pair).collect())
    }

    fn lack(&self, need: Need) -> Option<String> {
        let rails = self.rails().count();
        let too_few = |have: usize, want: usize| (have < want).then(|| format!("this machine has {have}"));
        let unless = |there: bool, why: &str| (!there).then(|| why.to_owned());
        match need {
            Need::Rdma => unless(rails > 0, "no port of an RDMA device is up"),
            Need::Rails(want) => too_few(rails, want),
            Need::Gpu => unless(self.facts.gpus > 0, "no GPU with a driver"),
            Need::Nvmeof => unless(!self.nvmeof.is_empty(), "HW_TESTS_NVMEOF names no target"),
            Need::Late => unless(self.late.is_some(), "HW_TESTS_NVMEOF_LATE names no namespace"),
            Need::Dax => unless(self.dax.is_some(), "HW_TESTS_DAX names no device"),
            Need::Poison => unless(has_capability(CAP_SYS_ADMIN), "it takes CAP_SYS_ADMIN"),
            Need::Cxl => unless(!self.facts.cxl.is_empty(), "no CXL memory as /dev/dax*"),
            Need::Numa(want) => too_few(self.facts.nodes.len(), want),
            Need::Peer => unless(self.peer.is_some(), "HW_TESTS_PEER names no second machine"),
            Need::Netadmin => unless(
                self.may_break_links && has_capability(CAP_NET_ADMIN),
                "HW_TESTS_FAULTS is not 1, or CAP_NET_ADMIN is missing",
            ),
            Need::Program(name) => unless(in_path(name), "it is not installed"),
            Need::Long => unless(self.may_take_long, "HW_TESTS_LONG is not 1"),
            Need::Suites => unless(!self.suites.is_empty(), "HW_TESTS_SUITES names no test program"),
            Need::Lab(profiles) => {
                let inside = self.lab.as_ref().is_some_and(|lab| profiles.contains(&lab.as_str()));
                unless(inside, "HW_TESTS_LAB names another profile, or is not set")
            }
        }
    }
}

impl NvmeofTarget {
    fn parse(text: &str) -> Result<Self> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let [transport, address, port, nqn] = <[String; 4]>::try_from(words)
            .map_err(|_| anyhow::anyhow!("HW_TESTS_NVMEOF: `{text}` is not `TRANSPORT ADDRESS PORT NQN`"))?;
        Ok(Self { transport, address, port, nqn })
    }
}

impl LateNamespace {
    fn parse(text: &str) -> Result<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [nsid, device, delay_ms] = words[..] else {
            bail!("HW_TESTS_NVMEOF_LATE: `{text}` is not `NSID DEVICE MILLISECONDS`")
        };
        let delay = Duration::from_millis(delay_ms.parse().context("HW_TESTS_NVMEOF_LATE: the delay")?);
        let nsid = nsid.parse().context("HW_TESTS_NVMEOF_LATE: the number of the namespace")?;
        Ok(Self { nsid, device: device.to_owned(), delay })
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rdma => f.write_str("rdma"),
            Self::Rails(count) => write!(f, "rails({count})"),
            Self::Gpu => f.write_str("gpu"),
            Self::Nvmeof => f.write_str("nvmeof"),
            Self::Late => f.write_str("late"),
            Self::Cxl => f.write_str("cxl"),
            Self::Dax => f.write_str("dax"),
            Self::Poison => f.write_str("poison"),
            Self::Numa(count) => write!(f, "numa({count})"),
            Self::Peer => f.write_str("peer"),
            Self::Netadmin => f.write_str("netadmin"),
            Self::Program(name) => write!(f, "program {name}"),
            Self::Long => f.write_str("long"),
            Self::Suites => f.write_str("suites"),
            Self::Lab(profiles) => write!(f, "lab {}", profiles.join(" or ")),
        }
    }
}

/// Numbers of capabilities, by `capabilities(7)`.
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;

/// Whether this process has a capability in its effective set, by `proc_pid_status(5)`.
fn has_capability(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .is_some_and(|set| set >> number & 1 == 1)
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
mod unit {
    use super::*;

    fn bare() -> Host {
        Host {
            facts: Facts::default(),
            peer: None,
            nvmeof: Vec::new(),
            late: None,
            dax: None,
            suites: Vec::new(),
            lab: None,
            may_break_links: false,
            may_take_long: false,
        }
    }

    #[test]
    fn what_is_missing_is_listed_and_what_is_present_is_not() {
        let mut host = bare();
        let needs = [Need::Rails(2), Need::Gpu];
        assert_eq!(
            host.lacks(&needs).as_deref(),
            Some("needs rails(2): this machine has 0; needs gpu: no GPU with a driver")
        );
        host.facts.rails =
            vec![Rail { active: true, ..Rail::default() }, Rail { active: true, ..Rail::default() }];
        host.facts.gpus = 1;
        assert_eq!(host.lacks(&needs), None);
    }

    #[test]
    fn a_port_that_is_down_is_not_a_rail() {
        let mut host = bare();
        host.facts.rails = vec![Rail::default()];
        assert!(host.lacks(&[Need::Rdma]).is_some());
    }

    #[test]
    fn links_may_not_be_broken_without_permission() {
        assert!(bare().lacks(&[Need::Netadmin]).is_some());
    }

    #[test]
    fn a_malformed_target_is_refused() {
        assert!(NvmeofTarget::parse("tcp 10.0.0.1 4420").is_err());
        assert_eq!(NvmeofTarget::parse("tcp 10.0.0.1 4420 lab").expect("four words").nqn, "lab");
        let late = LateNamespace::parse("2 /dev/ram1 3000").expect("three words");
        assert_eq!((late.nsid, late.delay), (2, Duration::from_secs(3)));
        for text in ["", "2 /dev/ram1", "x /dev/ram1 3000", "2 /dev/ram1 soon"] {
            assert!(LateNamespace::parse(text).is_err(), "{text}");
        }
    }
}
