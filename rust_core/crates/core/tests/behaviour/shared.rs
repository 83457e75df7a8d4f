//! Requests that come together and share a long prefix: it is computed once, and nobody waits for it in vain.

use std::collections::HashSet;

use oneloop_core::{CoreConfig, Policy, SubmitRequest};

use crate::support::driver::{Bench, VOCAB_SIZE};
use crate::support::rng::Rng;
use crate::{config, request, tokens};

const PREFIX_LEN: usize = 4_096;

/// A core with chunks of half the shared prefix.
fn roomy() -> CoreConfig {
    let mut config = CoreConfig::new(4_096, VOCAB_SIZE);
    config.max_model_len = 8_192;
    config.hash_key = Some([3; 16]);
    config
}

fn roomy_bench() -> Bench {
    let mut bench = Bench::new(roomy());
    bench.audited = false;
    bench
}

/// The prefix of this number, then a tail of `tail_len` tokens of its own.
fn sharing(prefix: u64, tail: u64, tail_len: usize) -> SubmitRequest {
    let mut prompt = tokens(prefix, PREFIX_LEN);
    prompt.extend(tokens(1_000 + tail, tail_len));
    request(prompt, 3)
}

/// Runs to the end with two steps in flight; returns the tokens of all steps.
fn run(bench: &mut Bench) -> u64 {
    bench.run_to_end(true);
    bench.core.audit().unwrap();
    assert_eq!(bench.core.num_deferred(), 0);
    bench.coverage.num_scheduled
}

/// Submits `num` requests with tails of 1 to 40 tokens; returns their number of tokens outside the prefix, of which
/// those for the second and third output of each of the n sequences.
fn submit_burst(bench: &mut Bench, prefixes: &[u64], num: u64, n: u64) -> u64 {
    let mut num_own = 0;
    for tail in 0..num {
        let tail_len = 1 + tail as usize % 40;
        let prefix = prefixes[tail as usize % prefixes.len()];
        let mut sharing = sharing(prefix, tail, tail_len);
        sharing.n = n;
        bench.submit(sharing);
        num_own += tail_len as u64 + 2 * n;
    }
    num_own
}

#[test]
fn a_burst_computes_its_prefix_once() {
    let mut bench = roomy_bench();
    let num_own = submit_burst(&mut bench, &[1], 256, 1);
    let mut max_used = 0;
    while bench.core.has_work() {
        bench.step();
        max_used = max_used.max(bench.core.stats().num_used_blocks);
    }
    assert_eq!(run(&mut bench), PREFIX_LEN as u64 + num_own);
    // The prefix once, and at most 3 blocks for the rest of each.
    assert!(max_used <= 256 + 3 * 256, "{max_used} blocks");
    // 2,048 tokens, 2,048 more, then all the others at once.
    let mut bench = roomy_bench();
    submit_burst(&mut bench, &[1], 16, 1);
    for _ in 0..3 {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_generation_tokens, 16);
}

#[test]
fn siblings_wait_and_find_the_prefix_too() {
    let mut bench = roomy_bench();
    let num_own = submit_burst(&mut bench, &[1], 60, 4);
    assert_eq!(run(&mut bench), PREFIX_LEN as u64 + num_own);
}

#[test]
fn interleaved_prefixes_are_computed_once_each() {
    let mut bench = roomy_bench();
    let num_own = submit_burst(&mut bench, &[1, 2, 3], 96, 1);
    assert_eq!(run(&mut bench), 3 * PREFIX_LEN as u64 + num_own);
}

/// Prompts that branch off from each other at any block: each block is computed once, whatever the order.
#[test]
fn a_tree_of_prompts_computes_each_block_once() {
    for seed in 1..40 {
        let mut rng = Rng(seed);
        let mut config = config();
        config.num_blocks = 4_096;
        config.max_num_seqs = rng.within(2, 40) as u32;
        config.max_num_batched_tokens = config.max_num_seqs + rng.within(1, 60) as u32;
        let mut bench = Bench::new(config);
        let mut prompts: Vec<Vec<i32>> = Vec::new();
        let mut blocks: HashSet<Vec<i32>> = HashSet::new();
        let mut num_expected = 0;
        for number in 0..rng.within(2, 40) {
            let mut prompt = match prompts.len() {
                0 => Vec::new(),
                len => prompts[rng.within(0, len as u64 - 1) as usize].clone(),
            };
            prompt.truncate(4 * rng.within(0, 30) as usize);
            prompt.extend(tokens(100 + number, rng.within(1, 80) as usize));
            // No full block at the end: that one each sequence computes for itself.
            prompt.truncate(200);
            prompt.resize(prompt.len() / 4 * 4 + rng.within(1, 3) as usize, 7);
            for end in (4..prompt.len()).step_by(4) {
                num_expected += 4 * u64::from(blocks.insert(prompt[..end].to_vec()));
            }
            num_expected += prompt.len() as u64 % 4;
            bench.submit(request(prompt.clone(), 1));
            prompts.push(prompt);
            if rng.once_in(3) {
                bench.schedule(false);
                bench.commit();
            }
        }
        assert_eq!(run(&mut bench), num_expected, "seed {seed}");
    }
}

/// A first sequence with a quarter of its prefix launched, and 19 that will wait for the rest.
fn with_waiters() -> (Bench, u64) {
    let mut config = roomy();
    config.max_num_batched_tokens = 1_024;
    let mut bench = Bench::new(config);
    let first = bench.submit(sharing(1, 0, 20));
    bench.step();
    for tail in 1..20 {
        bench.submit(sharing(1, tail, 20));
    }
    (bench, first)
}

#[test]
fn an_abort_of_who_is_waited_for_frees_the_others() {
    let (mut bench, first) = with_waiters();
    bench.schedule(false);
    assert_eq!(bench.core.num_deferred(), 19);
    assert!(bench.abort(first));
    assert_eq!(bench.core.num_deferred(), 0);
    // What the first one launched is found.
    assert_eq!(run(&mut bench), PREFIX_LEN as u64 + 19 * (20 + 2));
}

#[test]
fn leaders_that_are_aborted_one_after_the_other_hold_up_nobody() {
    let mut config = roomy();
    config.max_num_batched_tokens = 256;
    let mut bench = Bench::new(config);
    let handles: Vec<u64> = (0..12)
        .map(|tail| bench.submit(sharing(1, tail, 20)))
        .collect();
    let last = handles[11];
    for &handle in &handles[..11] {
        bench.step();
        assert_eq!(bench.core.stats().num_running, 1);
        bench.abort(handle);
    }
    // 11 · 256 tokens are done; the last one goes on.
    for _ in 0..6 {
        bench.step();
    }
    assert_eq!(bench.reported(last, 0).tokens.len(), 1);
    assert_eq!(run(&mut bench), PREFIX_LEN as u64 + 20 + 2);
}

#[test]
fn a_failed_step_of_who_is_waited_for_frees_the_others() {
    let (mut bench, first) = with_waiters();
    let num_before = bench.coverage.num_scheduled;
    bench.schedule(true);
    assert_eq!(bench.core.num_deferred(), 19);
    let num_lost = bench.coverage.num_scheduled - num_before;
    assert_eq!(bench.commit(), [(first, 0)]);
    assert_eq!(bench.core.num_deferred(), 0);
    assert_eq!(
        run(&mut bench),
        PREFIX_LEN as u64 + num_lost + 19 * (20 + 2)
    );
}

#[test]
fn a_preemption_of_who_is_waited_for_frees_the_others() {
    let mut config = config();
    config.max_num_seqs = 4;
    config.max_num_batched_tokens = 16;
    // 2 blocks for the oldest, 50 for the next, and a few for the oldest to grow into.
    config.num_blocks = 54;
    let mut bench = Bench::new(config);
    let oldest = bench.submit(request(tokens(1, 8), 30));
    bench.step();
    let first = bench.submit(request(tokens(2, 199), 2));
    let second = bench.submit(request(tokens(2, 150), 2));
    bench.step();
    assert_eq!(bench.core.num_deferred(), 0, "the first one took the step");
    while bench.coverage.num_preempted == 0 {
        assert_eq!(bench.reported(second, 0).tokens.len(), 0);
        bench.step();
        let waits = bench.coverage.num_preempted == 0;
        assert_eq!(bench.core.num_deferred(), usize::from(waits));
    }
    bench.run_to_end(true);
    for (handle, num_tokens) in [(oldest, 30), (first, 2), (second, 2)] {
        assert_eq!(bench.reported(handle, 0).tokens.len(), num_tokens);
    }
}

#[test]
fn a_waiting_one_can_be_aborted() {
    let (mut bench, _) = with_waiters();
    bench.schedule(false);
    let handles: Vec<u64> = bench.known.keys().skip(1).copied().collect();
    for (num_aborted, handle) in handles.into_iter().enumerate() {
        assert_eq!(bench.core.num_deferred(), 19 - num_aborted);
        assert!(bench.abort(handle));
    }
    assert_eq!(run(&mut bench), PREFIX_LEN as u64 + 20 + 2);
}

/// Steps until all of a few equal prompts run; panics if one waits for another.
fn assert_none_waits(config: CoreConfig, change: impl Fn(u64, &mut SubmitRequest)) {
    let mut bench = Bench::new(config);
    let mut num_tokens = 0;
    for number in 0..6 {
        let mut request = request(tokens(1, 150), 1);
        change(number, &mut request);
        num_tokens += request.prompt.len() as u64;
        bench.submit(request);
    }
    while bench.core.has_work() {
        bench.step();
        assert_eq!(bench.core.num_deferred(), 0);
    }
    assert_eq!(bench.coverage.num_scheduled, num_tokens);
}

#[test]
fn who_cannot_share_does_not_wait() {
    let mut without_cache = config();
    without_cache.enable_prefix_caching = false;
    assert_none_waits(without_cache, |_, _| ());
    assert_none_waits(config(), |number, request| {
        request.cache_salt = vec![number as u8];
    });
    assert_none_waits(config(), |number, request| {
        request.adapter = number as i32 - 1;
    });
    assert_none_waits(config(), |number, request| {
        request.prompt[0] = number as i32;
    });
}

#[test]
fn who_comes_behind_waiting_ones_is_admitted_at_once() {
    let mut bench = roomy_bench();
    submit_burst(&mut bench, &[1], 200, 1);
    bench.step();
    let short: Vec<u64> = (0..20)
        .map(|text| bench.submit(request(tokens(10 + text, 30), 1)))
        .collect();
    let done = bench.step();
    assert_eq!(bench.core.num_deferred(), 199);
    assert!(short.iter().all(|&handle| done.contains(&(handle, 0))));
}

#[test]
fn a_long_queue_is_looked_through_in_a_few_steps() {
    let mut config = roomy();
    config.max_num_batched_tokens = 256;
    let mut bench = Bench::new(config);
    bench.audited = false;
    let first = bench.submit(sharing(1, 0, 20));
    bench.step();
    for _ in 0..3_000 {
        bench.submit(sharing(1, 1, 20));
    }
    let short = bench.submit(request(tokens(2, 30), 1));
    let num_steps = (1..10)
        .find(|_| bench.step().contains(&(short, 0)))
        .unwrap();
    assert!(num_steps <= 4, "{num_steps} steps");
    assert!(bench.reported(first, 0).tokens.is_empty());
    assert_eq!(bench.core.num_deferred(), 3_000);
}

#[test]
fn waiting_ones_keep_their_order() {
    let mut config = roomy();
    config.max_num_seqs = 3;
    let mut bench = Bench::new(config);
    bench.audited = false;
    let handles: Vec<u64> = (0..20)
        .map(|tail| bench.submit(sharing(1, tail, 20)))
        .collect();
    let mut order: Vec<u64> = Vec::new();
    while bench.core.has_work() {
        let done = bench.step();
        order.extend(done.iter().map(|&(handle, _)| handle));
    }
    let mut seen = HashSet::new();
    order.retain(|&handle| seen.insert(handle));
    assert_eq!(order, handles);
}

#[test]
fn a_more_important_one_does_not_wait_for_a_less_important_one() {
    let mut config = roomy();
    config.policy = Policy::Priority;
    config.max_num_batched_tokens = 256;
    let mut bench = Bench::new(config);
    bench.audited = false;
    let submit = |bench: &mut Bench, tail, priority| {
        let mut sharing = sharing(1, tail, 20);
        sharing.priority = priority;
        bench.submit(sharing)
    };
    let low = submit(&mut bench, 0, 5);
    bench.step();
    let next = submit(&mut bench, 1, 5);
    bench.step();
    assert_eq!(bench.core.num_deferred(), 1);
    let high = submit(&mut bench, 2, 1);
    let mut num_steps = 0;
    while bench.reported(high, 0).tokens.is_empty() {
        bench.step();
        num_steps += 1;
        bench.core.audit().unwrap();
    }
    // From block 32 on it computes all by itself: 3,604 tokens, 255 a step.
    assert!(num_steps <= 16, "{num_steps} steps");
    assert!(bench.reported(low, 0).tokens.is_empty());
    // Who waited for the first one went over to the more important one, and finds what that has computed.
    bench.step();
    bench.step();
    assert_eq!(bench.reported(next, 0).num_cached_tokens, 4_096);
    bench.run_to_end(true);
}

/// The cache may hold the end of a prefix and not its middle, when the middle was computed twice.
#[test]
fn who_fills_a_gap_is_waited_for_up_to_its_end() {
    let mut config = config();
    config.policy = Policy::Priority;
    config.max_model_len = 2_048;
    let mut bench = Bench::new(config);
    let submit = |bench: &mut Bench, prompt, max_tokens, priority| {
        let mut request = request(prompt, max_tokens);
        request.priority = priority;
        bench.submit(request)
    };
    let keeper = submit(&mut bench, tokens(1, 400), 500, 5);
    bench.step();
    // Goes past it from block 24 on, and ends: the findable blocks up to 74 are its own, those after it the keeper's.
    submit(&mut bench, tokens(1, 301), 1, 1);
    while bench.reported(keeper, 0).tokens.is_empty() {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_cached_blocks, 51);
    let filler = submit(&mut bench, tokens(2, 380), 500, 6);
    while bench.core.stats().num_cached_blocks > 0 {
        bench.step();
    }
    assert!(bench.abort(filler));
    let [fills, waits] = [0, 1].map(|_| submit(&mut bench, tokens(1, 400), 1, 5));
    bench.step();
    bench.step();
    assert_eq!(bench.core.num_deferred(), 1);
    while bench.core.num_deferred() > 0 {
        assert!(bench.reported(fills, 0).tokens.is_empty());
        bench.step();
    }
    assert!(bench.reported(fills, 0).tokens.is_empty());
    bench.step();
    assert_eq!(bench.reported(waits, 0).num_cached_tokens, 396);
    assert!(bench.abort(keeper));
    bench.run_to_end(true);
}

/// 8 prompts of 4,000 tokens that run on 256 tokens a step.
fn with_long_prefills() -> (Bench, u64) {
    let mut config = roomy();
    config.max_num_batched_tokens = 256;
    let mut bench = Bench::new(config);
    bench.audited = false;
    let oldest = bench.submit(request(tokens(10, 4_000), 4));
    for text in 11..18 {
        bench.submit(request(tokens(text, 4_000), 4));
    }
    for _ in 0..10 {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_running, 8);
    (bench, oldest)
}

#[test]
fn who_is_waited_for_gets_on_beside_long_prefills() {
    let (mut bench, _) = with_long_prefills();
    let handles = [0, 1].map(|tail| bench.submit(sharing(1, tail, 20)));
    let num_steps = (1..200)
        .find(|_| bench.step().contains(&(handles[1], 0)))
        .unwrap();
    // Half of 247 tokens a step, where the others leave it a single one of their own half.
    assert!(num_steps <= 4_096 / 123 + 4, "{num_steps} steps");
    assert_eq!(bench.reported(handles[1], 0).num_cached_tokens, 4_096);
}

#[test]
fn the_oldest_prefill_gets_on_beside_those_that_are_waited_for() {
    let (mut bench, oldest) = with_long_prefills();
    let mut num_steps = 0;
    while bench.reported(oldest, 0).tokens.is_empty() {
        // A fresh pair that shares a prefix of more than a step with every step.
        for tail in 0..2 {
            let mut prompt = tokens(100 + num_steps, 300);
            prompt.extend(tokens(1_000 + tail, 10));
            bench.submit(request(prompt, 1));
        }
        bench.step();
        num_steps += 1;
        assert!(num_steps < 200);
    }
    assert!(bench.coverage.num_deferring_steps > 0);
    // A quarter of 245 tokens a step at least.
    assert!(num_steps <= 4_000 / 60, "{num_steps} steps");
}
