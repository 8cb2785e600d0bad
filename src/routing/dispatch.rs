//! What to send with a request so that the engine runs it on the picked rank.

use super::decision::Pick;
use crate::fleet::EngineStyle;
use crate::ids::LocalRank;

/// How a rank is named to its engine.
///
/// The number is always the **local** rank. A vLLM frontend counts the ranks that it manages from 0: those
/// of its node under hybrid and external load balancing (it refuses numbers beyond them), all of them under
/// internal, where the worker's range starts at 0 and both numbers are one. An SGLang controller indexes
/// its own list of ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dispatch {
    /// The number to send.
    pub local: LocalRank,
    /// The header to send it in, if the engine reads one.
    pub header: Option<&'static str>,
    /// The body field to send it in, if the engine reads one: the newest name first, an older engine knows
    /// only the later one. One of them is enough.
    pub body_fields: &'static [&'static str],
}

impl Dispatch {
    /// vLLM's header.
    pub const HEADER: &'static str = "X-data-parallel-rank";
    /// SGLang's fields, the newer first.
    pub const BODY_FIELDS: &'static [&'static str] = &["routed_dp_rank", "data_parallel_rank"];

    /// How `pick` is named to an engine of this style; `None` where the engine picks the rank itself, and where
    /// nobody said at which rank its worker starts.
    pub fn of(style: EngineStyle, pick: &Pick) -> Option<Self> {
        let local = pick.local()?;
        let (header, body_fields) = match style {
            EngineStyle::Vllm => (Some(Self::HEADER), &[][..]),
            EngineStyle::Sglang => (None, Self::BODY_FIELDS),
            EngineStyle::Unknown => (Some(Self::HEADER), Self::BODY_FIELDS),
        };
        Some(Self { local, header, body_fields })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RankKey;

    /// R4: the local number goes out, under the engine's own name.
    #[test]
    fn a_rank_is_named_by_its_local_number() {
        let pick = Pick::Rank { rank: RankKey::new("w2", 6), local: Some(LocalRank(2)) };
        let vllm = Dispatch::of(EngineStyle::Vllm, &pick);
        assert_eq!(
            vllm,
            Some(Dispatch { local: LocalRank(2), header: Some("X-data-parallel-rank"), body_fields: &[] })
        );
        let sglang = Dispatch::of(EngineStyle::Sglang, &pick);
        assert_eq!(sglang.map(|d| (d.header, d.body_fields)), Some((None, Dispatch::BODY_FIELDS)));
    }

    /// R4: a number that nobody said is not guessed.
    #[test]
    fn a_rank_without_a_known_start_has_no_number() {
        let pick = Pick::Rank { rank: RankKey::new("w2", 0), local: None };
        assert_eq!(Dispatch::of(EngineStyle::Vllm, &pick), None);
    }

    /// R6: nothing is sent where the engine picks.
    #[test]
    fn an_engine_that_picks_is_told_nothing() {
        let pick = Pick::Engine { worker: "w1".into() };
        assert_eq!(Dispatch::of(EngineStyle::Vllm, &pick), None);
    }
}
