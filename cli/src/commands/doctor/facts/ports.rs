//! TCP ports: whether they are free, and which process uses them.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

use crate::commands::doctor::source::Source;

/// A port to check.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    /// Port number.
    pub(crate) number: u16,
    /// Why it is not free.
    pub(crate) taken: Option<String>,
    /// Name and id of the listening process, if visible.
    pub(crate) holder: Option<(String, u32)>,
}

/// Looks for listeners and, on a running machine, tries to bind.
pub(super) fn gather(source: &Source, numbers: &[u16]) -> Vec<Port> {
    let listeners = if numbers.is_empty() { Vec::new() } else { listeners(source) };
    numbers
        .iter()
        .map(|&number| {
            let inode = listeners.iter().find(|(port, _)| *port == number).map(|(_, inode)| inode);
            let tried = if source.is_copy() { Ok(()) } else { try_bind(number) };
            let taken = match (inode, tried) {
                (Some(_), _) => Some("a process listens on it".to_owned()),
                (None, Err(error)) => Some(error.to_string()),
                (None, Ok(())) => None,
            };
            Port { number, taken, holder: inode.and_then(|inode| holder(source, inode)) }
        })
        .collect()
}

fn try_bind(port: u16) -> io::Result<()> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map(drop)
}

/// Ports with a listener, and the inode of its socket.
fn listeners(source: &Source) -> Vec<(u16, String)> {
    const LISTEN: &str = "0A";
    ["proc/net/tcp", "proc/net/tcp6"]
        .iter()
        .filter_map(|path| source.text(path))
        .flat_map(|text| {
            text.lines()
                .filter_map(|line| {
                    let words: Vec<&str> = line.split_whitespace().take(10).collect();
                    let [_, local, _, LISTEN, .., inode] = words[..] else { return None };
                    let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
                    Some((port, inode.to_owned()))
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The process that has the socket. Processes of other users do not show theirs.
fn holder(source: &Source, inode: &str) -> Option<(String, u32)> {
    let wanted = format!("socket:[{inode}]");
    source.entries("proc").iter().filter_map(|name| name.parse::<u32>().ok()).find_map(|pid| {
        let fds = format!("proc/{pid}/fd");
        source
            .entries(&fds)
            .iter()
            .any(|fd| source.link(&format!("{fds}/{fd}")).as_deref() == Some(wanted.as_str()))
            .then(|| Some((source.line(&format!("proc/{pid}/comm"))?, pid)))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_not_free_and_its_holder_is_known() {
        let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let number = holder.local_addr().unwrap().port();
        let port = &gather(&Source::this_machine(), &[number])[0];
        assert!(port.taken.is_some());
        assert_eq!(port.holder.as_ref().map(|(_, pid)| *pid), Some(std::process::id()));
    }
}
