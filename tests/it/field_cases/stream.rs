//! The publishers: what each rank's engine sends, and when it is there.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use rankwise::ids::{EventSeq, RankKey, SourceId};
use rankwise::indexer::Input;
use serde_json::{Value, json};

use super::history::Script;
use super::reading::{Fields, Run, fail, hash, list, not_runnable, text};
use super::stage::Stage;

/// A connection that the product never asked for.
const STRAY: SourceId = SourceId(u64::MAX);

/// One rank's engine.
pub struct Publisher {
    /// Whether anybody listens at its endpoint.
    pub up: bool,
    /// Processes before the present one.
    pub restarts: u32,
    /// What the present process has sent.
    pub sent: BTreeMap<u64, Bytes>,
    /// Whether the product was ever connected to it.
    pub met: bool,
    /// Answers to come.
    pub scripts: VecDeque<Script>,
    /// From where its history was asked.
    pub asked: Vec<u64>,
}

impl Default for Publisher {
    fn default() -> Self {
        let (sent, scripts) = (BTreeMap::new(), VecDeque::new());
        Self { up: true, restarts: 0, sent, met: false, scripts, asked: Vec::new() }
    }
}

impl Stage {
    pub(super) fn event(&mut self, step: &Value) -> Run {
        let step = Fields::only("event", step, &["worker", "dp_rank", "seq", "event"])?;
        let events = std::slice::from_ref(step.need("event")?);
        self.publish(&step.rank()?, step.need_count("seq")?, events, None, None)
    }

    pub(super) fn batch(&mut self, step: &Value) -> Run {
        let known = ["worker", "dp_rank", "seq", "events", "batch_rank", "topic"];
        let fields = Fields::only("batch", step, &known)?;
        let (seq, events) = (fields.need_count("seq")?, fields.list("events")?);
        self.publish(&fields.rank()?, seq, events, step.get("batch_rank"), fields.text("topic")?)
    }

    /// `batch_rank`: missing is the rank itself, null is a batch that names none.
    fn publish(
        &mut self,
        rank: &RankKey,
        seq: u64,
        events: &[Value],
        batch_rank: Option<&Value>,
        topic: Option<&str>,
    ) -> Run {
        let restarts = self.publisher(rank).restarts;
        let payload = payload(restarts, events, rank, batch_rank)?;
        let topic = topic.unwrap_or(self.settings.topics.of(rank.worker.as_str()));
        let number = Bytes::copy_from_slice(&seq.to_be_bytes());
        let frames = [Bytes::copy_from_slice(topic.as_bytes()), number, payload];
        self.send(rank, &frames)
    }

    /// Sends a message: who listens hears it.
    fn send(&mut self, rank: &RankKey, frames: &[Bytes]) -> Run {
        let source = self.links.get(rank).copied();
        let publisher = self.publisher(rank);
        if source.is_some()
            && let [_, seq, payload] = frames
            && let Ok(seq) = <[u8; 8]>::try_from(&seq[..])
        {
            publisher.sent.insert(u64::from_be_bytes(seq), payload.clone());
        }
        if source.is_some() && !publisher.up {
            return Ok(());
        }
        self.feed(Input::Frames { source: source.unwrap_or(STRAY), frames })
    }

    pub(super) fn raw(&mut self, step: &Value) -> Run {
        let step = Fields::only("raw", step, &["worker", "dp_rank", "frames", "expect"])?;
        let frames = frames_of(step.need("frames")?)?;
        let before = self.total();
        self.send(&step.rank()?, &frames)?;
        self.settle()?;
        let after = self.total();
        let became = if after.content.malformed_messages > before.content.malformed_messages {
            "dropped"
        } else if after.content.other_topic > before.content.other_topic {
            "ignored"
        } else if after.stream.applied_batches > before.stream.applied_batches {
            "applied"
        } else {
            "neither applied nor counted as bad"
        };
        match step.text("expect")? {
            None => Ok(()),
            Some(expected) if expected == became => Ok(()),
            Some(expected @ ("applied" | "dropped" | "ignored")) => {
                fail(format!("the message was {became}, expected {expected}"))
            }
            Some(other) => not_runnable(format!("raw with expect {other}")),
        }
    }

    pub(super) fn publisher_restart(&mut self, step: &Value) -> Run {
        let rank = Fields::only("publisher_restart", step, &["worker", "dp_rank"])?.rank()?;
        self.disconnect(&rank)?;
        let publisher = self.publisher(&rank);
        publisher.restarts += 1;
        publisher.sent.clear();
        self.reconnect(&rank)
    }

    pub(super) fn endpoint_down(&mut self, step: &Value) -> Run {
        let rank = Fields::only("endpoint_down", step, &["worker", "dp_rank"])?.rank()?;
        self.disconnect(&rank)?;
        self.publisher(&rank).up = false;
        self.refuse_again()
    }

    pub(super) fn endpoint_up(&mut self, step: &Value) -> Run {
        let rank = Fields::only("endpoint_up", step, &["worker", "dp_rank"])?.rank()?;
        self.publisher(&rank).up = true;
        self.reconnect(&rank)
    }

    fn disconnect(&mut self, rank: &RankKey) -> Run {
        let was_up = self.publisher(rank).up;
        match self.links.get(rank) {
            Some(&source) if was_up => self.feed(Input::Disconnected { source }),
            _ => Ok(()),
        }
    }

    fn reconnect(&mut self, rank: &RankKey) -> Run {
        let Some(&source) = self.links.get(rank) else { return Ok(()) };
        if self.publisher(rank).up {
            self.connect(source)?;
            self.publisher(rank).met = true;
        }
        Ok(())
    }

    /// Whoever is down refuses whoever tries again.
    pub(super) fn refuse_again(&mut self) -> Run {
        let down = |rank: &RankKey| self.publishers.get(rank).is_some_and(|publisher| !publisher.up);
        let sources: Vec<_> =
            self.links.iter().filter(|(rank, _)| down(rank)).map(|(_, source)| *source).collect();
        sources.into_iter().try_for_each(|source| self.feed(Input::Refused { source }))
    }

    pub(super) fn churn(&mut self, step: &Value) -> Run {
        let known = ["worker", "dp_rank", "chains", "blocks_per_chain", "shared_prefix_blocks", "end"];
        let step = Fields::only("churn", step, &known)?;
        let rank = step.rank()?;
        let own = step.need_count("blocks_per_chain")?;
        let mut chains = Chains { made: 0, block_size: self.settings.block_size };
        let prefix = chains.names(step.count("shared_prefix_blocks")?.unwrap_or(0));
        let parent = prefix.last().copied();
        if !prefix.is_empty() {
            self.publish_next(&rank, &chains.store(&prefix, None))?;
        }
        let mut stored = Vec::new();
        for _ in 0..step.need_count("chains")? {
            let names = chains.names(own);
            self.publish_next(&rank, &chains.store(&names, parent))?;
            stored.push(names);
        }
        match step.need_text("end")? {
            "remove" => {
                stored.push(prefix);
                for names in stored.iter().filter(|names| !names.is_empty()) {
                    let leaf_first: Vec<_> = names.iter().rev().collect();
                    self.publish_next(&rank, &json!({"type": "BlockRemoved", "block_hashes": leaf_first}))?;
                }
                Ok(())
            }
            "clear" => self.publish_next(&rank, &json!({"type": "AllBlocksCleared"})),
            "withdraw" => self.declare_again(&rank.worker),
            other => not_runnable(format!("churn with end {other}")),
        }
    }

    /// One chain of unique blocks on `worker`, and on `branch_worker` the same with a block of its own behind
    /// every n-th; asked for and withdrawn on a thread with a small stack, which recursion would overflow.
    pub(super) fn deep_chain(&mut self, step: &Value) -> Run {
        let known = [
            "worker",
            "dp_rank",
            "blocks",
            "blocks_per_event",
            "branch_worker",
            "branch_every",
            "expect_overlap",
            "stack_kib",
        ];
        let step = Fields::only("deep_chain", step, &known)?;
        let rank = step.rank()?;
        let (blocks, each) =
            (step.need_count("blocks")?, step.count("blocks_per_event")?.unwrap_or(1).max(1));
        let mut chains = Chains { made: 0, block_size: self.settings.block_size };
        let chain = chains.names(blocks);
        self.store_chain(&rank, &chains, &chain, None, each)?;
        let branching = step.text("branch_worker")?.map(|worker| self.first_rank(worker)).transpose()?;
        if let Some(branching) = &branching {
            let every = step.count("branch_every")?.unwrap_or(blocks).max(1);
            let mut parent = None;
            for part in chain.chunks(usize::try_from(every).unwrap_or(usize::MAX)) {
                if part.len() as u64 == every {
                    self.store_chain(branching, &chains, part, parent, each)?;
                    parent = part.last().copied();
                    let own = chains.names(1);
                    self.store_chain(branching, &chains, &own, parent, each)?;
                }
            }
        }
        let ids: Vec<u64> = chain.iter().flat_map(|name| chains.tokens(*name)).collect();
        let expected = match step.get("expect_overlap") {
            Some(Value::Object(by_rank)) => Some(Value::Object(by_rank.clone())),
            Some(of_rank) => {
                let mut expected = json!({ rank.to_string(): of_rank });
                if let Some(branching) = &branching {
                    let every = step.count("branch_every")?.unwrap_or(blocks).max(1);
                    expected[branching.to_string()] = json!(blocks / every * every);
                }
                Some(expected)
            }
            None => None,
        };
        let stack = usize::try_from(step.count("stack_kib")?.unwrap_or(256)).unwrap_or(256) << 10;
        let work = || {
            if let Some(expected) = expected {
                self.query(&json!({"op": "query", "tokens": ids, "expect": expected}))?;
            }
            let workers = std::iter::once(&rank).chain(&branching).map(|rank| rank.worker.as_str());
            for worker in workers.collect::<std::collections::BTreeSet<_>>() {
                self.withdraw(&json!({"op": "withdraw", "worker": worker}))?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(stack).spawn_scoped(scope, work).unwrap();
            thread.join().unwrap_or_else(|_| fail("panicked on a small stack"))
        })
    }

    fn first_rank(&self, worker: &str) -> Run<RankKey> {
        match self.indexer.fleet().worker(&worker.into()) {
            Some(spec) => Ok(RankKey { worker: worker.into(), dp_rank: spec.ranks.start() }),
            None => fail(format!("{worker} is not declared")),
        }
    }

    fn store_chain(
        &mut self,
        rank: &RankKey,
        chains: &Chains,
        names: &[u64],
        mut parent: Option<u64>,
        each: u64,
    ) -> Run {
        for names in names.chunks(usize::try_from(each).unwrap_or(usize::MAX)) {
            self.publish_next(rank, &chains.store(names, parent))?;
            parent = names.last().copied();
        }
        Ok(())
    }

    fn publish_next(&mut self, rank: &RankKey, event: &Value) -> Run {
        let last = self.publisher(rank).sent.last_key_value().map(|(seq, _)| *seq);
        let seq = last.map_or(EventSeq::ZERO, |last| EventSeq(last).next());
        self.publish(rank, seq.0, std::slice::from_ref(event), None, None)?;
        self.settle()
    }
}

/// Blocks that no other chain has.
struct Chains {
    made: u64,
    block_size: u64,
}

impl Chains {
    fn names(&mut self, blocks: u64) -> Vec<u64> {
        let first = self.made + 1;
        self.made += blocks;
        (first..first + blocks).collect()
    }

    fn tokens(&self, name: u64) -> std::ops::Range<u64> {
        name * self.block_size..(name + 1) * self.block_size
    }

    /// The tokens of a block follow from its name.
    fn store(&self, names: &[u64], parent: Option<u64>) -> Value {
        let size = self.block_size;
        let tokens: Vec<u64> = names.iter().flat_map(|name| self.tokens(*name)).collect();
        json!({"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
            "token_ids": tokens, "block_size": size})
    }
}

/// A batch as msgpack: an array of time, events as maps, and rank.
pub fn payload(restarts: u32, events: &[Value], rank: &RankKey, batch_rank: Option<&Value>) -> Run<Bytes> {
    let events = events.iter().map(wire_event).collect::<Run<Vec<_>>>()?;
    let rank = batch_rank.cloned().unwrap_or_else(|| rank.dp_rank.0.into());
    let batch = json!([1.0 + f64::from(restarts), events, rank]);
    rmp_serde::to_vec(&batch).map(Bytes::from).or_else(|why| fail(format!("cannot be written: {why}")))
}

/// The event with its hashes as integers.
fn wire_event(event: &Value) -> Run<Value> {
    let mut event = event.clone();
    let number = |value: &mut Value| match hash(value) {
        _ if value.is_null() => Ok(()),
        Some(number) => {
            *value = number;
            Ok(())
        }
        None => fail(format!("no hash: {value}")),
    };
    if let Some(parent) = event.get_mut("parent_block_hash") {
        number(parent)?;
    }
    if let Some(Value::Array(hashes)) = event.get_mut("block_hashes") {
        hashes.iter_mut().try_for_each(number)?;
    }
    Ok(event)
}

/// Frames in hex.
pub fn frames_of(value: &Value) -> Run<Vec<Bytes>> {
    list("frames", value)?.iter().map(|frame| hex(text("frames", frame)?)).collect()
}

fn hex(text: &str) -> Run<Bytes> {
    let digit = |at: usize| char::from(text.as_bytes()[at]).to_digit(16).map(|digit| digit as u8);
    let pair = |at: usize| Some(digit(2 * at)? << 4 | digit(2 * at + 1)?);
    let bytes: Option<Vec<u8>> =
        text.len().is_multiple_of(2).then(|| (0..text.len() / 2).map(pair).collect()).flatten();
    bytes.map_or_else(|| fail(format!("not hex: {text}")), |bytes| Ok(bytes.into()))
}
