//! Random runs on the simulated device are recorded and replayed: stops by text, forks, failed steps, name spaces and all.

use std::io::Cursor;
use std::sync::Arc;

use oneloop_core::{Event, Replay, ReplaySummary, TraceEncoder, TraceEnd, TraceQueue};

use crate::property::{Habits, random_config, random_operation};
use crate::support::driver::{Bench, Coverage};
use crate::support::rng::Rng;

/// A writer that takes when it is told to.
struct Writer {
    queue: Arc<TraceQueue>,
    encoder: TraceEncoder,
    bytes: Vec<u8>,
}

impl Writer {
    fn new(bench: &mut Bench) -> Self {
        let queue = bench.core.record_trace().unwrap();
        let encoder = TraceEncoder::new(bench.core.config());
        Self {
            queue,
            bytes: encoder.opening(),
            encoder,
        }
    }

    /// Everything up to the end of the trace.
    fn finish(mut self, bench: &mut Bench) -> Vec<u8> {
        bench.core.close_trace();
        let batch = self.queue.take();
        assert_eq!(batch.end, Some(TraceEnd::Closed));
        self.bytes.extend(self.encoder.encode(batch));
        self.bytes
    }
}

fn replayed(bytes: &[u8]) -> (ReplaySummary, Vec<Event>) {
    let mut replay = Replay::open(Cursor::new(bytes)).unwrap();
    let mut events = Vec::new();
    while let Some(event) = replay.advance().unwrap() {
        events.push(event);
    }
    (replay.summary().clone(), events)
}

#[test]
fn random_runs_are_replayed_exactly() {
    let is_long = std::env::var("ONELOOP_FUZZ").is_ok_and(|value| value == "long");
    let num_runs = if is_long { 2000 } else { 120 };
    let mut coverage = Coverage::default();
    let (mut num_bytes, mut num_resets) = (0, 0);
    for seed in 1..=num_runs {
        let mut rng = Rng(seed);
        let config = random_config(&mut rng);
        let mut bench = Bench::new(config.clone());
        let writer = Writer::new(&mut bench);
        let habits = Habits {
            max_live: rng.pick(&[3, 12, 40]),
            steps_per_failure: rng.pick(&[1_000_000, 50, 8]),
        };
        for _ in 0..1000 {
            random_operation(&mut rng, &mut bench, &config, habits);
        }
        bench.run_to_end(rng.once_in(2));
        let bytes = writer.finish(&mut bench);
        let (summary, events) = replayed(&bytes);
        assert_eq!(summary.difference, None, "seed {seed}");
        assert_eq!(summary.end, Some(TraceEnd::Closed));
        let stats = bench.core.stats();
        assert_eq!(summary.num_steps, stats.num_steps);
        num_resets += events
            .iter()
            .filter(|event| **event == Event::CacheReset(true))
            .count();
        num_bytes += bytes.len();
        coverage.add(&bench);
    }
    let per_run = |count: u64| count / num_runs;
    assert!(per_run(coverage.num_preempted) > 5, "{coverage:?}");
    assert!(per_run(coverage.num_forks) > 10, "{coverage:?}");
    assert!(per_run(coverage.num_cow) > 5, "{coverage:?}");
    assert!(per_run(coverage.num_hit_tokens) > 50, "{coverage:?}");
    assert!(per_run(coverage.num_deferring_steps) >= 1, "{coverage:?}");
    assert!(per_run(coverage.num_failed_steps) >= 1, "{coverage:?}");
    assert!(per_run(coverage.num_stopped) > 5, "{coverage:?}");
    assert!(per_run(coverage.num_aborted) > 5, "{coverage:?}");
    assert!(num_resets > 0);
    let per_token = num_bytes as u64 / coverage.num_scheduled;
    assert!(per_token < 16, "{per_token} bytes per scheduled token");
}

#[test]
fn a_step_of_many_decodes_takes_few_bytes_beside_its_tokens() {
    let mut bench = Bench::new(crate::config());
    bench.audited = false;
    let mut writer = Writer::new(&mut bench);
    for text in 0..16 {
        let mut request = crate::request(crate::tokens(text, 9), 240);
        request.ignore_eos = true;
        bench.submit(request);
    }
    for _ in 0..20 {
        bench.step();
    }
    let batch = writer.queue.take();
    writer.encoder.encode(batch);
    for _ in 0..200 {
        bench.step();
    }
    let batch = writer.queue.take();
    let num_bytes = writer.encoder.encode(batch).len();
    // 16 tokens of one byte each; the rest is the step: every fourth brings 16 new blocks.
    assert!(
        num_bytes < 200 * (16 + 45),
        "{num_bytes} bytes for 200 steps"
    );
}
