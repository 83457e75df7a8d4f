//! Priorities that change while a request waits or runs.

use oneloop_core::Policy;

use crate::support::driver::Bench;
use crate::{config, request, tokens};

fn by_priority() -> oneloop_core::CoreConfig {
    let mut config = config();
    config.policy = Policy::Priority;
    config
}

/// Runs to the end; handles in the order of their first tokens.
fn order(bench: &mut Bench) -> Vec<u64> {
    let mut order = Vec::new();
    while bench.core.has_work() {
        bench.schedule(false);
        for (handle, _) in bench.commit() {
            if !order.contains(&handle) {
                order.push(handle);
            }
        }
    }
    order
}

#[test]
fn who_waits_changes_its_place() {
    let mut config = by_priority();
    config.max_num_seqs = 1;
    let mut bench = Bench::new(config);
    let handles: Vec<u64> = (0..4)
        .map(|text| bench.submit(request(tokens(text, 5), 2)))
        .collect();
    bench.core.drain().unwrap();
    assert!(bench.set_priority(handles[3], -1));
    assert!(bench.set_priority(handles[0], 1));
    assert!(bench.set_priority(handles[0], 2));
    let expected = [handles[3], handles[1], handles[2], handles[0]];
    assert_eq!(order(&mut bench), expected);
}

#[test]
fn it_counts_from_the_submit_on() {
    let mut config = by_priority();
    config.max_num_seqs = 1;
    let mut bench = Bench::new(config);
    let first = bench.submit(request(tokens(1, 5), 2));
    let second = bench.submit(request(tokens(2, 5), 2));
    assert!(
        bench.set_priority(second, -1),
        "posted, and not taken up before"
    );
    assert_eq!(order(&mut bench), [second, first]);
}

#[test]
fn who_runs_is_preempted_by_its_new_priority() {
    for (changed, victim) in [(None, 2), (Some(0), 0)] {
        let mut config = by_priority();
        config.num_blocks = 15;
        let mut bench = Bench::new(config);
        let handles = [0, 1, 2].map(|text| bench.submit(request(tokens(text, 14), 12)));
        bench.step();
        if let Some(index) = changed {
            let handle: u64 = handles[index];
            assert!(bench.set_priority(handle, 7));
        }
        while bench.coverage.num_preempted == 0 {
            bench.step();
        }
        let before = handles.map(|handle| bench.reported(handle, 0).tokens.len());
        bench.step();
        let now = handles.map(|handle| bench.reported(handle, 0).tokens.len());
        let stalled: Vec<usize> = (0..3).filter(|&i| before[i] == now[i]).collect();
        assert_eq!(stalled, [victim]);
        bench.run_to_end(true);
    }
}

/// A running request, and three that wait for the prefix that it is about to compute.
fn with_waiters() -> (Bench, u64, Vec<u64>) {
    let mut config = by_priority();
    config.max_num_batched_tokens = 32;
    let mut bench = Bench::new(config);
    let prompt = tokens(5, 120);
    let first = bench.submit(request(prompt.clone(), 2));
    bench.step();
    let waiting = (0..3).map(|_| bench.submit(request(prompt.clone(), 2)));
    let waiting = waiting.collect();
    bench.schedule(false);
    assert_eq!(bench.core.num_deferred(), 3);
    (bench, first, waiting)
}

#[test]
fn nobody_waits_for_one_that_became_less_important() {
    let (mut bench, first, _) = with_waiters();
    assert!(bench.set_priority(first, 1));
    assert_eq!(bench.core.num_deferred(), 0);
    bench.commit();
    bench.run_to_end(true);
}

#[test]
fn who_became_more_important_than_the_one_it_waits_for_waits_no_longer() {
    let (mut bench, _, waiting) = with_waiters();
    assert!(bench.set_priority(waiting[1], -1));
    assert_eq!(bench.core.num_deferred(), 2);
    bench.schedule(false);
    bench.run_to_end(true);
    assert_eq!(bench.reported(waiting[1], 0).tokens.len(), 2);
}

#[test]
fn nothing_happens_to_what_has_ended_or_without_priorities() {
    let mut bench = Bench::new(by_priority());
    let handle = bench.submit(request(tokens(1, 5), 1));
    bench.run_to_end(true);
    assert!(!bench.core.set_priority(handle, 1).unwrap());
    assert!(!bench.core.set_priority(999, 1).unwrap());
    let mut bench = Bench::new(config());
    let handle = bench.submit(request(tokens(1, 5), 1));
    assert!(!bench.core.set_priority(handle, 1).unwrap());
    bench.run_to_end(true);
}
