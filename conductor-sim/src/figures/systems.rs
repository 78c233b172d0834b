//! The figures in which the paper measures the whole cluster.

use conductor_core::scheduler::PolicyKind;

use super::{Point, Study};
use crate::cluster::run;
use crate::coupled::{Coupled, CoupledSetup, run_coupled};
use crate::outcome::Outcome;
use crate::paper;
use crate::setup::{KV_TOKENS, SEQUENCES_MAX, Setup, Shipping};
use crate::trace::Trace;

/// Prefill nodes of the paper's cluster, but where the split is what a figure is about.
const GROUPS: usize = 8;
/// Tokens of one prefill of a coupled instance: the longest prompt that the model takes.
const BATCH_TOKENS_MAX: u64 = 131_072;
/// Tokens per step of chunked prefill. The paper does not say; with it the GPU time of figure 8 comes out.
const CHUNK_TOKENS: u32 = 2_048;
/// The limits with which figure 15 counts a request as effective: the paper does not print them.
const SPLIT_TTFT_NS_MAX: u64 = 10_000_000_000;
const SPLIT_TBT_NS_MAX: u64 = 100_000_000;

impl Study<'_> {
    pub(super) fn cluster(&self) -> Setup {
        self.split_into(GROUPS)
    }

    fn split_into(&self, groups: usize) -> Setup {
        Setup { policy: self.policy, ..Setup::paper(groups, self.calibration, self.seed) }
    }

    pub(super) fn coupled(&self, trace: &Trace, mode: Coupled) -> Outcome {
        let setup = CoupledSetup {
            nodes: 16,
            mode,
            cost: self.calibration.cost,
            kv_tokens: KV_TOKENS,
            batch_tokens_max: BATCH_TOKENS_MAX,
            sequences_max: SEQUENCES_MAX,
            seed: self.seed,
            speed: 1.0,
        };
        run_coupled(trace, &setup)
    }

    /// A run of each system, in the order of figures 1 and 8.
    fn each_system(&self, trace: &Trace) -> [Outcome; 4] {
        [
            run(trace, &self.cluster()),
            self.coupled(trace, Coupled::Plain),
            self.coupled(trace, Coupled::PrefixCaching),
            self.coupled(trace, Coupled::Chunked { step_tokens: CHUNK_TOKENS }),
        ]
    }

    pub(super) fn tbt_conversation(&self) -> Vec<Point> {
        let mut points = Vec::new();
        let outcomes = self.each_system(&self.traces.conversation);
        let share = |outcome: &Outcome, ms: f64| outcome.effective(u64::MAX, (ms * 1e6) as u64) * 100.0;
        for ((system, curve), outcome) in paper::FIGURE_1.iter().zip(&outcomes) {
            for (ms, paper) in *curve {
                points.push(self.predicted(system, *ms, *paper, share(outcome, *ms)));
            }
        }
        let at = |curve: paper::Curve, ms: f64| curve.iter().find(|point| point.0 == ms).map(|point| point.1);
        let [(_, mooncake), (_, vllm), ..] = paper::FIGURE_1;
        for ms in [100.0, 200.0, 300.0] {
            let paper = at(mooncake, ms).zip(at(vllm, ms)).map(|(more, less)| (more / less - 1.0) * 100.0);
            let ours = (share(&outcomes[0], ms) / share(&outcomes[1], ms) - 1.0) * 100.0;
            points.push(self.predicted(GAIN, ms, paper, ours));
        }
        points
    }

    pub(super) fn placement(&self) -> Vec<Point> {
        let policies = [PolicyKind::Cost, PolicyKind::Local, PolicyKind::LeastRequests, PolicyKind::Random];
        let runs = policies.map(|policy| {
            let outcome = run(&self.traces.conversation, &Setup { policy, ..self.cluster() });
            (outcome.ttft_s(), outcome.quantile(0.5, |record| record.ttft_ns) as f64 / 1e9)
        });
        let mut points = Vec::new();
        for ((name, mean, median), ours) in paper::FIGURE_5.iter().zip(runs) {
            points.push(self.predicted("mean TTFT s", *name, *mean, ours.0));
            points.push(self.predicted("median TTFT s", *name, *median, ours.1));
        }
        for ((name, mean, _), ours) in paper::FIGURE_5.iter().zip(runs) {
            let paper = mean / paper::FIGURE_5[0].1;
            points.push(self.predicted("mean, ratio to global", *name, paper, ours.0 / runs[0].0));
        }
        points
    }

    pub(super) fn prefill_time(&self) -> Vec<Point> {
        let mut points = Vec::new();
        let conversation = self.each_system(&self.traces.conversation);
        let synthetic = self.each_system(&self.traces.synthetic);
        for (nth, (system, on_conversation, on_synthetic)) in paper::FIGURE_8.into_iter().enumerate() {
            let ours = (conversation[nth].prefill_s(), synthetic[nth].prefill_s());
            points.push(self.predicted(system, "conversation", on_conversation, ours.0));
            points.push(self.predicted(system, "synthetic", on_synthetic, ours.1));
        }
        let saved = |with: f64, without: f64| (1.0 - with / without) * 100.0;
        let [(_, conv, syn), (_, conv_vllm, syn_vllm), ..] = paper::FIGURE_8;
        let ours = |runs: &[Outcome; 4]| saved(runs[0].prefill_s(), runs[1].prefill_s());
        points.push(self.predicted(SAVED, "conversation", saved(conv, conv_vllm), ours(&conversation)));
        points.push(self.predicted(SAVED, "synthetic", saved(syn, syn_vllm), ours(&synthetic)));
        points
    }

    pub(super) fn bandwidth(&self) -> Vec<Point> {
        let trace = &self.traces.synthetic;
        let mut points = Vec::new();
        let at = |gbits: f64, shipping| {
            let setup = Setup { nic_bytes_per_s: gbits * 1e9 / 8.0, shipping, ..self.cluster() };
            run(trace, &setup).ttft_s()
        };
        for (gbits, paper, ..) in paper::FIGURE_13 {
            points.push(self.predicted("mean TTFT s", gbits, paper, at(gbits, Shipping::AfterPrefill)));
        }
        for (gbits, ..) in paper::FIGURE_13 {
            let ours = at(gbits, Shipping::LayerWise);
            points.push(self.predicted("mean TTFT s, by layer", gbits, None, ours));
        }
        let requests = trace.requests();
        let tokens: u64 = requests.iter().map(|request| u64::from(request.tokens)).sum();
        let mean_bits =
            (tokens * self.calibration.cost.kv_bytes_per_token * 8) as f64 / requests.len().max(1) as f64;
        for (gbits, _, theory, _) in paper::FIGURE_13 {
            points.push(self.predicted("theoretical transfer s", gbits, theory, mean_bits / (gbits * 1e9)));
        }
        points
    }

    pub(super) fn split(&self) -> Vec<Point> {
        let runs = paper::FIGURE_15
            .map(|(groups, ..)| run(&self.traces.synthetic, &self.split_into(groups as usize)));
        let each = || paper::FIGURE_15.into_iter().zip(&runs);
        let mut points = Vec::new();
        for ((groups, _, ttft_s, _), run) in each() {
            points.push(self.predicted("mean TTFT s", f64::from(groups), ttft_s, run.ttft_s()));
        }
        for ((groups, _, _, tbt_ms), run) in each() {
            let kind = super::Kind::Calibrated;
            points.push(self.point("mean TBT ms", f64::from(groups), Some(tbt_ms), run.tbt_ms(), kind));
        }
        for ((groups, effective, ..), run) in each() {
            let ours = run.effective(SPLIT_TTFT_NS_MAX, SPLIT_TBT_NS_MAX) * 100.0;
            points.push(self.predicted("effective requests %", f64::from(groups), effective, ours));
        }
        points
    }
}

/// The series of figure 1 with the headline's numbers.
const GAIN: &str = "gain over vLLM %";
/// The series of figure 8 with the headline's numbers.
const SAVED: &str = "saved against vLLM %";
