//! A ring of tokens that never grows.

use te_core::Token;

/// First in, first out, at most as many as it was made for.
#[derive(Debug)]
pub struct TokenRing {
    tokens: Box<[Token]>,
    first: usize,
    len: usize,
}

impl TokenRing {
    /// Room for `capacity`, which is rounded up to a power of two.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { tokens: vec![Token(0); capacity.next_power_of_two()].into(), first: 0, len: 0 }
    }

    /// Adds one; `false` when there is no room.
    pub fn push(&mut self, token: Token) -> bool {
        if self.len == self.tokens.len() {
            return false;
        }
        let at = (self.first + self.len) & (self.tokens.len() - 1);
        self.tokens[at] = token;
        self.len += 1;
        true
    }

    /// Takes the oldest.
    pub fn pop(&mut self) -> Option<Token> {
        if self.len == 0 {
            return None;
        }
        let token = self.tokens[self.first];
        self.first = (self.first + 1) & (self.tokens.len() - 1);
        self.len -= 1;
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_gives_back_in_order_and_refuses_when_full() {
        let mut ring = TokenRing::new(3);
        assert!((0..4).all(|index| ring.push(Token(index))));
        assert!(!ring.push(Token(4)));
        assert_eq!(ring.pop(), Some(Token(0)));
        assert!(ring.push(Token(4)));
        assert_eq!(std::iter::from_fn(|| ring.pop()).map(|token| token.0).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }
}
