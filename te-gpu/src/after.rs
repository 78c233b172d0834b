//! A queue that holds work back until an event is over. Sans-IO.

use std::collections::VecDeque;

use te_core::Error;

/// Something that is over at some time: an event of a stream.
pub trait Over {
    /// Whether everything before the event is done. The call returns at once, and changes nothing.
    ///
    /// # Errors
    /// The driver's: the work before the event failed, or it is no event.
    fn is_over(&self) -> Result<bool, Error>;
}

/// Holds items back, each until its event is over: "transfer this *after* that work".
///
/// Nothing is put into a stream for it, so an item that is cancelled is just removed. The contract of a
/// transfer is that its memory is ready when it is submitted; this is how a caller keeps it without waiting.
///
/// ```
/// use te_gpu::{After, Over};
///
/// struct Now;
/// impl Over for Now {
///     fn is_over(&self) -> Result<bool, te_core::Error> {
///         Ok(true)
///     }
/// }
///
/// let mut queue = After::new();
/// queue.hold(Now, "a slice");
/// assert_eq!(queue.next_ready(), Some(("a slice", Ok(()))));
/// assert_eq!(queue.next_ready(), None);
/// ```
#[derive(Debug)]
pub struct After<E, T> {
    held: VecDeque<(E, T)>,
}

impl<E, T> Default for After<E, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E, T> After<E, T> {
    /// An empty queue.
    #[must_use]
    pub const fn new() -> Self {
        Self { held: VecDeque::new() }
    }

    /// Items that are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether no item is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

impl<E: Over, T> After<E, T> {
    /// Holds `item` back until `event` is over.
    pub fn hold(&mut self, event: E, item: T) {
        self.held.push_back((event, item));
    }

    /// The item that has been held longest of those whose event is over, and the event's error if the work
    /// before it failed. Each event is asked once at most; none blocks.
    pub fn next_ready(&mut self) -> Option<(T, Result<(), Error>)> {
        for at in 0..self.held.len() {
            let result = match self.held[at].0.is_over() {
                Ok(false) => continue,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            return self.held.remove(at).map(|(_, item)| (item, result));
        }
        None
    }

    /// Removes the first item for which `is_it` returns true.
    pub fn cancel(&mut self, mut is_it: impl FnMut(&T) -> bool) -> Option<T> {
        let at = self.held.iter().position(|(_, item)| is_it(item))?;
        self.held.remove(at).map(|(_, item)| item)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use te_core::ErrorKind;

    use super::*;

    type Answer = Rc<Cell<Result<bool, Error>>>;

    impl Over for Answer {
        fn is_over(&self) -> Result<bool, Error> {
            self.get()
        }
    }

    fn event(answer: Result<bool, Error>) -> Answer {
        Rc::new(Cell::new(answer))
    }

    #[test]
    fn an_item_comes_out_when_its_event_is_over_and_not_before() {
        let mut queue = After::new();
        let (first, second) = (event(Ok(false)), event(Ok(false)));
        queue.hold(Rc::clone(&first), 1);
        queue.hold(Rc::clone(&second), 2);
        assert_eq!((queue.next_ready(), queue.len()), (None, 2));
        second.set(Ok(true));
        assert_eq!((queue.next_ready(), queue.next_ready()), (Some((2, Ok(()))), None));
        let failed = ErrorKind::Rail.into();
        first.set(Err(failed));
        assert_eq!((queue.next_ready(), queue.is_empty()), (Some((1, Err(failed))), true));
    }

    #[test]
    fn a_cancelled_item_never_comes_out() {
        let mut queue = After::new();
        [1, 2, 3].into_iter().for_each(|item| queue.hold(event(Ok(true)), item));
        assert_eq!((queue.cancel(|item| *item == 2), queue.cancel(|item| *item == 2)), (Some(2), None));
        assert_eq!(
            (queue.next_ready(), queue.next_ready(), queue.next_ready()),
            (Some((1, Ok(()))), Some((3, Ok(()))), None)
        );
    }
}
