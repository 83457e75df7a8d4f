//! Random operations against a simulated device, with the audit after each.
//!
//! `ONELOOP_FUZZ=long` runs 10^6 operations on each of 20 seeds, `ONELOOP_FUZZ_SEED=<seed>` only that one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::support::constraints::Maze;
use crate::support::driver::{Bench, Coverage, VOCAB_SIZE};
use crate::support::prompt_results::HIDDEN_SIZE;
use crate::support::rng::Rng;
use oneloop_core::{CoreConfig, Policy, Pooling, SubmitRequest};

/// Sizes small enough that every limit is hit.
pub(crate) fn random_config(rng: &mut Rng) -> CoreConfig {
    let mut config = CoreConfig::new(rng.pick(&[5, 9, 14, 20, 30, 60]), VOCAB_SIZE);
    config.block_size = rng.pick(&[1, 2, 4, 4, 8]);
    config.max_num_seqs = rng.within(1, 10) as u32;
    let most_spare = rng.pick(&[4, 50, 50]);
    config.max_num_batched_tokens = config.max_num_seqs + rng.within(0, most_spare) as u32;
    let most = u64::from(config.max_num_batched_tokens);
    config.mixed_step_tokens = rng.once_in(2).then(|| rng.within(1, most + 2) as u32);
    config.max_model_len = rng.within(8, 90) as u32;
    config.enable_prefix_caching = !rng.once_in(6);
    config.policy = rng.pick(&[Policy::Fcfs, Policy::Priority]);
    config.max_steps_in_flight = rng.pick(&[1, 2, 2, 2, 3]);
    config.hash_key = Some([rng.bits() as u8; 16]);
    config.hidden_size = HIDDEN_SIZE;
    config
}

/// A request that fits the pool: a piece of one of a few texts, mostly, and something of its own.
pub(crate) fn random_request(rng: &mut Rng, config: &CoreConfig) -> SubmitRequest {
    let pool_len = config.num_blocks * config.block_size;
    let longest = u64::from((config.max_model_len - 1).min(pool_len));
    let shared_len = rng.within(0, longest);
    let mut text = Rng(rng.within(1, 3));
    let mut prompt: Vec<i32> = (0..shared_len)
        .map(|_| (text.bits() % u64::from(VOCAB_SIZE)) as i32)
        .collect();
    for _ in 0..rng.within(u64::from(shared_len == 0), (longest - shared_len).min(6)) {
        prompt.push((rng.bits() % u64::from(VOCAB_SIZE)) as i32);
    }
    let room = u64::from(config.max_model_len.min(pool_len + 1)) - prompt.len() as u64;
    let mut request = SubmitRequest::new(prompt);
    let max_tokens = rng.within(1, room.min(80));
    request.max_tokens = Some(max_tokens);
    request.min_tokens = if rng.once_in(3) {
        rng.within(0, max_tokens)
    } else {
        0
    };
    request.n = if rng.once_in(4) {
        rng.within(1, u64::from(config.max_num_seqs).min(5))
    } else {
        1
    };
    request.temperature = rng.pick(&[0.0, 1.0]);
    request.repetition_penalty = rng.pick(&[1.0, 1.0, 1.25]);
    request.logprobs = if rng.once_in(4) {
        Some(rng.within(0, 3))
    } else {
        None
    };
    let mut own = Rng(!rng.0);
    if request.logprobs.is_some() && own.once_in(2) {
        let count = own.within(1, 4);
        request.logprob_token_ids = (0..count).map(|_| own.within(0, 40) as i64).collect();
    }
    request.priority = rng.within(0, 3) as i64;
    request.adapter = rng.pick(&[-1, -1, -1, 0, 1]);
    request.eos_token_ids = vec![rng.within(0, 9) as i64];
    request.ignore_eos = rng.once_in(3);
    request.include_stop_str_in_output = rng.once_in(3);
    if rng.once_in(3) {
        request.stop_token_ids = vec![rng.within(10, 15) as i64, rng.within(10, 15) as i64];
    }
    if rng.once_in(4) {
        request.stop = rng
            .pick(&[&["q"][..], &["ab", "b"], &["xY", "YY"]])
            .iter()
            .map(ToString::to_string)
            .collect();
    }
    if rng.once_in(5) {
        request.logit_bias = vec![
            (rng.within(0, 20) as i64, 1.5),
            (rng.within(21, 30) as i64, -2.0),
        ];
    }
    if rng.once_in(3) {
        constrain(rng, &mut request);
    }
    if rng.once_in(5) {
        request.cache_salt = vec![rng.within(0, 1) as u8];
    }
    request.deterministic = rng.once_in(5);
    ask_of_prompt(rng, &mut request);
    request
}

/// Binds the request's tokens, often by several things at once.
fn constrain(rng: &mut Rng, request: &mut SubmitRequest) {
    let few = |rng: &mut Rng, most: u64| -> Vec<i64> {
        let len = rng.within(1, most);
        (0..len).map(|_| rng.within(0, 8) as i64).collect()
    };
    if rng.once_in(2) {
        request.grammar = Some(Maze::shared(rng.bits()));
        if rng.once_in(2) {
            request.grammar_after = few(rng, 2);
        }
    }
    if rng.once_in(3) {
        let seed = rng.bits();
        let is_in = |&id: &i64| Rng(seed ^ id as u64).once_in(2);
        let allowed: Vec<i64> = (0..i64::from(VOCAB_SIZE)).filter(is_in).collect();
        request.allowed_token_ids = (!allowed.is_empty()).then_some(allowed);
    }
    if rng.once_in(3) {
        request.bad_words = (0..rng.within(1, 3)).map(|_| few(rng, 3)).collect();
    }
    if rng.once_in(3) && (request.grammar.is_none() || !request.grammar_after.is_empty()) {
        request.thinking_budget = Some(rng.within(0, 9));
        request.thinking_end = few(rng, 3);
        if request.grammar.is_some() {
            request.grammar_after = request.thinking_end.clone();
        }
    }
}

/// Some requests want something of their prompt, many of those nothing else.
fn ask_of_prompt(rng: &mut Rng, request: &mut SubmitRequest) {
    if rng.once_in(8) {
        request.pooling = Some(rng.pick(&[Pooling::Last, Pooling::Mean]));
    } else if rng.once_in(4) {
        request.prompt_logprobs = Some(rng.within(0, 3));
    }
    if request.pooling.is_some() || request.prompt_logprobs.is_some() && rng.once_in(2) {
        (request.max_tokens, request.min_tokens, request.n) = (Some(0), 0, 1);
    }
}

/// Runs one seed; every operation is followed by the audit.
fn run(seed: u64, num_operations: u64, operation: &mut u64, coverage: &mut Coverage) {
    let mut rng = Rng(seed);
    while *operation < num_operations {
        let config = random_config(&mut rng);
        let mut bench = Bench::new(config.clone());
        let habits = Habits {
            max_live: rng.pick(&[3, 12, 40]),
            steps_per_failure: rng.pick(&[1_000_000, 50, 8]),
        };
        let end = (*operation + 2_000).min(num_operations);
        while *operation < end {
            *operation += 1;
            random_operation(&mut rng, &mut bench, &config, habits);
        }
        bench.run_to_end(rng.once_in(2));
        coverage.add(&bench);
    }
}

/// What differs from bench to bench.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Habits {
    pub(crate) max_live: usize,
    pub(crate) steps_per_failure: u64,
}

pub(crate) fn random_operation(
    rng: &mut Rng,
    bench: &mut Bench,
    config: &CoreConfig,
    habits: Habits,
) {
    bench.known.retain(|_, known| {
        !known.aborted
            && known
                .sequences
                .iter()
                .any(|sequence| sequence.finish.is_none())
    });
    match rng.within(0, 99) {
        0..=15 if bench.known.len() < habits.max_live => {
            // Often several with one prompt, so that some find in the cache what is on its way.
            let request = random_request(rng, config);
            for _ in 0..rng.pick(&[0, 0, 2]) {
                let mut twin = random_request(rng, config);
                (twin.prompt, twin.max_tokens, twin.min_tokens) = (
                    request.prompt.clone(),
                    Some(request.max_tokens.unwrap_or(1).max(1)),
                    0,
                );
                (twin.pooling, twin.prompt_logprobs) = (None, request.prompt_logprobs);
                (twin.adapter, twin.cache_salt) = (request.adapter, request.cache_salt.clone());
                twin.deterministic = request.deterministic;
                bench.submit(twin);
            }
            bench.submit(request);
        }
        16..=59 => {
            let fails = rng.once_in(habits.steps_per_failure);
            // Often followed at once by a request that finds what the failing step was to compute.
            let twin = bench
                .known
                .values()
                .next_back()
                .map(|known| known.request.clone());
            let launched = bench.schedule(fails);
            if let Some(twin) = twin.filter(|_| launched && fails && rng.once_in(2)) {
                bench.submit(twin);
                bench.schedule(false);
            }
        }
        60..=95 => {
            bench.commit();
        }
        96 => {
            let handles: Vec<u64> = bench.known.keys().copied().collect();
            if !handles.is_empty() {
                bench.set_priority(rng.pick(&handles), rng.within(0, 4) as i64 - 1);
            }
        }
        97 => {
            let handles: Vec<u64> = bench.known.keys().copied().collect();
            if !handles.is_empty() {
                bench.abort(rng.pick(&handles));
            }
        }
        98 => {
            bench.core.drain().unwrap();
            bench.audit();
        }
        _ => {
            let used = bench.core.stats().num_used_blocks;
            assert_eq!(bench.core.reset_prefix_cache(), used == 0);
            bench.audit();
        }
    }
}

#[test]
fn random_operations_keep_every_law() {
    let is_long = std::env::var("ONELOOP_FUZZ").is_ok_and(|value| value == "long");
    let (num_seeds, num_operations) = if is_long {
        (20, 1_000_000)
    } else {
        (6, 20_000)
    };
    let seeds: Vec<u64> = match std::env::var("ONELOOP_FUZZ_SEED") {
        Ok(seed) => vec![seed.parse().expect("ONELOOP_FUZZ_SEED is a number")],
        Err(_) => (1..=num_seeds).collect(),
    };
    let mut coverage = Coverage::default();
    for seed in &seeds {
        let mut operation = 0;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            run(*seed, num_operations, &mut operation, &mut coverage);
        }));
        if let Err(payload) = outcome {
            let message = payload.downcast_ref::<String>().cloned();
            let message =
                message.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
            if let Some(message) = message {
                panic!("ONELOOP_FUZZ_SEED={seed} fails at operation {operation}: {message}");
            }
            resume_unwind(payload);
        }
    }
    check_coverage(&coverage, seeds.len() as u64 * num_operations);
}

/// The run has been where the bugs live: per 10,000 operations at least this often.
fn check_coverage(coverage: &Coverage, num_operations: u64) {
    for (what, count, least) in [
        ("steps", coverage.num_steps, 1_500),
        ("tokens", coverage.num_tokens, 3_000),
        ("preemptions", coverage.num_preempted, 50),
        ("forks", coverage.num_forks, 150),
        ("copies on write", coverage.num_cow, 50),
        ("prefix hits", coverage.num_hit_tokens, 700),
        (
            "steps that leave sequences waiting for a prefix",
            coverage.num_deferring_steps,
            20,
        ),
        (
            "steps that are full beside streams",
            coverage.num_limited_steps,
            20,
        ),
        ("failed steps", coverage.num_failed_steps, 20),
        ("rows built on a failed step", coverage.num_bad_rows, 10),
        (
            "sequences sent back by a failure",
            coverage.num_recomputed,
            1,
        ),
        ("aborts", coverage.num_aborted, 50),
        ("changes of priority", coverage.num_prioritized, 25),
        ("stops", coverage.num_stopped, 50),
        ("full outputs", coverage.num_full, 300),
        ("masks", coverage.num_masks, 500),
        ("steps that wait for masks", coverage.num_held_steps, 100),
        ("ends of grammars", coverage.num_over, 5),
        ("broken constraints", coverage.num_broken, 5),
        ("prompts without tokens", coverage.num_without_tokens, 100),
    ] {
        assert!(
            count * 10_000 >= least * num_operations,
            "only {count} {what} in {num_operations} operations"
        );
    }
}
