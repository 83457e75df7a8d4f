//! How the tokens of a step are shared between long and short prompts and running streams.

use crate::support::driver::Bench;
use crate::{config, request, tokens};

/// 8 prompts of 4,000 tokens, all admitted, on a budget of 256 tokens a step.
fn with_long_prefills() -> (Bench, Vec<u64>) {
    let mut config = config();
    config.num_blocks = 16_000;
    config.max_model_len = 8_000;
    config.max_num_batched_tokens = 256;
    let mut bench = Bench::new(config);
    bench.audited = false;
    let long = (0..8)
        .map(|text| bench.submit(request(tokens(text, 4_000), 4)))
        .collect();
    for _ in 0..10 {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_running, 8);
    (bench, long)
}

#[test]
fn a_short_prompt_does_not_wait_for_long_ones() {
    let (mut bench, long) = with_long_prefills();
    let short = bench.submit(request(tokens(100, 200), 1));
    let num_steps = (1..100)
        .find(|_| bench.step().contains(&(short, 0)))
        .unwrap();
    assert!(
        num_steps <= 4,
        "the first token of 200 came after {num_steps} steps"
    );
    assert!(
        long.iter()
            .all(|&handle| bench.reported(handle, 0).tokens.is_empty())
    );
}

#[test]
fn long_prompts_get_on_under_a_stream_of_short_ones() {
    let (mut bench, long) = with_long_prefills();
    let mut num_steps = 0;
    let mut waiting = Vec::new();
    while bench.reported(long[0], 0).tokens.is_empty() {
        // 200 tokens of new short prompts a step: most of what there is.
        let handle = bench.submit(request(tokens(1_000 + num_steps, 200), 1));
        waiting.push((handle, num_steps));
        let done = bench.step();
        waiting.retain(|&(handle, _)| !done.contains(&(handle, 0)));
        num_steps += 1;
        assert!(num_steps < 200);
    }
    // Alone it takes 4,000 / 256 = 16 steps; at 30 % of that speed, 53.
    assert!(
        num_steps <= 53,
        "the oldest long prompt took {num_steps} steps more"
    );
}

#[test]
fn a_running_stream_gets_a_token_every_step() {
    let (mut bench, _) = with_long_prefills();
    let stream = bench.submit(request(tokens(100, 20), 100));
    while bench.reported(stream, 0).tokens.is_empty() {
        bench.step();
    }
    for text in 0..20 {
        bench.submit(request(tokens(2_000 + text, 300), 1));
        assert!(bench.step().contains(&(stream, 0)));
    }
}

#[test]
fn every_step_uses_the_whole_budget_while_prefills_want_it() {
    let (mut bench, _) = with_long_prefills();
    for _ in 0..50 {
        assert!(bench.schedule(false));
        assert_eq!(bench.last_header("num_tokens"), 256);
        bench.commit();
    }
}

#[test]
fn a_burst_of_long_prompts_delays_a_short_one_by_a_step_each_at_most() {
    let mut config = config();
    config.num_blocks = 4_000;
    config.max_model_len = 2_000;
    config.max_num_batched_tokens = 128;
    let mut bench = Bench::new(config);
    for text in 0..6 {
        bench.submit(request(tokens(text, 1_000), 4));
    }
    let short = bench.submit(request(tokens(100, 30), 1));
    let num_steps = (1..100)
        .find(|_| bench.step().contains(&(short, 0)))
        .unwrap();
    assert!(num_steps <= 7, "{num_steps} steps");
}

#[test]
fn under_the_priority_policy_more_important_prefills_come_first() {
    let mut config = config();
    config.policy = oneloop_core::Policy::Priority;
    config.num_blocks = 1_000;
    config.max_model_len = 1_000;
    let mut bench = Bench::new(config);
    let mut low = request(tokens(1, 600), 1);
    low.priority = 5;
    let low = bench.submit(low);
    bench.step();
    let mut high = request(tokens(2, 300), 1);
    high.priority = 1;
    let high = bench.submit(high);
    let num_steps = (1..100)
        .find(|_| bench.step().contains(&(high, 0)))
        .unwrap();
    // It shares its first step with the other (32 tokens), then all but one token of a step are its own (63).
    assert_eq!(num_steps, 6);
    assert!(bench.reported(low, 0).tokens.is_empty());
}
