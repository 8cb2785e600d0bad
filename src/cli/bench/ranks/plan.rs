//! What each rank states and what it runs its points on.

use anyhow::{Context, Result, bail};
use rankwise::ids::{DpRank, LocalRank};
use rankwise::lab::ranks::choice::{Choice, MAX_DENSITY, Named};
use rankwise::lab::ranks::completions::Completions;
use rankwise::lab::ranks::drill::Drill;
use rankwise::lab::ranks::engine::{self, Known};
use rankwise::lab::ranks::envelope::{Envelope, Field, Stated, uneven};
use rankwise::lab::ranks::grid::Point;
use rankwise::lab::ranks::lockstep::Claim;
use rankwise::lab::ranks::measured::Measured;
use rankwise::lab::ranks::runner::{PointRunner, TimeModel};
use rankwise::load::{Transport, WorkerUrl};
use rankwise::mock::server::{Fleet, FleetConfig};
use rankwise::mock::{EngineConfig, Timing};

/// What the ranks can take.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Capacity envelope (what an engine tells is asked; what is given here wins)")]
pub struct CapacityArgs {
    /// Longest sequence, prompt and answer together, in tokens
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<u64>,

    /// Requests that run at once
    #[arg(long, value_name = "N")]
    max_num_running_reqs: Option<u64>,

    /// Tokens in one step of the scheduler
    #[arg(long, value_name = "TOKENS")]
    max_num_scheduled_tokens: Option<u64>,

    /// KV blocks that requests can use
    #[arg(long, value_name = "N")]
    kv_blocks: Option<u64>,

    /// Tokens in a KV block; the same on all ranks
    #[arg(long, value_name = "TOKENS")]
    block_size: Option<u64>,

    /// What one rank states instead, such as 3:kv_blocks=100,max_model_len=2048; may be repeated
    #[arg(long, value_name = "RANK:FIELD=VALUE,..", value_parser = own_envelope)]
    envelope: Vec<(DpRank, Known)>,

    /// Ranks that can take different amounts: each number is halved on another rank, so that what is common is
    /// nobody's own
    #[arg(long, conflicts_with = "engine")]
    uneven: bool,

    /// Let a rank go wrong, to see the error: dies-before-joining, dies-in-exchange, dies-in-walk, hangs,
    /// other-grid, other-count, other-phases, nonsense, absurd; may be repeated
    #[arg(long, value_name = "RANK=FAULT", value_parser = drill)]
    drill: Vec<(DpRank, Drill)>,
}

/// Which points are measured.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Grid (each rank must be given the same)")]
pub struct GridArgs {
    /// Prefill points instead of those that the envelope gives: TOKENS or TOKENSxWIDTH, such as 128,511x2; none
    #[arg(long, value_name = "POINTS")]
    prefill_points: Option<Named>,

    /// Decode points instead of those that the envelope gives: CONTEXT or CONTEXTxWIDTH, such as 1024x8; none
    #[arg(long, value_name = "POINTS")]
    decode_points: Option<Named>,

    /// Steps from a length or width to four times as much, where points are not named
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DENSITY)))]
    density: u32,
}

impl GridArgs {
    /// The same for the grid.
    pub fn choice(&self) -> Choice {
        let Self { prefill_points, decode_points, density } = self;
        Choice { prefill: prefill_points.clone(), decode: decode_points.clone(), density: *density }
    }
}

/// What the points run on.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Engines")]
pub struct EngineArgs {
    /// An OpenAI-compatible engine: one for all ranks, each pinned to the engine's rank of its number, or one
    /// per rank in their order; with @R behind it, that rank of it
    #[arg(long = "engine", value_name = "URL[@R]", id = "engine")]
    engines: Vec<String>,

    /// The model to ask for; by default the first of /v1/models
    #[arg(long, value_name = "NAME", requires = "engine")]
    model: Option<String>,

    /// How many times faster than its time model a mock engine runs. Without --engine each rank gets a mock engine
    /// of its own, in its process and over real HTTP, whose limits are the rank's envelope
    #[arg(long, value_name = "FACTOR", default_value_t = 10.0, value_parser = speed, conflicts_with = "engine")]
    speed: f64,

    /// Compute the latencies by a time model instead of running anything: shows the grid in no time
    #[arg(long, conflicts_with_all = ["engine", "speed"])]
    computed: bool,
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if speed.is_finite() && speed > 0.0 => Ok(speed),
        _ => Err("a number above 0 is wanted, such as 1, 0.5 or 10".to_owned()),
    }
}

/// `3:kv_blocks=100,max_model_len=2048`
fn own_envelope(text: &str) -> Result<(DpRank, Known), String> {
    let form = "RANK:FIELD=VALUE,.. is wanted, such as 3:kv_blocks=100";
    let (rank, fields) = text.split_once(':').ok_or(form)?;
    let rank = rank.parse().map_err(|_| form)?;
    let mut known = Known::default();
    for field in fields.split(',') {
        let (name, value) = field.split_once('=').ok_or(form)?;
        let names = Field::ALL.map(Field::name).join(", ");
        let field =
            Field::named(name).ok_or_else(|| format!("{name:?} is none of the fields, which are {names}"))?;
        known.set(field, value.parse().map_err(|_| format!("{value:?} is no number"))?);
    }
    Ok((DpRank(rank), known))
}

/// `3=hangs`
fn drill(text: &str) -> Result<(DpRank, Drill), String> {
    let (rank, drill) = text.split_once('=').ok_or("RANK=FAULT is wanted, such as 3=hangs")?;
    let rank = rank.parse().map_err(|_| format!("{rank:?} is no rank"))?;
    Ok((DpRank(rank), drill.parse()?))
}

/// Without an engine: a small one. Large enough for a grid of some twenty points.
const DEFAULT: Stated = Stated {
    max_model_len: 4_096,
    max_num_running_reqs: 64,
    max_num_scheduled_tokens: 4_096,
    kv_blocks: 4_096,
    block_size: 16,
};

/// What every rank is to do.
#[derive(Debug)]
pub struct Plan {
    of: u32,
    choice: Choice,
    given: Known,
    own: Vec<(DpRank, Known)>,
    uneven: bool,
    drills: Vec<(DpRank, Drill)>,
    engines: Vec<WorkerUrl>,
    model: Option<String>,
    /// Whether one engine for all means that each rank has one of its ranks: not for a rank that was started
    /// by hand, whose engine may be its own.
    pinned: bool,
    /// `None` computes.
    speed: Option<f64>,
}

impl Plan {
    /// The plan of `of` ranks, or of one of them that was started by hand.
    ///
    /// # Errors
    /// Ranks that do not exist, engines that do not fit the ranks, URLs that cannot be used.
    pub fn new(
        capacity: &CapacityArgs,
        choice: Choice,
        engine: &EngineArgs,
        of: u32,
        by_hand: bool,
    ) -> Result<Self> {
        let mut given = Known::default();
        let numbers = [
            capacity.max_model_len,
            capacity.max_num_running_reqs,
            capacity.max_num_scheduled_tokens,
            capacity.kv_blocks,
            capacity.block_size,
        ];
        for (field, value) in Field::ALL.into_iter().zip(numbers) {
            if let Some(value) = value {
                given.set(field, value);
            }
        }
        let named = capacity.envelope.iter().map(|(rank, _)| rank);
        if let Some(rank) = named.chain(capacity.drill.iter().map(|(rank, _)| rank)).find(|rank| rank.0 >= of)
        {
            bail!("rank {rank} is none of {of} ranks: they are counted from 0");
        }
        let engines: Vec<WorkerUrl> = engine
            .engines
            .iter()
            .map(|url| {
                let parsed = WorkerUrl::parse(url)?;
                if parsed.transport() != Transport::Http {
                    bail!("{url} is no http:// URL");
                }
                Ok(parsed)
            })
            .collect::<Result<_>>()?;
        if by_hand && engines.len() > 1 {
            bail!("{} engines for one rank", engines.len());
        }
        if engines.len() > 1 && engines.len() != of as usize {
            bail!("{} engines for {of} ranks: give one for all of them, or one for each", engines.len());
        }
        Ok(Self {
            of,
            choice,
            given,
            own: capacity.envelope.clone(),
            uneven: capacity.uneven,
            drills: capacity.drill.clone(),
            engines,
            model: engine.model.clone(),
            pinned: of > 1 && !by_hand,
            speed: (!engine.computed).then_some(engine.speed),
        })
    }

    /// What the points run on, in words.
    pub fn runs_on(&self) -> String {
        match (self.engines.as_slice(), self.speed) {
            ([], None) => "a time model: computed, not measured".to_owned(),
            ([], Some(speed)) => format!("mock engines, {speed} times faster than their time model"),
            (engines, _) => engines.iter().map(shown).collect::<Vec<_>>().join(", "),
        }
    }

    /// What `rank` is to do. Asks its engine, if it has one.
    ///
    /// # Errors
    /// An engine that does not answer or does not tell enough; an envelope that cannot be.
    pub async fn rank(&self, rank: DpRank) -> Result<Planned> {
        let own = self.own.iter().filter(|(of, _)| *of == rank);
        let own = own.fold(Known::default(), |known, (_, more)| more.or(known));
        let engine = match self.engines.as_slice() {
            [] => None,
            [one] => Some((one, one.rank().map(|rank| rank.0).or(self.pinned.then_some(rank.0)))),
            each => each.get(rank.0 as usize).map(|one| (one, one.rank().map(|rank| rank.0))),
        };
        let (known, target) = match engine {
            None => {
                let whole = self.given.or(known(DEFAULT)).whole()?;
                let stated = if self.uneven { uneven(whole, rank, self.of) } else { whole };
                (own.or(known(stated)), self.speed.map_or(Target::Computed, |speed| Target::Mock { speed }))
            }
            Some((url, pin)) => {
                let pin = pin.map(LocalRank);
                let says = engine::ask(url.base(), pin.unwrap_or(LocalRank(0))).await?;
                let model = self.model.clone().or(says.model);
                let model = model
                    .with_context(|| format!("{} serves no model; name one with --model", shown(url)))?;
                let target = Target::Engine { base: url.base().to_owned(), pin, model };
                (own.or(self.given).or(says.known), target)
            }
        };
        let stated =
            known.whole().context("give the rest on the command line (--max-model-len and so on)")?;
        stated.check().with_context(|| format!("the envelope of rank {rank}"))?;
        let drill = self.drills.iter().find(|(of, _)| *of == rank).map(|(_, drill)| *drill);
        let who = format!("pid {} on {}", std::process::id(), host());
        let claim = Claim { rank, of: self.of, who, envelope: stated, choice: self.choice.clone() };
        Ok(Planned { claim, drill, target })
    }
}

fn known(stated: Stated) -> Known {
    let mut known = Known::default();
    for field in Field::ALL {
        known.set(field, stated.get(field));
    }
    known
}

fn shown(url: &WorkerUrl) -> String {
    let rank = url.rank().map(|rank| format!("@{rank}")).unwrap_or_default();
    format!("{}{rank}", url.base())
}

/// The host's name as the system knows it, for errors.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).unwrap_or_else(|| "?".to_owned())
}

/// What one rank is to do.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Who it is and what it states.
    pub claim: Claim,
    /// What it does wrong.
    pub drill: Option<Drill>,
    target: Target,
}

#[derive(Clone, Debug)]
enum Target {
    Computed,
    Mock { speed: f64 },
    Engine { base: String, pin: Option<LocalRank>, model: String },
}

impl Planned {
    /// What runs its points; a mock engine is started on the present runtime.
    ///
    /// # Errors
    /// Ports that cannot be bound, or when the system gives no HTTP client.
    pub async fn runner(&self) -> Result<Runner> {
        // Ranks may share an engine, and their prompts must not share a prefix.
        let seed = u64::from(self.claim.rank.0) << 32 | u64::from(std::process::id());
        match &self.target {
            Target::Computed => Ok(Runner::Computed(TimeModel::new(self.claim.envelope.check()?))),
            Target::Mock { speed } => {
                let fleet = mock(&self.claim.envelope.check()?, *speed).await?;
                let worker = fleet.workers().first().context("the mock engine has no address")?;
                let completions = Completions::new(&worker.url, &worker.model, None, seed)?;
                Ok(Runner::Engine { completions: Box::new(completions), _mock: Some(fleet) })
            }
            Target::Engine { base, pin, model } => {
                let completions = Box::new(Completions::new(base, model, *pin, seed)?);
                Ok(Runner::Engine { completions, _mock: None })
            }
        }
    }

    /// The arguments with which another process is this rank.
    pub fn arguments(&self) -> Vec<String> {
        let stated = &self.claim.envelope;
        let mut arguments: Vec<String> = Field::ALL
            .into_iter()
            .flat_map(|field| {
                [format!("--{}", field.name().replace('_', "-")), stated.get(field).to_string()]
            })
            .collect();
        arguments.extend(self.claim.choice.arguments());
        if let Target::Engine { base, pin, model } = &self.target {
            let pin = pin.map(|pin| format!("@{}", pin.0)).unwrap_or_default();
            arguments.extend([
                "--engine".to_owned(),
                format!("{base}{pin}"),
                "--model".to_owned(),
                model.clone(),
            ]);
        }
        if let Some(drill) = self.drill {
            arguments.extend(["--drill".to_owned(), format!("{}={drill}", self.claim.rank)]);
        }
        arguments
    }
}

/// A mock engine of one rank whose limits are `envelope`.
async fn mock(envelope: &Envelope, speed: f64) -> Result<Fleet> {
    let engine = EngineConfig {
        block_size: envelope.block_size(),
        blocks: envelope.kv_blocks(),
        max_running: envelope.max_num_running_reqs(),
        max_batched_tokens: envelope.max_num_scheduled_tokens(),
        max_model_len: envelope.max_model_len(),
        timing: Timing { speed, ..Timing::default() },
        ..EngineConfig::default()
    };
    let config = FleetConfig { engine, workers: 1, ranks: 1, ..FleetConfig::default() };
    Fleet::start(config).await.context("cannot start a mock engine")
}

/// Whatever runs points.
pub enum Runner {
    /// Nothing: the figures are computed.
    Computed(TimeModel),
    /// An engine.
    Engine {
        /// Its client.
        completions: Box<Completions>,
        /// The engine, where it is ours: it runs as long as this.
        _mock: Option<Fleet>,
    },
}

impl PointRunner for Runner {
    type Error = String;

    async fn warm_up(&mut self, point: &Point) -> Result<(), String> {
        match self {
            Self::Computed(model) => model.warm_up(point).await.map_err(|error| error.to_string()),
            Self::Engine { completions, .. } => {
                completions.warm_up(point).await.map_err(|error| error.to_string())
            }
        }
    }

    async fn run(&mut self, point: &Point) -> Result<Measured, String> {
        match self {
            Self::Computed(model) => model.run(point).await.map_err(|error| error.to_string()),
            Self::Engine { completions, .. } => {
                completions.run(point).await.map_err(|error| error.to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn envelopes_and_drills_are_read() {
        let (rank, known) = own_envelope("3:kv_blocks=100,max_model_len=7").unwrap();
        assert_eq!((rank, known.get(Field::KvBlocks)), (DpRank(3), Some(100)));
        assert_eq!((known.get(Field::MaxModelLen), known.get(Field::BlockSize)), (Some(7), None));
        for bad in ["", "3", "x:kv_blocks=1", "3:kv_blocks", "3:blocks=1", "3:kv_blocks=-1", "3:"] {
            assert!(own_envelope(bad).is_err(), "{bad}");
        }
        assert_eq!(drill("2=hangs").unwrap(), (DpRank(2), Drill::Hangs));
        assert!(drill("2=sleeps").unwrap_err().contains("dies-in-walk"));
        assert!(drill("hangs").is_err() && drill("x=hangs").is_err());
    }
}
