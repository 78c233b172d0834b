//! What a simulated run measured.

/// One request's part of a run. Times are nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Time to first token, from the request's arrival.
    pub ttft_ns: u64,
    /// Time between tokens: the mean of the longest tenth of the gaps between the answer's tokens.
    pub tbt_ns: u64,
    /// Time for which the prefill occupied its instance.
    pub prefill_ns: u64,
    /// Time of the predicted first token, from the arrival.
    pub predicted_ttft_ns: u64,
    /// Tokens of the prompt whose KV was reused.
    pub reused_tokens: u32,
    /// Tokens of the prompt whose KV came from another node.
    pub fetched_tokens: u32,
    /// Whether the request was refused at the door; the times are zero then.
    pub rejected: bool,
}

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The requests, in the order of their arrivals.
    pub records: Vec<Record>,
    /// Tokens of all prompts that were not refused.
    pub prompt_tokens: u64,
    /// Tokens of all answers.
    pub output_tokens: u64,
    /// When the last answer was complete, nanoseconds.
    pub end_ns: u64,
    /// The time for which NICs sent, over all nodes, nanoseconds.
    pub sent_ns: u64,
    /// Nodes of the cluster.
    pub nodes: usize,
}

impl Outcome {
    /// The requests that were not refused.
    pub fn served(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| !record.rejected)
    }

    /// The number of requests that were refused.
    #[must_use]
    pub fn rejected(&self) -> usize {
        self.records.len() - self.served().count()
    }

    /// The mean of a figure over the requests that were served; zero without requests.
    #[must_use]
    pub fn mean(&self, figure: impl Fn(&Record) -> u64) -> f64 {
        let (sum, count) = self
            .served()
            .fold((0u128, 0u64), |(sum, count), record| (sum + u128::from(figure(record)), count + 1));
        if count == 0 { 0.0 } else { sum as f64 / count as f64 }
    }

    /// Mean time to first token, seconds.
    #[must_use]
    pub fn ttft_s(&self) -> f64 {
        self.mean(|record| record.ttft_ns) / 1e9
    }

    /// Mean time between tokens, milliseconds.
    #[must_use]
    pub fn tbt_ms(&self) -> f64 {
        self.mean(|record| record.tbt_ns) / 1e6
    }

    /// Mean time of prefill per request, seconds of one node's GPUs.
    #[must_use]
    pub fn prefill_s(&self) -> f64 {
        self.mean(|record| record.prefill_ns) / 1e9
    }

    /// Share of the prompts' tokens whose KV was reused.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        let reused: u64 = self.served().map(|record| u64::from(record.reused_tokens)).sum();
        reused as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Share of all requests that were served with a first token and with gaps within the limits.
    #[must_use]
    pub fn effective(&self, ttft_ns_max: u64, tbt_ns_max: u64) -> f64 {
        let within = self
            .served()
            .filter(|record| record.ttft_ns <= ttft_ns_max && record.tbt_ns <= tbt_ns_max)
            .count();
        within as f64 / self.records.len().max(1) as f64
    }

    /// The quantile of a figure over the requests that were served: the smallest value that `share` of them
    /// do not exceed; zero without requests.
    #[must_use]
    pub fn quantile(&self, share: f64, figure: impl Fn(&Record) -> u64) -> u64 {
        let mut values: Vec<u64> = self.served().map(figure).collect();
        if values.is_empty() {
            return 0;
        }
        let nth = ((share * values.len() as f64) as usize).min(values.len() - 1);
        *values.select_nth_unstable(nth).1
    }

    /// Share of the run's time for which the average NIC sent.
    #[must_use]
    pub fn nic_use(&self) -> f64 {
        self.sent_ns as f64 / (self.end_ns.max(1) as f64 * self.nodes.max(1) as f64)
    }
}
