//! Pickle (protocol 5) and canonical CBOR of what vLLM hashes: tuples of bytes, integers, texts and None.

use alloc::vec::Vec;

/// Writes a value of Python. A tuple is begun with the number of its values and ended with the same.
pub(super) trait Serial {
    fn none(&mut self);
    fn int(&mut self, value: i64);
    fn bytes(&mut self, bytes: &[u8]);
    fn text(&mut self, text: &str);
    /// A text that is a constant of vLLM's code: one object, however often it occurs.
    fn constant(&mut self, text: &'static str);
    fn begin(&mut self, values: usize);
    fn end(&mut self, values: usize);
}

/// As the C implementation of CPython's `pickle.dumps(value, protocol=5)` writes values below 64 KiB.
pub(super) struct Pickle<'a> {
    out: &'a mut Vec<u8>,
    /// Objects that were given a number so far: an object that occurs again is written as its number.
    memoized: u32,
    /// Constants with their numbers.
    constants: Vec<(&'static str, u32)>,
}

const MEMOIZE: u8 = 0x94;

impl<'a> Pickle<'a> {
    pub(super) fn write(out: &'a mut Vec<u8>, write: impl FnOnce(&mut dyn Serial)) {
        // Protocol 5, and a frame whose length is known at its end.
        out.extend_from_slice(&[0x80, 5, 0x95]);
        let length = out.len();
        out.extend_from_slice(&[0; 8]);
        write(&mut Pickle { out, memoized: 0, constants: Vec::new() });
        out.push(b'.');
        let frame = (out.len() - length - 8) as u64;
        out[length..length + 8].copy_from_slice(&frame.to_le_bytes());
    }

    fn memoize(&mut self) {
        self.out.push(MEMOIZE);
        self.memoized += 1;
    }

    /// A length: in 1 byte behind `short`, or in 4 behind `long`.
    #[allow(clippy::cast_possible_truncation, reason = "texts of 4 GiB do not occur")]
    fn length(&mut self, length: usize, short: u8, long: u8) {
        match u8::try_from(length) {
            Ok(length) => self.out.extend_from_slice(&[short, length]),
            Err(_) => {
                self.out.push(long);
                self.out.extend_from_slice(&(length as u32).to_le_bytes());
            }
        }
    }
}

impl Serial for Pickle<'_> {
    fn none(&mut self) {
        self.out.push(b'N');
    }

    fn int(&mut self, value: i64) {
        if let Ok(byte) = u8::try_from(value) {
            self.out.extend_from_slice(&[b'K', byte]);
        } else if let Ok(short) = u16::try_from(value) {
            self.out.push(b'M');
            self.out.extend_from_slice(&short.to_le_bytes());
        } else if let Ok(int) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend_from_slice(&int.to_le_bytes());
        } else {
            // The fewest bytes of two's complement.
            let bits = 65 - if value < 0 { value.leading_ones() } else { value.leading_zeros() };
            let bytes = bits.div_ceil(8) as usize;
            self.out.extend_from_slice(&[0x8a, bytes.to_le_bytes()[0]]);
            self.out.extend_from_slice(&value.to_le_bytes()[..bytes]);
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.length(bytes.len(), b'C', b'B');
        self.out.extend_from_slice(bytes);
        self.memoize();
    }

    fn text(&mut self, text: &str) {
        self.length(text.len(), 0x8c, b'X');
        self.out.extend_from_slice(text.as_bytes());
        self.memoize();
    }

    fn constant(&mut self, text: &'static str) {
        let known = self.constants.iter().find(|(known, _)| *known == text);
        match known.map(|&(_, number)| (number, u8::try_from(number))) {
            Some((_, Ok(number))) => self.out.extend_from_slice(&[b'h', number]),
            Some((number, Err(_))) => {
                self.out.push(b'j');
                self.out.extend_from_slice(&number.to_le_bytes());
            }
            None => {
                self.constants.push((text, self.memoized));
                self.text(text);
            }
        }
    }

    fn begin(&mut self, values: usize) {
        if values > 3 {
            self.out.push(b'(');
        }
    }

    fn end(&mut self, values: usize) {
        self.out.push(match values {
            0 => return self.out.push(b')'),
            1 => 0x85,
            2 => 0x86,
            3 => 0x87,
            _ => b't',
        });
        self.memoize();
    }
}

/// As `cbor2.dumps(value, canonical=True)` writes it.
pub(super) struct Cbor<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Cbor<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out }
    }

    /// A type with its number or length, in the fewest bytes.
    #[allow(clippy::cast_possible_truncation, reason = "each arm has checked the range")]
    fn head(&mut self, kind: u8, number: u64) {
        let kind = kind << 5;
        match number {
            0..=23 => self.out.push(kind | number as u8),
            24..=0xff => self.out.extend_from_slice(&[kind | 24, number as u8]),
            0x100..=0xffff => {
                self.out.push(kind | 25);
                self.out.extend_from_slice(&(number as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.out.push(kind | 26);
                self.out.extend_from_slice(&(number as u32).to_be_bytes());
            }
            _ => {
                self.out.push(kind | 27);
                self.out.extend_from_slice(&number.to_be_bytes());
            }
        }
    }
}

impl Serial for Cbor<'_> {
    fn none(&mut self) {
        self.out.push(0xf6);
    }

    fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.head(0, value),
            Err(_) => self.head(1, (!value).cast_unsigned()),
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(2, bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.head(3, text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }

    fn constant(&mut self, text: &'static str) {
        self.text(text);
    }

    fn begin(&mut self, values: usize) {
        self.head(4, values as u64);
    }

    fn end(&mut self, _values: usize) {}
}
