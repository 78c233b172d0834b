//! Mooncake's commands, under their names and with their flags.
//!
//! ```text
//!   mooncake_master --rpc_port=50051 …   or   snowskin mooncake-master --rpc_port=50051 …
//!          │
//!   gflags: names and values ──▶ one translator per command ──▶ snowskin master --listen 0.0.0.0:50051 …
//!          └── flags without a meaning here: a warning each, never an exit
//! ```
//!
//! A command is recognised by the name of the program, for links to it, or by its first argument. It becomes
//! the arguments of a command of this program, which runs in the same process: its number and its signals
//! stay. The commands are not listed in `--help`: new users have `snowskin master` and `snowskin node`.

mod bench;
mod client;
mod file;
mod gflags;
mod master;
mod metadata;

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::path::Path;

use gflags::{Flag, Values};

use crate::exit::{Exit, Failure};
use crate::{Outcome, fail, output};

/// One of Mooncake's commands.
pub(crate) struct Command {
    /// Its name there, which is also the name of the program.
    name: &'static str,
    /// The first argument that stands for it.
    argument: &'static str,
    about: &'static str,
    flags: &'static [Flag],
    /// Makes the arguments of a command of this program of the flags that were given.
    translate: fn(&Values) -> Result<Native, Failure>,
}

/// What a command becomes.
#[derive(Debug, PartialEq)]
enum Native {
    /// These arguments of this program.
    Arguments(Vec<String>),
    /// The metadata server, which is no command of this program.
    Metadata(SocketAddr),
}

const COMMANDS: [Command; 4] = [
    Command {
        name: "mooncake_master",
        argument: "mooncake-master",
        about: "Run a master; see `snowskin master`",
        flags: master::FLAGS,
        translate: master::translate,
    },
    Command {
        name: "mooncake_client",
        argument: "mooncake-client",
        about: "Run a node that also serves processes of this machine; see `snowskin node`",
        flags: client::FLAGS,
        translate: client::translate,
    },
    Command {
        name: "mooncake_http_metadata_server",
        argument: "mooncake-http-metadata-server",
        about: "Run a metadata server for Mooncake's engines",
        flags: metadata::FLAGS,
        translate: metadata::translate,
    },
    Command {
        name: "transfer_engine_bench",
        argument: "mooncake-transfer-engine-bench",
        about: "Measure transfers between two engines; see `snowskin bench transfer`",
        flags: bench::FLAGS,
        translate: bench::translate,
    },
];

/// The command of Mooncake that the arguments of this process name, and the arguments that follow.
pub(crate) fn named(args: &[OsString]) -> Option<(&'static Command, &[OsString])> {
    let program = args.first().and_then(|path| Path::new(path).file_name());
    if let Some(command) = COMMANDS.iter().find(|command| program.is_some_and(|name| name == command.name)) {
        return Some((command, &args[1..]));
    }
    let first = args.get(1)?;
    let command = COMMANDS.iter().find(|command| *first == command.argument)?;
    Some((command, &args[2..]))
}

/// What is left to do after the flags were read.
pub(crate) enum Next {
    /// Run this program with these arguments; the first is its name.
    Run(Vec<String>),
    /// The command has ended.
    Ended(Outcome),
}

/// Reads the flags of a command and prints the warnings.
pub(crate) fn start(command: &'static Command, args: &[OsString]) -> Next {
    let args: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    if args.iter().any(|arg| matches!(&**arg, "--help" | "-help" | "--helpfull" | "--helpshort" | "-h")) {
        return Next::Ended(output::print(&help(command)).map(|()| Exit::Ok));
    }
    let (native, warnings) = read(command, args);
    for warning in warnings {
        eprintln!("{}: warning: {warning}", command.name);
    }
    match native {
        Ok(Native::Arguments(native)) => {
            Next::Run(std::iter::once("snowskin".to_owned()).chain(native).collect())
        }
        Ok(Native::Metadata(addr)) => Next::Ended(metadata::run(addr)),
        Err(failure) => Next::Ended(fail(failure)),
    }
}

fn read(command: &Command, args: Vec<String>) -> (Result<Native, Failure>, Vec<String>) {
    let (mut values, mut warnings) = gflags::parse(command.flags, args);
    if let Some(path) = values.text("config_path").map(str::to_owned) {
        match file::read(Path::new(&path)) {
            Ok(settings) => warnings.extend(values.add_below(command.flags, settings, &path)),
            Err(what) => {
                let failure = Failure::usage(format!("{}: --config_path: {path}: {what}", command.name));
                return (Err(failure), warnings);
            }
        }
    }
    warnings.extend(values.without_effect(command.flags));
    ((command.translate)(&values), warnings)
}

fn help(command: &Command) -> String {
    use std::fmt::Write as _;
    let mut text = format!(
        "{}\n\nUsage: {} [--FLAG=VALUE | --FLAG VALUE | --noFLAG]...\n\nFlags with a meaning here:\n",
        command.about, command.name
    );
    for flag in command.flags.iter().filter(|flag| flag.is_used()) {
        let _ = writeln!(text, "  --{}", flag.name);
    }
    text += "\nOther flags of Mooncake are accepted. Those that ask for something that this program lacks get a \
             warning.\n";
    text
}

/// `host:port` as a socket address; a host name is looked up, with a preference for IPv4.
fn address(host: &str, port: u16) -> Result<SocketAddr, Failure> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let found: Vec<SocketAddr> = (bare, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    // `localhost` has both kinds of address, and most users of these commands mean the older one.
    let best = found.iter().find(|addr| addr.is_ipv4()).or(found.first());
    best.copied().ok_or_else(|| {
        Failure::usage(format!(
            "{host:?} is no address of this machine: write an IP address, such as 0.0.0.0"
        ))
    })
}

/// The value of a flag, parsed; or `default`. `need` says what it may be.
fn parsed<T>(
    values: &Values,
    name: &str,
    default: T,
    need: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, Failure> {
    match values.text(name) {
        None => Ok(default),
        Some(text) => {
            parse(text.trim()).ok_or_else(|| Failure::usage(format!("--{name}={text}: write {need}")))
        }
    }
}

/// A port.
fn port(values: &Values, name: &str, default: u16) -> Result<u16, Failure> {
    parsed(values, name, default, "a port, 0 to 65535", |text| text.parse().ok())
}

/// A size in bytes, as Mooncake writes it: units are powers of 1024, and a fraction is allowed.
fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << unit);
    }
    let bytes = number.parse::<f64>().ok()? * f64::from(unit).exp2();
    (0.0..=(1_u64 << 53) as f64).contains(&bytes).then_some(bytes as u64)
}

/// A time in milliseconds; a number without a unit is in milliseconds.
fn millis(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim() {
        "" | "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// The address of this machine that the system uses towards `peer`; nothing is sent.
fn towards(peer: &str) -> IpAddr {
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let Some(peer) = peer.to_socket_addrs().ok().and_then(|mut addrs| addrs.next()) else {
        return loopback;
    };
    let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let found = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(peer)?;
        socket.local_addr()
    });
    found.map_or(loopback, |addr| addr.ip())
}

#[cfg(test)]
mod tests;
