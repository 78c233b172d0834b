//! Executes the text of the kernel, thread by thread, on memory that knows which bytes may be read.
//!
//! It understands the instructions that the kernel uses and no others. Threads of a block run one after the
//! other up to each barrier, blocks one after the other: what it cannot show is what depends on the order of
//! memory accesses between threads.

use std::collections::HashMap;

use te_core::testkit::Rng;

/// The memory of a device, from address `BASE` on.
pub(super) struct Memory {
    pub(super) bytes: Vec<u8>,
    /// Bytes that the kernel may read.
    pub(super) readable: Vec<bool>,
    /// All bytes after each store to this address.
    pub(super) watched: u64,
    pub(super) seen: Vec<Vec<u8>>,
}

pub(super) const BASE: u64 = 0x10_0000;

impl Memory {
    pub(super) fn new(bytes: usize, watched: u64) -> Self {
        Self { bytes: vec![0; bytes], readable: vec![false; bytes], watched, seen: Vec::new() }
    }

    fn place(&self, at: u64, len: usize) -> usize {
        let place = at.checked_sub(BASE).expect("an address of the memory") as usize;
        assert!(place + len <= self.bytes.len(), "{at:#x} is outside the memory");
        assert!(at.is_multiple_of(len as u64), "{len} bytes at {at:#x} are not aligned");
        place
    }

    fn load(&self, at: u64, len: usize) -> u64 {
        let place = self.place(at, len);
        assert!(self.readable[place..place + len].iter().all(|may| *may), "{at:#x} is not to be read");
        let mut word = [0; 8];
        word[..len].copy_from_slice(&self.bytes[place..place + len]);
        u64::from_le_bytes(word)
    }

    fn store(&mut self, at: u64, len: usize, value: u64) {
        let place = self.place(at, len);
        self.bytes[place..place + len].copy_from_slice(&value.to_le_bytes()[..len]);
        if at == self.watched {
            self.seen.push(self.bytes.clone());
        }
    }
}

struct Instruction {
    /// The predicate that guards it, and the value that it has to have.
    guard: Option<(String, bool)>,
    name: String,
    operands: Vec<String>,
}

/// An entry of the text.
pub(super) struct Entry {
    parameters: Vec<String>,
    code: Vec<Instruction>,
    labels: HashMap<String, usize>,
}

impl Entry {
    pub(super) fn parse(text: &str, name: &str) -> Self {
        let from = text.find(&format!(".entry {name}(")).expect("the text has the entry");
        let text = &text[from..];
        let (head, body) = text.split_once("\n{\n").expect("a body");
        let body = body.split_once("\n}\n").expect("an end").0;
        let is_parameter = |line: &&str| line.trim().starts_with(".param");
        let last_word = |line: &str| line.trim_end_matches(',').rsplit(' ').next().unwrap_or("").to_owned();
        let parameters = head.lines().filter(is_parameter).map(last_word).collect();
        let (mut code, mut labels) = (Vec::new(), HashMap::new());
        for line in body.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(".reg")) {
            match line.strip_suffix(':') {
                Some(label) => {
                    assert!(labels.insert(label.to_owned(), code.len()).is_none(), "{label} twice")
                }
                None => code.push(instruction(line)),
            }
        }
        Self { parameters, code, labels }
    }

    /// Runs a launch of `blocks` blocks of `threads` threads.
    pub(super) fn run(
        &self,
        memory: &mut Memory,
        values: &[u64],
        (blocks, threads): (u32, u32),
        rng: &mut Rng,
    ) {
        assert_eq!(values.len(), self.parameters.len());
        let mut order: Vec<u32> = (0..blocks).collect();
        while !order.is_empty() {
            let block = order.swap_remove(rng.index(order.len()));
            let special = |tid| {
                [("%ctaid.x", block), ("%ntid.x", threads), ("%tid.x", tid), ("%nctaid.x", blocks)]
                    .map(|(name, value)| (name.to_owned(), u64::from(value)))
            };
            let thread = |tid| Thread { at: 0, registers: HashMap::from(special(tid)), is_done: false };
            let mut running: Vec<Thread> = (0..threads).map(thread).collect();
            while running.iter().any(|thread| !thread.is_done) {
                running
                    .iter_mut()
                    .filter(|thread| !thread.is_done)
                    .for_each(|thread| self.until_barrier(thread, memory, values));
            }
        }
    }

    fn until_barrier(&self, thread: &mut Thread, memory: &mut Memory, values: &[u64]) {
        for _ in 0..1_000_000 {
            let Instruction { guard, name, operands } = &self.code[thread.at];
            thread.at += 1;
            if guard.as_ref().is_some_and(|(register, value)| (thread.get(register) != 0) != *value) {
                continue;
            }
            match name.as_str() {
                "ret" => return thread.is_done = true,
                "bar.sync" => return,
                "membar.sys" => {}
                "bra" => thread.at = self.labels[&operands[0]],
                name if name.starts_with("ld.param") => {
                    let parameter = operands[1].trim_matches(['[', ']']);
                    let nth = self.parameters.iter().position(|name| name == parameter);
                    thread.set(&operands[0], values[nth.expect("a parameter")]);
                }
                name => thread.step(name, operands, memory),
            }
        }
        panic!("a thread does not end");
    }
}

fn instruction(line: &str) -> Instruction {
    let line = line.strip_suffix(';').expect("an instruction ends with a semicolon");
    let (guard, line) = match line.strip_prefix('@') {
        Some(guarded) => {
            let (guard, line) = guarded.split_once(' ').expect("a guard and an instruction");
            let register = guard.trim_start_matches('!');
            (Some((register.to_owned(), register.len() == guard.len())), line)
        }
        None => (None, line),
    };
    let (name, operands) = line.split_once(' ').unwrap_or((line, ""));
    // Vectors in braces are one operand.
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for letter in operands.chars().filter(|letter| *letter != ' ') {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => parts.push(String::new()),
            _ => parts.last_mut().expect("one at least").push(letter),
        }
    }
    Instruction { guard, name: name.to_owned(), operands: parts }
}

struct Thread {
    at: usize,
    registers: HashMap<String, u64>,
    is_done: bool,
}

impl Thread {
    fn get(&self, operand: &str) -> u64 {
        match operand.parse() {
            Ok(number) => number,
            Err(_) => *self.registers.get(operand).unwrap_or_else(|| panic!("{operand} was not set")),
        }
    }

    fn set(&mut self, register: &str, value: u64) {
        let value = if register.starts_with("%r") { value & u64::from(u32::MAX) } else { value };
        match self.registers.get_mut(register) {
            Some(old) => *old = value,
            None => _ = self.registers.insert(register.to_owned(), value),
        }
    }

    /// An address: a register, with an offset or without.
    fn address(&self, operand: &str) -> u64 {
        let (register, offset) = operand.trim_matches(['[', ']']).split_once('+').unwrap_or((operand, "0"));
        self.get(register.trim_matches(['[', ']'])) + offset.parse::<u64>().expect("an offset")
    }

    fn step(&mut self, name: &str, operands: &[String], memory: &mut Memory) {
        if name.starts_with("ld.") || name.starts_with("st.") || name.starts_with("atom.") {
            return self.access(name, operands, memory);
        }
        let value = |nth: usize| self.get(&operands[nth]);
        let result = match name {
            "mov.u32" | "cvt.u64.u32" => value(1),
            "cvt.u32.u64" => value(1) & u64::from(u32::MAX),
            "neg.s64" => value(1).wrapping_neg(),
            "add.u32" | "add.u64" => value(1).wrapping_add(value(2)),
            "sub.u32" => value(1).wrapping_sub(value(2)),
            "min.u32" => value(1).min(value(2)),
            "mul.lo.u32" | "mul.wide.u32" => value(1) * value(2),
            "mad.lo.u32" => value(1) * value(2) + value(3),
            "div.u32" => value(1) / value(2),
            "rem.u32" => value(1) % value(2),
            "shr.u32" => value(1) >> value(2),
            "shl.b32" => value(1) << value(2),
            "and.b32" | "and.b64" => value(1) & value(2),
            "setp.ge.u32" => u64::from(value(1) >= value(2)),
            "setp.lt.u32" => u64::from(value(1) < value(2)),
            "setp.eq.u32" | "setp.eq.u64" => u64::from(value(1) == value(2)),
            "setp.ne.u32" => u64::from(value(1) != value(2)),
            "setp.lt.and.u32" => u64::from(value(1) < value(2) && value(3) != 0),
            _ => panic!("the interpreter does not know {name}"),
        };
        self.set(&operands[0], result);
    }

    fn access(&mut self, name: &str, operands: &[String], memory: &mut Memory) {
        let len = match name.rsplit('.').next() {
            Some("u8") => 1,
            Some("u32") => 4,
            Some("u64") => 8,
            _ => panic!("the interpreter does not know {name}"),
        };
        match name {
            "ld.global.u64" | "ld.global.u32" | "ld.global.nc.u8" => {
                self.set(&operands[0], memory.load(self.address(&operands[1]), len));
            }
            "st.global.u8" | "st.global.u32" | "st.release.sys.global.u64" => {
                memory.store(self.address(&operands[0]), len, self.get(&operands[1]));
            }
            "ld.global.nc.v4.u32" => {
                let at = self.address(&operands[1]);
                assert!(at.is_multiple_of(16), "a load of 16 bytes at {at:#x}");
                let loaded = [0, 4, 8, 12].map(|offset| memory.load(at + offset, 4));
                operands[0].split(',').zip(loaded).for_each(|(register, word)| self.set(register, word));
            }
            "st.global.v4.u32" => {
                let at = self.address(&operands[0]);
                assert!(at.is_multiple_of(16), "a store of 16 bytes at {at:#x}");
                for (nth, register) in operands[1].split(',').enumerate() {
                    memory.store(at + nth as u64 * 4, 4, self.get(register));
                }
            }
            "atom.global.add.u32" => {
                let at = self.address(&operands[1]);
                let old = memory.load(at, 4);
                memory.store(at, 4, old.wrapping_add(self.get(&operands[2])) & u64::from(u32::MAX));
                self.set(&operands[0], old);
            }
            _ => panic!("the interpreter does not know {name}"),
        }
    }
}
