//! "Bytes per object", not "bytes an object".
//!
//! The article is looked for between something counted and something that it is counted by. A clause such as
//! "the bytes a peer may write" has the same words; so what follows has to end the phrase.

use super::{Finding, Source};

/// Words that count. A number counts, too.
const COUNTS: &str = "bytes bits B KB MB GB KiB MiB GiB TiB k M ns us µs ms s nanoseconds microseconds milliseconds \
    seconds minutes once twice one two three four ten hundred thousand million millions instructions cycles slices \
    objects keys packets allocations pieces entries operations messages";
/// The same, but they may also be verbs: "requests a region" means no quotient, "requests a second" does.
const COUNTS_OR_VERBS: &str = "times requests puts gets calls lines transfers connections";
/// Units of time.
const TIMES: &str = "second minute hour day millisecond microsecond nanosecond";
/// Other things by which something is counted.
const THINGS: &str = "object peer slice call GiB MiB KiB byte client node request connection core batch key segment \
    region rail poll thread process item block piece chunk operation packet seed run round line turn put get test \
    entry replica";
/// Words that end a phrase.
const ENDINGS: &str = "and or at on in for with over of as while when beside than where by from to here but";

/// This file: it has examples.
const EXEMPT: &str = "xtask/src/tidy/per.rs";

pub(super) fn check(source: &Source) -> Vec<Finding> {
    if source.path == EXEMPT {
        return Vec::new();
    }
    source.lines(|line| {
        let (count, article, each) = found(line)?;
        Some(format!("not `{count} {article} {each}`: write `{count} per {each}`"))
    })
}

fn found(line: &str) -> Option<(&str, &str, &str)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.windows(3).enumerate().find_map(|(at, window)| {
        let &[count, article, each] = window else { return None };
        let count = count.trim_start_matches(|c: char| !c.is_alphanumeric());
        let each_bare = bare(each);
        let phrase_ends = |at_the_end_of_the_line| match words.get(at + 3) {
            _ if each_bare.len() < each.len() => true,
            Some(next) => is_in(ENDINGS, bare(next)) || next.starts_with(|c: char| !c.is_alphanumeric()),
            None => at_the_end_of_the_line,
        };
        // "One object a line".
        let is_one = at > 0 && words[at - 1].eq_ignore_ascii_case("one") && is_in(THINGS, count);
        let counts = is_one || is_in(COUNTS, count) || is_number(count);
        let is_per =
            (counts || is_in(COUNTS_OR_VERBS, count)) && is_in(TIMES, each_bare) && phrase_ends(true)
                || counts && is_in(THINGS, each_bare) && phrase_ends(false);
        (matches!(article, "a" | "an") && is_per).then_some((count, article, each_bare))
    })
}

fn is_in(list: &str, word: &str) -> bool {
    list.split_whitespace().any(|one| one == word)
}

/// A word without the punctuation behind it.
fn bare(word: &str) -> &str {
    word.trim_end_matches(|c: char| !c.is_alphanumeric())
}

/// `4`, `0.1`, `1,024`, `5M`.
fn is_number(word: &str) -> bool {
    let digits = word.trim_end_matches(['k', 'M']);
    digits.starts_with(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | ','))
        && !word.ends_with(['.', ','])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_article_for_per_is_found() {
        for line in [
            "/// Limit, bytes a second.",
            "// at most 8 slices a connection, whatever",
            "/// 10,000 puts a second.",
            "`json` for collectors: one object a line.",
            "in brackets CPU seconds a GiB, both ends",
            "once a minute",
            "| bytes an object | 156 |",
            "up to 12 µs a byte. `regex-lite`",
            "3.2 M a second (two clients)",
            "one a peer, and",
        ] {
            assert!(found(line).is_some(), "{line}");
        }
        assert_eq!(found("// bytes a second."), Some(("bytes", "a", "second")));
    }

    #[test]
    fn clauses_and_other_articles_are_not_found() {
        for line in [
            "/// The bytes a peer may write.",
            "/// The bytes a request touches, and",
            "// the keys a client",
            "// the tenant whose objects a request is about",
            "it sends a request, and",
            "the peer requests a region, and",
            "the two, a second and a third",
            "bytes per second",
            "gives one a name",
            "2. A client of the store",
            "for 4, a client",
        ] {
            assert_eq!(found(line), None, "{line}");
        }
    }
}
