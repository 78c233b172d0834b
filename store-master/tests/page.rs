//! The status page in a headless browser. Skipped by name where Chromium is not installed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::Write as _;
use std::process::{Command, Stdio};

use libtest_mimic::{Arguments, Failed, Trial};
use store_core::Key;
use store_core::message::{CancelTasks, CreateTasks, NewTask, Operation as _};

fn main() {
    let arguments = Arguments::from_args();
    let browser = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
        let version =
            Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    });
    if browser.is_none() {
        eprintln!(
            "Chromium is not installed: the status page is not tested (Debian has the package `chromium`)"
        );
    }
    let name = browser.unwrap_or_default();
    let trials = [
        ("the_page_shows_what_the_master_says_and_names_stay_text", shows as fn(&str) -> Result<(), Failed>),
        ("the_page_says_that_a_master_without_nodes_wants_one", wants_a_node),
        ("the_page_lists_tasks_that_are_not_done", lists_tasks),
        ("the_page_of_a_master_that_follows_names_the_leader", names_the_leader),
    ];
    let trials = trials
        .map(|(title, test)| Trial::test(title, move || test(name)).with_ignored_flag(browser.is_none()));
    libtest_mimic::run(&arguments, trials.into()).exit();
}

/// The document after its script has run for a few seconds of virtual time.
fn dom(browser: &str, url: &str) -> Result<String, Failed> {
    let profile = tempfile::tempdir()?;
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--virtual-time-budget=4000", "--timeout=60000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(url)
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn holds(document: &str, parts: &[&str]) -> Result<(), Failed> {
    match parts.iter().find(|part| !document.contains(**part)) {
        Some(part) => Err(format!("no {part:?} in\n{document}").into()),
        None => Ok(()),
    }
}

fn shows(browser: &str) -> Result<(), Failed> {
    let master = common::start();
    common::fill(master.rpc_addr());
    let url = format!("http://{}/", master.http_addr().unwrap());
    let document = dom(browser, &url)?;
    holds(
        &document,
        &[
            "Serving",
            "40.0 KiB",
            "1.0 MiB",
            "3.9 %",
            "0000000000000abc",
            "<strong>10</strong>",
            "&lt;img src=x",
        ],
    )?;
    if document.contains("<img") {
        return Err("the name of a segment became markup".into());
    }
    Ok(())
}

/// One task that no node has fetched, and more cancelled ones than fit a page of tasks.
fn lists_tasks(browser: &str) -> Result<(), Failed> {
    let master = common::start();
    let mut stream = common::connect(master.rpc_addr());
    common::fill_on(&mut stream, 1, "a");
    common::mount_on(&mut stream, 2, "b");
    let mut ids = Vec::new();
    for round in 0..31_u8 {
        let task = NewTask { key: Key(&[b'k', round % 10]), source: None, target: None };
        let mut out = Vec::new();
        CreateTasks::encode_request(&mut out, 1, &(), std::iter::once(task))?;
        stream.write_all(&out)?;
        let answer = common::read_answer(&mut stream)?;
        ids.push(CreateTasks::decode_response(&answer.frame())?.1.next().ok_or("no answer")??);
        if round < 30 {
            out.clear();
            CancelTasks::encode_request(&mut out, 2, &(), ids.last().copied().into_iter())?;
            stream.write_all(&out)?;
            common::read_answer(&mut stream)?;
        }
    }
    let document = dom(browser, &format!("http://{}/", master.http_addr().unwrap()))?;
    let last = ids.last().ok_or("none")?.to_string();
    holds(&document, &["1 waiting", "30 canceled", ">pending<", &last])?;
    if document.contains(">canceled<") {
        return Err("a finished task is listed".into());
    }
    Ok(())
}

fn wants_a_node(browser: &str) -> Result<(), Failed> {
    let master = common::start();
    let document = dom(browser, &format!("http://{}/", master.http_addr().unwrap()))?;
    holds(&document, &["No node has mounted memory", "class=\"bad\""])
}

fn names_the_leader(browser: &str) -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    let start = |id: u64| {
        common::start_with(common::with(common::config(), |config| {
            config.ha.arbiter = format!("file://{}", dir.path().display());
            config.ha.listen = "127.0.0.1:0".parse().unwrap();
            config.ha.member_id = id;
        }))
    };
    let masters = [start(1), start(2)];
    let pages = || masters.each_ref().map(|master| format!("http://{}/", master.http_addr().unwrap()));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        let documents = pages().map(|url| dom(browser, &url));
        let follows =
            documents.iter().flatten().find(|text| text.contains("Another master leads: 127.0.0.1:"));
        let leads = documents.iter().flatten().find(|text| text.contains("No node has mounted memory"));
        if let (Some(follows), Some(leads)) = (follows, leads) {
            return [follows, leads]
                .iter()
                .try_for_each(|text| holds(text, &["<h2>Masters</h2>", "<td title=\"yes\">yes</td>"]));
        }
        if std::time::Instant::now() > deadline {
            return Err(format!("no leader and follower: {documents:?}").into());
        }
    }
}
