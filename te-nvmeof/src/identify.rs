//! The structures of Identify (Base Specification 5.1.13) and of the discovery log page (5.1.12.3.1): the
//! fields that this crate reads and writes. No I/O.

/// The length of the data of Identify, in bytes.
pub const IDENTIFY_BYTES: usize = 4096;
/// The length of one entry of the discovery log page, and of its header, in bytes.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

/// CNS of Identify: what is wanted.
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod cns {
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    pub const DESCRIPTORS: u8 = 0x03;
}

/// CTRATT: keep-alive is based on traffic.
const TRAFFIC_KEEP_ALIVE: u32 = 1 << 6;
/// CTRATT: host identifiers have 128 bits.
const HOST_ID_128: u32 = 1;
/// ONCS: reservations.
const RESERVATIONS: u16 = 1 << 5;
/// NIDT of an NGUID and of a UUID in the list of descriptors.
const NIDT_NGUID: u8 = 2;
const NIDT_UUID: u8 = 3;

/// What Identify Controller says (figure 313).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Controller {
    /// CNTLID.
    pub id: u16,
    /// Bytes of the longest transfer; `None` when there is no limit.
    pub transfer_bytes_max: Option<u32>,
    /// IOCCSZ: bytes of data that a command of an I/O queue may contain.
    pub in_capsule_bytes: u32,
    /// CIU: which of several lives of this controller number it is (TP8028).
    pub instance: u8,
    /// CIRN: a random number of this life (TP8028).
    pub instance_random: u64,
    /// CCRL: the number of cross-controller resets that may run; 0 when there are none (TP8028).
    pub resets_max: u8,
    /// CQT: how long commands may go on after the end of the controller, ms (TP4129). 0 when not stated.
    pub quiesce_ms: u32,
    /// KAS, in ms; 0 when the controller has no keep-alive.
    pub keep_alive_granularity_ms: u32,
    /// Commands count as signs of life.
    pub traffic_keep_alive: bool,
    /// ONCS: namespaces have reservations.
    pub reservations: bool,
    /// MAXCMD: the number of commands that a queue may hold; 0 when not stated.
    pub commands_max: u16,
    /// CNTRLTYPE 2: a discovery controller.
    pub discovery: bool,
}

impl Controller {
    /// Reads the structure. `page_bytes` is the smallest page size of CAP, in which MDTS counts.
    #[must_use]
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES], page_bytes: u32) -> Self {
        let mdts = u32::from(bytes[77]);
        let ratio = |at: usize| u32::from(u16_at(bytes, at)) * 100;
        Self {
            id: u16_at(bytes, 78),
            transfer_bytes_max: (mdts > 0).then(|| page_bytes.checked_shl(mdts).unwrap_or(u32::MAX).max(512)),
            in_capsule_bytes: u32_at(bytes, 1792).saturating_mul(16).saturating_sub(64),
            instance: bytes[135],
            instance_random: u64_at(bytes, 136),
            resets_max: bytes[1807],
            quiesce_ms: u32::from(u16_at(bytes, 386)),
            keep_alive_granularity_ms: ratio(320),
            traffic_keep_alive: u32_at(bytes, 96) & TRAFFIC_KEEP_ALIVE != 0,
            reservations: u16_at(bytes, 520) & RESERVATIONS != 0,
            commands_max: u16_at(bytes, 514),
            discovery: bytes[111] == 2,
        }
    }

    /// Writes the structure, with the name of the subsystem.
    pub fn write(&self, subsystem: &str, bytes: &mut [u8; IDENTIFY_BYTES]) {
        bytes.fill(0);
        bytes[4..72].fill(b' ');
        put(bytes, 4, b"snowskin");
        put(bytes, 24, b"Snowskin registered memory");
        put(bytes, 64, b"1");
        bytes[76] = 2;
        bytes[77] = self.transfer_bytes_max.map_or(0, |max| (max / 4096).max(1).ilog2() as u8);
        put(bytes, 78, &self.id.to_le_bytes());
        put(bytes, 80, &0x0002_0100_u32.to_le_bytes());
        let traffic = if self.traffic_keep_alive { TRAFFIC_KEEP_ALIVE } else { 0 };
        put(bytes, 96, &(HOST_ID_128 | traffic).to_le_bytes());
        bytes[111] = if self.discovery { 2 } else { 1 };
        bytes[135] = self.instance;
        put(bytes, 136, &self.instance_random.to_le_bytes());
        bytes[258] = 3;
        bytes[259] = 3;
        put(bytes, 320, &((self.keep_alive_granularity_ms / 100) as u16).to_le_bytes());
        put(bytes, 386, &(self.quiesce_ms.min(0xffff) as u16).to_le_bytes());
        (bytes[512], bytes[513]) = (0x66, 0x44);
        put(bytes, 514, &self.commands_max.to_le_bytes());
        put(bytes, 516, &0xffff_fffe_u32.to_le_bytes());
        put(bytes, 520, &(if self.reservations { RESERVATIONS } else { 0 }).to_le_bytes());
        put(bytes, 536, &(1_u32 | 1 << 20).to_le_bytes());
        put(bytes, 540, &1024_u32.to_le_bytes());
        put(bytes, 768, subsystem.as_bytes());
        put(bytes, 1792, &((64 + self.in_capsule_bytes) / 16).to_le_bytes());
        put(bytes, 1796, &1_u32.to_le_bytes());
        bytes[1803] = 1;
        bytes[1807] = self.resets_max;
    }
}

/// What Identify Namespace says (NVM Command Set 4.1.5.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// NSZE: the number of blocks.
    pub blocks: u64,
    /// Bytes per block.
    pub block_bytes: u32,
    /// Bytes of metadata per block. Namespaces with metadata are not supported.
    pub metadata_bytes: u16,
    /// NGUID; zero when the namespace has none.
    pub nguid: [u8; 16],
    /// NSATTR: the namespace is write protected.
    pub write_protected: bool,
    /// RESCAP: the types of reservations that it has.
    pub reservations: u8,
}

impl Namespace {
    /// Reads the structure; `None` when it states a size of blocks that is not one.
    #[must_use]
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> Option<Self> {
        let format = usize::from(bytes[26] & 0xf | bytes[26] >> 1 & 0x30);
        let at = 128 + 4 * format;
        let shift = bytes[at + 2];
        let mut nguid = [0; 16];
        nguid.copy_from_slice(&bytes[104..120]);
        (9..=16).contains(&shift).then(|| Self {
            blocks: u64_at(bytes, 0),
            block_bytes: 1 << shift,
            metadata_bytes: u16_at(bytes, at),
            nguid,
            write_protected: bytes[99] & 1 != 0,
            reservations: bytes[31],
        })
    }

    /// Writes the structure.
    pub fn write(&self, bytes: &mut [u8; IDENTIFY_BYTES]) {
        bytes.fill(0);
        for at in [0, 8, 16] {
            put(bytes, at, &self.blocks.to_le_bytes());
        }
        bytes[30] = 1;
        bytes[31] = self.reservations;
        bytes[99] = u8::from(self.write_protected);
        put(bytes, 104, &self.nguid);
        put(bytes, 128, &self.metadata_bytes.to_le_bytes());
        bytes[130] = self.block_bytes.max(1).ilog2() as u8;
    }
}

/// The NGUID or the UUID in a list of descriptors (5.1.13.2.3). The NGUID counts when there are both.
#[must_use]
pub fn identity_of(bytes: &[u8; IDENTIFY_BYTES]) -> Option<[u8; 16]> {
    let (mut at, mut found) = (0, None);
    while let Some(&[kind, len, _, _]) = bytes.get(at..at + 4) {
        if kind == 0 || len == 0 {
            break;
        }
        let value = bytes.get(at + 4..at + 4 + usize::from(len))?;
        if let (NIDT_NGUID | NIDT_UUID, Ok(id)) = (kind, value.try_into()) {
            if kind == NIDT_NGUID {
                return Some(id);
            }
            found = Some(id);
        }
        at += 4 + usize::from(len);
    }
    found
}

/// Writes a list of descriptors that contains this NGUID.
pub fn write_identity(nguid: [u8; 16], bytes: &mut [u8; IDENTIFY_BYTES]) {
    bytes.fill(0);
    (bytes[0], bytes[1]) = (NIDT_NGUID, 16);
    put(bytes, 4, &nguid);
    // The command set: NVM.
    (bytes[20], bytes[21]) = (4, 1);
}

/// Writes a list of active namespaces: those above `above`, in order.
pub fn write_active(namespaces: impl Iterator<Item = u32>, above: u32, bytes: &mut [u8; IDENTIFY_BYTES]) {
    let mut found: Vec<u32> = namespaces.filter(|nsid| *nsid > above).collect();
    found.sort_unstable();
    bytes.fill(0);
    for (to, nsid) in bytes.chunks_exact_mut(4).zip(found) {
        to.copy_from_slice(&nsid.to_le_bytes());
    }
}

/// A subsystem that a discovery service knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// TRTYPE: 3 is TCP.
    pub transport: u8,
    /// SUBTYPE: 2 is a subsystem with namespaces.
    pub kind: u8,
    /// TRADDR.
    pub address: String,
    /// TRSVCID: the port.
    pub port: String,
    /// SUBNQN.
    pub nqn: String,
}

impl DiscoveryEntry {
    /// Writes the entry. Texts that are too long are cut.
    pub fn write(&self, bytes: &mut [u8; DISCOVERY_ENTRY_BYTES]) {
        bytes.fill(0);
        let family = if self.address.contains(':') { 2 } else { 1 };
        (bytes[0], bytes[1], bytes[2]) = (self.transport, family, self.kind);
        put(bytes, 4, &1_u16.to_le_bytes());
        put(bytes, 6, &0xffff_u16.to_le_bytes());
        put(bytes, 8, &32_u16.to_le_bytes());
        bytes[32..64].fill(b' ');
        bytes[512..768].fill(b' ');
        put(bytes, 32, &self.port.as_bytes()[..self.port.len().min(32)]);
        put(bytes, 256, &self.nqn.as_bytes()[..self.nqn.len().min(223)]);
        put(bytes, 512, &self.address.as_bytes()[..self.address.len().min(256)]);
    }

    /// Reads an entry; `None` when its texts are not ASCII.
    #[must_use]
    pub fn parse(bytes: &[u8; DISCOVERY_ENTRY_BYTES]) -> Option<Self> {
        let text = |from: usize, to: usize| {
            let part = &bytes[from..to];
            let len = part.iter().position(|byte| *byte == 0).unwrap_or(part.len());
            let text = core::str::from_utf8(&part[..len]).ok()?.trim_end();
            text.is_ascii().then(|| text.to_owned())
        };
        Some(Self {
            transport: bytes[0],
            kind: bytes[2],
            port: text(32, 64)?,
            nqn: text(256, 512)?,
            address: text(512, 768)?,
        })
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + value.len()) {
        to.copy_from_slice(value);
    }
}

fn u16_at(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_comes_back() {
        let written = Controller {
            id: 7,
            transfer_bytes_max: Some(1 << 20),
            in_capsule_bytes: 16 << 10,
            instance: 3,
            instance_random: 0x1122_3344_5566_7788,
            resets_max: 1,
            quiesce_ms: 250,
            keep_alive_granularity_ms: 100,
            traffic_keep_alive: true,
            reservations: true,
            commands_max: 128,
            discovery: false,
        };
        let mut bytes = [0xff; IDENTIFY_BYTES];
        written.write("nqn.2014-08.org.example:x", &mut bytes);
        assert_eq!(Controller::parse(&bytes, 4096), written);
        // The offsets are those of the specification (TP8028, TP4129).
        assert_eq!((bytes[135], bytes[1807], bytes[386]), (3, 1, 250));
        bytes[77] = 255;
        assert_eq!(Controller::parse(&bytes, 4096).transfer_bytes_max, Some(u32::MAX), "a huge MDTS");
    }

    #[test]
    fn a_namespace_and_its_identity_come_back() {
        let written = Namespace {
            blocks: 1 << 40,
            block_bytes: 4096,
            metadata_bytes: 0,
            nguid: [9; 16],
            write_protected: true,
            reservations: 0x7f,
        };
        let mut bytes = [0xff; IDENTIFY_BYTES];
        written.write(&mut bytes);
        assert_eq!(Namespace::parse(&bytes), Some(written));
        bytes[130] = 0;
        assert_eq!(Namespace::parse(&bytes), None, "blocks of one byte");
        write_identity([5; 16], &mut bytes);
        assert_eq!(identity_of(&bytes), Some([5; 16]));
        bytes[1] = 255;
        assert_eq!(identity_of(&bytes), None, "a descriptor of another length");
        assert_eq!(identity_of(&[0xff; IDENTIFY_BYTES]), None);
    }

    #[test]
    fn an_entry_of_the_discovery_log_comes_back() {
        let written = DiscoveryEntry {
            transport: 3,
            kind: 2,
            address: "10.0.0.1".into(),
            port: "4420".into(),
            nqn: "nqn.2014-08.org.example:x".into(),
        };
        let mut bytes = [0; DISCOVERY_ENTRY_BYTES];
        written.write(&mut bytes);
        assert_eq!(DiscoveryEntry::parse(&bytes), Some(written));
        bytes[600] = 0xff;
        assert_eq!(DiscoveryEntry::parse(&bytes), None);
    }
}
