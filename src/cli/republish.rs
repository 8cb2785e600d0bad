//! `rankwise replay --publish`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::future::{join_all, try_join_all};
use rankwise::capture::{CaptureScript, stem};
use serde::Serialize;
use tokio::time::sleep;

use super::inputs::Loading;
use super::output::{message_bar, print_json, print_text};
use super::publish::{Pace, PublishOptions, Published, RankEndpoints, ReplayRanks, publish_capture};
use super::{Verdict, runtime};

/// The arguments around `--publish`.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Publishing")]
pub struct PublishArgs {
    /// Send the captures out again on ZMQ ports, one per rank, with replay endpoints; the recorded numbers
    /// stay, and a restart in the capture binds again with an empty buffer
    #[arg(long)]
    publish: bool,

    /// The interface to bind; anyone who reaches it can subscribe
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", requires = "publish")]
    host: String,

    /// Rank N publishes on this port plus N, the ranks of a second capture after those of the first; without
    /// it, on free ports
    #[arg(long, value_name = "PORT", requires = "publish")]
    base_port: Option<u16>,

    /// Rank N answers replays on this port plus N; without it, on free ports
    #[arg(long, value_name = "PORT", requires = "publish")]
    replay_base_port: Option<u16>,

    /// Which ranks have a replay endpoint
    #[arg(long, value_name = "WHICH", default_value = "all", requires = "publish")]
    replay: ReplayRanks,

    /// So many times as fast as recorded
    #[arg(long, value_name = "X", default_value = "1", requires = "publish", value_parser = speed)]
    speed: f64,

    /// As fast as subscribers take it
    #[arg(long, requires = "publish", conflicts_with = "speed")]
    fast: bool,

    /// Subscriptions of each rank to wait for before its first message, and again after a restart
    #[arg(long, value_name = "N", default_value = "1", requires = "publish")]
    wait_subscribers: usize,

    /// Go on without them after this long
    #[arg(long, value_name = "SECONDS", default_value = "30", requires = "publish", value_parser = seconds)]
    wait_seconds: Duration,

    /// Keep the ports open for so long after the last message, to answer replays
    #[arg(long, value_name = "SECONDS", default_value = "0", requires = "publish", value_parser = seconds)]
    linger: Duration,
}

impl PublishArgs {
    /// Whether `--publish` was given.
    pub fn wanted(&self) -> bool {
        self.publish
    }

    /// Publishes the captures beside each other.
    ///
    /// # Errors
    /// Captures that cannot be read, ports that cannot be bound.
    pub fn run(&self, captures: &[PathBuf], json: bool) -> Result<Verdict> {
        let mut loading = Loading::new(captures);
        let scripts = captures.iter().map(|path| loading.load(path)).collect::<Result<Vec<_>>>()?;
        drop(loading);
        runtime()?.block_on(self.publish_all(captures, &scripts, json))
    }

    async fn publish_all(
        &self,
        captures: &[PathBuf],
        scripts: &[CaptureScript],
        json: bool,
    ) -> Result<Verdict> {
        let mut all = Vec::new();
        let mut offset = 0;
        for (path, script) in captures.iter().zip(scripts) {
            let options = self.options(offset)?;
            let published = publish_capture(script, &options).await;
            all.push(published.with_context(|| path.display().to_string())?);
            offset += script.ranks().last().map_or(0, |rank| rank.0.saturating_add(1));
        }
        let rows = captures.iter().zip(scripts).zip(&all);
        announce(rows.map(|((path, script), published)| Row::new(path, script, published)).collect(), json)?;
        let messages = scripts.iter().map(|script| script.live().len() as u64).sum();
        let start = Instant::now();
        finish_all(&mut all, messages).await?;
        let seconds = start.elapsed().as_secs_f64();
        sleep(self.linger).await;
        join_all(all.into_iter().map(Published::close)).await;
        if json {
            print_json(&End { published: Summary { messages, seconds } })?;
        } else {
            print_text(format!("published {messages} messages in {seconds:.1} s, waiting included"))?;
        }
        Ok(Verdict::Ok)
    }

    fn options(&self, offset: u32) -> Result<PublishOptions> {
        let shifted = |base: Option<u16>| -> Result<Option<u16>> {
            let Some(base) = base else { return Ok(None) };
            match u16::try_from(u64::from(base) + u64::from(offset)) {
                Ok(port) => Ok(Some(port)),
                Err(_) => bail!("port {base} plus {offset} ranks is past 65535; choose a lower base port"),
            }
        };
        Ok(PublishOptions {
            host: self.host.clone(),
            base_port: shifted(self.base_port)?,
            replay_base_port: shifted(self.replay_base_port)?,
            replay: self.replay,
            pace: if self.fast { Pace::Fast } else { Pace::Speed(self.speed) },
            subscribers: self.wait_subscribers,
            patience: self.wait_seconds,
        })
    }
}

async fn finish_all(all: &mut [Published], messages: u64) -> Result<()> {
    let bar = message_bar(Some(messages));
    bar.set_message("publishing");
    let sent: Vec<_> = all.iter().map(Published::counter).collect();
    let finished = try_join_all(all.iter_mut().map(Published::finished));
    let show = async {
        loop {
            bar.set_position(sent.iter().map(|sent| sent.get()).sum());
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        ended = finished => ended?,
        () = show => Vec::new(),
    };
    bar.finish_and_clear();
    Ok(())
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(speed) if speed.is_finite() && speed > 0.0 => Ok(speed),
        _ => Err("a number above 0 is wanted, such as 1, 0.5 or 10".to_owned()),
    }
}

/// Seconds as an argument: not negative, at most some 30 years.
pub(in crate::cli) fn seconds(text: &str) -> Result<Duration, String> {
    const MAX: f64 = 1e9;
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=MAX).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("a number of seconds is wanted, such as 10 or 0.5".to_owned()),
    }
}

/// What is published where, for programs and for people.
#[derive(Serialize)]
struct Announcement {
    publishing: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    file: String,
    worker: String,
    engine: String,
    engine_version: String,
    block_size: Option<u32>,
    ranks: Vec<RankRow>,
}

#[derive(Serialize)]
struct RankRow {
    dp_rank: u32,
    events: String,
    replay: Option<String>,
}

#[derive(Serialize)]
struct End {
    published: Summary,
}

#[derive(Serialize)]
struct Summary {
    messages: u64,
    seconds: f64,
}

impl Row {
    fn new(path: &std::path::Path, script: &CaptureScript, published: &Published) -> Self {
        let header = script.header();
        let rank = |at: &RankEndpoints| RankRow {
            dp_rank: at.dp_rank.0,
            events: at.events.clone(),
            replay: at.replay.clone(),
        };
        Self {
            file: path.display().to_string(),
            worker: stem(path),
            engine: header.engine().to_owned(),
            engine_version: header.engine_version().to_owned(),
            block_size: header.fields().block_size,
            ranks: published.endpoints().iter().map(rank).collect(),
        }
    }
}

fn announce(rows: Vec<Row>, json: bool) -> Result<()> {
    if json {
        return print_json(&Announcement { publishing: rows });
    }
    let mut table = super::output::table(["worker", "rank", "events", "replay"], 4);
    for row in rows {
        for rank in row.ranks {
            let replay = rank.replay.unwrap_or_else(|| "-".to_owned());
            table.add_row([row.worker.clone(), rank.dp_rank.to_string(), rank.events, replay]);
        }
    }
    print_text(table)
}
