//! The house rules that a compiler does not know: who may import whom, what the pure half must not name,
//! how long a file may be, where a panic needs its reason, and that every promise has a test.
//!
//! Each rule is a function from source to complaints. It is run on `src/`, which must have none, and on
//! made-up source that breaks it, which must have some: a rule that cannot fail proves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod source;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use self::source::{Source, Token};

/// How far from the outside a part is. Imports go down only, and within a layer not at all; two layers
/// have an order inside, which [`may_import`] knows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Layer {
    Vocabulary,
    Island,
    Bridge,
    /// What several shells stand on, since none imports another: sockets without a purpose of their own.
    Wire,
    Shell,
    /// Puts the parts together, and may name them all.
    Top,
}

/// Every part of the house. A file in `src/` that belongs to none of them has no place yet: give it one
/// here, in the README and in the crate's documentation.
const PARTS: &[(&str, Layer)] = &[
    ("ids", Layer::Vocabulary),
    ("block", Layer::Vocabulary),
    ("trust", Layer::Vocabulary),
    ("events", Layer::Island),
    ("index", Layer::Island),
    ("fleet", Layer::Island),
    ("load", Layer::Island),
    ("indexer", Layer::Bridge),
    ("pump", Layer::Bridge),
    ("routing", Layer::Bridge),
    ("wire", Layer::Wire),
    ("ingest", Layer::Shell),
    ("capture", Layer::Shell),
    ("service", Layer::Shell),
    ("telemetry", Layer::Shell),
    ("mock", Layer::Shell),
    ("lab", Layer::Shell),
    ("cli", Layer::Top),
    ("lib", Layer::Top),
    ("main", Layer::Top),
];

/// Parts that build without the feature `io`, and so for a router that brings its own sockets and clock.
const PURE: &[&str] =
    &["ids", "block", "trust", "events", "index", "fleet", "load", "indexer", "pump", "routing", "capture"];

/// A file longer than this without its tests has a second reason to change.
const MAX_LINES: usize = 750;

/// What the work so far promises; each must be proved by a test that says so. (Work to come adds its own.)
const DELIVERED: &[&str] = &[
    "R1", "R2", "R3", "R4", "R5", "R7", "R8", "R9", "I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9",
    "E1", "E2", "E3", "E4", "E5", "E7", "S1", "S2", "S3", "T1", "T2", "B1", "B2", "B3", "B4",
];

/// The last number of each family of promises.
const FAMILIES: &[(char, u32)] =
    &[('R', 9), ('I', 11), ('E', 10), ('L', 20), ('S', 6), ('B', 4), ('T', 3), ('A', 4)];

// === the rules on our own source ===

#[test]
fn imports_go_down_only() {
    all_clean(&import_complaints);
}

#[test]
fn parts_do_not_name_what_they_must_not_know() {
    all_clean(&absence_complaints);
}

#[test]
fn files_are_short_and_no_drawers() {
    all_clean(&shape_complaints);
}

#[test]
fn every_panic_outside_tests_has_its_reason() {
    all_clean(&panic_complaints);
}

#[test]
fn unsafe_is_in_one_file() {
    all_clean(&unsafe_complaints);
}

#[test]
fn every_delivered_promise_is_named_by_a_test() {
    let proved = our_proofs();
    let missing: Vec<_> = DELIVERED.iter().filter(|id| !proved.contains(**id)).collect();
    assert!(missing.is_empty(), "no test names {missing:?}: put the id on the test that proves it");
}

#[test]
fn no_test_names_a_promise_that_does_not_exist() {
    let strange: Vec<_> = our_proofs().into_iter().filter(|id| !exists(id)).collect();
    assert!(strange.is_empty(), "no such promise: {strange:?}");
}

fn exists(id: &str) -> bool {
    FAMILIES.iter().any(|&(family, last)| {
        id.strip_prefix(family)
            .and_then(|number| number.parse::<u32>().ok())
            .is_some_and(|number| (1..=last).contains(&number))
    })
}

fn our_proofs() -> BTreeSet<String> {
    let mut proved = BTreeSet::new();
    for folder in ["src", "tests/it"] {
        for path in rust_files(&root().join(folder)) {
            proved.extend(proofs(&fs::read_to_string(&path).unwrap()));
        }
    }
    proved
}

// === the rules ===

/// What is made of an engine's events.
const KNOWN_TO_NO_ENGINE: &[&str] = &["index", "indexer", "pump", "routing"];

/// Which parts a part may import, itself apart.
fn may_import(from: (&str, Layer), to: (&str, Layer)) -> bool {
    match (from.1, to.1) {
        // Engines that knew what is made of their events would prove it by itself.
        (Layer::Shell, _) if from.0 == "mock" && KNOWN_TO_NO_ENGINE.contains(&to.0) => false,
        (Layer::Top, to) => to != Layer::Top || from.0 == "main",
        (Layer::Vocabulary, to) => to == Layer::Vocabulary,
        // Whoever fills the index and whoever asks it both stand on the indexer.
        (Layer::Bridge, Layer::Bridge) => to.0 == "indexer",
        (from, to) => to < from,
    }
}

fn import_complaints(source: &Source) -> Vec<String> {
    let part = source.part();
    let Some(from) = part_named(part) else {
        return vec![format!("{}: `{part}` is no part of the house", source.path)];
    };
    let mut complaints = Vec::new();
    for (name, line) in names_at_the_root(source) {
        let complaint = match part_named(&name) {
            Some(to) if to.0 == from.0 || may_import(from, to) => continue,
            Some(to) => format!("{:?} `{part}` imports {:?} `{name}`", from.1, to.1),
            // The top's own names and modules that it does not show.
            None if from.1 == Layer::Top => continue,
            None => format!("`crate::{name}` is no part of the house"),
        };
        complaints.push(format!("{}:{}: {complaint}", source.path, line + 1));
    }
    complaints
}

fn part_named(name: &str) -> Option<(&'static str, Layer)> {
    PARTS.iter().copied().find(|&(part, _)| part == name)
}

/// What is named directly below the crate's root, by `crate::` or by enough `super::`s, alone or in braces.
fn names_at_the_root(source: &Source) -> Vec<(String, usize)> {
    let tokens = source.tokens();
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    let path_at = |at: usize| text(at) == ":" && text(at + 1) == ":";
    let mut names = Vec::new();
    let mut braces = 0;
    // Brace depths at which an inline module was opened: `super` inside means one level less.
    let mut inline = Vec::new();
    for at in 0..tokens.len() {
        match text(at) {
            "{" => {
                braces += 1;
                if at >= 2 && text(at - 2) == "mod" {
                    inline.push(braces);
                }
            }
            "}" => {
                if inline.last() == Some(&braces) {
                    inline.pop();
                }
                braces -= 1;
            }
            "crate" if path_at(at + 1) => collect(&tokens, at + 3, &mut names),
            // Only the first of a row of supers; `pub(super)` and a bare `super` name nothing.
            "super" if path_at(at + 1) && !(at >= 3 && text(at - 3) == "super") => {
                let mut last = at;
                let mut climbs = 1;
                while path_at(last + 1) && text(last + 3) == "super" {
                    last += 3;
                    climbs += 1;
                }
                if climbs == source.depth() + inline.len() && path_at(last + 1) {
                    collect(&tokens, last + 3, &mut names);
                }
            }
            _ => {}
        }
    }
    names
}

/// The name at `at`, or the first name of each branch if a brace opens there.
fn collect(tokens: &[Token], at: usize, names: &mut Vec<(String, usize)>) {
    let mut push = |token: &Token| names.push((token.text.clone(), token.line));
    match tokens.get(at) {
        Some(open) if open.text == "{" => {
            let mut nested = 0;
            let mut first = false;
            for token in &tokens[at..] {
                match token.text.as_str() {
                    "{" => nested += 1,
                    "}" => nested -= 1,
                    "," => {}
                    _ if first && nested == 1 => push(token),
                    _ => {}
                }
                first = nested == 1 && matches!(token.text.as_str(), "{" | ",");
                if nested == 0 {
                    break;
                }
            }
        }
        Some(token) => push(token),
        None => {}
    }
}

/// Words that a part must not name, each with the parts that may and the reason.
struct Absence {
    words: &'static [&'static str],
    absent_from: &'static [&'static str],
    because: &'static str,
}

const ABSENCES: &[Absence] = &[
    // The ranks of a bench talk over sockets of their own, which carry no events and outlive no bench: nothing
    // of `ingest` would fit them, and nothing of them is of use there.
    Absence {
        words: &["zeromq"],
        absent_from: &["service", "telemetry", "mock", "cli", "main", "lib"],
        because: "only `ingest` and `wire` know the socket library, and `lab` for the ranks of a bench",
    },
    Absence {
        words: &[
            "zeromq",
            "tokio",
            "futures",
            "axum",
            "tower_http",
            "reqwest",
            "tonic",
            "prost",
            "clap",
            "indicatif",
            "anyhow",
        ],
        absent_from: PURE,
        because: "the pure half builds without them",
    },
    Absence {
        words: &["TcpStream", "TcpListener", "UdpSocket", "UnixStream", "UnixListener"],
        absent_from: PURE,
        because: "the pure half opens no socket",
    },
    Absence { words: &["Instant", "SystemTime"], absent_from: PURE, because: "time comes in as an argument" },
    Absence {
        words: &["thread", "crossbeam_channel"],
        absent_from: &[
            "ids", "block", "trust", "events", "index", "fleet", "load", "indexer", "routing", "capture",
        ],
        because: "of the pure half only the pump has a thread and a queue",
    },
    Absence {
        words: &["Serialize"],
        absent_from: &[
            "ids", "block", "trust", "events", "index", "fleet", "load", "indexer", "pump", "routing",
        ],
        because: "inner types are not serialisable, so that the inside can change",
    },
    Absence {
        words: &["axum", "tower_http", "reqwest", "tonic", "clap"],
        absent_from: &["ingest"],
        because: "sockets do not know HTTP or arguments",
    },
    Absence {
        words: &["println", "eprintln", "dbg"],
        absent_from: PURE,
        because: "a library does not write to its user's terminal",
    },
];

fn absence_complaints(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    for token in source.tokens().iter().filter(|token| !source.test[token.line]) {
        for absence in ABSENCES {
            if absence.absent_from.contains(&source.part()) && absence.words.contains(&token.text.as_str()) {
                let Source { path, .. } = source;
                let (line, word) = (token.line + 1, &token.text);
                complaints.push(format!("{path}:{line}: names `{word}`, but {}", absence.because));
            }
        }
    }
    complaints
}

/// Names that say nothing of what is inside.
const DRAWERS: &[&str] = &["util", "utils", "common", "helper", "helpers", "misc", "shared", "protocols"];

fn shape_complaints(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    let lines = source.test.iter().filter(|test| !**test).count();
    if lines > MAX_LINES {
        complaints.push(format!("{}: {lines} lines without tests, more than {MAX_LINES}", source.path));
    }
    let stations = source.path.trim_end_matches(".rs").split('/');
    complaints.extend(
        stations
            .filter(|name| DRAWERS.contains(name))
            .map(|name| format!("{}: `{name}` is a drawer; name it after what it owns", source.path)),
    );
    complaints
}

/// A reason must stand on the line of the panic or on one of these many lines above it, which is as long as
/// rustfmt lets the chains get that end in one.
const REASON_REACH: usize = 4;

fn panic_complaints(source: &Source) -> Vec<String> {
    let macros = ["panic", "todo", "unimplemented", "unreachable"];
    let tokens = source.tokens();
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    let mut complaints = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let word = token.text.as_str();
        let method =
            matches!(word, "unwrap" | "expect") && at > 0 && text(at - 1) == "." && text(at + 1) == "(";
        let panics = macros.contains(&word) && text(at + 1) == "!";
        if !(method || panics) || source.test[token.line] {
            continue;
        }
        let reach = token.line.saturating_sub(REASON_REACH)..=token.line;
        if !source.commented[reach].contains(&true) {
            let line = token.line + 1;
            complaints.push(format!(
                "{}:{line}: `{word}` without a comment that says why it cannot fail",
                source.path
            ));
        }
    }
    complaints
}

/// What readers share with the writer: the one file with `unsafe`, and its argument.
const UNSAFE: &str = "index/published.rs";

fn unsafe_complaints(source: &Source) -> Vec<String> {
    if source.path == UNSAFE {
        return Vec::new();
    }
    let tokens = source.tokens();
    let unsafe_at = tokens.iter().filter(|token| token.text == "unsafe");
    unsafe_at.map(|token| format!("{}:{}: `unsafe`", source.path, token.line + 1)).collect()
}

/// The promises that the tests of a file name: in the documentation of a test, in its name, or in the header
/// of an integration test's file.
fn proofs(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let (mut header, mut doc) = (String::new(), String::new());
    let (mut is_test, mut ignored, mut any_test) = (false, false, false);
    for line in text.lines().map(str::trim_start) {
        if let Some(words) = line.strip_prefix("//!") {
            header.push_str(words);
            header.push('\n');
        } else if let Some(words) = line.strip_prefix("///") {
            doc.push_str(words);
            doc.push('\n');
        } else if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            ignored |= line.starts_with("#[ignore");
        } else if !line.starts_with("//") {
            if is_test
                && !ignored
                && let Some((_, name)) = line.split_once("fn ")
            {
                any_test = true;
                found.extend(ids(&doc));
                let name = name.split('(').next().unwrap_or_default();
                found.extend(ids(&name.to_uppercase().replace('_', " ")));
            }
            doc.clear();
            (is_test, ignored) = (false, false);
        }
    }
    if any_test {
        found.extend(ids(&header));
    }
    found
}

/// The words of `text` that look like a promise's id.
fn ids(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| looks_like_id(word))
        .map(str::to_owned)
}

fn looks_like_id(word: &str) -> bool {
    let mut chars = word.chars();
    let family = chars.next().is_some_and(|c| FAMILIES.iter().any(|&(family, _)| family == c));
    family && (2..=3).contains(&word.len()) && chars.all(|c| c.is_ascii_digit())
}

// === reading ===

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn all_clean(rule: &dyn Fn(&Source) -> Vec<String>) {
    let src = root().join("src");
    let files = rust_files(&src);
    assert!(files.len() > 20, "only {} files in {}", files.len(), src.display());
    let mut complaints = Vec::new();
    for file in files {
        let path = file.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/");
        complaints.extend(rule(&Source::new(&path, &fs::read_to_string(&file).unwrap())));
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

// === the rules on source that breaks them ===

/// `rule` complains of the lines `expected` (from 1) of this file, and of nothing else.
fn check(rule: &dyn Fn(&Source) -> Vec<String>, path: &str, text: &str, expected: &[usize]) {
    let complaints = rule(&Source::new(path, text));
    let lines: Vec<usize> = complaints
        .iter()
        .map(|complaint| complaint.split(':').nth(1).and_then(|line| line.parse().ok()).unwrap_or(0))
        .collect();
    assert_eq!(lines, expected, "{path}:\n{text}\n{complaints:?}");
}

#[test]
fn wrong_imports_are_seen() {
    let rule = &import_complaints;
    check(rule, "index/tree.rs", "use crate::events::Limits;", &[1]);
    check(rule, "index/tree.rs", "use crate::block::Tier;\nuse crate::index::core::Core;", &[]);
    check(
        rule,
        "index/tree.rs",
        "use crate::{\n    block::{Tier, load},\n    load::LoadTable,\n    ids,\n};",
        &[3],
    );
    check(rule, "index/tree.rs", "fn f() { crate::routing::f() }", &[1]);
    check(rule, "index/tree.rs", "use super::super::fleet::Fleet;", &[1]);
    check(rule, "index/tree.rs", "use super::fleet::Fleet;", &[]);
    check(rule, "index/mod.rs", "pub(in super::index) fn f() {}\nuse super::fleet::Fleet;", &[2]);
    check(rule, "load.rs", "mod inner {\n    use super::fleet;\n    use super::super::fleet;\n}", &[3]);
    check(rule, "load.rs", "use crate::*;", &[1]);
    check(rule, "block.rs", "use crate::index::Reader;", &[1]);
    check(rule, "block.rs", "use crate::ids::RankKey;", &[]);
    check(rule, "indexer/mod.rs", "use crate::routing::Router;", &[1]);
    check(rule, "routing/router.rs", "use crate::indexer::View;\nuse crate::pump::Pump;", &[2]);
    check(rule, "pump.rs", "use crate::ingest::Ingest;", &[1]);
    check(rule, "service/mod.rs", "use crate::ingest::Ingest;\nuse crate::routing::Router;", &[1]);
    check(rule, "service/mod.rs", "use crate::cli::Args;", &[1]);
    check(rule, "mock/server.rs", "use crate::wire::publisher::Publisher;\nuse crate::ingest::Ingest;", &[2]);
    check(rule, "mock/engine.rs", "use crate::block::BlockSize;\nuse crate::index::Reader;", &[2]);
    check(rule, "wire/publisher.rs", "use crate::ids::EventSeq;\nuse crate::ingest::Ingest;", &[2]);
    check(rule, "cli/serve.rs", "use crate::service::Service;\nuse crate::ingest::Ingest;", &[]);
    check(rule, "main.rs", "use rankwise::cli;", &[]);
    check(rule, "kitchen.rs", "", &[0]);
    // Comments, strings and documentation import nothing.
    let quiet = "// crate::events\n/* crate::events /* nested */ crate::events */\n/// [`crate::events`]\n\
                 const S: &str = \"crate::events \\\" crate::events\";\nconst R: &str = r#\"\" crate::events\"#;\n\
                 const C: char = '\"';\nfn f<'a>(x: &'a str) {}\nuse crate::events;";
    check(rule, "index/tree.rs", quiet, &[8]);
}

#[test]
fn forbidden_knowledge_is_seen() {
    let rule = &absence_complaints;
    check(rule, "service/mod.rs", "use zeromq::SubSocket;", &[1]);
    check(rule, "ingest/mod.rs", "use zeromq::SubSocket;\nuse axum::Router;", &[2]);
    check(rule, "indexer/mod.rs", "fn f() {\n    tokio::spawn(g());\n}", &[2]);
    check(rule, "load/table.rs", "let now = std::time::Instant::now();", &[1]);
    check(rule, "load/table.rs", "use std::{thread, time::{Duration, SystemTime}};", &[1, 1]);
    check(
        rule,
        "pump.rs",
        "use std::thread;\nuse crossbeam_channel::Sender;\nuse std::net::TcpStream;",
        &[3],
    );
    check(rule, "routing/choice.rs", "use crossbeam_channel::Sender;", &[1]);
    check(rule, "fleet/spec.rs", "#[derive(Serialize)]\nstruct S;", &[1]);
    check(rule, "capture/format.rs", "#[derive(Serialize)]\nstruct S;", &[]);
    check(rule, "events/frame.rs", "fn f() { println!(\"\") }", &[1]);
    check(
        rule,
        "load/table.rs",
        "#[cfg(test)]\nmod tests {\n    use std::time::Instant;\n}\nuse std::time::Instant;",
        &[5],
    );
    check(rule, "load/tests.rs", "use std::time::Instant;", &[]);
}

#[test]
fn long_files_and_drawers_are_seen() {
    let long = "fn f() {}\n".repeat(MAX_LINES + 1);
    check(&shape_complaints, "index/tree.rs", &long, &[0]);
    let tested = format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{\n{long}}}");
    check(&shape_complaints, "index/tree.rs", &tested, &[]);
    check(&shape_complaints, "index/utils.rs", "", &[0]);
    check(&shape_complaints, "common/tree.rs", "", &[0]);
}

#[test]
fn unexplained_panics_are_seen() {
    let rule = &panic_complaints;
    check(rule, "index/tree.rs", "fn f() {\n    g().unwrap();\n}", &[2]);
    check(rule, "index/tree.rs", "/// Says what, not why.\nfn f() { g().expect(\"x\") }", &[2]);
    check(rule, "index/tree.rs", "fn f() {\n    // g is never empty here.\n    g().unwrap();\n}", &[]);
    check(rule, "index/tree.rs", "fn f() {\n    g().unwrap(); // never empty\n    g().unwrap_or(0);\n}", &[]);
    check(
        rule,
        "index/tree.rs",
        "fn f() {\n    todo!()\n}\nfn g() { panic!(\"\") }\nfn h() { unreachable!() }",
        &[2, 4, 5],
    );
    check(rule, "index/tree.rs", "/// ```\n/// g().unwrap();\n/// ```\nfn f() {}", &[]);
    check(
        rule,
        "index/tree.rs",
        "#[cfg(test)]\nfn f() {\n    g().unwrap();\n}\nfn h() { g().unwrap() }",
        &[5],
    );
    check(rule, "index/tree.rs", "#[cfg(test)]\nmod tests;\nfn h() { g().unwrap() }", &[3]);
}

#[test]
fn unsafe_is_seen() {
    check(
        &unsafe_complaints,
        "index/tree.rs",
        "// unsafe\n#![forbid(unsafe_code)]\nfn f() { unsafe {} }",
        &[3],
    );
    check(&unsafe_complaints, UNSAFE, "fn f() { unsafe {} }", &[]);
}

#[test]
fn proofs_are_found_on_tests_only() {
    let found = |text: &str| proofs(text).into_iter().collect::<Vec<_>>();
    assert_eq!(found("/// R3, case C01: a port per rank.\n#[test]\nfn f() {}"), ["R3"]);
    assert_eq!(found("#[test]\nfn e3_c10_history_first() {}"), ["E3"]);
    assert_eq!(found("/// I7\n#[tokio::test]\n#[allow(x)]\nasync fn f() {}"), ["I7"]);
    assert_eq!(found("//! I3: vectors.\n\n#[test]\nfn f() {}"), ["I3"]);
    assert_eq!(found("//! I3: vectors.\nfn f() {}"), [""; 0]);
    assert_eq!(found("/// R3\nfn f() {}\n#[test]\nfn g() {}"), [""; 0]);
    assert_eq!(found("/// R3\n#[test]\n#[ignore]\nfn f() {}"), [""; 0]);
    assert_eq!(found("/// RR3 R333 X1 R\n#[test]\nfn f() {}"), [""; 0]);
    assert!(exists("L20") && !exists("L21") && !exists("R0"));
}
