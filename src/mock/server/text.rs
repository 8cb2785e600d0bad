//! A tokenizer that needs no vocabulary: a word is a token.

use twox_hash::xxhash3_64::Hasher as Xxh3;

use crate::mock::request::VOCABULARY;

/// Appends the tokens of `text`.
///
/// `<N>` is token N, which is how [`piece`] writes tokens: an answer that is sent back as part of the next prompt
/// has the tokens that it was generated with. Every other word is a token of its own above the vocabulary of
/// answers; two words share one once in two thousand million. Linear in the text.
pub(super) fn tokenize(text: &str, tokens: &mut Vec<u32>) {
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        match written_token(rest) {
            Some((token, after)) => {
                tokens.push(token);
                rest = after.trim_start();
            }
            None => {
                let end = rest
                    .char_indices()
                    .skip(1)
                    .find(|&(at, c)| c.is_whitespace() || (c == '<' && written_token(&rest[at..]).is_some()))
                    .map_or(rest.len(), |(at, _)| at);
                let (word, after) = rest.split_at(end);
                tokens.push(word_token(word));
                rest = after.trim_start();
            }
        }
    }
}

/// A token as text.
pub(super) fn piece(token: u32) -> String {
    format!("<{token}>")
}

/// The token that `text` begins with in the form of [`piece`], and what follows it.
fn written_token(text: &str) -> Option<(u32, &str)> {
    let inner = text.strip_prefix('<')?;
    let digits = inner.bytes().take_while(u8::is_ascii_digit).take(10).count();
    let token = inner[..digits].parse().ok()?;
    Some((token, inner[digits..].strip_prefix('>')?))
}

fn word_token(word: &str) -> u32 {
    let room = u64::from(u32::MAX - VOCABULARY) / 2;
    // Below half of the range above the vocabulary, so it fits.
    VOCABULARY + (Xxh3::oneshot(word.as_bytes()) % room) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        tokenize(text, &mut tokens);
        tokens
    }

    #[test]
    fn words_are_tokens_and_answers_keep_theirs() {
        assert_eq!(tokens("a  b\na"), tokens(" a b a "));
        assert_eq!(tokens("a b a").len(), 3);
        assert_eq!(tokens("a b a")[0], tokens("a")[0]);
        let answer = [7, 31_999, 0].map(piece).concat();
        assert_eq!(tokens(&answer), [7, 31_999, 0]);
        assert_eq!(tokens(&format!("hi{answer}there")).len(), 5);
        assert!(tokens("<x> <4294967296> <> < 99999999999>").iter().all(|token| *token >= VOCABULARY));
        assert!(tokens("").is_empty());
    }
}
