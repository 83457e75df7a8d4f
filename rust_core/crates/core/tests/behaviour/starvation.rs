//! A pool far too small for the load: everything ends, nothing thrashes, the tokens stay the same.

use oneloop_core::{CoreConfig, Policy};

use crate::support::driver::{Bench, VOCAB_SIZE};
use crate::support::rng::Rng;
use crate::{request, tokens};

/// 64 blocks of 16 tokens; requests of 100 to 900 tokens in all, some with shared prefixes, some with n > 1.
fn starved(policy: Policy, with_forks: bool) -> Bench {
    let mut config = CoreConfig::new(64, VOCAB_SIZE);
    config.max_num_seqs = 64;
    config.max_num_batched_tokens = 256;
    config.max_model_len = 1_024;
    config.policy = policy;
    config.hash_key = Some([1; 16]);
    let mut bench = Bench::new(config);
    bench.audited = false;
    let mut rng = Rng(12);
    for number in 0..256 {
        let total = rng.within(100, 900);
        let prompt_len = rng.within(20, total - 10);
        let text = if rng.once_in(2) { 1 } else { 1_000 + number };
        let mut request = request(tokens(text, prompt_len as usize), total - prompt_len);
        request.priority = rng.within(0, 2) as i64;
        request.n = if with_forks && rng.once_in(8) { 4 } else { 1 };
        bench.submit(request);
    }
    bench
}

fn run(mut bench: Bench, max_preemptions: u32) -> u64 {
    let mut num_idle_steps = 0;
    while bench.core.has_work() {
        let launched = bench.schedule(false);
        let progressed = !bench.commit().is_empty();
        if launched {
            bench.schedule(false);
        }
        num_idle_steps = if progressed { 0 } else { num_idle_steps + 1 };
        // The longest prompt takes a few steps, and two are in flight.
        assert!(
            num_idle_steps < 20,
            "no new token for {num_idle_steps} steps"
        );
    }
    bench.check_idle();
    bench.core.audit().unwrap();
    assert!(bench.coverage.num_preempted > 0, "the pool was not starved");
    let worst = bench.device.num_admissions.values().max().unwrap() - 1;
    assert!(
        worst <= max_preemptions,
        "a sequence was preempted {worst} times"
    );
    bench.core.stats().num_preemptions
}

#[test]
fn all_end_and_none_is_preempted_often() {
    let num_preemptions = run(starved(Policy::Fcfs, false), 6);
    // Not only the worst case: on average less than one each.
    assert!(num_preemptions < 256, "{num_preemptions} preemptions");
}

#[test]
fn all_forks_end_too() {
    run(starved(Policy::Fcfs, true), 8);
}

#[test]
fn priorities_change_the_order_and_not_the_outcome() {
    run(starved(Policy::Priority, true), 8);
}

#[test]
fn one_sequence_may_grow_to_the_whole_pool() {
    let mut config = CoreConfig::new(64, VOCAB_SIZE);
    config.max_model_len = 2_048;
    let mut bench = Bench::new(config);
    bench.audited = false;
    // 64 blocks of 16 hold 1,024 tokens; the KV of the last one is never needed.
    let whole = bench.submit(request(tokens(1, 25), 1_000));
    let others: Vec<u64> = (2..10)
        .map(|text| bench.submit(request(tokens(text, 100), 50)))
        .collect();
    bench.run_to_end(true);
    assert_eq!(bench.reported(whole, 0).tokens.len(), 1_000);
    assert!(
        others
            .iter()
            .all(|&handle| bench.reported(handle, 0).tokens.len() == 50)
    );
}

#[test]
fn siblings_that_do_not_fit_together_take_turns() {
    let mut config = CoreConfig::new(16, VOCAB_SIZE);
    config.block_size = 4;
    let mut bench = Bench::new(config);
    let mut all = request(tokens(1, 10), 50);
    all.n = 6;
    let handle = bench.submit(all);
    bench.run_to_end(true);
    assert!((0..6).all(|index| bench.reported(handle, index).tokens.len() == 50));
    assert!(bench.coverage.num_preempted > 0);
}

#[test]
fn one_that_is_preempted_again_and_again_waits_for_more_room() {
    let mut config = CoreConfig::new(100, VOCAB_SIZE);
    config.block_size = 1;
    config.policy = Policy::Priority;
    config.max_model_len = 200;
    let mut bench = Bench::new(config);
    bench.audited = false;
    let submit = |bench: &mut Bench, text, max_tokens, priority| {
        let mut request = request(tokens(text, 5), max_tokens);
        request.priority = priority;
        bench.submit(request)
    };
    let patient = submit(&mut bench, 1, 90, 1);
    bench.step();
    // Wave after wave of more important ones, each of which grows to take all there is; something always runs.
    for wave in 0..40 {
        for number in 0..5 {
            submit(&mut bench, 10 + 5 * wave + number, 14 + number, 0);
        }
        for _ in 0..15 {
            bench.step();
        }
    }
    bench.run_to_end(true);
    let num_preemptions = bench.device.num_admissions[&(patient, 0)] - 1;
    assert!(num_preemptions <= 6, "preempted {num_preemptions} times");
}
