//! The parser of NVMe/TCP: a prefix of a PDU never gives another result than the whole, data never lies
//! outside of its PDU, and identities never panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_nvmeof::identify::{self, Controller, DiscoveryEntry, IDENTIFY_BYTES, Namespace};
use te_nvmeof::pdu::{self, Agreed, Data, End, HEAD_BYTES_MAX, Pdu, Step};

const DATA_BYTES_MAX: u32 = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    if which & 0x80 != 0 {
        let mut page = [0; IDENTIFY_BYTES];
        let len = bytes.len().min(IDENTIFY_BYTES);
        page[..len].copy_from_slice(&bytes[..len]);
        let controller = Controller::parse(&page, 4096);
        assert!(controller.transfer_bytes_max.is_none_or(|max| max >= 512));
        if let Some(namespace) = Namespace::parse(&page) {
            assert!(namespace.block_bytes.is_power_of_two() && namespace.block_bytes >= 512);
        }
        let _ = identify::identity_of(&page);
        if let Ok(entry) = <&[u8; 1024]>::try_from(&page[..1024]) {
            let _ = DiscoveryEntry::parse(entry);
        }
        return;
    }
    let from = if which & 1 == 0 { End::Host } else { End::Controller };
    let agreed =
        Agreed { header_digest: which & 2 != 0, data_digest: which & 4 != 0, alignment: which >> 3 & 3 };
    let parse = |bytes: &[u8]| pdu::parse(bytes, from, agreed, DATA_BYTES_MAX);
    let whole = parse(bytes);
    if let Ok(Step::Frame(pdu, used)) = &whole {
        assert!(*used <= bytes.len() && *used <= HEAD_BYTES_MAX);
        if let Pdu::Command(_, data) | Pdu::H2cData(_, data) | Pdu::C2hData(_, data) = pdu {
            let Data { len, digest } = *data;
            assert!(len <= DATA_BYTES_MAX && (len == 0 || digest == agreed.data_digest));
            let plen = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            let end = *used as u32 + len + if digest { 4 } else { 0 };
            assert_eq!(end, plen, "the data ends where the PDU does");
        }
    }
    for len in (0..bytes.len().min(160)).chain([bytes.len().saturating_sub(1)]) {
        match parse(&bytes[..len.min(bytes.len())]) {
            Ok(Step::Need(needed)) => assert!(needed > len, "asks for {needed} of {len}"),
            early => assert_eq!(early, whole, "with {len} of {} bytes", bytes.len()),
        }
    }
});
