//! Sizes in text form: `4KiB`, `1MiB`, `64k`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Binary units. A size is printed with the first unit that divides it.
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Bytes of one GiB, for rates.
pub const GIB: f64 = (1u64 << 30) as f64;

impl ByteSize {
    /// The size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The size rounded to two or three digits, for people.
    #[must_use]
    pub fn approximate(self) -> String {
        for (name, unit) in UNITS {
            if self.0 >= unit {
                let value = self.0 as f64 / unit as f64;
                return if value < 10.0 {
                    format!("{value:.1} {name}")
                } else {
                    format!("{value:.0} {name}")
                };
            }
        }
        format!("{} B", self.0)
    }
}

/// `KiB MiB GiB TiB` and bare `k m g t` are powers of 1024, `KB MB GB TB` powers of 1000; case does not
/// matter.
impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { text: text.chars().take(32).collect() };
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(digits);
        let unit: u64 = match suffix.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(error()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(unit).map(Self).ok_or_else(error);
        }
        let bytes = number.parse::<f64>().map_err(|_| error())? * unit as f64;
        // A fraction of a byte is a typing error, and so is more than any memory holds.
        if bytes.fract() != 0.0 || !(0.0..=(1u64 << 53) as f64).contains(&bytes) {
            return Err(error());
        }
        Ok(Self(bytes as u64))
    }
}

/// Accepts a number of bytes, or a text with a unit.
impl<'de> serde::Deserialize<'de> for ByteSize {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl serde::de::Visitor<'_> for Reader {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a size such as \"64KiB\"")
            }

            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| {
                    E::custom(format_args!(
                        "`{bytes}` is not a size: write a number of bytes, or a size such as 64KiB"
                    ))
                })
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// Exact: the printed text parses to the same size.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((name, unit)) => f.pad(&format!("{}{name}", self.0 / unit)),
            None => f.pad(&format!("{}B", self.0)),
        }
    }
}

/// Text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeError {
    text: String,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is not a size: write a number of bytes, or a number with KiB, MiB, GiB, TiB, such as 64KiB",
            self.text
        )
    }
}

impl std::error::Error for SizeError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Option<u64> {
        text.parse::<ByteSize>().ok().map(ByteSize::bytes)
    }

    #[test]
    fn sizes_parse_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("4KiB", 4096),
            ("4 kib", 4096),
            ("64k", 65_536),
            ("1MiB", 1 << 20),
            ("1.5GiB", 3 << 29),
            ("1MB", 1_000_000),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in [
            "",
            "k",
            "-1",
            "4XiB",
            "1.3B",
            "1..2k",
            "999999999999999999999",
            "99999999999TiB",
            "inf",
            "nan",
            "1e3",
        ] {
            assert_eq!(size(text), None, "{text}");
        }
        let error = "lots".parse::<ByteSize>().unwrap_err().to_string();
        assert!(error.contains("`lots`") && error.contains("64KiB"), "{error}");
    }

    #[test]
    fn what_is_printed_parses_again() {
        for bytes in [0, 1, 1023, 1024, 1025, 4096, 1 << 20, (1 << 20) + 1, 16 << 20, u64::MAX] {
            assert_eq!(size(&ByteSize(bytes).to_string()), Some(bytes));
        }
        assert_eq!(format!("{:>8}", ByteSize(4096)), "    4KiB");
    }
}
