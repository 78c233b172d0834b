//! What a peer and a pool give to `te-cxl`: exports, the superblock, and the lines that owners and peers
//! write. What parses is written as the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use te_cxl::Export;
use te_cxl::pool::format::{
    LineBytes, OwnerRecord, PeerRecord, Row, Superblock, Use, parse_expelled, write_expelled,
};

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else { return };
    if which % 2 == 0 {
        if let Ok(export) = Export::parse(bytes) {
            let mut out = [0; Export::BYTES];
            assert_eq!(export.write(&mut out), Some(bytes.len()));
            assert_eq!(&out[..], bytes);
        }
        return;
    }
    let Some(mut line) = bytes.get(..64).and_then(|bytes| LineBytes::try_from(bytes).ok()) else { return };
    line_of(&line);
    // Most lines have a wrong checksum: what is behind it is reached with a right one.
    let crc = crc32c::crc32c(&line[..60]);
    line[60..].copy_from_slice(&crc.to_le_bytes());
    line_of(&line);
});

fn line_of(line: &LineBytes) {
    let same = |written: LineBytes| assert_eq!(&written, line);
    if let Ok(block) = Superblock::parse(line, u64::MAX) {
        same(block.write());
        assert!(block.extents > 0 && block.extent_at(block.extents - 1) < block.size);
        for (base, len) in [(block.front_bytes(), 1), (block.size, u64::MAX), (0, block.size)] {
            if let Some((first, count)) = block.extents_of(base, len) {
                assert!(first + count <= block.extents);
            }
        }
    }
    OwnerRecord::parse(line).into_iter().for_each(|owner| same(owner.write()));
    PeerRecord::parse(line).into_iter().for_each(|peer| same(peer.write()));
    Row::parse(line).into_iter().for_each(|row| same(row.write()));
    parse_expelled(line).into_iter().for_each(|identities| same(write_expelled(identities)));
    if let Ok(Some(used)) = Use::parse(line) {
        same(used.write());
        let _ = used.touches(0, u32::MAX);
    }
}
