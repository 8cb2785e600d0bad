//! Rust source as the house rules see it: code without comments and strings, line by line, and which lines
//! are tests. A lexer is enough for that; nothing here understands types.

/// One file of `src/`.
pub struct Source {
    /// Path below `src/`, with `/`.
    pub path: String,
    /// Per line: the code, with comments and the insides of literals blanked out.
    pub code: Vec<String>,
    /// Per line: whether an ordinary comment (not a doc comment) is on it.
    pub commented: Vec<bool>,
    /// Per line: whether it belongs to a test.
    pub test: Vec<bool>,
}

/// A word, or one character of punctuation, and its line (from 0).
pub struct Token {
    pub text: String,
    pub line: usize,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        let (blanked, commented) = blank(text);
        let code: Vec<String> = blanked.split('\n').map(str::to_owned).collect();
        let all_tests = path.ends_with("/tests.rs") || path.contains("/tests/");
        let mut source = Self { path: path.to_owned(), test: vec![all_tests; code.len()], code, commented };
        source.mark_tests();
        source
    }

    /// The part that the file belongs to: its first folder, or its own name.
    pub fn part(&self) -> &str {
        let first = self.path.split('/').next().unwrap_or_default();
        first.strip_suffix(".rs").unwrap_or(first)
    }

    /// How many modules deep the file is: 1 for `index.rs` and `index/mod.rs`, 2 for `index/tree.rs`.
    pub fn depth(&self) -> usize {
        match self.path.strip_suffix("/mod.rs") {
            Some(folder) => folder.split('/').count(),
            None if self.path == "lib.rs" || self.path == "main.rs" => 0,
            None => self.path.split('/').count(),
        }
    }

    pub fn tokens(&self) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        for (line, code) in self.code.iter().enumerate() {
            let mut word = String::new();
            for c in code.chars().chain([' ']) {
                if c.is_alphanumeric() || c == '_' {
                    word.push(c);
                    continue;
                }
                if !word.is_empty() {
                    tokens.push(Token { text: std::mem::take(&mut word), line });
                }
                if !c.is_whitespace() {
                    tokens.push(Token { text: c.to_string(), line });
                }
            }
        }
        tokens
    }

    /// Marks what stands under `#[cfg(test)]`, to the end of its item.
    fn mark_tests(&mut self) {
        let tokens = self.tokens();
        let texts: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
        for start in 0..texts.len() {
            if !texts[start..].starts_with(&["#", "[", "cfg", "(", "test", ")", "]"]) {
                continue;
            }
            let mut nested = 0;
            let end = (start + 7..texts.len()).find(|&at| {
                match texts[at] {
                    "{" | "(" | "[" => nested += 1,
                    "}" | ")" | "]" => nested -= 1,
                    _ => {}
                }
                nested == 0 && (texts[at] == ";" || texts[at] == "}")
            });
            let last = end.map_or(self.test.len() - 1, |end| tokens[end].line);
            self.test[tokens[start].line..=last].fill(true);
        }
    }
}

/// Blanks comments and literals; says per line whether an ordinary comment is on it.
fn blank(text: &str) -> (String, Vec<bool>) {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut commented = vec![false];
    let mut at = 0;
    while at < chars.len() {
        let (end, kind) = piece(&chars, at);
        for &c in &chars[at..end] {
            match kind {
                Kind::Code => code.push(c),
                _ => code.push(if c == '\n' { c } else { ' ' }),
            }
            if kind == Kind::Comment {
                *commented.last_mut().unwrap() = true;
            }
            if c == '\n' {
                commented.push(false);
            }
        }
        at = end;
    }
    (code, commented)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Doc,
    Literal,
}

/// The piece that begins at `at`: its end and what it is. Code comes a character or a word at a time.
fn piece(chars: &[char], at: usize) -> (usize, Kind) {
    let starts = |with: &str| with.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    if starts("//") {
        let doc = (starts("///") && !starts("////")) || starts("//!");
        let end = (at..chars.len()).find(|&i| chars[i] == '\n').unwrap_or(chars.len());
        return (end, if doc { Kind::Doc } else { Kind::Comment });
    }
    if starts("/*") {
        return (block_comment_end(chars, at), Kind::Comment);
    }
    match chars[at] {
        '"' => (string_end(chars, at), Kind::Literal),
        '\'' => match char_end(chars, at) {
            Some(end) => (end, Kind::Literal),
            // A lifetime.
            None => (at + 1, Kind::Code),
        },
        c if c.is_alphanumeric() || c == '_' => {
            let word = (at..chars.len())
                .find(|&i| !(chars[i].is_alphanumeric() || chars[i] == '_'))
                .unwrap_or(chars.len());
            let prefix: String = chars[at..word].iter().collect();
            match raw_string_end(chars, word, &prefix) {
                Some(end) => (end, Kind::Literal),
                None => (word, Kind::Code),
            }
        }
        _ => (at + 1, Kind::Code),
    }
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let mut nested = 0;
    let mut at = start;
    while at + 1 < chars.len() {
        match (chars[at], chars[at + 1]) {
            ('/', '*') => nested += 1,
            ('*', '/') => nested -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if nested == 0 {
            return at;
        }
    }
    chars.len()
}

fn string_end(chars: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

fn char_end(chars: &[char], start: usize) -> Option<usize> {
    if chars.get(start + 1) == Some(&'\\') {
        let close = (start + 3..chars.len()).find(|&i| chars[i] == '\'')?;
        return Some(close + 1);
    }
    (chars.get(start + 2) == Some(&'\'')).then_some(start + 3)
}

/// The end of a raw string whose prefix (`r`, `br`, `cr`) ends at `at`.
fn raw_string_end(chars: &[char], at: usize, prefix: &str) -> Option<usize> {
    if !matches!(prefix, "r" | "br" | "cr") {
        return None;
    }
    let open = (at..chars.len()).find(|&i| chars[i] != '#')?;
    if chars[open] != '"' {
        return None;
    }
    let hashes = open - at;
    let closes =
        |i: usize| chars[i] == '"' && chars[i + 1..].iter().take_while(|&&c| c == '#').count() >= hashes;
    let close = (open + 1..chars.len()).find(|&i| closes(i))?;
    Some(close + 1 + hashes)
}
