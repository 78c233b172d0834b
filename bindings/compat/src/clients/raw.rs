//! Sources and sinks of the store from raw addresses.
#![allow(unsafe_code, reason = "raw addresses are the currency of the interfaces that this crate serves")]

use store_client::{BufferRange, PARTS_MAX, Sink, Source};

use super::Worker;

/// Memory of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub addr: u64,
    /// Length, bytes.
    pub len: u64,
}

/// Memory of one item, as a client takes it.
pub enum Place {
    /// All of it lies in buffers that are registered with the client: no byte is copied.
    Registered(Vec<BufferRange>),
    /// It is plain memory.
    Plain(Vec<Span>),
}

/// Total length of the spans, bytes; `None` beyond the address space, or for memory at address 0.
pub fn total(spans: &[Span]) -> Option<u64> {
    spans.iter().try_fold(0_u64, |total, span| {
        let is_memory = span.len == 0 || span.addr != 0 && span.addr.checked_add(span.len).is_some();
        total.checked_add(span.len).filter(|total| is_memory && isize::try_from(*total).is_ok())
    })
}

/// Whether two of the spans have a byte in common.
pub fn overlap(spans: impl Iterator<Item = Span>) -> bool {
    let mut spans: Vec<Span> = spans.filter(|span| span.len > 0).collect();
    spans.sort_unstable_by_key(|span| span.addr);
    spans.windows(2).any(|pair| pair[1].addr - pair[0].addr < pair[0].len)
}

impl Place {
    /// Where the memory is for this client. Spans that are adjacent in memory become one.
    pub fn of(worker: &Worker, spans: &[Span]) -> Self {
        let joined = joined(spans);
        let range = |span: &Span| {
            let (region, offset) = worker.find(span.addr, span.len)?;
            Some(BufferRange { region, offset, len: span.len })
        };
        match joined.iter().map(range).collect() {
            Some(ranges) => Self::Registered(ranges),
            None => Self::Plain(joined),
        }
    }

    /// Whether the client takes as many parts at once.
    pub fn fits(&self) -> bool {
        match self {
            Self::Registered(ranges) => ranges.len() <= PARTS_MAX,
            Self::Plain(spans) => spans.len() <= PARTS_MAX,
        }
    }

    /// The bytes of plain memory.
    ///
    /// # Safety
    /// The memory is mapped and readable during `'a`, and nothing writes it.
    pub unsafe fn slices<'a>(&self) -> Vec<&'a [u8]> {
        match self {
            Self::Registered(_) => Vec::new(),
            // SAFETY: the caller's promise; `total` has checked addresses and lengths.
            Self::Plain(spans) => spans
                .iter()
                .map(|span| unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.len as usize) })
                .collect(),
        }
    }

    /// As [`slices`](Self::slices), to be written.
    ///
    /// # Safety
    /// The memory is mapped and writable during `'a`, and nothing else accesses it.
    pub unsafe fn slices_mut<'a>(&self) -> Vec<&'a mut [u8]> {
        match self {
            Self::Registered(_) => Vec::new(),
            // SAFETY: the caller's promise; `total` has checked addresses and lengths.
            Self::Plain(spans) => spans
                .iter()
                .map(|span| unsafe {
                    std::slice::from_raw_parts_mut(span.addr as *mut u8, span.len as usize)
                })
                .collect(),
        }
    }

    /// The source of a put. `slices` are those of this place.
    pub fn source<'a>(&'a self, slices: &'a [&'a [u8]]) -> Source<'a> {
        match (self, slices) {
            (Self::Registered(ranges), _) => match ranges.as_slice() {
                [range] => Source::Region(*range),
                ranges => Source::Regions(ranges),
            },
            (Self::Plain(_), [bytes]) => Source::Bytes(bytes),
            (Self::Plain(_), slices) => Source::Slices(slices),
        }
    }

    /// The sink of a get. `slices` are those of this place.
    pub fn sink<'a>(&'a self, slices: &'a mut [&'a mut [u8]]) -> Sink<'a> {
        match self {
            Self::Registered(ranges) => match ranges.as_slice() {
                [range] => Sink::Region(*range),
                ranges => Sink::Regions(ranges),
            },
            Self::Plain(_) => match slices {
                [bytes] => Sink::Bytes(bytes),
                slices => Sink::Slices(slices),
            },
        }
    }
}

/// The spans without empty ones; those that are adjacent in memory are one.
pub(super) fn joined(spans: &[Span]) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans.iter().filter(|span| span.len > 0) {
        match joined.last_mut() {
            Some(last) if last.addr + last.len == span.addr => last.len += span.len,
            _ => joined.push(*span),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(addr: u64, len: u64) -> Span {
        Span { addr, len }
    }

    #[test]
    fn adjacent_spans_become_one_and_empty_ones_vanish() {
        let spans = [span(10, 5), span(15, 5), span(0, 0), span(20, 1), span(30, 1), span(29, 1)];
        assert_eq!(joined(&spans), [span(10, 11), span(30, 1), span(29, 1)]);
        assert_eq!(joined(&[]), []);
    }

    #[test]
    fn spans_overlap_when_they_have_a_byte_in_common() {
        let overlap = |spans: &[Span]| overlap(spans.iter().copied());
        assert!(!overlap(&[]) && !overlap(&[span(10, 5)]));
        assert!(!overlap(&[span(15, 5), span(10, 5), span(12, 0)]));
        assert!(overlap(&[span(15, 5), span(10, 6)]));
        assert!(overlap(&[span(10, 5), span(10, 5)]));
        assert!(overlap(&[span(10, u64::MAX - 10), span(1 << 40, 1)]));
    }

    #[test]
    fn lengths_that_cannot_be_memory_are_refused() {
        assert_eq!(total(&[span(10, 5), span(0, 0), span(7, 1)]), Some(6));
        for bad in [
            vec![span(0, 1)],
            vec![span(u64::MAX, 2)],
            vec![span(10, u64::MAX)],
            vec![span(10, u64::MAX / 2), span(10, u64::MAX / 2), span(10, 9)],
        ] {
            assert_eq!(total(&bad), None, "{bad:?}");
        }
    }
}
