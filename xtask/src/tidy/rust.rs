//! Just enough of Rust's syntax for the rules: which part of a line is code and which is a comment, and where
//! functions and inline modules begin and end. It knows no grammar; rustfmt has parsed the files before.

/// One line, divided.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Line {
    /// The code, without the contents of strings and characters.
    pub(super) code: String,
    /// The comment, with its slashes.
    pub(super) comment: String,
}

/// What the text is in the middle of.
enum State {
    Code,
    /// Comments `/* */` nest: how deep.
    Comment(u32),
    Text,
    /// A raw string that ends with a quote and this many `#`.
    RawText(usize),
}

/// A function with a body, or a module in its parent's file.
#[derive(Debug, PartialEq)]
pub(super) struct Block {
    /// `fn` or `mod`.
    pub(super) keyword: &'static str,
    pub(super) name: String,
    /// Lines, from 1 on, both included.
    pub(super) first: usize,
    pub(super) last: usize,
}

impl Block {
    pub(super) fn lines(&self) -> usize {
        self.last - self.first + 1
    }

    pub(super) fn contains(&self, line: usize) -> bool {
        (self.first..=self.last).contains(&line)
    }
}

/// Divides every line of a file.
pub(super) fn lines(text: &str) -> Vec<Line> {
    let mut state = State::Code;
    text.lines().map(|line| divide(line, &mut state)).collect()
}

fn divide(text: &str, state: &mut State) -> Line {
    let chars: Vec<char> = text.chars().collect();
    let mut line = Line::default();
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        at += match *state {
            State::Code => code(rest, &mut line, state),
            State::Comment(depth) => {
                let (taken, next) = match *rest {
                    ['/', '*', ..] => (2, State::Comment(depth + 1)),
                    ['*', '/', ..] if depth == 1 => (2, State::Code),
                    ['*', '/', ..] => (2, State::Comment(depth - 1)),
                    _ => (1, State::Comment(depth)),
                };
                line.comment.extend(&rest[..taken]);
                *state = next;
                taken
            }
            State::Text => match *rest {
                ['\\', _, ..] => 2,
                ['"', ..] => {
                    line.code.push('"');
                    *state = State::Code;
                    1
                }
                _ => 1,
            },
            State::RawText(hashes) => {
                let ends = rest[0] == '"' && rest[1..].iter().take_while(|c| **c == '#').count() >= hashes;
                if ends {
                    line.code.push('"');
                    *state = State::Code;
                    1 + hashes
                } else {
                    1
                }
            }
        };
    }
    line
}

/// Takes in what code begins with; returns how many characters that were.
fn code(rest: &[char], line: &mut Line, state: &mut State) -> usize {
    let continues_a_name = line.code.chars().next_back().is_some_and(is_of_name);
    match *rest {
        ['/', '/', ..] => {
            line.comment.extend(rest);
            rest.len()
        }
        ['/', '*', ..] => {
            line.comment.push_str("/*");
            *state = State::Comment(1);
            2
        }
        ['"', ..] => {
            line.code.push('"');
            *state = State::Text;
            1
        }
        ['r', ..] | ['b' | 'c', 'r', ..] if !continues_a_name => {
            let prefix = if rest[0] == 'r' { 1 } else { 2 };
            let hashes = rest[prefix..].iter().take_while(|c| **c == '#').count();
            if rest.get(prefix + hashes) == Some(&'"') {
                line.code.push('"');
                *state = State::RawText(hashes);
                prefix + hashes + 1
            } else {
                line.code.push(rest[0]);
                1
            }
        }
        // A character, or a lifetime.
        ['\'', '\\', _, ref more @ ..] => {
            line.code.push_str("''");
            more.iter().position(|c| *c == '\'').map_or(rest.len(), |end| 3 + end + 1)
        }
        ['\'', _, '\'', ..] => {
            line.code.push_str("''");
            3
        }
        _ => {
            line.code.push(rest[0]);
            1
        }
    }
}

pub(super) fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The names, keywords and single other characters of a line's code.
fn tokens(code: &str) -> impl Iterator<Item = &str> {
    let mut rest = code;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let len = match rest.find(|c| !is_of_name(c)) {
            Some(0) => first.len_utf8(),
            Some(len) => len,
            None => rest.len(),
        };
        let (token, after) = rest.split_at(len);
        rest = after;
        Some(token)
    })
}

/// Whether the code of a line has this name or keyword.
pub(super) fn has_token(code: &str, name: &str) -> bool {
    code.contains(name) && tokens(code).any(|token| token == name)
}

/// Functions and inline modules, in the order in which they end.
pub(super) fn blocks(lines: &[Line]) -> Vec<Block> {
    /// A declaration whose body has not begun.
    struct Declared {
        block: Block,
        /// Open parentheses and brackets.
        nest: usize,
    }
    let mut declared: Option<Declared> = None;
    let mut keyword = None;
    let mut depth = 0;
    let mut open: Vec<(usize, Block)> = Vec::new();
    let mut closed = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let number = index + 1;
        for token in tokens(&line.code) {
            let is_name = token.starts_with(|c: char| is_of_name(c) && !c.is_ascii_digit());
            if let Some(keyword) = keyword.take().filter(|_| is_name) {
                let block = Block { keyword, name: token.to_owned(), first: number, last: number };
                declared = Some(Declared { block, nest: 0 });
                continue;
            }
            match (token, &mut declared) {
                ("fn", _) => keyword = Some("fn"),
                ("mod", _) => keyword = Some("mod"),
                ("(" | "[", Some(declared)) => declared.nest += 1,
                (")" | "]", Some(declared)) => declared.nest = declared.nest.saturating_sub(1),
                (";", Some(Declared { nest: 0, .. })) => declared = None,
                ("{", _) => {
                    if let Some(Declared { block, .. }) = declared.take_if(|declared| declared.nest == 0) {
                        open.push((depth, block));
                    }
                    depth += 1;
                }
                ("}", _) => {
                    depth = depth.saturating_sub(1);
                    if let Some((_, mut block)) = open.pop_if(|(at, _)| *at == depth) {
                        block.last = number;
                        closed.push(block);
                    }
                }
                _ => {}
            }
        }
    }
    closed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code_of(text: &str) -> Vec<String> {
        lines(text).into_iter().map(|line| line.code).collect()
    }

    #[test]
    fn strings_characters_and_comments_are_not_code() {
        assert_eq!(code_of(r#"let a = "} // {"; // more"#), [r#"let a = ""; "#]);
        assert_eq!(
            code_of(r"let b = ('{', '\'', '\u{7d}', 'a: &'static str);"),
            ["let b = ('', '', '', 'a: &'static str);"]
        );
        assert_eq!(code_of("a /* { /* b */ } */ c"), ["a  c"]);
        assert_eq!(code_of("x = br##\"{\"#\n}\"##; y"), ["x = \"", "\"; y"]);
        assert_eq!(code_of("s = \"a \\\n  { \\\" b\"; t"), ["s = \"", "\"; t"]);
        assert_eq!(lines("a(); // why")[0].comment, "// why");
    }

    #[test]
    fn raw_names_are_not_raw_strings() {
        assert_eq!(code_of("r#type = for_r"), ["r#type = for_r"]);
    }

    #[test]
    fn functions_and_modules_are_found_with_their_lines() {
        let text = "\
mod a;
fn declared(x: [u8; 4]);
pub(crate) fn one(
    f: fn(u8) -> [u8; 2],
) -> u8 {
    fn inner() {}
    match f { _ => { 1 } }
}
#[cfg(test)]
mod tests {
    fn two() {
    }
}
";
        let found = blocks(&lines(text));
        let found: Vec<_> =
            found.iter().map(|block| (block.keyword, block.name.as_str(), block.first, block.last)).collect();
        let expected =
            [("fn", "inner", 6, 6), ("fn", "one", 3, 8), ("fn", "two", 11, 12), ("mod", "tests", 10, 13)];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_keyword_is_a_token_of_its_own() {
        assert!(has_token("unsafe { x() }", "unsafe"));
        assert!(!has_token("#![deny(unsafe_code)]", "unsafe"));
    }
}
