//! What `rankwise bench serve` prints and writes.

use anyhow::Result;
use rankwise::lab::plot::{Scale, Series, duration_label, latency_over_points, percentile_curves};
use rankwise::lab::{Latencies, Report, Table};
use serde_json::{Map, Value, json};

use super::cpu::words;
use super::figures::Figures;
use super::load::Outcome;
use super::serve::Args;
use super::target::Prepared;
use super::visible;
use crate::cli::output::{short, table};

/// Said in every report: who measures on the machine that is measured should know.
const SHARED: &str = "Client, publishers and service share this machine's cores: the figures are of all of them together. GET \
     /health (--what health) shows what the client and HTTP alone can do.";

/// A loaded service.
pub struct LoadReport<'a> {
    /// As asked.
    pub args: &'a Args,
    /// What was sent.
    pub requests: &'a [Prepared],
    /// The search's trials, in their order.
    pub trials: Vec<Outcome>,
    /// The run at the rate that was asked for, or at half the highest.
    pub run: Option<Outcome>,
    /// Messages that the ranks published meanwhile.
    pub published: u64,
}

impl LoadReport<'_> {
    /// The highest trial that was kept up.
    fn best(&self) -> Option<&Outcome> {
        let kept = self.trials.iter().filter(|trial| trial.trial().kept_up());
        kept.max_by(|a, b| a.rate.total_cmp(&b.rate))
    }

    /// For `--json`.
    pub fn body(&self) -> Value {
        let mut body = Map::new();
        body.insert("bench".to_owned(), "serve".into());
        body.extend(self.args.load_parameters());
        let sizes = self.requests.iter().map(|request| request.body.as_ref().map_or(0, bytes::Bytes::len));
        let bytes = sizes.sum::<usize>() / self.requests.len().max(1);
        let measured = json!({
            "prompts": self.requests.len(), "mean_request_bytes": bytes, "messages_published": self.published,
            "highest_rate": self.best().map(|best| best.rate),
            "at_highest_rate": self.best().map(Outcome::body),
            "client_ceiling": self.client_ceiling(),
            "run": self.run.as_ref().map(Outcome::body),
            "trials": self.trials.iter().map(Outcome::body).collect::<Vec<_>>(),
        });
        body.extend(measured.as_object().cloned().unwrap_or_default());
        Value::Object(body)
    }

    /// For the terminal.
    pub fn text(&self) -> String {
        let mut lines = table(head(), 1);
        for run in self.rows() {
            lines.add_row(row(run));
        }
        let found = match (self.args.searches(), self.best()) {
            (false, _) => String::new(),
            (true, Some(best)) => format!("\n{}", self.sentence(best)),
            (true, None) => "\nNo rate was kept up.".to_owned(),
        };
        let more = [self.failures(), self.cpu()].into_iter().flatten();
        let more: String = more.map(|line| format!("\n{line}")).collect();
        format!("{lines}{found}{more}\n{SHARED}")
    }

    fn failures(&self) -> Option<String> {
        let runs = || self.trials.iter().chain(&self.run);
        let failed: u64 = runs().map(|run| run.failed).sum();
        let said = runs().find_map(|run| run.failure.as_deref())?;
        Some(format!("{failed} requests failed, one of them with: {said}"))
    }

    fn cpu(&self) -> Option<String> {
        let run = self.run.as_ref().filter(|run| !run.cpu.is_empty())?;
        let ceiling = self.client_ceiling().map(|rate| {
            format!(" The client has one thread: more than {}/s it could not send.", short(rate))
        });
        let cpu = words(&run.cpu);
        Some(format!(
            "Processor time per request at {}/s: {cpu}.{}",
            short(run.rate),
            ceiling.unwrap_or_default()
        ))
    }

    /// Requests per second that would keep the client's one thread busy all the time.
    fn client_ceiling(&self) -> Option<f64> {
        self.run.as_ref().and_then(|run| run.cpu.get("client")).map(|micros| 1e6 / micros)
    }

    fn sentence(&self, best: &Outcome) -> String {
        format!(
            "Highest rate that was kept up: {}/s (99 % answered within {}; p50 {}, p99 {}).",
            short(best.rate),
            duration_label(self.args.limit().as_nanos() as f64),
            at(&best.latency, 0.5),
            at(&best.latency, 0.99),
        )
    }

    /// The search's trials by their rate, and the last run.
    fn rows(&self) -> Vec<&Outcome> {
        let mut rows: Vec<&Outcome> = self.trials.iter().chain(&self.run).collect();
        rows.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        rows
    }

    /// For `--html`.
    ///
    /// # Errors
    /// A plot that cannot be drawn.
    pub fn page(&self) -> Result<Report> {
        let mut report = Report::new("rankwise bench serve");
        parameters(&mut report, &self.args.load_parameters());
        if let Some(best) = self.best() {
            report.note(self.sentence(best));
        }
        for line in [self.failures(), self.cpu()].into_iter().flatten() {
            report.note(line);
        }
        let mut runs = Table::new(head());
        self.rows().into_iter().for_each(|run| {
            runs.row(row(run));
        });
        report.note(SHARED).heading("Rates").table(runs);
        if self.trials.len() > 1 {
            let series = [("p50", 0.5), ("p99", 0.99)].map(|(name, quantile)| Series {
                name: name.to_owned(),
                points: self
                    .rows()
                    .iter()
                    .filter_map(|run| Some((run.rate, run.latency.at(quantile)? as f64)))
                    .collect(),
            });
            report.plot(latency_over_points("Latency over rate", "requests/s", Scale::Log, &series)?);
        }
        let named: Vec<(String, &Latencies)> = [self.best(), self.run.as_ref()]
            .into_iter()
            .flatten()
            .flat_map(|run| {
                let rate = short(run.rate);
                [
                    (format!("{rate}/s, from when it was due"), &run.latency),
                    (format!("{rate}/s, from when it was sent"), &run.service),
                ]
            })
            .collect();
        let curves: Vec<(&str, &Latencies)> = named.iter().map(|(name, of)| (name.as_str(), *of)).collect();
        report.heading("Percentiles").plot(percentile_curves("Latency by percentile", &curves)?);
        Ok(report)
    }
}

fn head() -> Vec<String> {
    let fixed = ["rate/s", "in time"].map(str::to_owned);
    fixed.into_iter().chain(Figures::HEAD.map(str::to_owned)).chain(["sent late, p99".to_owned()]).collect()
}

fn row(run: &Outcome) -> Vec<String> {
    let share = format!("{:.2} %", run.trial().share() * 100.0);
    let figures = Figures::of(&run.latency).cells();
    let late = at(&run.lateness, 0.99);
    [format!("{:.0}", run.rate), share].into_iter().chain(figures).chain([late]).collect()
}

fn at(latencies: &Latencies, quantile: f64) -> String {
    latencies.at(quantile).map_or_else(|| "-".to_owned(), |nanos| duration_label(nanos as f64))
}

fn parameters(report: &mut Report, of: &Map<String, Value>) {
    for (name, value) in of {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        report.parameter(name.replace('_', " "), text);
    }
}

/// Events until they were visible.
pub struct VisibleReport<'a> {
    /// As asked.
    pub args: &'a Args,
    /// Messages per second and rank.
    pub rate: f64,
    /// As measured.
    pub outcome: visible::Outcome,
}

impl VisibleReport<'_> {
    /// The figure that the others stand beside: the reader's, or where the service is elsewhere, HTTP's.
    pub fn main(&self) -> &Latencies {
        let of = &self.outcome;
        if of.in_process.count() > 0 { &of.in_process } else { &of.http }
    }

    fn rows(&self) -> [(&'static str, &Latencies); 3] {
        let of = &self.outcome;
        [
            ("send to visible, reader in process", &of.in_process),
            ("send to answer, POST /query", &of.http),
            ("sent later than planned", &of.lateness),
        ]
    }

    /// For `--json`.
    pub fn body(&self) -> Value {
        let mut body = Map::new();
        body.insert("bench".to_owned(), "event_to_visible".into());
        body.extend(self.args.fleet_parameters());
        let of = &self.outcome;
        let measured = json!({
            "messages": of.messages, "achieved_messages_per_s": self.achieved(), "unseen": of.unseen,
            "in_process": Figures::of(&of.in_process), "http": Figures::of(&of.http),
            "send_lateness": Figures::of(&of.lateness), "cpu_us_per_message": of.cpu,
        });
        body.extend(measured.as_object().cloned().unwrap_or_default());
        Value::Object(body)
    }

    fn achieved(&self) -> Option<f64> {
        let seconds = self.outcome.took.as_secs_f64();
        (seconds > 0.0).then(|| self.outcome.messages as f64 / seconds)
    }

    /// For the terminal.
    pub fn text(&self) -> String {
        let head = [""].into_iter().chain(Figures::HEAD);
        let mut lines = table(head.collect::<Vec<_>>(), 1);
        for (name, latencies) in self.rows() {
            lines.add_row([name.to_owned()].into_iter().chain(Figures::of(latencies).cells()));
        }
        format!("{lines}\n{}\n{SHARED}", self.sentence())
    }

    fn sentence(&self) -> String {
        format!(
            "{} messages, {}/s of {}/s planned; {} watched blocks were not seen. Processor time per message: {}.",
            self.outcome.messages,
            self.achieved().map_or_else(|| "-".to_owned(), short),
            short(self.rate * f64::from(self.args.ranks())),
            self.outcome.unseen,
            words(&self.outcome.cpu),
        )
    }

    /// For `--html`.
    ///
    /// # Errors
    /// A plot that cannot be drawn.
    pub fn page(&self) -> Result<Report> {
        let mut report = Report::new("rankwise bench serve --event-to-visible");
        parameters(&mut report, &self.args.fleet_parameters());
        let mut rows = Table::new([""].into_iter().chain(Figures::HEAD));
        for (name, latencies) in self.rows() {
            rows.row([name.to_owned()].into_iter().chain(Figures::of(latencies).cells()));
        }
        report.note(self.sentence()).note(SHARED).table(rows);
        report.plot(percentile_curves("From send to visible", &self.rows())?);
        Ok(report)
    }
}
