//! Devices of device-mapper: `dmsetup(8)`, and one call of `linux/dm-ioctl.h`.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::Command;

/// A device over another one; removed when it is dropped.
pub(crate) struct Mapped {
    name: &'static str,
    control: File,
}

impl Mapped {
    /// `table`: as `dmsetup create` takes it.
    pub(crate) fn create(name: &'static str, table: &str) -> Self {
        let control = File::options().read(true).write(true).open("/dev/mapper/control").unwrap();
        dmsetup(&["create", name, "--table", table]);
        Self { name, control }
    }

    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from("/dev/mapper").join(self.name)
    }

    /// From now on nothing ends that is ordered, until it is resumed.
    pub(crate) fn suspend(&self) {
        dmsetup(&["suspend", "--nolockfs", "--noflush", self.name]);
    }

    pub(crate) fn resume(&self) {
        dmsetup(&["resume", self.name]);
    }

    /// From now on it is something else.
    pub(crate) fn becomes(&self, table: &str) {
        dmsetup(&["load", self.name, "--table", table]);
        self.suspend();
        self.resume();
    }

    /// Sends a message to its target. Faster than `dmsetup message`, which has to be started: what happens
    /// at the same time comes soon after.
    pub(crate) fn message(&self, text: &str) {
        let mut call = Call::new(self.name, text);
        // SAFETY: the kernel reads and writes `data_size` bytes at most, which is the size of `call`.
        let result = unsafe { libc::ioctl(self.control.as_raw_fd(), Call::TARGET_MESSAGE, &raw mut call) };
        assert_eq!(result, 0, "{text}: {}", std::io::Error::last_os_error());
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // What waits in it ends.
        self.resume();
        dmsetup(&["remove", "--retry", self.name]);
    }
}

fn dmsetup(words: &[&str]) {
    // There is no udev in the guest, which would make the nodes.
    let output = Command::new("dmsetup").args(words).env("DM_DISABLE_UDEV", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "dmsetup {words:?}: {}: {said}", output.status);
}

/// `struct dm_ioctl`, `struct dm_target_msg` and its text.
#[repr(C)]
struct Call {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event: u32,
    padding: u32,
    device: u64,
    name: [u8; 128],
    uuid: [u8; 129],
    data: [u8; 7],
    sector: u64,
    text: [u8; Self::TEXT_BYTES],
}

impl Call {
    const TEXT_BYTES: usize = 64;
    /// Bytes of `struct dm_ioctl`.
    const HEAD_BYTES: u32 = 312;
    /// `_IOWR(0xfd, 14, struct dm_ioctl)`.
    const TARGET_MESSAGE: libc::c_ulong = (3 << 30) | ((Self::HEAD_BYTES as libc::c_ulong) << 16) | 0xfd0e;

    fn new(name: &str, text: &str) -> Self {
        let mut call = Self {
            version: [4, 0, 0],
            data_size: size_of::<Self>() as u32,
            data_start: Self::HEAD_BYTES,
            target_count: 0,
            open_count: 0,
            flags: 0,
            event: 0,
            padding: 0,
            device: 0,
            name: [0; 128],
            uuid: [0; 129],
            data: [0; 7],
            sector: 0,
            text: [0; Self::TEXT_BYTES],
        };
        assert!(text.len() < Self::TEXT_BYTES, "{text}");
        call.name[..name.len()].copy_from_slice(name.as_bytes());
        call.text[..text.len()].copy_from_slice(text.as_bytes());
        call
    }
}

const _: () = assert!(std::mem::offset_of!(Call, sector) == Call::HEAD_BYTES as usize);
