//! Steps in which streams decode: how much of them prompts may take, and how much they always get.

use oneloop_core::CoreConfig;

use crate::support::driver::Bench;
use crate::support::rng::Rng;
use crate::{config, request, tokens};

const MIXED_STEP_TOKENS: u32 = 40;

/// Steps of 128 tokens, of 40 beside streams.
fn mixed_config() -> CoreConfig {
    let mut config = config();
    config.num_blocks = 4_000;
    config.max_model_len = 2_000;
    config.max_num_seqs = 64;
    config.max_num_batched_tokens = 128;
    config.mixed_step_tokens = Some(MIXED_STEP_TOKENS);
    config
}

/// `num_streams` requests that have their first token and go on for long.
fn with_streams(num_streams: u64, final_only: bool) -> Bench {
    let mut bench = Bench::new(mixed_config());
    bench.audited = false;
    for text in 0..num_streams {
        let mut request = request(tokens(text, 3), 1_000);
        request.final_only = final_only;
        bench.submit(request);
    }
    while bench.core.stats().num_running < num_streams {
        bench.step();
    }
    bench
}

/// Tokens of the next steps, all of which are committed.
fn step_sizes(bench: &mut Bench, num_steps: usize) -> Vec<i64> {
    (0..num_steps)
        .map(|_| {
            assert!(bench.schedule(false));
            let num_tokens = bench.last_header("num_tokens");
            bench.commit();
            num_tokens
        })
        .collect()
}

#[test]
fn prompts_take_what_streams_leave_of_a_mixed_step() {
    let mut bench = with_streams(4, false);
    bench.submit(request(tokens(100, 150), 1));
    assert_eq!(step_sizes(&mut bench, 6), [40, 40, 40, 40, 10, 4]);
}

#[test]
fn prompts_get_half_of_a_mixed_step_however_many_streams_run() {
    let mut bench = with_streams(32, false);
    bench.submit(request(tokens(100, 60), 1));
    // Its first token of each step after the first is one of the rows'.
    assert_eq!(step_sizes(&mut bench, 4), [52, 53, 51, 32]);
}

#[test]
fn steps_without_streams_are_full() {
    let mut bench = with_streams(0, false);
    bench.submit(request(tokens(100, 300), 1));
    assert_eq!(step_sizes(&mut bench, 3), [128, 128, 44]);
}

#[test]
fn who_waits_for_the_end_only_is_no_stream() {
    let mut bench = with_streams(4, true);
    bench.submit(request(tokens(100, 300), 1));
    assert_eq!(step_sizes(&mut bench, 3), [128, 128, 56]);
}

#[test]
fn a_first_token_is_no_stream_yet() {
    let mut bench = with_streams(0, false);
    bench.submit(request(tokens(1, 129), 5));
    bench.submit(request(tokens(2, 300), 1));
    // The second step computes the first one's last prompt token; from the third on it is a stream.
    assert_eq!(step_sizes(&mut bench, 3), [128, 128, 40]);
}

#[test]
fn who_is_computed_again_is_no_stream_until_then() {
    let mut config = mixed_config();
    config.num_blocks = 80;
    config.enable_prefix_caching = false;
    let mut bench = Bench::new(config);
    bench.audited = false;
    bench.submit(request(tokens(1, 3), 40));
    bench.step();
    let long = bench.submit(request(tokens(2, 300), 10));
    while bench.core.stats().num_finished_length == 0 {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_preemptions, 1);
    let num_known = 300 + bench.reported(long, 0).tokens.len() as i64;
    assert!(num_known > 300);
    assert_eq!(
        step_sizes(&mut bench, 4),
        [128, 128, num_known - 2 * 128, 1]
    );
}

#[test]
fn rows_that_owe_nothing_take_no_room() {
    let mut bench = with_streams(2, false);
    for text in 10..12 {
        bench.submit(request(tokens(text, 3), 2));
    }
    bench.step();
    assert!(bench.schedule(false)); // the last tokens of two
    assert_eq!(bench.last_header("num_rows"), 4);
    bench.submit(request(tokens(100, 150), 1));
    assert!(bench.schedule(false));
    assert_eq!(bench.last_header("num_rows"), 3);
    assert_eq!(
        bench.last_header("num_tokens"),
        i64::from(MIXED_STEP_TOKENS)
    );
}

#[test]
fn a_burst_beside_streams_is_over_after_a_bounded_time() {
    let mut bench = with_streams(32, false);
    let mut rng = Rng(7);
    let mut num_tokens = 0;
    let burst: Vec<u64> = (0..30)
        .map(|text| {
            let length = rng.within(1, 120);
            num_tokens += length;
            bench.submit(request(tokens(1_000 + text, length as usize), 1))
        })
        .collect();
    let most_steps = num_tokens.div_ceil(u64::from(MIXED_STEP_TOKENS / 2)) as usize;
    step_sizes(&mut bench, most_steps);
    assert!(
        burst
            .iter()
            .all(|&handle| bench.reported(handle, 0).tokens.len() == 1),
        "prompts of {num_tokens} tokens were not done after {most_steps} steps"
    );
}

#[test]
fn one_token_beside_streams_is_enough_to_get_on() {
    let mut config = mixed_config();
    config.mixed_step_tokens = Some(1);
    let mut bench = Bench::new(config);
    bench.audited = false;
    let stream = bench.submit(request(tokens(1, 3), 500));
    bench.step();
    let long = bench.submit(request(tokens(2, 50), 3));
    let num_steps = (1..100)
        .find(|_| {
            let done = bench.step();
            assert!(done.contains(&(stream, 0)));
            done.contains(&(long, 0))
        })
        .unwrap();
    // One in the first step; then one as a row and one beside the rows.
    assert_eq!(num_steps, 26);
    bench.run_to_end(true);
}
