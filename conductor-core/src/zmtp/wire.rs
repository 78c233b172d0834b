//! The bytes of ZMTP: greeting, frames, commands. No state.

use alloc::vec::Vec;

use super::{Error, Kind};

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 64;
pub(super) const MORE: u8 = 1;
pub(super) const LONG: u8 = 2;
pub(super) const COMMAND: u8 = 4;
/// Bytes of the longest head of a frame: flags and a length of 64 bits.
pub(super) const HEAD_BYTES_MAX: usize = 9;
/// Bytes of the context of a PING, which the PONG returns (RFC 37).
pub(super) const CONTEXT_BYTES_MAX: usize = 16;
/// Bytes of an identity (RFC 23).
pub(super) const IDENTITY_BYTES_MAX: usize = 255;
const MECHANISM: core::ops::Range<usize> = 12..32;

/// The greeting: signature, version 3.1, mechanism NULL, no server role (RFC 37).
#[must_use]
pub const fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[8] = 1;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[11] = 1;
    bytes[12] = b'N';
    bytes[13] = b'U';
    bytes[14] = b'L';
    bytes[15] = b'L';
    bytes
}

/// The minor version of a greeting that has arrived so far; `None` while more bytes are needed. A greeting
/// that cannot become valid is refused at the first byte that shows it.
///
/// # Errors
/// [`Error::NotZmtp`], [`Error::Version`], [`Error::Mechanism`].
pub(super) fn parse_greeting(bytes: &[u8]) -> Result<Option<u8>, Error> {
    match (bytes.first(), bytes.get(9)) {
        (Some(0xff) | None, Some(0x7f) | None) => {}
        _ => return Err(Error::NotZmtp),
    }
    match bytes.get(10) {
        Some(major) if *major < 3 => return Err(Error::Version { major: *major }),
        _ => {}
    }
    let Some(greeting) = bytes.first_chunk::<GREETING_BYTES>() else { return Ok(None) };
    let mut mechanism = [0; 20];
    mechanism.copy_from_slice(&greeting[MECHANISM]);
    if mechanism[..4] != *b"NULL" || mechanism[4..].iter().any(|byte| *byte != 0) {
        return Err(Error::Mechanism(mechanism));
    }
    // A later major version has to speak ours (RFC 23), so only the minor version of 3 counts.
    Ok(Some(if greeting[10] > 3 { 1 } else { greeting[11] }))
}

/// The head of a frame: flags, bytes of the head, bytes of the body. `None` while more bytes are needed.
///
/// # Errors
/// [`Error::Flags`].
pub(super) fn parse_head(bytes: &[u8]) -> Result<Option<(u8, usize, u64)>, Error> {
    let Some(&flags) = bytes.first() else { return Ok(None) };
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(Error::Flags(flags));
    }
    Ok(if flags & LONG == 0 {
        bytes.get(1).map(|len| (flags, 2, u64::from(*len)))
    } else {
        let len = bytes.get(1..HEAD_BYTES_MAX).and_then(<[u8]>::first_chunk::<8>);
        len.map(|len| (flags, HEAD_BYTES_MAX, u64::from_be_bytes(*len)))
    })
}

/// Appends the head of a frame with a body of `len` bytes.
pub(super) fn put_head(out: &mut Vec<u8>, flags: u8, len: usize) {
    match u8::try_from(len) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(len as u64).to_be_bytes());
        }
    }
}

/// Appends the frames of a message. A message without parts has no frames.
pub fn put_message(out: &mut Vec<u8>, parts: &[&[u8]]) {
    for (i, part) in parts.iter().enumerate() {
        put_head(out, if i + 1 == parts.len() { 0 } else { MORE }, part.len());
        out.extend_from_slice(part);
    }
}

/// Bytes that [`put_message`] appends.
pub(super) fn message_bytes(parts: &[&[u8]]) -> usize {
    parts.iter().map(|part| part.len() + if part.len() < 256 { 2 } else { HEAD_BYTES_MAX }).sum()
}

/// Appends a command, whose data are `data` one after another.
pub(super) fn put_command(out: &mut Vec<u8>, name: &str, data: &[&[u8]]) {
    let len = 1 + name.len() + data.iter().map(|data| data.len()).sum::<usize>();
    put_head(out, COMMAND, len);
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    data.iter().for_each(|data| out.extend_from_slice(data));
}

/// Appends READY of a socket; `identity` has at most [`IDENTITY_BYTES_MAX`] bytes.
pub(super) fn put_ready(out: &mut Vec<u8>, kind: Kind, identity: &[u8]) {
    let name = kind.name().as_bytes();
    let name_len = (name.len() as u32).to_be_bytes();
    let identity_len = (identity.len() as u32).to_be_bytes();
    let socket_type: [&[u8]; 4] = [b"\x0b", b"Socket-Type", &name_len, name];
    if kind.has_identity() {
        let [a, b, c, d] = socket_type;
        put_command(out, "READY", &[a, b, c, d, b"\x08", b"Identity", &identity_len, identity]);
    } else {
        put_command(out, "READY", &socket_type);
    }
}

/// The name of a command, and its data.
///
/// # Errors
/// [`Error::Command`].
pub(super) fn parse_command(body: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let (&len, rest) = body.split_first().ok_or(Error::Command("it has no name"))?;
    if len == 0 || usize::from(len) > rest.len() {
        return Err(Error::Command("its name is empty or longer than the command"));
    }
    Ok(rest.split_at(usize::from(len)))
}

/// Socket type and identity of a READY. Other properties are ignored.
///
/// # Errors
/// [`Error::Command`].
pub(super) fn parse_ready(mut data: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    const CUT: Error = Error::Command("a property of READY is cut off");
    let (mut socket_type, mut identity): (Option<&[u8]>, &[u8]) = (None, &[]);
    while let Some((&len, rest)) = data.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(len)).ok_or(CUT)?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or(CUT)?;
        let len = usize::try_from(u32::from_be_bytes(*len)).map_err(|_| CUT)?;
        let (value, rest) = rest.split_at_checked(len).ok_or(CUT)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = Some(value);
        } else if name.eq_ignore_ascii_case(b"Identity") {
            identity = value;
        }
        data = rest;
    }
    if identity.len() > IDENTITY_BYTES_MAX {
        return Err(Error::Command("the identity in READY has more than 255 bytes"));
    }
    Ok((socket_type.ok_or(Error::Command("READY does not name a socket type"))?, identity))
}
