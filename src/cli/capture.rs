//! `rankwise capture`: live ranks to a capture file.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rankwise::block::BlockSize;
use rankwise::capture::format::HeaderEndpoint;
use rankwise::capture::{HeaderFields, is_capture};
use rankwise::fleet::{Endpoints, EventsFrom, Fleet, PoolKey, RankPlan, Ranks, WorkerSpec};
use rankwise::ids::DpRank;

use super::output::{print_json, print_text, table};
use super::recording::{Limits, Recorded, Recording, record};
use super::republish::seconds;
use super::{Verdict, runtime};

/// Record live ranks to a capture file
///
/// Every message of every rank is written as it came, byte for byte. Ctrl-C ends the file properly; what was
/// recorded can be fed to an index with `rankwise replay`. Connections that are lost are made again and
/// leave a mark in the file.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise capture --endpoint tcp://10.0.0.5:5557 --ranks 0-3 --engine vllm --out run.kvcap.gz
      record four ranks, rank N on port 5557+N, until Ctrl-C
  rankwise capture --endpoint tcp://10.0.0.5:5557 --replay-endpoint tcp://10.0.0.5:5657 --with-history \\
      --seconds 60 --out run.kvcap
      record rank 0 for a minute, with what its replay endpoint still has from before")]
pub struct Args {
    /// Where rank 0 publishes: rank N is N ports higher (an ipc path gets _dpN). Given once per rank, each
    /// rank's own. A wildcard (tcp://*:5557) is bound, for engines that connect to us
    #[arg(long = "endpoint", required = true, value_name = "ENDPOINT")]
    endpoints: Vec<String>,

    /// The global ranks, as in 0-3 or 0,2,4-7; without it as many as there are endpoints
    #[arg(long, value_name = "RANKS", value_parser = parse_ranks)]
    ranks: Option<Ranks>,

    /// Prefix of the topics to subscribe to; without it all
    #[arg(long, value_name = "TOPIC", default_value = "")]
    topic: String,

    /// Where rank 0 answers replays, or one per rank, as with --endpoint
    #[arg(long = "replay-endpoint", value_name = "ENDPOINT", requires = "with_history")]
    replay_endpoints: Vec<String>,

    /// Ask the replay endpoint for everything that it still has at each connect, and for what is missing at
    /// each hole, and record the answers
    #[arg(long, requires = "replay_endpoints")]
    with_history: bool,

    /// The file to write, *.kvcap or *.kvcap.gz; an existing one is not overwritten
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// Stop after this long
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<Duration>,

    /// Stop after so many live messages of all ranks together
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    messages: Option<u64>,

    /// The engine's name, for the file's header
    #[arg(long, value_name = "NAME", default_value = "unknown")]
    engine: String,

    /// The engine's version, for the file's header
    #[arg(long, value_name = "VERSION", default_value = "")]
    engine_version: String,

    /// Tokens per block, for the file's header; without it what the first stored block says
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    block_size: Option<u32>,

    /// What is being recorded, in words
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Does it.
    ///
    /// # Errors
    /// Endpoints that no rank can have, a file that cannot be written.
    pub fn run(self) -> Result<Verdict> {
        if !is_capture(&self.out) {
            bail!("{}: a capture's name ends in .kvcap or .kvcap.gz", self.out.display());
        }
        let plans = self.plans()?;
        let recording = Recording {
            out: self.out.clone(),
            header: self.header(&plans),
            plans,
            with_history: self.with_history,
            limits: Limits { time: self.seconds, messages: self.messages },
        };
        let recorded = runtime()?.block_on(record(recording))?;
        if self.json {
            print_json(&recorded)?
        } else {
            print_text(summary(&recorded))?
        }
        Ok(Verdict::Ok)
    }

    /// Every rank with its endpoints, found and checked as a service does it.
    fn plans(&self) -> Result<Vec<RankPlan>> {
        const WORKER: &str = "capture";
        let ranks = match &self.ranks {
            Some(ranks) => ranks.clone(),
            None => Ranks::range(0, u32::try_from(self.endpoints.len())?)?,
        };
        let replay = match self.replay_endpoints.as_slice() {
            [] => None,
            endpoints => Some(per_rank("--replay-endpoint", endpoints, &ranks)?),
        };
        let endpoints = per_rank("--endpoint", &self.endpoints, &ranks)?;
        let events = EventsFrom::Zmq { endpoints, replay, topic: self.topic.clone() };
        // Nothing is indexed here, so that any block size is good.
        let block_size = BlockSize::new(self.block_size.unwrap_or(1)).context("the block size is 0")?;
        let spec = WorkerSpec::new(WORKER, PoolKey::new(WORKER, None), block_size, ranks).events(events);
        let mut fleet = Fleet::new();
        fleet.declare(spec).context("these ranks cannot be recorded")?;
        Ok(fleet.plans(&WORKER.into()).cloned().collect())
    }

    fn header(&self, plans: &[RankPlan]) -> HeaderFields {
        let address = |at: &Option<rankwise::fleet::Endpoint>| at.as_ref().map(|at| at.address().to_owned());
        let endpoints = plans.iter().map(|plan| HeaderEndpoint {
            rank: plan.rank.dp_rank.0,
            events: address(&plan.events).unwrap_or_default(),
            replay: address(&plan.replay),
        });
        HeaderFields {
            engine: self.engine.clone(),
            engine_version: self.engine_version.clone(),
            dp_size: u32::try_from(plans.len()).ok(),
            block_size: self.block_size,
            topic: self.topic.clone(),
            endpoints: endpoints.collect(),
            note: self.note.clone(),
            ..HeaderFields::default()
        }
    }
}

/// One endpoint is the base of all ranks; several are one per rank.
fn per_rank(flag: &str, endpoints: &[String], ranks: &Ranks) -> Result<Endpoints> {
    match endpoints {
        [base] => Ok(Endpoints::base(base)),
        several if several.len() == ranks.len() as usize => {
            Ok(Endpoints::per_rank(ranks.iter().zip(several.iter().cloned())))
        }
        several => bail!(
            "{flag} is given {} times for {} ranks; give it once, or once per rank",
            several.len(),
            ranks.len()
        ),
    }
}

/// Reads `0-3` or `0,2,4-7`.
fn parse_ranks(text: &str) -> Result<Ranks, String> {
    let number = |text: &str| {
        text.trim().parse::<u32>().map_err(|_| format!("{text:?} is no rank; write 0-3 or 0,2,4-7"))
    };
    let mut ranks: Option<Ranks> = None;
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        // Checked before anything is expanded: `0-4294967295` is four billion ranks.
        let size = last.checked_sub(first).ok_or_else(|| format!("{part}: the last rank comes first"))?;
        let range = Ranks::range(first, size.saturating_add(1)).map_err(|error| error.to_string())?;
        match &mut ranks {
            None => ranks = Some(range),
            Some(ranks) => range.iter().try_for_each(|rank: DpRank| {
                ranks.insert(rank).map(|_| ()).map_err(|error| error.to_string())
            })?,
        }
    }
    ranks.ok_or_else(|| "no rank is given".to_owned())
}

fn summary(recorded: &Recorded) -> String {
    let mut ranks = table(["rank", "connects", "messages", "replayed", "first", "last", "holes"], 1);
    for rank in &recorded.ranks {
        let seq = |seq: Option<u64>| seq.map_or("-".to_owned(), |seq| seq.to_string());
        ranks.add_row([
            rank.dp_rank.to_string(),
            rank.connects.to_string(),
            rank.messages.to_string(),
            rank.replayed.to_string(),
            seq(rank.first_seq),
            seq(rank.last_seq),
            rank.holes.to_string(),
        ]);
    }
    let Recorded { file, messages, seconds, .. } = recorded;
    format!("{ranks}\n\n{messages} messages in {seconds:.1} s recorded in {file}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// R3: ranks are global, and nothing is expanded before it is bounded.
    #[test]
    fn ranks_are_read_as_ranges_and_lists() {
        let read = |text| parse_ranks(text).map(|ranks| ranks.iter().map(|rank| rank.0).collect::<Vec<_>>());
        assert_eq!(read("0-3").unwrap(), [0, 1, 2, 3]);
        assert_eq!(read("7, 2,4-5").unwrap(), [2, 4, 5, 7]);
        for bad in ["", "x", "3-1", "0-4294967295", "0-9999", "-1", "1,,2"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn endpoints_are_one_base_or_one_per_rank() {
        let ranks = Ranks::range(0, 2).unwrap();
        let endpoints = |count: usize| vec!["tcp://h:1".to_owned(); count];
        assert_eq!(per_rank("--endpoint", &endpoints(1), &ranks).unwrap(), Endpoints::base("tcp://h:1"));
        assert_eq!(per_rank("--endpoint", &endpoints(2), &ranks).unwrap().per_rank.len(), 2);
        assert!(per_rank("--endpoint", &endpoints(3), &ranks).is_err());
    }
}
