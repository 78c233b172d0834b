//! Regular expressions of untrusted clients: their cost is bounded, whatever they are.
//!
//! A pattern runs as a lazy automaton: states are built when a key first leads to them, and cached. With
//! cached states a byte takes 2 ns; building one takes about a microsecond. A pattern that needs so many
//! states that the cache overflows is refused instead of being run in another, slower way. So a call costs at
//! most one pass over [`KEY_BYTES_PER_CALL`] bytes and one filled cache (measured: 65 µs and 180 µs), and
//! compiling the longest allowed pattern takes 120 µs.

use alloc::boxed::Box;
use alloc::string::String;

use regex_automata::Input;
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;

use crate::ErrorCode;

/// Length limit of a pattern, bytes.
pub(crate) const PATTERN_BYTES_MAX: usize = 1_024;
/// Bytes of keys that one call may search.
pub(crate) const KEY_BYTES_PER_CALL: usize = 32 << 10;
/// Size limit of a compiled pattern, before the automaton is built, bytes.
const PROGRAM_BYTES_MAX: usize = 8 << 10;
/// Size of the cache of states, bytes.
const CACHE_BYTES: usize = 32 << 10;
/// A pattern whose cache has overflowed continues only if each of its states served at least this many bytes
/// of keys.
const BYTES_PER_STATE_MIN: usize = 40;
/// Limit on nested groups and repetitions.
const NEST_MAX: u32 = 32;

/// A compiled pattern, and its states so far.
#[derive(Debug)]
pub(crate) struct Pattern {
    text: Box<str>,
    automaton: DFA,
    states: Cache,
}

/// What one call may still search.
#[derive(Debug)]
pub(crate) struct Budget {
    key_bytes: usize,
    overflows: usize,
}

impl Pattern {
    /// # Errors
    /// `InvalidPattern`: it is empty, too long, no regular expression, or compiles to too much.
    pub(crate) fn new(text: &str) -> Result<Self, ErrorCode> {
        if text.is_empty() || text.len() > PATTERN_BYTES_MAX {
            return Err(ErrorCode::InvalidPattern);
        }
        let syntax = syntax::Config::new().unicode(false).utf8(false).nest_limit(NEST_MAX);
        let program = thompson::Config::new()
            .utf8(false)
            .nfa_size_limit(Some(PROGRAM_BYTES_MAX))
            .which_captures(WhichCaptures::None);
        let config = DFA::config()
            .prefilter(None)
            .cache_capacity(CACHE_BYTES)
            .minimum_cache_clear_count(Some(0))
            .minimum_bytes_per_state(Some(BYTES_PER_STATE_MIN));
        let built = DFA::builder().syntax(syntax).thompson(program).configure(config).build(text);
        let automaton = built.map_err(|_| ErrorCode::InvalidPattern)?;
        let states = automaton.create_cache();
        Ok(Self { text: String::from(text).into(), automaton, states })
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The budget of a call that begins.
    pub(crate) fn budget(&self) -> Budget {
        Budget { key_bytes: KEY_BYTES_PER_CALL, overflows: self.states.clear_count() }
    }

    /// Whether a key matches anywhere. `None`: the budget is used up, and the key was not searched.
    ///
    /// # Errors
    /// `InvalidPattern`: the pattern is too costly.
    pub(crate) fn matches(&mut self, key: &[u8], budget: &mut Budget) -> Result<Option<bool>, ErrorCode> {
        let overflown = self.states.clear_count() != budget.overflows;
        // The first key finds the whole budget: each call searches at least one key, so that every listing
        // makes progress.
        if overflown || budget.key_bytes < key.len() {
            return Ok(None);
        }
        budget.key_bytes -= key.len();
        let found = self.automaton.try_search_fwd(&mut self.states, &Input::new(key).earliest(true));
        found.map(|found| Some(found.is_some())).map_err(|_| ErrorCode::InvalidPattern)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(text: &str, key: &[u8]) -> bool {
        let mut pattern = Pattern::new(text).unwrap();
        let mut budget = pattern.budget();
        pattern.matches(key, &mut budget).unwrap().unwrap()
    }

    #[test]
    fn patterns_are_about_bytes_and_match_anywhere() {
        assert!(matches("b", b"abc") && !matches("^b", b"abc") && matches("c$", b"abc"));
        assert!(matches(r"^kv/llama-3/\d+/layer(0|1[0-9])$", b"kv/llama-3/77/layer12"));
        assert!(matches(r"\xff", &[0, 0xff]), "a key need not be text");
        assert!(matches("(?i)KEY", b"key") && matches(r"\bkey\b", b"a key."));
        assert!(matches("(a+)+$", &[b'a'; 1_024]) && !matches("(a+)+b", &[b'a'; 1_024]));
    }

    #[test]
    fn what_is_too_much_is_refused_at_once() {
        let nested = |depth: usize| "(".repeat(depth) + "a" + &")".repeat(depth);
        for text in [
            "",
            &*"a".repeat(1_025),
            "(a{1000}){1000}",
            "((a{30}){30}){30}",
            &nested(200),
            &"(x+x+)+y".repeat(40),
            "(",
            "a**{",
            r"(a)\1",
            "(?=a)",
            r"\p{Greek}",
        ] {
            assert_eq!(Pattern::new(text).err(), Some(ErrorCode::InvalidPattern), "{text:.20}");
        }
        assert!(Pattern::new(&"a|".repeat(100)).is_ok());
    }

    #[test]
    fn a_pattern_that_needs_ever_new_states_is_refused_rather_than_run_slowly() {
        let mut pattern = Pattern::new("(a[ab]{20}c|b[ab]{20}d)").unwrap();
        let mut dice = 12_345u64;
        let key: alloc::vec::Vec<u8> = core::iter::repeat_with(|| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if dice >> 40 & 1 == 0 { b'a' } else { b'b' }
        })
        .take(1_024)
        .collect();
        let mut budget = pattern.budget();
        assert_eq!(pattern.matches(&key, &mut budget), Err(ErrorCode::InvalidPattern));
        assert!(pattern.states.memory_usage() <= 2 * CACHE_BYTES);
    }

    #[test]
    fn a_call_looks_at_so_many_bytes_and_the_next_goes_on() {
        let mut pattern = Pattern::new("^kv/.*[0-9]$").unwrap();
        for _ in 0..2 {
            let mut budget = pattern.budget();
            let mut keys = 0;
            while pattern.matches(&[b'k'; 1_024], &mut budget).unwrap().is_some() {
                keys += 1;
            }
            assert_eq!(keys, KEY_BYTES_PER_CALL / 1_024);
        }
    }
}
