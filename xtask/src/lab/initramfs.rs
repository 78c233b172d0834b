//! An archive in the "newc" format of cpio(5), which the kernel unpacks: enough for a shell and some modules.

/// The archive under construction.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a directory, whose parent must have been added before.
    pub(super) fn dir(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    /// Adds a file that every user may read and execute.
    pub(super) fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, 0o100_755, content);
    }

    /// Adds `/dev/console`, major 5, minor 1: the kernel opens it for the first process before devtmpfs is
    /// mounted.
    pub(super) fn console(&mut self) {
        self.header("dev/console", 0o020_600, 0, (5, 1));
    }

    /// The finished archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.header(name, mode, content.len(), (0, 0));
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn header(&mut self, name: &str, mode: u32, len: usize, (major, minor): (u32, u32)) {
        self.entries += 1;
        let (len, name_len) = (len as u32, name.len() as u32 + 1);
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize,
        // check.
        let fields = [self.entries, mode, 0, 0, 1, 0, len, 0, 0, major, minor, name_len, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_contents_start_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.dir("bin");
        archive.file("bin/x", b"hello");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let magics: Vec<usize> =
            (0..bytes.len()).step_by(4).filter(|&at| bytes[at..].starts_with(b"070701")).collect();
        assert_eq!(magics.len(), 3, "a directory, a file, the trailer");
        let size = &bytes[magics[1] + 54..magics[1] + 62];
        assert_eq!(size, b"00000005");
        assert!(bytes[magics[1]..].windows(5).any(|window| window == b"hello"));
    }
}
