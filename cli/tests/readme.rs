//! README.md and README.zh-CN.md have the same headings, commands, links and figures. Texts are not compared.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

/// A heading and the text below it, up to the next heading.
#[derive(Debug, Default)]
struct Section {
    title: String,
    level: usize,
    /// Commands and Python without their comments; other code blocks unchanged.
    code: Vec<String>,
    /// Number of cells in each row of tables.
    rows: Vec<usize>,
    /// Sorted, because the order of a sentence depends on the language.
    numbers: Vec<String>,
    /// Sorted, without links to headings within the page.
    links: Vec<String>,
}

fn sections(file: &str) -> Vec<Section> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let mut sections: Vec<Section> = Vec::new();
    let mut block: Option<(bool, String)> = None; // whether `#` begins a comment, and its text
    for line in text.lines() {
        if let Some(fence) = line.strip_prefix("```") {
            block = match block.take() {
                Some((_, code)) => {
                    sections.last_mut().unwrap().code.push(code);
                    None
                }
                None => Some((fence == "sh" || fence == "python", String::new())),
            };
            continue;
        }
        if let Some((has_comments, code)) = &mut block {
            let line = if *has_comments { line.split(" #").next().unwrap().trim_end() } else { line };
            code.push_str(line);
            code.push('\n');
            continue;
        }
        let level = line.bytes().take_while(|byte| *byte == b'#').count();
        if level > 0 && line.as_bytes().get(level) == Some(&b' ') {
            let title = line[level..].trim().to_owned();
            sections.push(Section { title, level, ..Section::default() });
        }
        let Some(section) = sections.last_mut() else { continue };
        if line.starts_with('|') {
            section.rows.push(line.matches('|').count());
        }
        section.numbers.extend(numbers(line));
        section.links.extend(line.split("](").skip(1).filter_map(|rest| {
            let target = rest.split(')').next()?;
            (!target.starts_with('#')).then(|| target.to_owned())
        }));
    }
    for section in &mut sections {
        section.numbers.sort();
        section.links.sort();
    }
    sections
}

/// `0.3664`, `64`, `2.04`; a full stop is not part of a number.
fn numbers(line: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == ',';
    line.split(|c| !is_part(c))
        .map(|part| part.trim_matches(['.', ',']))
        .filter(|part| part.bytes().any(|byte| byte.is_ascii_digit()))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_chinese_readme_is_in_step_with_the_english_one() {
    let (english, chinese) = (sections("README.md"), sections("README.zh-CN.md"));
    let outline = |sections: &[Section]| sections.iter().map(|section| section.level).collect::<Vec<_>>();
    assert_eq!(outline(&english), outline(&chinese), "headings: {english:#?}\n{chinese:#?}");
    for (english, chinese) in english.iter().zip(&chinese) {
        let at = format!("{} / {}", english.title, chinese.title);
        assert_eq!(english.code, chinese.code, "commands and pictures of {at}");
        assert_eq!(english.rows, chinese.rows, "rows and columns of {at}");
        assert_eq!(english.numbers, chinese.numbers, "figures of {at}");
        let own = |links: &[String]| {
            links.iter().filter(|link| !link.starts_with("README")).cloned().collect::<Vec<_>>()
        };
        assert_eq!(own(&english.links), own(&chinese.links), "links of {at}");
    }
}

#[test]
fn each_readme_names_the_other() {
    for (file, other) in [("README.md", "README.zh-CN.md"), ("README.zh-CN.md", "README.md")] {
        let links: Vec<String> = sections(file).into_iter().flat_map(|section| section.links).collect();
        assert!(links.iter().any(|link| link == other), "{file} does not lead to {other}");
    }
}
