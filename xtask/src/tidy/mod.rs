//! The house rules that neither rustfmt nor clippy check.
//!
//! Each rule is a function from the tree to findings; a finding names its file, its line and what to do. The
//! rules of one line are here; those that need more have modules:
//!
//! * [`words`]: words that are not used any more; [`per`]: "per", not "a"
//! * [`lengths`]: of files and functions; [`wrap`]: of lines of comments and prose
//! * [`unsafe_code`]: where it may be
//! * [`time`]: no sleeps in tests
//! * [`rust`]: the little of Rust's syntax that they need

mod lengths;
mod per;
mod rust;
mod time;
mod unsafe_code;
mod words;
mod wrap;

use crate::host::{self, Package};
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Crates that build without std.
const NO_STD_CRATES: [&str; 3] = ["te-core", "store-core", "conductor-core"];
/// Crates that no other program links: their `main.rs` or `lib.rs` needs no picture and no example.
const TOOLS: [&str; 4] = ["benches", "cli", "hw-tests", "xtask"];
/// The end of the names of translated documents.
const TRANSLATION: &str = ".zh-CN.md";
/// Directories without sources of the project, unless they are modules below a crate's `src`.
const NOT_OURS: [&str; 4] = ["target", "corpus", "artifacts", "node_modules"];

/// Files that a program writes: the rules of words hold for the text that it writes them from.
const GENERATED: [&str; 2] = ["docs/reference/config.md", "te-rdma/src/sys/layout.rs"];

/// One text file of the tree.
struct Source {
    /// Relative to the root, with `/`.
    path: String,
    text: String,
}

/// What is wrong, and where.
#[derive(Debug, PartialEq)]
struct Finding {
    path: String,
    line: usize,
    what: String,
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn finding(&self, line: usize, what: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line, what: what.into() }
    }

    /// A finding for each line for which `judge` returns what is wrong.
    fn lines(&self, judge: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
        let numbered = self.text.lines().enumerate();
        numbered.filter_map(|(index, line)| Some(self.finding(index + 1, judge(line)?))).collect()
    }
}

/// Checks the whole tree.
///
/// # Errors
/// When a rule is broken; the findings have been printed.
pub(crate) fn run() -> Result<()> {
    let host = host::Host::probe()?;
    let sources = read_tree(&host.root)?;
    let mut findings = Vec::new();
    let rust_sources: Vec<(&Source, Vec<rust::Line>)> = sources
        .iter()
        .filter(|source| source.is_rust())
        .map(|source| (source, rust::lines(&source.text)))
        .collect();
    for source in &sources {
        findings.extend(text_hygiene(source));
        findings.extend(paths_of_one_machine(source));
        if !GENERATED.contains(&source.path.as_str()) {
            findings.extend(words::check(source));
            findings.extend(per::check(source));
            findings.extend(wrap::check(source));
        }
        if source.path.ends_with(".md") {
            findings.extend(dead_links(source, &host.root));
        }
    }
    for (source, lines) in &rust_sources {
        findings.extend(ignored_tests_say_why(source));
        findings.extend(lengths::check(source, lines));
        findings.extend(time::check(source, lines));
    }
    findings.extend(unsafe_code::check(&sources, &rust_sources));
    for package in &host.packages {
        findings.extend(crate_opens_with_docs(package, &host.root)?);
        findings.extend(manifest(package, &host.root)?);
    }
    findings.extend(dependencies_have_reasons(&sources));

    for finding in &findings {
        println!("      {}:{}: {}", finding.path, finding.line, finding.what);
    }
    match findings.len() {
        0 => Ok(()),
        count => bail!("{count} findings"),
    }
}

fn read_tree(root: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    let mut dirs: Vec<PathBuf> = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let kind = entry.file_type()?;
            let module = path.strip_prefix(root).is_ok_and(|path| path.iter().any(|part| part == "src"));
            if kind.is_dir() && name != ".git" && (module || !NOT_OURS.contains(&name.as_str())) {
                dirs.push(path);
            } else if kind.is_file() && is_text(&name) {
                let relative = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
                let text = fs::read_to_string(&path).with_context(|| format!("cannot read {relative}"))?;
                sources.push(Source { path: relative, text });
            }
        }
    }
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(sources)
}

fn is_text(name: &str) -> bool {
    const EXTENSIONS: [&str; 8] = [".rs", ".toml", ".md", ".sh", ".yml", ".yaml", ".html", ".service"];
    EXTENSIONS.iter().any(|extension| name.ends_with(extension)) || name == "run"
}

fn text_hygiene(source: &Source) -> Vec<Finding> {
    let mut findings = source.lines(|line| {
        let merge_marker = ["<<<<<<< ", ">>>>>>> "].iter().any(|marker| line.starts_with(marker));
        if merge_marker {
            return Some("a merge conflict that was committed".to_owned());
        }
        if line.ends_with([' ', '\t']) && !line.trim_start().starts_with("//") {
            return Some("trailing white space".to_owned());
        }
        // The project's language is English; the box drawings and arrows of the pictures are below these
        // planes. The name of a translation names its language, and so does a link to it, in that language.
        let translated = [source.path.as_str(), line].iter().any(|text| text.contains(TRANSLATION));
        if !translated && line.chars().any(|c| matches!(c, '\u{3000}'..='\u{9fff}' | '\u{ff00}'..='\u{ffef}'))
        {
            return Some("write English".to_owned());
        }
        None
    });
    if !source.text.is_empty() && !source.text.ends_with('\n') {
        findings.push(source.finding(source.text.lines().count(), "no newline at the end of the file"));
    }
    let unfinished = [["TO", "DO"].concat(), ["FIX", "ME"].concat()];
    findings.extend(source.lines(|line| {
        let word = unfinished.iter().find(|word| line.contains(word.as_str()))?;
        Some(format!("{word}: do it, or describe what is missing where a user will read it"))
    }));
    findings
}

/// Paths that exist only on the machine of their author.
fn paths_of_one_machine(source: &Source) -> Vec<Finding> {
    let private = ["/work", "/home", "/root", "/Users"].map(|dir| format!("{dir}/"));
    source.lines(|line| {
        let starts_here = |at: usize| {
            let before = line[..at].chars().next_back();
            !before.is_some_and(|c| c.is_ascii_alphanumeric() || "._-/}*".contains(c))
        };
        let found = |dir: &&String| line.match_indices(dir.as_str()).any(|(at, _)| starts_here(at));
        let dir = private.iter().find(found)?;
        Some(format!("`{dir}` is a path of one machine: make it relative, or an argument"))
    })
}

/// The lines of the changelog's list of renames, from 0 on; empty for other files.
fn changelog_renames(source: &Source) -> std::ops::Range<usize> {
    let is_list = |line: &str| line.trim_start_matches('#').trim() == "Renamed" && line.starts_with('#');
    let lines = || source.text.lines();
    match lines().position(is_list) {
        Some(first) if source.path == "CHANGELOG.md" => {
            let len = lines().skip(first + 1).position(|line| line.starts_with('#'));
            first..len.map_or(lines().count(), |len| first + 1 + len)
        }
        _ => 0..0,
    }
}

fn ignored_tests_say_why(source: &Source) -> Vec<Finding> {
    let bare = ["#[ig", "nore]"].concat();
    source.lines(|line| line.contains(&bare).then(|| "give the reason: `#[ignore = \"...\"]`".to_owned()))
}

/// Relative links of a document whose target is not there.
fn dead_links(source: &Source, root: &Path) -> Vec<Finding> {
    let dir = root.join(&source.path);
    let dir = dir.parent().unwrap_or(root);
    source.lines(|line| {
        let targets = line.match_indices("](").filter_map(|(at, _)| line[at + 2..].split(')').next());
        let mut local = targets.filter(|target| !target.contains("://") && !target.starts_with('#'));
        let dead = local.find(|target| !dir.join(target.split('#').next().unwrap_or_default()).exists())?;
        Some(format!("the link to `{dead}` has no target"))
    })
}

fn crate_opens_with_docs(package: &Package, root: &Path) -> Result<Vec<Finding>> {
    let dir = package.manifest.parent().unwrap_or(root);
    let file = dir.join(if package.has_lib { "src/lib.rs" } else { "src/main.rs" });
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let path = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
    let source = Source { path, text };
    Ok(opening(&source, &package.name))
}

fn opening(source: &Source, package: &str) -> Vec<Finding> {
    let docs: Vec<&str> = source
        .text
        .lines()
        .take_while(|line| !line.starts_with("mod ") && !line.starts_with("pub "))
        .collect();
    let docs: Vec<&str> = docs.into_iter().filter_map(|line| line.strip_prefix("//!")).collect();
    let mut findings = Vec::new();
    if docs.is_empty() {
        findings.push(source.finding(1, "a crate opens with a description of itself (`//!`)"));
    }
    if !TOOLS.contains(&package) {
        let fences = docs.iter().filter(|line| line.trim_start().starts_with("```")).count();
        if !docs.iter().any(|line| line.trim() == "```text") {
            findings.push(source.finding(1, "a crate opens with a picture of its parts (a `text` block)"));
        }
        if fences < 4 {
            findings.push(source.finding(1, "a crate opens with an example that compiles"));
        }
    }
    // With it, the compiler requires a reason wherever unsafe code is allowed.
    if !["deny(unsafe_code)", "forbid(unsafe_code)"].iter().any(|lint| source.text.contains(lint)) {
        findings.push(source.finding(1, "a crate has `#![deny(unsafe_code)]` or `#![forbid(unsafe_code)]`"));
    }
    if NO_STD_CRATES.contains(&package) && !source.text.contains("no_std") {
        findings.push(source.finding(1, "this crate is `#![no_std]`"));
    }
    findings
}

fn manifest(package: &Package, root: &Path) -> Result<Vec<Finding>> {
    let text = fs::read_to_string(&package.manifest)
        .with_context(|| format!("cannot read {}", package.manifest.display()))?;
    let path = package.manifest.strip_prefix(root).unwrap_or(&package.manifest);
    Ok(manifest_rules(&Source { path: path.to_string_lossy().into_owned(), text }))
}

/// Lints are the workspace's, versions are the workspace's, and each feature has a paragraph.
fn manifest_rules(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !source.text.contains("[lints]\nworkspace = true") {
        findings.push(source.finding(1, "inherit the lints: `[lints]` with `workspace = true`"));
    }
    let mut section = "";
    let mut previous = "";
    for (index, line) in source.text.lines().enumerate() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[features]" && line.contains('=') && !line.starts_with(['#', ' ', ']']) {
            if !previous.starts_with("##") && !line.starts_with("default ") {
                findings.push(
                    source.finding(index + 1, "a feature has a line of `##` above it that explains it"),
                );
            }
        } else if section.contains("dependencies]") {
            let versioned = line.contains("version = ") || line.contains(" = \"");
            if versioned && !line.starts_with('#') && !line.contains("path = ") {
                findings.push(
                    source.finding(index + 1, "versions live in the workspace: `NAME.workspace = true`"),
                );
            }
        }
        previous = line;
    }
    findings
}

/// Every dependency of the workspace has its paragraph in DEPENDENCIES.md.
fn dependencies_have_reasons(sources: &[Source]) -> Vec<Finding> {
    let find = |path: &str| sources.iter().find(|source| source.path == path);
    let (Some(manifest), Some(reasons)) = (find("Cargo.toml"), find("DEPENDENCIES.md")) else {
        return Vec::new();
    };
    let mut inside = false;
    let mut findings = Vec::new();
    for (index, line) in manifest.text.lines().enumerate() {
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        } else if let Some((name, spec)) = line.split_once(" = ")
            && inside
            && !spec.contains("path = ")
            && !reasons.text.contains(&format!("`{name}`"))
        {
            findings
                .push(manifest.finding(index + 1, format!("DEPENDENCIES.md gives no reason for `{name}`")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn what(findings: &[Finding]) -> Vec<(usize, &str)> {
        findings.iter().map(|finding| (finding.line, finding.what.as_str())).collect()
    }

    #[test]
    fn trailing_space_and_a_missing_last_newline_are_found() {
        let findings = text_hygiene(&source("a.rs", "let a; \nlet b;"));
        assert_eq!(what(&findings), [(1, "trailing white space"), (2, "no newline at the end of the file")]);
    }

    #[test]
    fn only_translations_and_links_to_them_are_in_other_languages() {
        let chinese = "\u{4e2d}\u{6587}\n";
        assert_eq!(what(&text_hygiene(&source("README.md", chinese))), [(1, "write English")]);
        assert_eq!(text_hygiene(&source("README.zh-CN.md", chinese)), []);
        let link = "[\u{4e2d}\u{6587}](README.zh-CN.md)\n";
        assert_eq!(text_hygiene(&source("README.md", link)), []);
    }

    #[test]
    fn a_path_of_one_machine_is_found_and_a_url_is_not() {
        let private = format!("open(\"/{}/me/trace\")\n", "home");
        assert_eq!(paths_of_one_machine(&source("a.rs", &private)).len(), 1);
        let url = format!("see https://example.org/{}/x and ./{}/y\n", "work", "work");
        assert_eq!(paths_of_one_machine(&source("a.rs", &url)), []);
    }

    #[test]
    fn a_feature_without_a_paragraph_is_found() {
        let text = "[lints]\nworkspace = true\n[features]\ndefault = []\n## Good.\na = []\nb = []\n";
        let findings = manifest_rules(&source("x/Cargo.toml", text));
        assert_eq!(what(&findings), [(7, "a feature has a line of `##` above it that explains it")]);
    }

    #[test]
    fn a_version_outside_the_workspace_is_found() {
        let text = "[lints]\nworkspace = true\n[dependencies]\nlibc.workspace = true\nnix = \"0.31\"\n";
        assert_eq!(manifest_rules(&source("x/Cargo.toml", text)).len(), 1);
    }

    #[test]
    fn a_dependency_without_a_reason_is_found() {
        let tree = [
            source(
                "Cargo.toml",
                "[workspace.dependencies]\nte-core = { path = \"te-core\" }\nlibc = \"0.2\"\n",
            ),
            source("DEPENDENCIES.md", "nothing\n"),
        ];
        assert_eq!(
            what(&dependencies_have_reasons(&tree)),
            [(3, "DEPENDENCIES.md gives no reason for `libc`")]
        );
    }

    #[test]
    fn a_library_opens_with_a_picture_and_an_example() {
        let good = "//! What.\n//!\n//! ```text\n//! a - b\n//! ```\n//!\n//! ```\n//! x();\n//! ```\n#![deny(unsafe_code)]\nmod a;\n";
        assert_eq!(opening(&source("te-tcp/src/lib.rs", good), "te-tcp"), []);
        assert_eq!(opening(&source("te-tcp/src/lib.rs", "//! What.\nmod a;\n"), "te-tcp").len(), 3);
        assert_eq!(
            opening(&source("xtask/src/main.rs", "//! What.\n#![forbid(unsafe_code)]\nmod a;\n"), "xtask"),
            []
        );
    }
}
