//! What a message costs, from frames to index, and what a question costs, on a capture of a real engine.
//!
//! `cargo bench --bench wire_to_index`. Runs on the captures in `fixtures/captures`; figures of one machine,
//! to be compared with each other and with an earlier run on the same machine, not with anyone else's.
#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;
use std::path::Path;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use rankwise::block::Announcements;
use rankwise::capture::{CaptureScript, Feed, Truth};
use rankwise::events::{EventBatch, Limits, decode_batch, decode_batch_fast, parse_live};
use rankwise::index::HybridRule;
use rankwise::indexer::Config;
use rankwise::routing::{Overlaps, Prompt};

const CAPTURES: [&str; 2] = ["vllm-0.33.0-bench-dp4.kvcap.gz", "sglang-0.5.23-bench-dp4.kvcap.gz"];

fn load(name: &str) -> (CaptureScript, Truth) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures").join(name);
    (CaptureScript::load(&path, |_| {}).unwrap(), Truth::beside(&path).unwrap())
}

fn feed(script: &CaptureScript) -> Feed<'_> {
    Feed::new(script, "w", Announcements::Counted, Config::default()).unwrap()
}

fn wire_to_index(c: &mut Criterion) {
    for name in CAPTURES {
        let (script, _) = load(name);
        let payloads: Vec<_> =
            script.live().iter().map(|message| parse_live(&message.frames).unwrap().payload).collect();
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Elements(payloads.len() as u64));
        group.bench_function("decode, of record", |b| {
            b.iter(|| {
                for payload in &payloads {
                    black_box(decode_batch(payload, &Limits::default()).unwrap());
                }
            });
        });
        group.bench_function("decode, cursor", |b| {
            let mut batch = EventBatch::default();
            b.iter(|| {
                for payload in &payloads {
                    decode_batch_fast(payload, &Limits::default(), &mut batch).unwrap();
                    black_box(&batch);
                }
            });
        });
        group.bench_function("frames to index", |b| {
            b.iter_batched(
                || feed(&script),
                |mut feed| {
                    feed.run();
                    feed
                },
                BatchSize::LargeInput,
            );
        });
        group.finish();
    }
}

fn questions(c: &mut Criterion) {
    for name in CAPTURES {
        let (script, truth) = load(name);
        let mut feed = feed(&script);
        feed.run();
        let pool = feed.pool().unwrap();
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Elements(truth.probes.len() as u64));
        group.bench_function("overlap of the probes, from tokens", |b| {
            let mut overlaps = Overlaps::default();
            b.iter(|| {
                for probe in &truth.probes {
                    overlaps.find(&pool, &Prompt::tokens(&probe.tokens), HybridRule::Joint);
                    black_box(overlaps.found());
                }
            });
        });
        group.finish();
    }
}

criterion_group!(benches, wire_to_index, questions);
criterion_main!(benches);
