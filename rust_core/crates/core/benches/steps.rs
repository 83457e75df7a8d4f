//! Microseconds of `schedule` + `commit` for running decodes, and of admitting a prompt that is all cached.
//!
//! `cargo bench -p oneloop-core --bench steps`
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use oneloop_core::text::Vocabulary;
use oneloop_core::{Core, CoreConfig, SLAB_ALIGNMENT, SubmitRequest};

const VOCAB_SIZE: u32 = 128_000;
const PROMPT_LEN: usize = 512;
const NUM_STEPS: usize = 400;

struct Slab {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Slab {
    fn new(core: &Core) -> Self {
        let len = core.layout().num_bytes;
        let memory = vec![0; len + SLAB_ALIGNMENT];
        let start = memory.as_ptr().align_offset(SLAB_ALIGNMENT);
        Self { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }

    /// The "model": any token for every sample.
    fn fill(&mut self, core: &Core, state: &mut u64) {
        let field = core
            .layout()
            .fields
            .iter()
            .find(|field| field.name == "output_token")
            .unwrap();
        let (offset, length) = (field.offset, field.length);
        let tokens: &mut [i32] =
            bytemuck::cast_slice_mut(&mut self.bytes()[offset..offset + 4 * length]);
        for token in tokens {
            *state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *token = ((*state >> 33) % u64::from(VOCAB_SIZE)) as i32;
        }
    }
}

fn vocabulary() -> Arc<Vocabulary> {
    let pieces = (0..VOCAB_SIZE).map(|id| format!(" {:x}", id % 4096));
    Arc::new(Vocabulary::new(pieces, &[], false).unwrap())
}

fn prompt(state: &mut u64, len: usize) -> Vec<i32> {
    (0..len)
        .map(|_| {
            *state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((*state >> 33) % u64::from(VOCAB_SIZE)) as i32
        })
        .collect()
}

/// Steps with two in flight; returns µs of schedule and of commit per step, in order.
fn run_steps(
    core: &mut Core,
    slabs: &mut [Slab],
    num_steps: usize,
    state: &mut u64,
) -> Vec<(f64, f64)> {
    let mut in_flight = VecDeque::new();
    let mut times = Vec::with_capacity(num_steps);
    for step in 0..num_steps {
        let index = step % slabs.len();
        let started = Instant::now();
        let step_id = core.schedule(slabs[index].bytes()).unwrap();
        let schedule_us = started.elapsed().as_secs_f64() * 1e6;
        let Some(step_id) = step_id else { break };
        slabs[index].fill(core, state);
        in_flight.push_back((step_id, index));
        if in_flight.len() < 2 {
            continue;
        }
        let (step_id, index) = in_flight.pop_front().unwrap();
        let started = Instant::now();
        let deltas = core.commit(step_id, slabs[index].bytes()).unwrap();
        times.push((schedule_us, started.elapsed().as_secs_f64() * 1e6));
        drop(deltas);
    }
    while let Some((step_id, index)) = in_flight.pop_front() {
        core.commit(step_id, slabs[index].bytes()).unwrap();
    }
    times
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn decode(num_seqs: u32, vocabulary: &Arc<Vocabulary>) -> f64 {
    let mut config = CoreConfig::new(num_seqs * 80, VOCAB_SIZE);
    config.max_num_seqs = num_seqs;
    config.max_num_batched_tokens = 8192;
    let mut core = Core::new(config, Some(vocabulary.clone())).unwrap();
    let mut slabs: Vec<Slab> = (0..3).map(|_| Slab::new(&core)).collect();
    let mut state = 1;
    for _ in 0..num_seqs {
        let mut request = SubmitRequest::new(prompt(&mut state, PROMPT_LEN));
        request.max_tokens = Some(600);
        request.eos_token_ids = vec![2];
        request.ignore_eos = true;
        core.submit(request).unwrap();
    }
    while core.stats().num_generation_tokens < u64::from(num_seqs) * 4 {
        run_steps(&mut core, &mut slabs, 8, &mut state);
    }
    let times = run_steps(&mut core, &mut slabs, NUM_STEPS, &mut state);
    let schedule_us = median(times.iter().map(|time| time.0).collect());
    let commit_us = median(times.iter().map(|time| time.1).collect());
    let total_us = median(times.iter().map(|time| time.0 + time.1).collect());
    println!(
        "{num_seqs} decodes: schedule {schedule_us:.1} µs, commit {commit_us:.1} µs, together {total_us:.1} µs"
    );
    total_us
}

/// µs of submit and schedule of one request, which then ends.
fn admit(core: &mut Core, slabs: &mut [Slab], tokens: Vec<i32>, state: &mut u64) -> f64 {
    let mut request = SubmitRequest::new(tokens);
    request.max_tokens = Some(1);
    let started = Instant::now();
    core.submit(request).unwrap();
    let step_id = core.schedule(slabs[0].bytes()).unwrap().unwrap();
    let admit_us = started.elapsed().as_secs_f64() * 1e6;
    core.commit(step_id, slabs[0].bytes()).unwrap();
    run_steps(core, slabs, 8, state);
    admit_us
}

fn admit_cached(len: usize) -> f64 {
    let mut config = CoreConfig::new(40_000, VOCAB_SIZE);
    config.max_model_len = 16_384;
    config.max_num_batched_tokens = 8192;
    let mut core = Core::new(config, None).unwrap();
    let mut slabs: Vec<Slab> = (0..3).map(|_| Slab::new(&core)).collect();
    let mut state = 7;
    let tokens = prompt(&mut state, len);
    let mut times = Vec::new();
    for round in 0..40 {
        let num_hits = core.stats().num_prefix_hit_tokens;
        let admit_us = admit(&mut core, &mut slabs, tokens.clone(), &mut state);
        if round > 0 {
            assert_eq!(
                core.stats().num_prefix_hit_tokens - num_hits,
                len as u64 - 16
            );
            times.push(admit_us);
        }
        // Other content in between, so that the prompt's blocks are not all in the nearest cache.
        let other = prompt(&mut state, len);
        admit(&mut core, &mut slabs, other, &mut state);
    }
    let admit_us = median(times);
    println!("admission of {len} cached tokens: {admit_us:.1} µs");
    admit_us
}

fn main() {
    let vocabulary = vocabulary();
    let step_us: Vec<(u32, f64)> = [64, 256, 1024]
        .map(|num_seqs| (num_seqs, decode(num_seqs, &vocabulary)))
        .to_vec();
    let admit_us = admit_cached(8192);
    let steps: Vec<String> = step_us
        .iter()
        .map(|(num_seqs, us)| format!("\"{num_seqs}\": {us:.1}"))
        .collect();
    println!(
        "{{\"step_us\": {{{}}}, \"admit_cached_8k_us\": {admit_us:.1}}}",
        steps.join(", ")
    );
}
