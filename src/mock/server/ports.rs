//! Which ports a worker's ranks are bound on.

use std::time::Duration;

use super::{FleetConfig, RankAddress, StartError};
use crate::load::stat::LOAD_STAT_TOPIC;
use crate::mock::config::Shape;
use crate::wire::publisher::{PublishError, Publisher, PublisherConfig};

/// One rank's sockets.
pub(super) struct RankPorts {
    pub(super) events: Publisher,
    /// Only where the engine has one.
    pub(super) load_stat: Option<Publisher>,
}

impl RankPorts {
    pub(super) fn address(&self, dp_rank: u32) -> RankAddress {
        RankAddress {
            dp_rank,
            events: self.events.events_endpoint().to_owned(),
            replay: self.events.replay_endpoint().unwrap_or_default().to_owned(),
            load_stat: self.load_stat.as_ref().map(|socket| socket.events_endpoint().to_owned()),
        }
    }
}

/// How a rank's events are published.
pub(super) fn publisher_config(config: &FleetConfig) -> PublisherConfig {
    PublisherConfig {
        buffer: config.replay_buffer,
        // Subscribers that still read when a fleet ends read to the end; the others are not waited for.
        linger: Duration::from_millis(500),
        ..PublisherConfig::default()
    }
}

/// The port that is `offset` above `base`; 0 stays 0.
pub(super) fn offset(base: u16, offset: u32) -> Result<u16, StartError> {
    if base == 0 {
        return Ok(0);
    }
    let port = u64::from(base) + u64::from(offset);
    u16::try_from(port).map_err(|_| StartError::PortRange { base, offset })
}

/// Where the search for neighbours may begin anew: a shared machine has other takers.
const ATTEMPTS: usize = 16;

/// Binds the ports of every rank of a worker.
///
/// Where the system chooses, a rank's port is its neighbour's plus 1, so that the worker can be named by one base
/// endpoint like an engine's. If that does not come about, each rank has some port of its own.
pub(super) async fn bind_worker(config: &FleetConfig, worker: u32) -> Result<Vec<RankPorts>, StartError> {
    let first = worker.saturating_mul(config.ranks);
    let base = Base { events: offset(config.event_port, first)?, replay: offset(config.replay_port, first)? };
    // Past 65535 is an error whoever holds the ports.
    offset(base.events, config.ranks - 1)?;
    offset(base.replay, config.ranks - 1)?;
    if base.events != 0 && base.replay != 0 {
        return bind_ranks(config, base, Chosen::AsGiven).await;
    }
    for _ in 0..ATTEMPTS {
        if let Ok(bound) = bind_ranks(config, base, Chosen::Neighbours).await {
            return Ok(bound);
        }
    }
    bind_ranks(config, base, Chosen::AsGiven).await
}

#[derive(Clone, Copy)]
struct Base {
    events: u16,
    replay: u16,
}

/// What becomes of a port 0 on the ranks behind the first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Chosen {
    /// The first one's port plus the rank.
    Neighbours,
    /// The system chooses again.
    AsGiven,
}

async fn bind_ranks(config: &FleetConfig, base: Base, chosen: Chosen) -> Result<Vec<RankPorts>, StartError> {
    let mut bound: Vec<RankPorts> = Vec::new();
    let mut load_base = 0;
    let mut base = base;
    for rank in 0..config.ranks {
        let events = endpoint(config, offset(base.events, rank)?);
        let replay = endpoint(config, offset(base.replay, rank)?);
        let events = Publisher::bind(&events, Some(&replay), publisher_config(config)).await?;
        let load_stat = match config.engine.shape {
            Shape::Vllm => None,
            Shape::Sglang => Some(bind_load_stat(config, offset(load_base, rank)?).await?),
        };
        if rank == 0 && chosen == Chosen::Neighbours {
            base.events = port_of(events.events_endpoint());
            base.replay = events.replay_endpoint().map_or(0, port_of);
            load_base = load_stat.as_ref().map_or(0, |socket| port_of(socket.events_endpoint()));
        }
        bound.push(RankPorts { events, load_stat });
    }
    Ok(bound)
}

async fn bind_load_stat(config: &FleetConfig, port: u16) -> Result<Publisher, PublishError> {
    let sends = PublisherConfig {
        topic: LOAD_STAT_TOPIC.to_owned(),
        // Nobody asks for loads that are over.
        buffer: 0,
        ..publisher_config(config)
    };
    Publisher::bind(&endpoint(config, port), None, sends).await
}

fn endpoint(config: &FleetConfig, port: u16) -> String {
    match config.host.contains(':') {
        true => format!("tcp://[{}]:{port}", config.host.trim_matches(['[', ']'])),
        false => format!("tcp://{}:{port}", config.host),
    }
}

/// The port of a bound endpoint; 0 where there is none, which chooses again.
pub(super) fn port_of(endpoint: &str) -> u16 {
    endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0)
}
