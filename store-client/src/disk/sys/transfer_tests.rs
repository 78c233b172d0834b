//! What is given to the kernel, and what is copied.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use super::*;
use crate::disk::sys::Lent;

const ALIGNMENT: Alignment = Alignment { memory: 512, block: 512 };

fn lent(bytes: &[u8]) -> Arc<Lent> {
    let mut buffer = AlignedBuffer::new(bytes.len());
    buffer.copy_from_slice(bytes);
    Arc::new(Lent::buffer(buffer))
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn write(parts: Vec<Part>) -> Transfer {
    Transfer::new(Io { op: 1, offset: 512, work: IoWork::Write(parts) }, ALIGNMENT)
}

fn bytes_of(transfer: &Transfer) -> Vec<u8> {
    let file = file_of(&[]);
    assert_eq!(transfer.run(&file).unwrap(), transfer.bytes);
    let mut bytes = vec![0; transfer.bytes as usize];
    file.read_exact_at(&mut bytes, 512).unwrap();
    bytes
}

#[test]
fn whole_blocks_are_written_from_where_they_are_and_the_rest_is_gathered() {
    let object: Vec<u8> = (0..5_000u32).map(|at| at as u8 | 1).collect();
    let header: Arc<[u8]> = vec![9; 1_024].into();
    let memory = lent(&object);
    let part = Part::Lent { memory: Arc::clone(&memory), offset: 0, bytes: 5_000 };
    let transfer = write(vec![Part::Bytes(header, 0), part, Part::Zeros(120)]);
    // Header, nine blocks in place, tail and padding.
    let lengths: Vec<usize> = transfer.pieces.iter().map(|piece| piece.iov_len).collect();
    assert_eq!(lengths, [1_024, 4_608, 512]);
    assert_eq!(transfer.pieces[1].iov_base.addr(), memory.span().as_ptr().addr(), "not copied");
    let bytes = bytes_of(&transfer);
    assert!(bytes[..1_024] == [9; 1_024] && bytes[1_024..6_024] == object && bytes[6_024..] == [0; 120]);
    // A share of the memory is held as long as the transfer exists.
    assert_eq!(Arc::strong_count(&memory), 2);
    let completion = transfer.end(Ok(6_144));
    assert_eq!((completion.op, completion.result, Arc::strong_count(&memory)), (1, Ok(6_144), 1));
}

#[test]
fn memory_off_the_alignment_is_copied_as_a_whole() {
    let object = vec![7; 3_000];
    let memory = lent(&object);
    let transfer = write(vec![Part::Lent { memory, offset: 8, bytes: 2_048 }]);
    assert_eq!(transfer.pieces.len(), 1);
    assert_eq!(bytes_of(&transfer), vec![7; 2_048]);
}

#[test]
fn more_pieces_than_one_call_takes_are_written_by_several() {
    let memory = lent(&vec![5; 600]);
    let parts = (0..1_500)
        .flat_map(|_| [Part::Lent { memory: Arc::clone(&memory), offset: 0, bytes: 600 }, Part::Zeros(424)]);
    let transfer = write(parts.collect());
    assert_eq!(transfer.pieces.len(), 3_000, "in place and gathered by turns");
    let bytes = bytes_of(&transfer);
    assert!(bytes.chunks(1_024).all(|image| image[..600] == [5; 600] && image[600..] == [0; 424]));
}

#[test]
fn a_read_that_ends_early_reports_what_it_has_and_touches_nothing_else() {
    let file = file_of(&[3; 1_500]);
    for (offset, direct) in [(0, true), (1, false)] {
        let memory = lent(&[8; 4_096]);
        let into = Destination::Lent { memory: Arc::clone(&memory), offset, bytes: 2_048 };
        let transfer = Transfer::new(Io { op: 2, offset: 512, work: IoWork::Read(into) }, ALIGNMENT);
        assert_eq!(transfer.bounce.is_none(), direct);
        let result = transfer.run(&file);
        assert_eq!(result.as_ref().ok(), Some(&988));
        let completion = transfer.end(result);
        assert_eq!(completion.result, Ok(988));
        let bytes = Arc::into_inner(memory).unwrap().into_buffer().unwrap();
        let (at, end) = (offset as usize, offset as usize + 988);
        assert!(bytes[at..end] == [3; 988] && bytes[..at].iter().chain(&bytes[end..]).all(|byte| *byte == 8));
    }
}

#[test]
fn the_file_that_cannot_be_written_is_an_error_with_its_number() {
    let path = tempfile::NamedTempFile::new().unwrap();
    let file = File::open(path.path()).unwrap();
    let transfer = write(vec![Part::Zeros(512)]);
    let result = transfer.run(&file);
    let error = transfer.end(result).result.unwrap_err();
    assert_eq!((error.kind, error.errno), (store_core::disk::IoError::Device, libc::EBADF));
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let transfer = write(vec![Part::Zeros(512)]);
    let result = transfer.run(&full);
    let error = transfer.end(result).result.unwrap_err();
    assert_eq!((error.kind, error.errno), (store_core::disk::IoError::NoSpace, libc::ENOSPC));
}
