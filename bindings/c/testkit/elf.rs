//! Just enough of ELF (64 bits, little endian) to list what a shared library exports and needs.

use std::collections::BTreeSet;
use std::path::Path;

const SHT_DYNAMIC: u32 = 6;
const SHT_DYNSYM: u32 = 11;
const DT_NEEDED: u64 = 1;
const DT_SONAME: u64 = 14;

pub(crate) struct Elf {
    bytes: Vec<u8>,
}

/// A section: where it is in the file, and the section that it refers to.
#[derive(Clone, Copy)]
struct Section {
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
}

impl Elf {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(
            &bytes[..6],
            b"\x7fELF\x02\x01",
            "{} is not a 64-bit little-endian ELF file",
            path.display()
        );
        Self { bytes }
    }

    /// The names of global and weak symbols that the library defines.
    pub(crate) fn exported(&self) -> BTreeSet<String> {
        let table = self.section_of(SHT_DYNSYM);
        let names = self.section(table.link);
        let symbols = (table.offset..table.offset + table.size).step_by(24).skip(1);
        symbols
            .filter(|at| {
                let (info, section) = (self.bytes[at + 4], self.number(at + 6, 2));
                section != 0 && matches!(info >> 4, 1 | 2)
            })
            .map(|at| self.text(names, self.number(at, 4)))
            .collect()
    }

    /// The libraries that the loader loads with it.
    pub(crate) fn needed(&self) -> Vec<String> {
        self.dynamic(DT_NEEDED)
    }

    /// The name under which programs look for it.
    pub(crate) fn soname(&self) -> Option<String> {
        self.dynamic(DT_SONAME).pop()
    }

    fn dynamic(&self, tag: u64) -> Vec<String> {
        let table = self.section_of(SHT_DYNAMIC);
        let names = self.section(table.link);
        let entries = (table.offset..table.offset + table.size).step_by(16);
        let wanted = entries.filter(|at| self.number(*at, 8) == tag);
        wanted.map(|at| self.text(names, self.number(at + 8, 8))).collect()
    }

    fn section_of(&self, kind: u32) -> Section {
        let count = self.number(0x3c, 2) as usize;
        let found = (0..count).map(|index| self.section(index)).find(|section| section.kind == kind);
        found.expect("the section is there")
    }

    fn section(&self, index: usize) -> Section {
        let at = self.number(0x28, 8) as usize + index * self.number(0x3a, 2) as usize;
        Section {
            kind: self.number(at + 4, 4) as u32,
            offset: self.number(at + 24, 8) as usize,
            size: self.number(at + 32, 8) as usize,
            link: self.number(at + 40, 4) as usize,
        }
    }

    fn text(&self, names: Section, offset: u64) -> String {
        let start = names.offset + offset as usize;
        let bytes = self.bytes[start..].split(|byte| *byte == 0).next().expect("a NUL ends it");
        String::from_utf8_lossy(bytes).into_owned()
    }

    fn number(&self, at: usize, len: usize) -> u64 {
        self.bytes[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}
