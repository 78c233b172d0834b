//! What the paper leaves open: other policies, congestion, and admission.

use conductor_core::scheduler::PolicyKind;

use super::{Point, Study};
use crate::cluster::run;
use crate::setup::Setup;

/// The policies that are compared: ours, Algorithm 1 at three thresholds, and those of other routers.
const COMPARED: [PolicyKind; 12] = [
    PolicyKind::Cost,
    PolicyKind::Algorithm1 { threshold: 1.0 },
    PolicyKind::Algorithm1 { threshold: 2.0 },
    PolicyKind::Algorithm1 { threshold: 4.0 },
    PolicyKind::Local,
    PolicyKind::Dynamo,
    PolicyKind::Preble,
    PolicyKind::TwoTier,
    PolicyKind::CacheAware,
    PolicyKind::LeastTime,
    PolicyKind::PowerOfTwo,
    PolicyKind::RoundRobin,
];
/// Prefill nodes.
const GROUPS: usize = 8;
/// One link of 100 Gbit/s, bytes per second.
const ONE_LINK: f64 = 12.5e9;
/// The limit on the time to first token (Section 5.1), seconds.
const TTFT_S_MAX: f64 = 30.0;
impl Study<'_> {
    pub(super) fn policies(&self) -> Vec<Point> {
        let mut points = Vec::new();
        for (name, trace) in
            [("conversation", &self.traces.conversation), ("synthetic", &self.traces.synthetic)]
        {
            for speed in [1.0, 1.25] {
                // Mean and 99 % of policies that fetch nothing: no bandwidth changes them.
                let mut known = [None; COMPARED.len()];
                for (link, nic_bytes_per_s) in
                    [("87 GB/s", self.calibration.nic_bytes_per_s), ("12.5 GB/s", ONE_LINK)]
                {
                    let at = format!("{name}, {speed}x, {link}");
                    for (policy, known) in COMPARED.into_iter().zip(&mut known) {
                        let (mean, p99) = known.unwrap_or_else(|| {
                            let base = Setup::prefill_only(GROUPS, self.calibration, self.seed);
                            let outcome = run(trace, &Setup { policy, speed, nic_bytes_per_s, ..base });
                            (outcome.ttft_s(), outcome.quantile(0.99, |record| record.ttft_ns) as f64 / 1e9)
                        });
                        let fetches = matches!(policy, PolicyKind::Cost | PolicyKind::Algorithm1 { .. });
                        *known = (!fetches).then_some((mean, p99));
                        points.push(self.predicted(&format!("{policy}, mean TTFT s"), &*at, None, mean));
                        points.push(self.predicted(&format!("{policy}, p99 TTFT s"), &*at, None, p99));
                    }
                }
            }
        }
        points
    }

    pub(super) fn congestion(&self) -> Vec<Point> {
        let mut points = Vec::new();
        for (series, policy) in [("booked", PolicyKind::Cost), ("blind", PolicyKind::CostBlind)] {
            for gbits in [40.0, 80.0, 160.0, 320.0, 400.0] {
                let setup = Setup { policy, nic_bytes_per_s: gbits * 1e9 / 8.0, ..self.cluster() };
                points.push(self.predicted(
                    series,
                    gbits,
                    None,
                    run(&self.traces.synthetic, &setup).ttft_s(),
                ));
            }
        }
        points
    }

    /// Of the requests that arrive, the share that is answered in time with and without refusals; and of
    /// those that are accepted, the share that is answered in time.
    pub(super) fn admission(&self) -> Vec<Point> {
        let mut points = Vec::new();
        for (name, trace) in
            [("conversation", &self.traces.conversation), ("synthetic", &self.traces.synthetic)]
        {
            for speed in [1.0, 2.0, 3.0] {
                let base = || Setup { speed, ..Setup::prefill_only(GROUPS, self.calibration, self.seed) };
                let late = (TTFT_S_MAX * 1e9) as u64;
                let open = run(trace, &base());
                let gated = run(trace, &Setup { ttft_s_max: Some(TTFT_S_MAX), ..base() });
                let accepted = gated.records.len() - gated.rejected();
                let in_time = gated.effective(late, u64::MAX) * gated.records.len() as f64;
                let add = |series: &str, ours: f64| {
                    self.predicted(&format!("{name}, {series}"), speed, None, ours * 100.0)
                };
                points.push(add("no admission, % in time", open.effective(late, u64::MAX)));
                points.push(add("admission, % in time", gated.effective(late, u64::MAX)));
                points.push(add("admission, % of the accepted in time", in_time / accepted.max(1) as f64));
            }
        }
        points
    }
}
