//! Sizes and flags as texts.

/// Suffixes of sizes, and the bytes that each stands for. Powers of 1024, in Mooncake as here.
const SUFFIXES: [(&str, u64); 9] = [
    ("kb", 1 << 10),
    ("mb", 1 << 20),
    ("gb", 1 << 30),
    ("tb", 1 << 40),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("b", 1),
];
/// Bits behind the point of a fraction that count.
const FRACTION_DIGITS_MAX: usize = 15;

/// Parses a size in bytes: a number, possibly with a fraction, and possibly with one of the suffixes `b`,
/// `k`, `kb`, `m`, `mb`, `g`, `gb`, `t`, `tb` in any case, which are powers of 1024
/// (`MW/mooncake/mooncake_config.py:75-143`). A fraction of a byte is dropped. `None`: the text is not a
/// size, or is one of more than 2^63 - 1 bytes.
///
/// ```
/// use snowskin_compat::config::parse_size;
/// assert_eq!(parse_size("1.5 GB"), Some(3 << 29));
/// assert_eq!(parse_size("3355443200"), Some(3_355_443_200));
/// assert_eq!(parse_size("50%"), None);
/// ```
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let (number, unit) = SUFFIXES
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?.trim_end(), *unit)))
        .unwrap_or((text.as_str(), 1));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || ![whole, fraction].iter().all(|part| is_digits(part)) {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS_MAX)];
    let parts = u128::from(unit) * fraction.parse::<u128>().unwrap_or(0) / 10_u128.pow(fraction.len() as u32);
    let bytes = u128::from(whole).checked_mul(unit.into())?.checked_add(parts)?;
    u64::try_from(bytes).ok().filter(|bytes| i64::try_from(*bytes).is_ok())
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Parses a flag: `1`, `true`, `yes`, `on`, and `0`, `false`, `no`, `off`, in any case.
#[must_use]
pub fn parse_bool(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_that_users_write() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("17b", 17),
            ("16 MB", 16 << 20),
            ("32mb", 32 << 20),
            ("4 GB", 4 << 30),
            ("1.5gb", 3 << 29),
            (".5k", 512),
            ("2.", 2),
            ("1t", 1 << 40),
            (" 8K ", 8 << 10),
            ("1.9", 1),
            ("0.1kb", 102),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn texts_that_are_not_sizes() {
        for text in [
            "",
            " ",
            "kb",
            ".",
            "-5",
            "+5",
            "50%",
            "1e9",
            "0x10",
            "1 2",
            "1.2.3",
            "mb1",
            "1 kib",
            "inf",
            "9223372036854775808",
            "8388608tb",
            "99999999999999999999999999999999999999999999",
        ] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn flags() {
        assert_eq!(parse_bool(" True "), Some(true));
        assert_eq!(parse_bool("OFF"), Some(false));
        assert_eq!(parse_bool("2"), None);
        assert_eq!(parse_bool(""), None);
    }

    proptest! {
        #[test]
        fn any_text_is_a_size_or_not(text in ".{0,40}") {
            let _ = (parse_size(&text), parse_bool(&text));
        }

        #[test]
        fn any_number_is_its_own_size(bytes in 0..=i64::MAX as u64) {
            prop_assert_eq!(parse_size(&bytes.to_string()), Some(bytes));
        }
    }
}
