//! Words that are not used any more, and what to write instead. DESIGN.md has the glossary.

use super::{Finding, Source, changelog_renames, rust};

/// Words with one meaning, and their replacement.
struct Retired {
    /// Words or phrases in lower case. They are found in any case, and as parts of identifiers: `lanes` is a
    /// word of `lanes_max`, and `lane` of `OwnLane`.
    words: &'static [&'static str],
    /// Identifiers, exactly as written.
    names: &'static [&'static str],
    instead: &'static str,
    /// Parts of paths and lines where the word has its usual meaning.
    unless: &'static [&'static str],
}

const fn words(words: &'static [&'static str], instead: &'static str) -> Retired {
    Retired { words, names: &[], instead, unless: &[] }
}

const fn names(names: &'static [&'static str], instead: &'static str) -> Retired {
    Retired { words: &[], names, instead, unless: &[] }
}

impl Retired {
    const fn unless(mut self, unless: &'static [&'static str]) -> Self {
        self.unless = unless;
        self
    }
}

const TABLE: &[Retired] = &[
    words(&["side channel", "side channels"], "control connection"),
    words(&["acquaintance", "acquaintances"], "known incarnation"),
    words(&["stranger", "strangers"], "peer with another incarnation, unknown peer, attacker"),
    words(&["pulse", "pulses"], "keep-alive, liveness"),
    words(&["bury", "buries", "buried", "burying"], "destroy"),
    words(&["retire", "retires", "retired", "retiring", "retirement"], "drain, evict, close"),
    words(&["exorcise", "exorcises", "exorcised", "exorcism"], "retry the destruction"),
    words(&["undead"], "not yet destroyed"),
    words(&["limbo"], "pending release"),
    words(&["zombie", "zombies"], "pending release").unless(&["process"]),
    words(&["deaf"], "write-blocked"),
    words(&["vain"], "idle (a poll), needless (an eviction), without effect"),
    words(&["heat"], "recently active set, read rate").unless(&["mooncake"]),
    words(&["the way"], "route, path, how, in transit"),
    words(&["aside"], "detached (a copy), leased set, in reserve, except"),
    words(&["nobody"], "what it is that does not: no thread, no caller, no peer"),
    words(&["somebody", "anybody"], "who it is: a caller, another peer, any client"),
    words(&["whoever", "whomever", "whom"], "who it is: the caller that, the peer that"),
    words(&["lane", "lanes"], "connection (of te-tcp: data connection)").unless(&[
        "pci",
        "topology",
        "doctor/",
        "sys/crc/",
        "te-rdma/src/sys/",
        "MC_TCP_LANES_PER_PEER",
    ]),
    words(&["toll", "tolls"], "price, charge"),
    words(&["census"], "counts"),
    words(&["kib block", "kib blocks", "blocks of 64 kib", "block of 64 kib"], "chunk"),
    names(&["SegmentId"], "`RemoteRegionId`"),
    names(&["INLINE"], "`CALLER_DRIVEN`").unless(&["te-rdma/"]),
    names(&["GO", "RUN", "SOON"], "a name that states what the constant is, such as `POLL_BUDGET`"),
];

/// This file: it has the table.
const EXEMPT: &str = "xtask/src/tidy/words.rs";

/// A line that keeps a former name for compatibility contains one of these, or the line above it does.
const FORMER_NAME: [&str; 2] = ["alias", "Deprecated: use"];

pub(super) fn check(source: &Source) -> Vec<Finding> {
    if source.path == EXEMPT {
        return Vec::new();
    }
    let renames = changelog_renames(source);
    let mut findings = Vec::new();
    for what in complaints(&source.path, &source.path) {
        findings.push(source.finding(1, format!("the file's name: {what}")));
    }
    let mut above = "";
    for (index, line) in source.text.lines().enumerate() {
        let keeps_a_name = FORMER_NAME.iter().any(|mark| line.contains(mark) || above.contains(mark));
        if !keeps_a_name && !renames.contains(&index) {
            findings.extend(complaints(&source.path, line).map(|what| source.finding(index + 1, what)));
        }
        above = line;
    }
    findings
}

fn complaints<'a>(path: &'a str, line: &'a str) -> impl Iterator<Item = String> + 'a {
    let words = words_of(line);
    TABLE.iter().filter_map(move |retired| {
        let word = retired.words.iter().find(|word| words.contains(&format!(" {word} ")));
        let name = || retired.names.iter().find(|name| path.ends_with(".rs") && rust::has_token(line, name));
        let found = word.or_else(name)?;
        let elsewhere = retired.unless.iter().any(|part| path.contains(part) || line.contains(part));
        (!elsewhere).then(|| format!("not `{found}`: {}", retired.instead))
    })
}

/// The words of a line in lower case, with a space before and behind each. Identifiers are divided into their
/// words; characters other than letters and the separators of phrases become separate words.
fn words_of(line: &str) -> String {
    let mut words = String::from(" ");
    let mut chars = line.chars().peekable();
    let mut previous = ' ';
    while let Some(c) = chars.next() {
        let next_is_lower = chars.peek().is_some_and(char::is_ascii_lowercase);
        let begins = c.is_ascii_uppercase()
            && (previous.is_ascii_lowercase() || previous.is_ascii_uppercase() && next_is_lower);
        let is_separator = matches!(c, ' ' | '_' | '-');
        if (begins || is_separator || !c.is_ascii_alphabetic()) && !words.ends_with(' ') {
            words.push(' ');
        }
        if !is_separator {
            words.push(c.to_ascii_lowercase());
        }
        if !is_separator && !c.is_ascii_alphabetic() {
            words.push(' ');
        }
        previous = c;
    }
    if !words.ends_with(' ') {
        words.push(' ');
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn lines(path: &str, text: &str) -> Vec<usize> {
        check(&source(path, text)).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn words_are_found_in_text_and_in_identifiers() {
        assert_eq!(words_of("OwnLane"), " own lane ");
        assert_eq!(words_of("lanes_max"), " lanes max ");
        assert_eq!(words_of("RPCLane(x)"), " rpc lane ( x ) ");
        for line in [
            "// A lane.",
            "let lanes_max = 1;",
            "struct OwnLane;",
            "LANES_MAX",
            "a side-channel",
            "SideChannel",
        ] {
            assert_eq!(lines("te-tcp/src/a.rs", line), [1], "{line}");
        }
    }

    #[test]
    fn other_words_with_the_same_letters_are_not_found() {
        for line in ["// A planet.", "let airplanes = 1;", "the side. Channel", "wheat", "preheat", "tollway"]
        {
            assert_eq!(lines("te-tcp/src/a.rs", line), Vec::<usize>::new(), "{line}");
        }
    }

    #[test]
    fn names_are_found_exactly() {
        assert_eq!(
            lines("te-core/src/a.rs", "let a: SegmentId;\nlet segment_id = 1;\nRUN_MAX\nRUN\n"),
            [1, 4]
        );
        assert_eq!(lines("deploy/a.sh", "RUN\n"), Vec::<usize>::new());
    }

    #[test]
    fn a_word_with_its_usual_meaning_is_accepted() {
        assert_eq!(lines("te-core/src/topology/pci.rs", "lanes: u8\n"), Vec::<usize>::new());
        assert_eq!(lines("cli/tests/a.rs", "// no zombie process is left\n// the zombie's put\n"), [2]);
    }

    #[test]
    fn former_names_stand_in_aliases_and_in_the_list_of_renames() {
        let alias =
            "#[serde(alias = \"lanes\")]\nconnections: u8,\n// Deprecated: use x_connections, not x_lanes\n";
        assert_eq!(lines("te-tcp/src/config.rs", alias), Vec::<usize>::new());
        assert_eq!(lines("cli/tests/a.rs", "// An alias.\n\"--lanes\"\n\"--lanes\"\n"), [3]);
        let changes = "### Renamed\n\n* `lanes`: `connections`\n\n### Fixed\n\n* a lane\n";
        assert_eq!(lines("CHANGELOG.md", changes), [7]);
    }

    #[test]
    fn the_name_of_a_file_counts() {
        assert_eq!(lines("te-tcp/src/lane/mod.rs", "\n"), [1]);
    }
}
