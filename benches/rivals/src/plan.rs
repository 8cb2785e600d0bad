//! Which workloads are run, and how large they are.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::contender::Field;
use crate::measure::Spec;
use crate::measure::serving::Plan;
use crate::workload::blocks::Naming;
use crate::workload::trace;

/// What the user asked for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Fewer questions, fewer rounds, smaller caches at 256 ranks.
    pub quick: bool,
    /// Where the results go, beside the table.
    pub json: Option<PathBuf>,
    /// A trace to replay instead of the made-up one.
    pub trace: Option<PathBuf>,
    /// Only the run of ten million entries.
    pub ten_million: bool,
    /// Print every row, not only those that say most.
    pub every_row: bool,
    /// Only workloads and measures whose name contains this.
    pub only: Option<String>,
    /// Times that everything timed is repeated, with other seeds.
    pub rounds: Option<usize>,
    /// The label of the only workload; used on a child process.
    pub weighed: Option<String>,
    /// Do what is counted of this contender, under callgrind; used on a child process.
    pub counted: Option<String>,
}

/// How to call the program.
pub const USAGE: &str = "\
rivals [--quick] [--json FILE] [--trace FILE] [--rounds N] [--only TEXT] [--all] [--ten-million]

  --quick        a few minutes instead of half an hour
  --json FILE    write every row and every count of wrong answers to FILE
  --trace FILE   replay a public trace (JSON lines, .gz or not) instead of a small made-up one
  --rounds N     repeat everything timed N times with other seeds (1 with --quick, else 3)
  --only TEXT    only parts whose name contains TEXT
  --all          print every row, not only those that say most
  --ten-million  only the run of ten million entries over 256 ranks";

impl Options {
    /// Reads the command line.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--all" => options.every_row = true,
                "--ten-million" => options.ten_million = true,
                "--json" => options.json = Some(value()?.into()),
                "--trace" => options.trace = Some(value()?.into()),
                "--only" => options.only = Some(value()?),
                "--rounds" => {
                    options.rounds = Some(value()?.parse().map_err(|_| "--rounds needs a number")?);
                }
                "--weighed" => options.weighed = Some(value()?),
                "--counted" => options.counted = Some(value()?),
                other => return Err(format!("unknown argument {other}")),
            }
        }
        Ok(options)
    }

    /// Whether a part is to be run.
    pub fn wants(&self, part: &str) -> bool {
        self.only.as_ref().is_none_or(|only| part.contains(only.as_str()))
    }

    /// Times that everything timed is repeated.
    pub fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 }).max(1)
    }

    /// The workloads.
    ///
    /// # Errors
    ///
    /// When the trace cannot be read.
    pub fn workloads(&self) -> io::Result<Vec<(Spec, Plan)>> {
        let questions = self.questions();
        if self.ten_million {
            let plan = Plan { field: Field::Best, questions, one_block: false };
            return Ok(vec![(Spec::traffic(256, 10_000_000, 1_000_000), plan)]);
        }
        let all = Plan { field: Field::All, questions, one_block: false };
        let of_256 = match self.quick {
            true => Spec::traffic(256, 2_000_000, 800_000),
            false => Spec::traffic(256, 4_000_000, 2_000_000),
        };
        let churn = if self.quick { 600_000 } else { 1_500_000 };
        let own_names = Spec {
            label: "64 ranks, 1 M entries, engine's own names".to_owned(),
            naming: Naming::Engine,
            ..Spec::traffic(64, 1_000_000, churn)
        };
        let mut workloads = vec![
            (Spec::traffic(8, 1_000_000, churn), all),
            (Spec::traffic(64, 1_000_000, churn), Plan { one_block: true, ..all }),
            (of_256, all),
            (self.trace_spec()?, all),
            (own_names, Plan { field: Field::Best, ..all }),
            (
                Spec::traffic(8, 16_000, 8_000),
                Plan { field: Field::WithNaive, questions: 20, one_block: false },
            ),
        ];
        workloads.retain(|(spec, _)| match &self.weighed {
            Some(label) => spec.label == *label,
            None => self.wants(&spec.label),
        });
        Ok(workloads)
    }

    /// Where one thread reads what another writes.
    pub fn side_by_side(&self) -> Vec<(Spec, Plan)> {
        let plan = Plan { field: Field::All, questions: self.questions(), one_block: false };
        let mut specs = vec![Spec::traffic(64, 1_000_000, 0)];
        if !self.quick {
            specs.push(Spec::traffic(256, 4_000_000, 0));
        }
        if self.ten_million || !self.wants("side by side") {
            specs.clear();
        }
        specs.into_iter().map(|spec| (spec, plan)).collect()
    }

    /// What is sent in frames.
    pub fn wire(&self) -> Option<Spec> {
        let churn = if self.quick { 600_000 } else { 1_500_000 };
        (!self.ten_million && self.wants("wire")).then(|| Spec::traffic(64, 500_000, churn))
    }

    fn questions(&self) -> usize {
        if self.quick { 600 } else { 1_500 }
    }

    fn trace_spec(&self) -> io::Result<Spec> {
        let (label, lines, entries) = match &self.trace {
            Some(path) => ("public trace, 64 ranks, 2 M entries", trace::read(path)?, 2_000_000),
            None => ("made-up trace, 64 ranks, 500 k entries", trace::made_up(7, 6_000), 500_000),
        };
        let churn = if self.quick { 600_000 } else { usize::MAX };
        Ok(Spec {
            label: label.to_owned(),
            ranks: 64,
            entries,
            churn,
            trace: Some(Arc::new(lines)),
            naming: Naming::default(),
        })
    }
}
