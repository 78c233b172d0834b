//! The limits of settings: one check and one error for all fabrics.

use core::fmt;
use core::net::IpAddr;

/// A setting of a fabric that is outside its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The name of the setting.
    pub field: &'static str,
    /// The value that it has.
    pub value: u64,
    /// The smallest value that is allowed.
    pub min: u64,
    /// The largest value that is allowed.
    pub max: u64,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}: set it to a value from {} to {}", self.field, self.value, self.min, self.max)
    }
}

impl std::error::Error for ConfigError {}

/// Checks settings, each given as name, value, smallest and largest value that is allowed.
///
/// # Errors
/// The first setting whose value is outside its limits.
pub fn check_ranges(
    rows: impl IntoIterator<Item = (&'static str, u64, u64, u64)>,
) -> Result<(), ConfigError> {
    for (field, value, min, max) in rows {
        if value < min || value > max {
            return Err(ConfigError { field, value, min, max });
        }
    }
    Ok(())
}

/// Checks that a peer can connect to the address that exports carry.
///
/// # Errors
/// When the address is `0.0.0.0` or `::`.
pub fn check_advertised(advertise: Option<IpAddr>) -> Result<(), ConfigError> {
    if advertise.is_some_and(|ip| ip.is_unspecified()) {
        return Err(ConfigError { field: "advertise (unspecified)", value: 0, min: 1, max: 1 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_setting_outside_its_limits_is_named_with_them() {
        let rows = [("width", 1, 1, 16), ("depth", 9, 1, 8), ("window", 0, 1, 8)];
        let error = check_ranges(rows).expect_err("the depth is too large");
        assert_eq!(error.to_string(), "depth is 9: set it to a value from 1 to 8");
        assert_eq!(check_ranges([("least", 1, 1, 8), ("most", 8, 1, 8)]), Ok(()));
        assert!(check_ranges([("less", 0, 1, 8)]).is_err());
    }

    #[test]
    fn an_unspecified_address_is_not_advertised() {
        assert_eq!(check_advertised(Some(IpAddr::from([10, 0, 0, 1]))), Ok(()));
        assert_eq!(check_advertised(None), Ok(()));
        assert!(check_advertised(Some(IpAddr::from([0, 0, 0, 0]))).is_err());
    }
}
