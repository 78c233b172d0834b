//! A multi-turn workload to replay without a trace: seeded, endless, and reproducible on every machine.
//!
//! A conversation begins with one of a few system prompts (Zipf distributed), and each turn sends the whole
//! conversation so far plus a new question, as chat front ends do. A request is more likely to continue a
//! recent conversation than an old one (Zipf over recency). The result has the shape of the published traces:
//! a shared head, long private prefixes, and a tail of blocks that are used once.

use crate::content::mix;
use crate::trace::Request;

/// Tokens per block.
const BLOCK_TOKENS: u64 = 512;

/// The shape of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Number of system prompts.
    pub prompts: usize,
    /// Most blocks of a system prompt.
    pub prompt_blocks_max: usize,
    /// Most blocks that one turn adds.
    pub turn_blocks_max: usize,
    /// Blocks at which a conversation ends.
    pub conversation_blocks_max: usize,
    /// Most conversations that are open at the same time; the least recently used one ends first.
    pub conversations_max: usize,
    /// Share of requests that begin a conversation, percent.
    pub new_percent: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            prompts: 8,
            prompt_blocks_max: 6,
            turn_blocks_max: 6,
            conversation_blocks_max: 96,
            conversations_max: 256,
            new_percent: 20,
        }
    }
}

/// An endless iterator of requests.
#[derive(Clone, Debug)]
pub struct Workload {
    shape: Shape,
    random: Random,
    prompts: Vec<Vec<u64>>,
    /// Open conversations, the most recent one last.
    conversations: Vec<Vec<u64>>,
    next_id: u64,
    now_ms: f64,
}

impl Workload {
    /// The workload that follows from `seed`.
    #[must_use]
    pub fn new(seed: u64, shape: Shape) -> Self {
        let mut workload = Self {
            shape,
            random: Random { state: mix(seed) },
            prompts: Vec::new(),
            conversations: Vec::new(),
            next_id: 0,
            now_ms: 0.0,
        };
        for _ in 0..shape.prompts.max(1) {
            let blocks = workload.new_blocks(shape.prompt_blocks_max);
            workload.prompts.push(blocks);
        }
        workload
    }

    fn new_blocks(&mut self, most: usize) -> Vec<u64> {
        let count = 1 + self.random.below(most.max(1) as u64);
        let first = self.next_id;
        self.next_id += count;
        (first..self.next_id).collect()
    }

    fn pick_conversation(&mut self) -> Vec<u64> {
        let begins = self.conversations.is_empty() || self.random.below(100) < self.shape.new_percent;
        if begins {
            let prompt = self.random.zipf(self.prompts.len());
            return self.prompts[prompt].clone();
        }
        let back = self.random.zipf(self.conversations.len());
        self.conversations.remove(self.conversations.len() - 1 - back)
    }
}

impl Iterator for Workload {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let mut hash_ids = self.pick_conversation();
        let turn = self.new_blocks(self.shape.turn_blocks_max);
        hash_ids.extend(turn);
        self.now_ms += self.random.below(2_000) as f64;
        let output_length = 1 + self.random.below(BLOCK_TOKENS);
        if hash_ids.len() < self.shape.conversation_blocks_max {
            if self.conversations.len() >= self.shape.conversations_max.max(1) {
                self.conversations.remove(0);
            }
            self.conversations.push(hash_ids.clone());
        }
        Some(Request {
            timestamp: self.now_ms,
            input_length: hash_ids.len() as u64 * BLOCK_TOKENS,
            output_length,
            hash_ids,
        })
    }
}

/// splitmix64.
#[derive(Clone, Debug)]
struct Random {
    state: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        let value = mix(self.state);
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        value
    }

    /// A random number from 0 to `bound` - 1.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A random number from 0 to `count` - 1, with a probability of about 1 / (rank + 1): the inverse of the
    /// continuous approximation of the harmonic sum.
    fn zipf(&mut self, count: usize) -> usize {
        let uniform = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let rank = ((count as f64 + 1.0).powf(uniform) - 1.0) as usize;
        rank.min(count.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn ideal_hit_rate(requests: &[Request]) -> f64 {
        let (mut seen, mut refs, mut hits) = (HashSet::<u64>::new(), 0, 0);
        for request in requests {
            refs += request.hash_ids.len();
            hits += request.hash_ids.iter().take_while(|id| seen.contains(*id)).count();
            seen.extend(&request.hash_ids);
        }
        hits as f64 / refs as f64
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_and_another_one_others() {
        let take = |seed| Workload::new(seed, Shape::default()).take(200).collect::<Vec<_>>();
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
    }

    #[test]
    fn ids_are_prefix_chained() {
        let mut parents = std::collections::HashMap::new();
        for request in Workload::new(7, Shape::default()).take(1000) {
            let mut parent = None;
            for id in request.hash_ids {
                assert_eq!(*parents.entry(id).or_insert(parent), parent, "block {id} has two prefixes");
                parent = Some(id);
            }
        }
    }

    #[test]
    fn it_has_turns_that_hit_and_blocks_that_do_not() {
        let requests: Vec<_> = Workload::new(0, Shape::default()).take(2000).collect();
        let rate = ideal_hit_rate(&requests);
        assert!((0.5..0.95).contains(&rate), "{rate}");
        assert!(requests.iter().all(|r| (2..=102).contains(&r.hash_ids.len())));
    }
}
