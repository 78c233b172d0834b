//! Reads the long arrays of numbers in a request by hand: token ids and hashes are nearly all of its bytes.
//!
//! ```text
//!   {"model":"m","token_ids":[101,15,…],"block_size":16}
//!    └── small: serde ────────┘ └ here ┘ └── serde ────┘
//! ```
//!
//! [`take`] moves the array of a named field of the outermost object into a vector, and leaves the rest as a
//! document in which the array is `[]`. Everything else about the document is judged by the caller, which
//! parses that rest.

use std::fmt;

/// Why a document cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadNumbers {
    /// The byte at this place is not part of an array of numbers.
    At(usize),
    /// The number at this place is out of range.
    Range(usize),
    /// There are more numbers than this.
    TooMany(usize),
    /// The field appears twice.
    Twice,
    /// The document ends within the array.
    Truncated,
}

impl fmt::Display for BadNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(at) => write!(f, "byte {at} does not belong into an array of whole numbers"),
            Self::Range(at) => write!(f, "the number at byte {at} is out of range"),
            Self::TooMany(max) => write!(f, "the array has more than {max} numbers, which is the limit"),
            Self::Twice => f.write_str("the array appears twice: send it once"),
            Self::Truncated => f.write_str("the document ends within the array"),
        }
    }
}

impl std::error::Error for BadNumbers {}

/// A number of such an array.
pub(crate) trait Number: Sized {
    /// Whether a minus sign may stand before it.
    const SIGNED: bool;
    /// The number with this magnitude. `None` when it is out of range.
    fn of(magnitude: u64, negative: bool) -> Option<Self>;
}

/// A token id: 0 to 2^32 - 1.
impl Number for u32 {
    const SIGNED: bool = false;

    fn of(magnitude: u64, _: bool) -> Option<Self> {
        Self::try_from(magnitude).ok()
    }
}

/// A hash: 0 to 2^64 - 1, or a signed 64-bit number, whose bits are taken (SGLang publishes those).
impl Number for u64 {
    const SIGNED: bool = true;

    fn of(magnitude: u64, negative: bool) -> Option<Self> {
        match negative {
            false => Some(magnitude),
            true => (magnitude <= 1 << 63).then(|| magnitude.wrapping_neg()),
        }
    }
}

/// Finds the first of `names` among the fields of the outermost object whose value is an array, appends its
/// numbers to `out` and the document without them to `rest`. Returns whether there is such a field. Without
/// one, `rest` is the whole document.
///
/// # Errors
/// See [`BadNumbers`]. What is wrong elsewhere in the document is not found here.
pub(crate) fn take<N: Number>(
    document: &[u8],
    names: &[&str],
    count_max: usize,
    out: &mut Vec<N>,
    rest: &mut Vec<u8>,
) -> Result<bool, BadNumbers> {
    let (mut at, mut depth, mut copied, mut found) = (0, 0_usize, 0, false);
    while let Some(&byte) = document.get(at) {
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                let end = end_of_text(document, at);
                let name = document.get(at + 1..end.saturating_sub(1)).unwrap_or_default();
                let wanted = depth == 1 && names.iter().any(|wanted| wanted.as_bytes() == name);
                if let Some(open) = wanted.then(|| array_of_field(document, end)).flatten() {
                    if std::mem::replace(&mut found, true) {
                        return Err(BadNumbers::Twice);
                    }
                    rest.extend_from_slice(document.get(copied..=open).unwrap_or_default());
                    copied = numbers(document, open + 1, count_max, out)?;
                    at = copied + 1;
                    continue;
                }
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    rest.extend_from_slice(document.get(copied..).unwrap_or_default());
    Ok(found)
}

/// Where the text that begins at `at` ends, behind its closing quote.
fn end_of_text(document: &[u8], at: usize) -> usize {
    let mut next = at + 1;
    while let Some(&byte) = document.get(next) {
        match byte {
            b'\\' => next += 2,
            b'"' => return next + 1,
            _ => next += 1,
        }
    }
    document.len()
}

/// Where the array begins that is the value of the field whose name ends at `at`.
fn array_of_field(document: &[u8], at: usize) -> Option<usize> {
    let colon = skip_blanks(document, at);
    (document.get(colon) == Some(&b':')).then_some(())?;
    let open = skip_blanks(document, colon + 1);
    (document.get(open) == Some(&b'[')).then_some(open)
}

fn skip_blanks(document: &[u8], mut at: usize) -> usize {
    while let Some(b' ' | b'\n' | b'\r' | b'\t') = document.get(at) {
        at += 1;
    }
    at
}

/// Reads numbers from behind the opening bracket. Returns where the closing one is.
fn numbers<N: Number>(
    document: &[u8],
    at: usize,
    count_max: usize,
    out: &mut Vec<N>,
) -> Result<usize, BadNumbers> {
    let mut at = skip_blanks(document, at);
    if document.get(at) == Some(&b']') {
        return Ok(at);
    }
    // At least two bytes per number: no more room than the document can fill.
    out.reserve(((document.len() - at) / 6).min(count_max));
    let first = out.len();
    loop {
        let (number, next) = number(document, at)?;
        if out.len() - first >= count_max {
            return Err(BadNumbers::TooMany(count_max));
        }
        out.push(number);
        // One comma, with or without one blank, is what writers of JSON write.
        at = match document.get(next) {
            Some(b',') => next + 1 + usize::from(document.get(next + 1) == Some(&b' ')),
            Some(b']') => return Ok(next),
            _ => {
                let next = skip_blanks(document, next);
                match document.get(next) {
                    Some(b',') => next + 1,
                    Some(b']') => return Ok(next),
                    Some(_) => return Err(BadNumbers::At(next)),
                    None => return Err(BadNumbers::Truncated),
                }
            }
        };
        if !document.get(at).is_some_and(u8::is_ascii_digit) {
            at = skip_blanks(document, at);
        }
    }
}

/// The number at `at`, and what is behind it.
fn number<N: Number>(document: &[u8], at: usize) -> Result<(N, usize), BadNumbers> {
    let negative = N::SIGNED && document.get(at) == Some(&b'-');
    let from = at + usize::from(negative);
    let (magnitude, len) = match document.get(from..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => match up_to_eight_digits(*chunk) {
            (_, 8) => many_digits(document, from)?,
            short => short,
        },
        None => many_digits(document, from)?,
    };
    let leading_zero = len > 1 && document.get(from) == Some(&b'0');
    match document.get(from + len) {
        None => return Err(BadNumbers::Truncated),
        // A fraction or an exponent.
        Some(b'.' | b'e' | b'E') => return Err(BadNumbers::At(from + len)),
        Some(_) if len == 0 || leading_zero => return Err(BadNumbers::At(from)),
        Some(_) => {}
    }
    Ok((N::of(magnitude, negative).ok_or(BadNumbers::Range(at))?, from + len))
}

/// The number that the first digits are, and how many digits there are, from eight bytes at once.
fn up_to_eight_digits(bytes: [u8; 8]) -> (u64, usize) {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    let digits = u64::from_le_bytes(bytes) ^ ZEROS;
    // The highest bit of a byte that is not 0 to 9. A carry out of such a byte reaches later ones only.
    let others = (digits.wrapping_add(0x7676_7676_7676_7676) | digits) & 0x8080_8080_8080_8080;
    let len = (others.trailing_zeros() / 8) as usize;
    if len == 0 {
        return (0, 0);
    }
    // Moves the digits to the end, with zeros in front.
    let digits = digits << (8 * (8 - len));
    // Neighbouring digits become numbers below 100, then below 10,000, then the whole.
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let high = (pairs & 0x0000_00ff_0000_00ff).wrapping_mul(0x000f_4240_0000_0064);
    let low = ((pairs >> 16) & 0x0000_00ff_0000_00ff).wrapping_mul(0x0000_2710_0000_0001);
    (high.wrapping_add(low) >> 32, len)
}

/// The same for any number of digits.
fn many_digits(document: &[u8], from: usize) -> Result<(u64, usize), BadNumbers> {
    let (mut number, mut len) = (0_u64, 0);
    while let Some(digit) = document.get(from + len).filter(|byte| byte.is_ascii_digit()) {
        let next = number.checked_mul(10).and_then(|number| number.checked_add(u64::from(digit - b'0')));
        number = next.ok_or(BadNumbers::Range(from))?;
        len += 1;
    }
    Ok((number, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(document: &str) -> Result<(Vec<u32>, String), BadNumbers> {
        let (mut out, mut rest) = (Vec::new(), Vec::new());
        take(document.as_bytes(), &["token_ids"], 1_000, &mut out, &mut rest)?;
        Ok((out, String::from_utf8(rest).unwrap()))
    }

    #[test]
    fn the_array_is_taken_out_and_the_rest_is_left_as_a_document() {
        let (numbers, rest) =
            tokens("{\"model\":\"m\", \"token_ids\" : [ 1,22, 333 ,\n4444,4294967295,0], \"n\":[1]}")
                .unwrap();
        assert_eq!(numbers, [1, 22, 333, 4_444, u32::MAX, 0]);
        assert_eq!(rest, "{\"model\":\"m\", \"token_ids\" : [], \"n\":[1]}");
        assert_eq!(tokens("{\"token_ids\":[]}").unwrap(), (vec![], "{\"token_ids\":[]}".into()));
        assert_eq!(tokens("{}").unwrap(), (vec![], "{}".into()));
    }

    #[test]
    fn every_length_of_number_is_read_at_every_distance_to_the_end() {
        for digits in 1..=10_u32 {
            let number = u32::try_from(u64::from(10_u32.pow(digits - 1)) * 4).unwrap_or(u32::MAX);
            for behind in ["]}", "],\"more\":\"of the document\"}"] {
                let text = format!("{{\"token_ids\":[{number},{number}{behind}");
                assert_eq!(tokens(&text).unwrap().0, [number, number], "{text}");
            }
        }
    }

    #[test]
    fn a_field_of_that_name_elsewhere_is_not_taken() {
        for text in [
            "{\"a\":{\"token_ids\":[1]}}",
            "{\"a\":\"\\\"token_ids\\\":[1]\"}",
            "[\"token_ids\",[1]]",
            "{\"token_ids\":1}",
            "{\"token_ids\\\\\":[1]}",
        ] {
            assert_eq!(tokens(text).unwrap(), (vec![], text.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_not_an_array_of_whole_numbers_is_refused_with_its_place() {
        use BadNumbers::{At, Range, Truncated, Twice};
        for (text, wrong) in [
            ("{\"token_ids\":[1,]}", At(16)),
            ("{\"token_ids\":[,1]}", At(14)),
            ("{\"token_ids\":[1 2]}", At(16)),
            ("{\"token_ids\":[-1]}", At(14)),
            ("{\"token_ids\":[1.5]}", At(15)),
            ("{\"token_ids\":[1e3]}", At(15)),
            ("{\"token_ids\":[01]}", At(14)),
            ("{\"token_ids\":[\"1\"]}", At(14)),
            ("{\"token_ids\":[[1]]}", At(14)),
            ("{\"token_ids\":[null]}", At(14)),
            ("{\"token_ids\":[4294967296]}", Range(14)),
            ("{\"token_ids\":[99999999999999999999999]}", Range(14)),
            ("{\"token_ids\":[1", Truncated),
            ("{\"token_ids\":[1,", Truncated),
            ("{\"token_ids\":[", Truncated),
            ("{\"token_ids\":[1],\"token_ids\":[2]}", Twice),
        ] {
            assert_eq!(tokens(text), Err(wrong), "{text}");
        }
    }

    #[test]
    fn more_numbers_than_the_limit_are_refused() {
        let (mut out, mut rest) = (Vec::<u32>::new(), Vec::new());
        let error = take(b"{\"t\":[1,2,3,4]}", &["t"], 3, &mut out, &mut rest);
        assert_eq!(error, Err(BadNumbers::TooMany(3)));
        let mut out = Vec::<u32>::new();
        assert_eq!(take(b"{\"t\":[1,2,3]}", &["t"], 3, &mut out, &mut Vec::new()), Ok(true));
    }

    #[test]
    fn hashes_may_be_signed_and_have_all_64_bits() {
        let (mut out, mut rest) = (Vec::<u64>::new(), Vec::new());
        let text = b"{\"h\":[18446744073709551615,-1,-9223372036854775808,12345678,123456789]}";
        take(text, &["seq_hashes", "h"], 10, &mut out, &mut rest).unwrap();
        assert_eq!(out, [u64::MAX, u64::MAX, 1 << 63, 12_345_678, 123_456_789]);
        for bad in ["18446744073709551616", "-9223372036854775809", "-", "--1"] {
            let text = format!("{{\"h\":[{bad}]}}");
            assert!(
                take::<u64>(text.as_bytes(), &["h"], 10, &mut Vec::new(), &mut Vec::new()).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn no_cut_document_is_read_beyond_its_end() {
        let text = b"{\"a\":\"\\\"\",\"token_ids\":[1, 22222222, 333333333],\"b\":[{}]}";
        for end in 0..text.len() {
            let _ = take::<u32>(&text[..end], &["token_ids"], 10, &mut Vec::new(), &mut Vec::new());
        }
    }
}
