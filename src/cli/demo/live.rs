//! The ranks as they work.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::super::output::{print_text, table};
use super::drive::RoutingPolicy;
use super::report::{Counts, Tally, percent, share};
use super::stage::{RankNow, Stage};

/// Shows the ranks: as a table that is redrawn if stdout is a terminal, else a line a second; nothing if stdout is
/// for JSON.
pub struct Live {
    form: Form,
    looks: u32,
}

enum Form {
    Table(ProgressBar),
    Lines,
    Nothing,
}

/// Looks per line.
const PER_LINE: u32 = 5;

impl Live {
    pub fn new(json: bool) -> Self {
        let form = match (json, std::io::stdout().is_terminal()) {
            (true, _) => Form::Nothing,
            (false, true) => {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
                if let Ok(style) = ProgressStyle::with_template("{msg}") {
                    bar.set_style(style);
                }
                Form::Table(bar)
            }
            (false, false) => Form::Lines,
        };
        Self { form, looks: 0 }
    }

    /// One look.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn show(
        &mut self,
        policy: RoutingPolicy,
        since: Duration,
        stage: &Stage,
        tally: &Tally,
    ) -> Result<()> {
        self.looks += 1;
        match &self.form {
            Form::Table(bar) => bar.set_message(drawn(policy, since, &stage.ranks_now(), &tally.counts())),
            Form::Lines if self.looks.is_multiple_of(PER_LINE) => {
                print_text(line(policy, since, &stage.ranks_now(), &tally.counts()))?;
            }
            Form::Lines | Form::Nothing => {}
        }
        Ok(())
    }

    /// The last look stays on the terminal.
    pub fn end(self) {
        if let Form::Table(bar) = self.form {
            bar.abandon();
        }
    }
}

fn drawn(policy: RoutingPolicy, since: Duration, ranks: &[Option<RankNow>], counts: &Counts) -> String {
    let mut lines = table(["rank", "trust", "blocks", "load", "hits", "picks"], 2);
    for (now, counts) in ranks.iter().zip(&counts.ranks) {
        let [trust, blocks, load] = cells(now.as_ref());
        let hits = percent(share(counts.cached_tokens, counts.prompt_tokens));
        lines.add_row([counts.rank.to_string(), trust, blocks, load, hits, counts.picks.to_string()]);
    }
    format!("{}\n{lines}", head(policy, since, counts))
}

fn line(policy: RoutingPolicy, since: Duration, ranks: &[Option<RankNow>], counts: &Counts) -> String {
    let mut line = head(policy, since, counts);
    for (now, counts) in ranks.iter().zip(&counts.ranks) {
        let [trust, blocks, load] = cells(now.as_ref());
        let hits = percent(share(counts.cached_tokens, counts.prompt_tokens));
        line.push_str(&format!(
            "; {} {trust} {blocks} blocks load {load} hits {hits} picks {}",
            counts.rank, counts.picks
        ));
    }
    line
}

fn head(policy: RoutingPolicy, since: Duration, counts: &Counts) -> String {
    let picks: u64 = counts.ranks.iter().map(|rank| rank.picks).sum();
    let cached: u64 = counts.ranks.iter().map(|rank| rank.cached_tokens).sum();
    let prompt: u64 = counts.ranks.iter().map(|rank| rank.prompt_tokens).sum();
    let (name, seconds, hits) = (policy.name(), since.as_secs_f64(), percent(share(cached, prompt)));
    format!("{name} {seconds:.1} s: {picks} answers, hit rate {hits}")
}

/// Trust, indexed blocks, and active blocks of the rank's load, which may be unknown.
fn cells(now: Option<&RankNow>) -> [String; 3] {
    let Some(now) = now else { return ["-".to_owned(), "-".to_owned(), "-".to_owned()] };
    let load = now.load.decode_blocks().map_or_else(|| "unknown".to_owned(), |blocks| format!("{blocks:.0}"));
    [now.trust.to_string(), now.blocks.to_string(), load]
}
