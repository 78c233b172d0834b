//! Checks `te-rdma/src/sys/abi.rs` against the headers of libibverbs.
//!
//! The bindings are written by hand, because a page of structures that a person has read is worth more than
//! ten thousand generated lines. Counting bytes is left to the compiler: this task writes a C program that
//! prints the size of each structure, the offset of each field and the value of each constant in `abi.rs`,
//! compiles it with the installed headers, and writes the results to `layout.rs` as assertions, which every
//! build checks, with or without headers.

use crate::cmd::Cmd;
use crate::host;
use anyhow::{Context as _, Result, bail, ensure};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const ABI: &str = "te-rdma/src/sys/abi.rs";
const LAYOUT: &str = "te-rdma/src/sys/layout.rs";
const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Options of `cargo xtask bindgen`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail when the checked-in layout differs from the headers.
    #[arg(long)]
    check: bool,
}

impl Args {
    /// The arguments for `--check`.
    pub(crate) fn check() -> Self {
        Self { check: true }
    }
}

/// The declarations of `abi.rs`.
#[derive(Debug, Default, PartialEq)]
struct Abi {
    constants: Vec<String>,
    structs: Vec<Struct>,
}

#[derive(Debug, PartialEq)]
struct Struct {
    name: String,
    /// Name in `abi.rs`, name in C.
    fields: Vec<(String, String)>,
}

/// Why this cannot run on this machine; `None` if it can.
pub(crate) fn obstacle() -> Option<String> {
    if cfg!(not(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))) {
        return Some("the checked-in layout is that of x86-64 Linux with glibc".to_owned());
    }
    if !Path::new(HEADER).exists() {
        return Some(format!("{HEADER} is missing: `apt-get install libibverbs-dev`"));
    }
    if Cmd::new("cc --version").stdout(Path::new(".")).is_none() {
        return Some("no C compiler: `apt-get install gcc`".to_owned());
    }
    None
}

/// Rewrites the layout, or compares it.
///
/// # Errors
/// Headers or compiler are missing, `abi.rs` does not parse, or the layout differs (`--check`).
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(obstacle) = obstacle() {
        bail!("{obstacle}");
    }
    let root = host::workspace_root();
    let abi = parse(&fs::read_to_string(root.join(ABI)).with_context(|| format!("cannot read {ABI}"))?);
    ensure!(!abi.structs.is_empty() && !abi.constants.is_empty(), "{ABI}: nothing was recognised");
    let dir = root.join("target/bindgen");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("layout.c"), c_program(&abi))?;
    Cmd::new("cc -std=gnu11 -Wall -Werror -o layout layout.c").run(&dir, Some(60)).with_context(|| {
        format!(
            "the headers lack a name of {ABI}; compile `{}` to see which one",
            dir.join("layout.c").display()
        )
    })?;
    let said = Cmd::new("./layout").stdout(&dir).context("the C program failed")?;
    let layout = rust_file(&said);
    let path = root.join(LAYOUT);
    if fs::read_to_string(&path).is_ok_and(|old| old == layout) {
        println!("{LAYOUT} agrees with the headers: {} lines", said.lines().count());
        return Ok(());
    }
    if args.check {
        bail!("{LAYOUT} differs from the headers: run `cargo xtask bindgen` and review the diff");
    }
    fs::write(&path, layout)?;
    println!("{LAYOUT} rewritten: {} lines", said.lines().count());
    Ok(())
}

fn parse(text: &str) -> Abi {
    let mut abi = Abi::default();
    let mut open = false;
    for line in text.lines() {
        let (code, comment) = line.split_once("//").unwrap_or((line, ""));
        let code = code.trim();
        if let Some(rest) = code.strip_prefix("pub(crate) const ") {
            abi.constants.extend(rest.split(':').next().map(|name| name.trim().to_owned()));
        } else if let Some(rest) = code.strip_prefix("pub(crate) struct ") {
            abi.structs
                .push(Struct { name: rest.trim_end_matches(" {").trim().to_owned(), fields: Vec::new() });
            open = true;
        } else if code == "}" {
            open = false;
        } else if let (true, Some(rest)) = (open, code.strip_prefix("pub(crate) ")) {
            let Some((name, _type)) = rest.split_once(':') else { continue };
            let in_c = comment.trim().strip_prefix("C:").map_or(name, str::trim);
            if in_c != "-"
                && let Some(last) = abi.structs.last_mut()
            {
                last.fields.push((name.to_owned(), in_c.to_owned()));
            }
        }
    }
    abi
}

fn c_program(abi: &Abi) -> String {
    let mut c = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\nint main(void)\n{\n",
    );
    for Struct { name, fields } in &abi.structs {
        let _ = writeln!(
            c,
            "\tprintf(\"assert!(size_of::<{name}>() == %zu);\\n\", sizeof(struct {name}));\n\
             \tprintf(\"assert!(align_of::<{name}>() == %zu);\\n\", _Alignof(struct {name}));"
        );
        for (rust, in_c) in fields {
            let _ = writeln!(
                c,
                "\tprintf(\"assert!(offset_of!({name}, {rust}) == %zu);\\n\", offsetof(struct {name}, {in_c}));"
            );
        }
    }
    for name in &abi.constants {
        let _ = writeln!(c, "\tprintf(\"assert!({name} as u64 == %llu);\\n\", (unsigned long long){name});");
    }
    c.push_str("\treturn 0;\n}\n");
    c
}

fn rust_file(assertions: &str) -> String {
    let mut file = String::from(
        "//! Sizes, offsets and values of `infiniband/verbs.h`, as the C compiler sees them. Written by\n\
         //! `cargo xtask bindgen`.\n\
         #![cfg(all(target_arch = \"x86_64\", target_os = \"linux\", target_env = \"gnu\"))]\n\n\
         use super::abi::*;\nuse std::mem::offset_of;\n\nconst _: () = {\n",
    );
    for line in assertions.lines() {
        let _ = writeln!(file, "    {line}");
    }
    file.push_str("};\n");
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_fields_and_constants_are_recognised() {
        let abi = parse(
            "pub(crate) const IBV_A: u32 = 1 << 3;\n#[repr(C)]\npub(crate) struct ibv_x {\n    pub(crate) a: u64,\n    \
             pub(crate) b: u32, // C: wr.b\n    pub(crate) pad: u32, // C: -\n}\npub(crate) type T = u8;\n",
        );
        assert_eq!(abi.constants, ["IBV_A"]);
        let fields = vec![("a".to_owned(), "a".to_owned()), ("b".to_owned(), "wr.b".to_owned())];
        assert_eq!(abi.structs, [Struct { name: "ibv_x".to_owned(), fields }]);
        let c = c_program(&abi);
        assert!(c.contains("offsetof(struct ibv_x, wr.b)") && c.contains("(unsigned long long)IBV_A"));
        assert!(!c.contains("pad"));
    }
}
