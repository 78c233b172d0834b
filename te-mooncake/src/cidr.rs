//! Networks of peers: `10.0.0.0/8`, `::1`.

use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

/// A network in CIDR notation. Its text is an address with the number of leading bits that count; without a
/// number, all of them. IPv4-mapped addresses count as IPv4.
///
/// ```
/// use te_mooncake::Cidr;
///
/// let network: Cidr = "10.1.0.0/16".parse()?;
/// assert!(network.contains("10.1.2.3".parse()?) && !network.contains("10.2.0.1".parse()?));
/// assert!(network.contains("::ffff:10.1.2.3".parse()?));
/// assert_eq!("::1".parse::<Cidr>()?.to_string(), "::1/128");
/// assert!("10.1.0.0/33".parse::<Cidr>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    bits: u8,
}

/// A text that is not a network; holds its first 64 characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CidrError(String);

impl Cidr {
    /// Every IPv4 address.
    pub const ANY_V4: Self = Self { address: IpAddr::V4(core::net::Ipv4Addr::UNSPECIFIED), bits: 0 };
    /// Every IPv6 address that is not an IPv4 address.
    pub const ANY_V6: Self = Self { address: IpAddr::V6(core::net::Ipv6Addr::UNSPECIFIED), bits: 0 };

    /// Whether the network has this address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differing = u32::from(own) ^ u32::from(other);
                differing.checked_shr(32 - u32::from(self.bits)).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differing = u128::from(own) ^ u128::from(other);
                differing.checked_shr(128 - u32::from(self.bits)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }

    /// Whether the network has every address of its kind.
    #[must_use]
    pub const fn is_any(&self) -> bool {
        self.bits == 0
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let wrong = || CidrError(text.chars().take(64).collect());
        let (address, bits) = match text.trim().split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| wrong())?)),
            None => (text.trim(), None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        // `::ffff:10.0.0.0/104` is `10.0.0.0/8`.
        let (canonical, shift) = match (address, address.to_canonical()) {
            (IpAddr::V6(_), IpAddr::V4(v4)) => (IpAddr::V4(v4), 96),
            (_, other) => (other, 0),
        };
        let bits_max = if canonical.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            None => bits_max,
            Some(bits) => bits.checked_sub(shift).filter(|bits| *bits <= bits_max).ok_or_else(wrong)?,
        };
        Ok(Self { address: canonical, bits })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl From<IpAddr> for Cidr {
    /// The network of this address alone.
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self { address, bits: if address.is_ipv4() { 32 } else { 128 } }
    }
}

impl TryFrom<String> for Cidr {
    type Error = CidrError;

    fn try_from(text: String) -> Result<Self, CidrError> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(network: Cidr) -> Self {
        network.to_string()
    }
}

impl fmt::Display for CidrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a network: write an address and a number of bits, such as 10.0.0.0/8 or ::1/128",
            self.0
        )
    }
}

impl std::error::Error for CidrError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(network: &str, address: &str) -> bool {
        let network: Cidr = network.parse().expect(network);
        network.contains(address.parse().expect(address))
    }

    #[test]
    fn a_network_has_the_addresses_that_agree_in_its_bits() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.255.255", "11.0.0.0"),
            ("10.9.9.9/8", "10.0.0.1", "9.255.255.255"),
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("192.168.4.0/22", "192.168.7.255", "192.168.8.0"),
            ("fd00::/8", "fd12::1", "fe80::1"),
            ("::1", "::1", "::2"),
            ("::ffff:10.0.0.0/104", "10.1.1.1", "11.0.0.0"),
        ] {
            assert!(has(network, inside) && !has(network, outside), "{network}");
        }
        assert!(has("0.0.0.0/0", "8.8.8.8") && has("::/0", "2001:db8::1"));
        assert!(!has("0.0.0.0/0", "::1") && !has("::/0", "8.8.8.8"), "each kind has its own networks");
        assert!(has("127.0.0.0/8", "::ffff:127.0.0.1"), "as a socket for both kinds reports it");
        assert!(
            Cidr::ANY_V4.is_any()
                && Cidr::from(IpAddr::from([127, 0, 0, 1])).contains(IpAddr::from([127, 0, 0, 1]))
        );
    }

    #[test]
    fn texts_come_back_and_others_are_refused() {
        for (text, written) in
            [("10.0.0.0/8", "10.0.0.0/8"), (" ::1 ", "::1/128"), ("1.2.3.4", "1.2.3.4/32"), ("::/0", "::/0")]
        {
            assert_eq!(text.parse::<Cidr>().expect(text).to_string(), written);
        }
        for bad in [
            "",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0/8",
            "host/8",
            "::/129",
            "1.2.3.4/-1",
            "::ffff:1.2.3.4/95",
            "*",
        ] {
            let error = bad.parse::<Cidr>().expect_err(bad).to_string();
            assert!(error.contains("such as 10.0.0.0/8"), "{error}");
        }
    }
}
