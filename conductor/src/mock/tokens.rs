//! The mock engine's tokenizer and its "model": both deterministic, and neither of any use but for tests.
//!
//! ```text
//!   id          text
//!   0 … 255     one byte
//!   256 … 4351  a space and a word of four letters: consonant, vowel, consonant, vowel
//!   above       U+FFFD; such ids come only from clients that send ids
//! ```
//!
//! Text is read from left to right: a space that is followed by a word of that form is one token, any other
//! byte is one token. So `detokenize(tokenize(text)) == text` for every text, and
//! `tokenize(detokenize(ids)) == ids` for ids that are words, which is all that the model generates.
//!
//! The next token is a hash of all tokens before it. A continuation of "prompt and the first n tokens" is
//! therefore the same as the rest of the undisturbed output, which tests of failures rely on.

/// Number of ids that have a text.
pub const VOCABULARY: u32 = 256 + WORDS;

const CONSONANTS: &[u8; 16] = b"bdfghjklmnprstvz";
const VOWELS: &[u8; 4] = b"aeio";
const WORDS: u32 = 16 * 4 * 16 * 4;
/// Bytes of a word with its space.
const WORD_BYTES: usize = 5;

/// The tokens of a text.
#[must_use]
pub fn tokenize(text: &str) -> Vec<u32> {
    let (mut rest, mut ids) = (text.as_bytes(), Vec::with_capacity(text.len() / WORD_BYTES + 1));
    while let Some((&first, after)) = rest.split_first() {
        match word(rest) {
            Some(word) => {
                ids.push(256 + word);
                rest = &rest[WORD_BYTES..];
            }
            None => {
                ids.push(first.into());
                rest = after;
            }
        }
    }
    ids
}

/// The text of tokens. Bytes that are not UTF-8 become U+FFFD.
#[must_use]
pub fn detokenize(ids: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(ids.len() * WORD_BYTES);
    for &id in ids {
        match id {
            0..256 => bytes.push(id as u8),
            256..VOCABULARY => bytes.extend(spell(id - 256)),
            _ => bytes.extend("\u{fffd}".as_bytes()),
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// The text of a conversation, as the mock engine's chat template writes it: a line with the role, the
/// content, and so on; at the end the line that asks the assistant to speak.
pub fn template<'a>(messages: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = String::new();
    for (role, content) in messages {
        text.extend(["<|", role, "|>\n", content, "\n"]);
    }
    text.push_str("<|assistant|>\n");
    text
}

/// The number of the word at the beginning of `bytes`.
fn word(bytes: &[u8]) -> Option<u32> {
    let word = bytes.get(..WORD_BYTES)?;
    let place = |letters: &[u8], at: usize| letters.iter().position(|&letter| letter == word[at]);
    if word[0] != b' ' {
        return None;
    }
    let (a, b) = (place(CONSONANTS, 1)?, place(VOWELS, 2)?);
    let (c, d) = (place(CONSONANTS, 3)?, place(VOWELS, 4)?);
    Some((((a * 4 + b) * 16 + c) * 4 + d) as u32)
}

fn spell(word: u32) -> [u8; WORD_BYTES] {
    let at = |letters: &[u8], shift: u32| letters[(word >> shift) as usize % letters.len()];
    [b' ', at(CONSONANTS, 8), at(VOWELS, 6), at(CONSONANTS, 2), at(VOWELS, 0)]
}

/// The state of the "model" after some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generator(u64);

impl Generator {
    /// The state after a prompt.
    #[must_use]
    pub fn after(prompt: &[u32]) -> Self {
        let mut state = Self(0x5eed);
        prompt.iter().for_each(|&token| state.push(token));
        state
    }

    /// Generates the next token; the state then includes it.
    pub fn generate(&mut self) -> u32 {
        let token = 256 + (self.0 >> 40) as u32 % WORDS;
        self.push(token);
        token
    }

    fn push(&mut self, token: u32) {
        self.0 = (self.0 ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_becoming_tokens_and_text_again() {
        for text in ["", " ", "  baba", " baba dido", "\u{e9}, \u{4e16}\u{754c} zizoz", " bab", " babax"] {
            assert_eq!(detokenize(&tokenize(text)), text);
        }
        assert_eq!(tokenize(" baba"), [256]);
        assert_eq!(tokenize(" zozo"), [VOCABULARY - 1]);
    }

    #[test]
    fn every_word_is_a_token_of_its_own() {
        let words: Vec<u32> = (256..VOCABULARY).collect();
        assert_eq!(tokenize(&detokenize(&words)), words);
    }

    #[test]
    fn a_continuation_is_the_rest_of_the_undisturbed_output() {
        let prompt = tokenize("Once upon a time");
        let mut model = Generator::after(&prompt);
        let whole: Vec<u32> = (0..50).map(|_| model.generate()).collect();
        let continued = [&prompt[..], &whole[..20]].concat();
        let mut model = Generator::after(&continued);
        assert_eq!((20..50).map(|_| model.generate()).collect::<Vec<_>>(), whole[20..]);
        // And another prompt has another output.
        assert_ne!(Generator::after(&prompt[1..]).generate(), whole[0]);
    }

    #[test]
    fn ids_without_a_text_do_not_panic() {
        assert_eq!(detokenize(&[u32::MAX, 0x80, 65]), "\u{fffd}\u{fffd}A");
    }
}
