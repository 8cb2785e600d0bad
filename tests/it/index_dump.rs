//! An index made of another's content.

use rand::SeedableRng;
use rand::rngs::StdRng;
use rankwise::block::Tier;
use rankwise::index::{self, HybridRule, IndexQuery, Scratch};

use crate::index_stress::{Subject, ask, random_event};

/// I1, I4, I9: after random histories with tiers, holes, clears, placeholders, chunks and a rank that uses names
/// of its own, an index of the dump has the same content and answers, and goes on as the original does.
#[test]
fn an_index_of_a_dump_is_the_same_index() {
    for seed in 0..20 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut original = Subject::new();
        (0..400).for_each(|_| original.apply(random_event(&mut random)));
        let dump = original.reader.dump();
        assert!(!dump.is_empty() && dump.len() + 1 == original.reader.stats().nodes);
        let (index, reader) = index::of_dump(dump);
        let mut copy = Subject { index, reader, ..Subject::new() };
        compare(&original, &copy);
        for _ in 0..200 {
            let event = random_event(&mut random);
            original.apply(event);
            copy.apply(event);
        }
        compare(&original, &copy);
    }
}

fn compare(original: &Subject, copy: &Subject) {
    for &slot in &original.slots {
        assert_eq!(original.reader.contents(slot), copy.reader.contents(slot));
        for tier in Tier::ALL {
            assert_eq!(original.reader.tier_size(slot, tier), copy.reader.tier_size(slot, tier));
        }
    }
    let (a, b) = (original.reader.stats(), copy.reader.stats());
    assert_eq!((a.distinct_blocks, a.total_blocks), (b.distinct_blocks, b.total_blocks));
    let mut scratch = Scratch::default();
    for prompt in &original.prompts {
        let query = IndexQuery { locals: prompt, sequences: &[], hybrid: HybridRule::Joint };
        assert_eq!(ask(&original.reader, &query, &mut scratch), ask(&copy.reader, &query, &mut scratch));
    }
}
