//! What users do: conversations that begin with one of a few system prompts and go on turn by turn.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Conversations and when each turn comes: the same for every policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Traffic {
    pub conversations: Vec<Conversation>,
}

/// A system prompt, and turns. A turn's prompt is everything before it, the answers included, and its own words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conversation {
    pub system: Vec<u32>,
    pub turns: Vec<Turn>,
}

/// What a user says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// When, since the start; later if the answer before it takes longer.
    pub at: Duration,
    pub words: Vec<u32>,
    /// Tokens of the answer.
    pub answer: u32,
}

/// System prompts of the fleet's applications, and the tokens of each.
const SYSTEMS: u32 = 8;
const SYSTEM_TOKENS: u32 = 256;

/// Conversations that begin per second and rank: with their turns some five requests.
const BEGIN_PER_RANK: f64 = 0.75;

/// Most conversations that begin per second: what one process can send and answer beside everything else.
const BEGIN_AT_MOST: f64 = 18.0;

/// Words are above this; what a mock engine generates is below.
const FIRST_WORD: u32 = 40_000;

impl Traffic {
    /// The traffic of this seed for so many ranks; nobody says anything later than `length`.
    pub fn plan(seed: u64, ranks: u32, length: Duration) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let systems: Vec<Vec<u32>> = (0..SYSTEMS).map(|_| words(&mut rng, SYSTEM_TOKENS)).collect();
        let rate = (f64::from(ranks) * BEGIN_PER_RANK).min(BEGIN_AT_MOST);
        let count = (rate * length.as_secs_f64()).ceil() as u32;
        let conversations = (0..count.max(1)).map(|_| {
            let system = systems[rng.random_range(0..systems.len())].clone();
            let mut at = length.mul_f64(rng.random_range(0.0..0.8));
            let mut turns = Vec::new();
            for _ in 0..rng.random_range(5..13) {
                let said = rng.random_range(96..256);
                turns.push(Turn { at, words: words(&mut rng, said), answer: rng.random_range(8..32) });
                at += Duration::from_millis(rng.random_range(300..900));
                if at > length {
                    break;
                }
            }
            Conversation { system, turns }
        });
        Self { conversations: conversations.collect() }
    }
}

fn words(rng: &mut StdRng, count: u32) -> Vec<u32> {
    (0..count).map(|_| rng.random_range(FIRST_WORD..FIRST_WORD + 50_000)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_is_the_same_traffic() {
        let length = Duration::from_secs(8);
        let traffic = Traffic::plan(7, 8, length);
        assert_eq!(traffic, Traffic::plan(7, 8, length));
        assert_ne!(traffic, Traffic::plan(8, 8, length));
        assert_eq!(traffic.conversations.len(), 48);
        for conversation in &traffic.conversations {
            assert!(!conversation.turns.is_empty());
            assert!(conversation.turns.is_sorted_by_key(|turn| turn.at));
            assert!(conversation.turns.iter().all(|turn| turn.at <= length));
        }
        let systems: std::collections::BTreeSet<_> =
            traffic.conversations.iter().map(|conversation| &conversation.system).collect();
        assert!(systems.len() > 4, "system prompts are shared, and there are several");
    }
}
