//! Fields that narrow a question to some ranks, and what an adapter is called.

use super::boundary::WireId;
use super::problem::Problem;
use super::state::short;
use crate::ids::{DpRank, WorkerId};
use crate::indexer::{PoolView, RankView, WorkerView};

/// Which ranks a question is about; by default all.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Narrow<'a> {
    pub(super) worker: Option<&'a WorkerId>,
    pub(super) dp_rank: Option<DpRank>,
}

impl<'a> Narrow<'a> {
    /// What `worker_id`, `instance_id` and `dp_rank` say together.
    pub(super) fn of(
        worker_id: Option<&'a WireId>,
        instance_id: Option<&'a WireId>,
        dp_rank: Option<u32>,
    ) -> Result<Self, Problem> {
        if let (Some(worker), Some(instance)) = (worker_id, instance_id)
            && worker.id != instance.id
        {
            let detail = "worker_id and instance_id name two workers; give one of them";
            return Err(Problem::bad_request("names_differ", detail).field("instance_id"));
        }
        Ok(Self { worker: worker_id.or(instance_id).map(|of| &of.id), dp_rank: dp_rank.map(DpRank) })
    }

    /// Refuses what the pool does not have: nothing would be left to answer about.
    pub(super) fn check(&self, pool: &PoolView) -> Result<(), Problem> {
        if let Some(id) = self.worker
            && pool.worker(id).is_none()
        {
            let detail = format!("worker {} is not declared in {}", short(id.as_str()), pool.key);
            return Err(Problem::not_found("unknown_worker", detail).field("worker_id"));
        }
        if let Some(rank) = self.dp_rank
            && !pool.ranks().any(|(worker, rank)| self.admits(worker, rank))
        {
            let detail = format!("no rank {rank} of what is asked about; dp_rank is the global rank");
            return Err(Problem::bad_request("no_such_rank", detail).field("dp_rank"));
        }
        Ok(())
    }

    /// Whether a rank is asked about.
    pub(super) fn admits(&self, worker: &WorkerView, rank: &RankView) -> bool {
        self.worker.is_none_or(|id| *id == worker.spec.worker)
            && self.dp_rank.is_none_or(|wanted| wanted == rank.plan.rank.dp_rank)
    }
}

/// The adapter that a prompt is for: a name, or the number under which the engines know one without a name.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Adapter<'a> {
    pub(super) name: Option<&'a str>,
    pub(super) number: Option<i64>,
}

impl<'a> Adapter<'a> {
    /// What `model` (an adapter asked for as a model), `lora_name` and `lora_id` say together. A number below 0
    /// is Mooncake's word for none; beside a name it says nothing more.
    pub(super) fn of(
        model: Option<&'a str>,
        lora_name: Option<&'a str>,
        lora_id: Option<i64>,
    ) -> Result<Self, Problem> {
        let lora_name = lora_name.filter(|name| !name.is_empty());
        if let (Some(model), Some(name)) = (model, lora_name)
            && model != name
        {
            let detail = format!(
                "the model {:?} is an adapter, and lora_name {:?} is another; give one of them",
                short(model),
                short(name)
            );
            return Err(Problem::bad_request("two_adapters", detail).field("lora_name"));
        }
        let name = model.or(lora_name);
        Ok(Self { name, number: lora_id.filter(|id| name.is_none() && *id >= 0) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A1, A3
    #[test]
    fn what_an_adapter_is_called_is_one_thing() {
        let of = |model, name, id| Adapter::of(model, name, id).map(|of| (of.name, of.number));
        assert_eq!(of(None, None, None).unwrap(), (None, None));
        assert_eq!(of(None, Some(""), Some(-1)).unwrap(), (None, None));
        assert_eq!(of(None, None, Some(12)).unwrap(), (None, Some(12)));
        assert_eq!(of(None, Some("sql"), Some(12)).unwrap(), (Some("sql"), None));
        assert_eq!(of(Some("sql"), Some("sql"), None).unwrap(), (Some("sql"), None));
        assert_eq!(of(Some("sql"), Some("law"), None).unwrap_err().status(), 400);
    }
}
