//! Captures out again on real ports: one publisher per rank, in the recorded time or another.
//!
//! [`publish_capture`] is for every command that needs an engine's streams without an engine. Each rank is
//! one publisher with its replay endpoint; a restart in the capture closes both, binds them again and forgets
//! what was sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::future::{join_all, try_join_all};
use rankwise::capture::script::ReplayFraming as RecordedFraming;
use rankwise::capture::{CaptureScript, PublishStep, RankPlan};
use rankwise::ids::{DpRank, Moment};
use rankwise::ingest::{Publisher, PublisherConfig, ReplayFraming};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How a capture is published.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// The interface: a host name or address.
    pub host: String,
    /// The events port of global rank 0, each rank's is its number higher; `None` lets the system choose.
    pub base_port: Option<u16>,
    /// The same for replay endpoints.
    pub replay_base_port: Option<u16>,
    /// Which ranks have a replay endpoint.
    pub replay: ReplayRanks,
    /// When each message is sent.
    pub pace: Pace,
    /// Subscriptions of each rank that are waited for before the first message, and again after a restart.
    pub subscribers: usize,
    /// How long they are waited for. Then it goes on without them, as an engine does.
    pub patience: Duration,
}

/// When messages are sent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Pace {
    /// So many times as fast as recorded.
    Speed(f64),
    /// As fast as they are taken; ranks run beside each other.
    Fast,
}

/// Which ranks have a replay endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum ReplayRanks {
    /// Every rank: each serves what it has sent
    All,
    /// Ranks of which replay answers were recorded
    Recorded,
    /// None
    None,
}

/// Where one rank is published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEndpoints {
    /// The global rank.
    pub dp_rank: DpRank,
    /// Its events.
    pub events: String,
    /// Its replays; `None` if it has no such endpoint.
    pub replay: Option<String>,
}

/// A capture that is being published. Dropping it closes every port at once.
pub struct Published {
    endpoints: Vec<RankEndpoints>,
    sent: Arc<AtomicU64>,
    sending: Option<JoinHandle<Result<Vec<RankSender>>>>,
    done: Vec<RankSender>,
}

/// Counts the messages of a capture that is being published.
#[derive(Clone, Debug)]
pub struct SentCounter(Arc<AtomicU64>);

impl SentCounter {
    /// Messages sent so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Binds every rank's ports and starts publishing, on the runtime that it is called on.
///
/// # Errors
/// Ports past 65535, and endpoints that cannot be bound.
pub async fn publish_capture(script: &CaptureScript, options: &PublishOptions) -> Result<Published> {
    let sent = Arc::new(AtomicU64::new(0));
    let topic = &script.header().fields().topic;
    let plans = script.publish_plan().ranks;
    let binding = plans.into_iter().map(|plan| RankSender::bind(plan, topic, options, Arc::clone(&sent)));
    let senders = try_join_all(binding).await?;
    let endpoints = senders.iter().map(RankSender::endpoints).collect();
    let origin = script.live().iter().map(|message| message.at).min().unwrap_or_default();
    let sending = tokio::spawn(send_all(senders, origin));
    Ok(Published { endpoints, sent, sending: Some(sending), done: Vec::new() })
}

impl Published {
    /// Where the ranks are published, ascending by rank.
    pub fn endpoints(&self) -> &[RankEndpoints] {
        &self.endpoints
    }

    /// Counts the messages as they are sent, over all ranks.
    pub fn counter(&self) -> SentCounter {
        SentCounter(Arc::clone(&self.sent))
    }

    /// Waits until everything is sent. The ports stay open and replays are answered until
    /// [`Published::close`]. May be cancelled.
    ///
    /// # Errors
    /// A rank's ports could not be bound again after a restart, or its publisher has ended.
    pub async fn finished(&mut self) -> Result<()> {
        if let Some(sending) = &mut self.sending {
            let ended = sending.await;
            self.sending = None;
            self.done = ended.context("publishing broke off")??;
        }
        Ok(())
    }

    /// Hands what was sent to the connections and frees the ports. What was not sent yet is not.
    pub async fn close(mut self) {
        let done = std::mem::take(&mut self.done);
        join_all(done.into_iter().map(|sender| sender.publisher.close())).await;
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        if let Some(sending) = &self.sending {
            sending.abort();
        }
    }
}

/// All ranks wait for their subscribers, then start together: what lay between their messages stays.
async fn send_all(senders: Vec<RankSender>, origin: Moment) -> Result<Vec<RankSender>> {
    join_all(senders.iter().map(RankSender::wait_for_subscribers)).await;
    let start = Instant::now();
    try_join_all(senders.into_iter().map(|sender| sender.send_all(start, origin))).await
}

/// One rank's publisher on its way through the plan.
struct RankSender {
    plan: RankPlan,
    config: PublisherConfig,
    publisher: Publisher,
    pace: Pace,
    subscribers: usize,
    patience: Duration,
    sent: Arc<AtomicU64>,
}

impl RankSender {
    async fn bind(
        plan: RankPlan,
        topic: &str,
        options: &PublishOptions,
        sent: Arc<AtomicU64>,
    ) -> Result<Self> {
        let config = publisher_config(&plan, topic);
        let events = endpoint(&options.host, options.base_port, plan.rank)?;
        let with_replay = match options.replay {
            ReplayRanks::All => true,
            ReplayRanks::Recorded => plan.has_replay,
            ReplayRanks::None => false,
        };
        let replay = match with_replay {
            true => Some(endpoint(&options.host, options.replay_base_port, plan.rank)?),
            false => None,
        };
        let publisher = Publisher::bind(&events, replay.as_deref(), config.clone())
            .await
            .with_context(|| format!("cannot publish rank {}", plan.rank))?;
        let PublishOptions { pace, subscribers, patience, .. } = *options;
        Ok(Self { plan, config, publisher, pace, subscribers, patience, sent })
    }

    fn endpoints(&self) -> RankEndpoints {
        RankEndpoints {
            dp_rank: self.plan.rank,
            events: self.publisher.events_endpoint().to_owned(),
            replay: self.publisher.replay_endpoint().map(ToOwned::to_owned),
        }
    }

    async fn wait_for_subscribers(&self) {
        let subscribed = self.publisher.subscribed(self.subscribers);
        if self.subscribers > 0 && timeout(self.patience, subscribed).await.is_err() {
            tracing::warn!(
                rank = self.plan.rank.0,
                wanted = self.subscribers,
                there = self.publisher.subscriptions(),
                "publishing without the subscribers that were waited for"
            );
        }
    }

    async fn send_all(mut self, start: Instant, origin: Moment) -> Result<Self> {
        for step in 0..self.plan.steps.len() {
            let (PublishStep::Publish { at, .. } | PublishStep::Restart { at }) = &self.plan.steps[step];
            if let Pace::Speed(speed) = self.pace {
                sleep_until(due(start, at.since(origin), speed)).await;
            }
            match &self.plan.steps[step] {
                PublishStep::Restart { .. } => self = self.restart().await?,
                PublishStep::Publish { frames, .. } => {
                    for (seq, payload) in self.plan.filling(step) {
                        self.publisher.remember(seq, payload);
                    }
                    self.publisher.publish_frames(frames.clone()).await?;
                    self.sent.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(self)
    }

    /// The same ports with nothing remembered, as a new process has them.
    async fn restart(self) -> Result<Self> {
        let RankEndpoints { events, replay, dp_rank } = self.endpoints();
        self.publisher.close().await;
        let publisher = bind_again(&events, replay.as_deref(), &self.config)
            .await
            .with_context(|| format!("cannot publish rank {dp_rank} again after its restart"))?;
        let sender = Self { publisher, ..self };
        sender.wait_for_subscribers().await;
        Ok(sender)
    }
}

/// Binds ports that were ours a moment ago: the system may need another to let them go.
async fn bind_again(events: &str, replay: Option<&str>, config: &PublisherConfig) -> Result<Publisher> {
    // Two seconds in all: longer, and somebody else has taken the port.
    const ATTEMPTS: u32 = 40;
    for _ in 1..ATTEMPTS {
        match Publisher::bind(events, replay, config.clone()).await {
            Ok(publisher) => return Ok(publisher),
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
    Ok(Publisher::bind(events, replay, config.clone()).await?)
}

/// As the recorded publisher framed its messages and answers.
fn publisher_config(plan: &RankPlan, topic: &str) -> PublisherConfig {
    let recorded = plan.steps.iter().find_map(|step| match step {
        PublishStep::Publish { frames, .. } if frames.len() > 2 => frames.first(),
        _ => None,
    });
    let topic = match recorded.map(|frame| std::str::from_utf8(frame)) {
        Some(Ok(recorded)) => recorded.to_owned(),
        _ => topic.to_owned(),
    };
    let framing = match plan.framing {
        Some(RecordedFraming::Plain) => ReplayFraming::WithoutTopic,
        Some(RecordedFraming::WithTopic) | None => ReplayFraming::WithTopic,
    };
    PublisherConfig { topic, framing, ..PublisherConfig::default() }
}

/// The endpoint of a rank: the base port plus its global number.
fn endpoint(host: &str, base_port: Option<u16>, rank: DpRank) -> Result<String> {
    let port = match base_port {
        None => 0,
        Some(base) => match u16::try_from(u64::from(base) + u64::from(rank.0)) {
            Ok(port) => port,
            Err(_) => bail!("port {base} plus rank {rank} is past 65535; choose a lower base port"),
        },
    };
    Ok(if host.contains(':') && !host.starts_with('[') {
        format!("tcp://[{host}]:{port}")
    } else {
        format!("tcp://{host}:{port}")
    })
}

/// When something is due that was recorded `after` the first message.
fn due(start: Instant, after: Duration, speed: f64) -> Instant {
    // A speed so low that the moment cannot be expressed is as good as a year.
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let after =
        Duration::try_from_secs_f64(after.as_secs_f64() / speed).map_or(YEAR, |after| after.min(YEAR));
    start + after
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn ports_follow_from_the_global_rank() {
        assert_eq!(endpoint("127.0.0.1", Some(5557), DpRank(3)).unwrap(), "tcp://127.0.0.1:5560");
        assert_eq!(endpoint("::1", None, DpRank(3)).unwrap(), "tcp://[::1]:0");
        assert!(endpoint("*", Some(65_535), DpRank(1)).unwrap_err().to_string().contains("past 65535"));
    }

    #[test]
    fn speed_divides_recorded_time() {
        let start = Instant::now();
        let after = Duration::from_secs(10);
        assert_eq!(due(start, after, 4.0) - start, Duration::from_millis(2500));
        assert!(due(start, after, f64::MIN_POSITIVE) > start + Duration::from_secs(3600));
    }
}
