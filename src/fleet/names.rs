//! Names to things, by longest prefix.
//!
//! A name matches exactly. A pattern that ends in the separator `/` matches everything below it; nothing else
//! is a pattern, so `llama` can never catch `llama-3`, and `meta/` catches `meta/llama-3` and not `metaphor`.

use std::collections::HashMap;

use radix_trie::{Trie, TrieCommon};

/// Resolves model, adapter and topic names: exact names first, then the longest pattern.
///
/// Cost: an exact name is one hash look-up; a pattern is a walk along the name's bytes (0.2 µs among 10,000),
/// about 500 bytes each. The trie recurses over the depth to which patterns nest, which
/// [`NameTable::MAX_LEN`] bounds.
#[derive(Clone, Debug)]
pub struct NameTable<T> {
    exact: HashMap<String, T>,
    patterns: Trie<String, T>,
}

impl<T> Default for NameTable<T> {
    fn default() -> Self {
        Self { exact: HashMap::new(), patterns: Trie::new() }
    }
}

impl<T> NameTable<T> {
    /// What a pattern ends in.
    pub const SEPARATOR: char = '/';
    /// Longest name or pattern, in bytes: names of models and topics are far shorter, and it bounds the
    /// trie's depth.
    pub const MAX_LEN: usize = 512;

    /// Puts a name, or a pattern if it ends in the separator; gives back what it meant before.
    ///
    /// # Errors
    /// `value` comes back if the name is empty, is the bare separator (it would catch everything that begins
    /// with one, by accident), or is longer than [`NameTable::MAX_LEN`].
    pub fn insert(&mut self, name: &str, value: T) -> Result<Option<T>, T> {
        if name.is_empty() || name.len() > Self::MAX_LEN || name == "/" {
            return Err(value);
        }
        Ok(if name.ends_with(Self::SEPARATOR) {
            self.patterns.insert(name.to_owned(), value)
        } else {
            self.exact.insert(name.to_owned(), value)
        })
    }

    /// Takes a name or pattern out.
    pub fn remove(&mut self, name: &str) -> Option<T> {
        if name.ends_with(Self::SEPARATOR) { self.patterns.remove(name) } else { self.exact.remove(name) }
    }

    /// What `name` means: itself, else the longest pattern above it.
    pub fn resolve(&self, name: &str) -> Option<&T> {
        self.exact.get(name).or_else(|| {
            // Only the part up to the last separator within the bound can be a pattern.
            let head = name.as_bytes().get(..Self::MAX_LEN).unwrap_or(name.as_bytes());
            let end = head.iter().rposition(|&byte| byte == b'/')? + 1;
            // A separator is one byte, so the cut is at a character's edge.
            self.patterns.get_ancestor_value(name.get(..end)?)
        })
    }

    /// How many names and patterns there are. Walks the patterns.
    pub fn len(&self) -> usize {
        self.exact.len() + self.patterns.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.patterns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(names: &[&'static str]) -> NameTable<&'static str> {
        let mut table = NameTable::default();
        for &name in names {
            assert_eq!(table.insert(name, name), Ok(None));
        }
        table
    }

    /// The trap of prefix look-up without a separator.
    #[test]
    fn llama_does_not_catch_llama_3() {
        let table = table(&["llama", "llama/"]);
        assert_eq!(table.resolve("llama"), Some(&"llama"));
        assert_eq!(table.resolve("llama-3"), None);
        assert_eq!(table.resolve("llama3/x"), None);
        assert_eq!(table.resolve("llam"), None);
        assert_eq!(table.resolve("llama/3"), Some(&"llama/"));
    }

    #[test]
    fn the_longest_pattern_wins_and_an_exact_name_beats_it() {
        let table = table(&["meta/", "meta/llama/", "meta/llama/8b"]);
        assert_eq!(table.resolve("meta/opt"), Some(&"meta/"));
        assert_eq!(table.resolve("meta/llama/70b"), Some(&"meta/llama/"));
        assert_eq!(table.resolve("meta/llama/8b"), Some(&"meta/llama/8b"));
        assert_eq!(table.resolve("meta/llama/8b-chat"), Some(&"meta/llama/"));
        assert_eq!(table.resolve("meta/llama"), Some(&"meta/"));
        assert_eq!(table.resolve("meta"), None);
        assert_eq!(table.resolve("metaphor"), None);
        assert_eq!(table.resolve(""), None);
    }

    /// The trie compares half bytes: `p` (0x70) and `/` (0x2f) share none, `o` and `/` share one.
    #[test]
    fn half_a_byte_in_common_is_no_match() {
        let table = table(&["a/", "q/x/", "Q/"]);
        assert_eq!(table.resolve("ao"), None);
        assert_eq!(table.resolve("a?b/"), None);
        assert_eq!(table.resolve("q/y/z"), None);
        assert_eq!(table.resolve("Q/y"), Some(&"Q/"));
    }

    #[test]
    fn names_that_are_none_come_back() {
        let mut table = NameTable::default();
        assert_eq!(table.insert("", 1), Err(1));
        assert_eq!(table.insert("/", 1), Err(1));
        assert_eq!(table.insert(&"x".repeat(513), 1), Err(1));
        assert!(table.is_empty());
    }

    #[test]
    fn long_and_foreign_names_still_find_their_pattern() {
        let table = table(&["meta/", "m\u{fc}ller/"]);
        assert_eq!(table.resolve(&format!("meta/{}", "\u{fc}".repeat(5000))), Some(&"meta/"));
        assert_eq!(table.resolve("m\u{fc}ller/7b"), Some(&"m\u{fc}ller/"));
        assert_eq!(table.resolve("m\u{fc}/7b"), None);
    }

    #[test]
    fn what_is_taken_out_is_gone() {
        let mut table = table(&["meta/", "meta/llama/", "llama"]);
        assert_eq!(table.len(), 3);
        assert_eq!(table.remove("meta/llama/"), Some("meta/llama/"));
        assert_eq!(table.resolve("meta/llama/8b"), Some(&"meta/"));
        assert_eq!(table.remove("llama"), Some("llama"));
        assert_eq!(table.remove("llama"), None);
        assert_eq!(table.resolve("llama"), None);
    }

    /// Against a literal scan, over names made of few letters and separators.
    #[test]
    fn agrees_with_a_literal_scan() {
        let words = ["a", "b", "aa", "/", "o", "\u{ef}"];
        let mut names = vec![String::new()];
        for _ in 0..4 {
            names = names.iter().flat_map(|n| words.iter().map(move |w| format!("{n}{w}"))).collect();
        }
        let mut table = NameTable::default();
        let kept: Vec<_> = names.iter().step_by(7).cloned().collect();
        for name in &kept {
            let _ = table.insert(name, name.clone());
        }
        for name in &names {
            let literal = kept.iter().find(|k| *k == name && !k.ends_with('/')).or_else(|| {
                let fits = |k: &&String| k.ends_with('/') && name.starts_with(k.as_str());
                kept.iter().filter(fits).max_by_key(|k| k.len())
            });
            assert_eq!(table.resolve(name), literal, "{name}");
        }
    }
}
