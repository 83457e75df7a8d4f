//! The order of admission and of preemption, and aborts in every state.

use oneloop_core::Policy;

use crate::support::driver::Bench;
use crate::{config, request, tokens};

/// Handles in the order of their first tokens, with one slot.
fn order(policy: Policy, priorities: &[i64]) -> Vec<usize> {
    let mut config = config();
    config.policy = policy;
    config.max_num_seqs = 1;
    let mut bench = Bench::new(config);
    let handles: Vec<u64> = priorities
        .iter()
        .zip(0..)
        .map(|(&priority, text)| {
            let mut request = request(tokens(text, 5), 2);
            request.priority = priority;
            bench.submit(request)
        })
        .collect();
    let mut order = Vec::new();
    while bench.core.has_work() {
        bench.schedule(false);
        order.extend(bench.commit().into_iter().map(|(handle, _)| handle));
    }
    order.dedup();
    order
        .iter()
        .map(|first| handles.iter().position(|handle| handle == first).unwrap())
        .collect()
}

#[test]
fn first_come_first_served() {
    assert_eq!(order(Policy::Fcfs, &[5, 1, -3, 1]), [0, 1, 2, 3]);
}

#[test]
fn lower_priority_values_first_then_by_arrival() {
    assert_eq!(
        order(Policy::Priority, &[5, 1, -3, 1, i64::MIN, i64::MAX]),
        [4, 2, 1, 3, 0, 5]
    );
}

#[test]
fn the_least_important_sequence_is_preempted() {
    for (policy, victim) in [(Policy::Fcfs, 2), (Policy::Priority, 1)] {
        let mut config = config();
        config.policy = policy;
        config.num_blocks = 15;
        let mut bench = Bench::new(config);
        let handles = [(0, 1), (1, 9), (2, 3)].map(|(text, priority)| {
            let mut request = request(tokens(text, 14), 12);
            request.priority = priority;
            bench.submit(request)
        });
        while bench.coverage.num_preempted == 0 {
            bench.step();
        }
        let waiting = handles.map(|handle| bench.reported(handle, 0).tokens.len());
        bench.step();
        let now = handles.map(|handle| bench.reported(handle, 0).tokens.len());
        let stalled: Vec<usize> = (0..3)
            .filter(|&index| waiting[index] == now[index])
            .collect();
        assert_eq!(stalled, [victim], "{policy:?}");
        bench.run_to_end(true);
    }
}

#[test]
fn nothing_passes_the_head_of_the_queue() {
    let mut config = config();
    config.num_blocks = 20;
    let mut bench = Bench::new(config);
    bench.submit(request(tokens(1, 40), 10));
    bench.step();
    let large = bench.submit(request(tokens(2, 60), 1));
    let small = bench.submit(request(tokens(3, 4), 1));
    let mut order = Vec::new();
    while bench.core.has_work() {
        bench.schedule(false);
        order.extend(bench.commit().into_iter().map(|(handle, _)| handle));
    }
    let position = |handle| order.iter().position(|&other| other == handle);
    assert!(position(large) < position(small));
}

#[test]
fn a_preempted_sequence_waits_for_its_results_in_flight() {
    let mut config = config();
    config.num_blocks = 11;
    config.max_steps_in_flight = 3;
    let mut bench = Bench::new(config);
    let older = bench.submit(request(tokens(1, 14), 20));
    let younger = bench.submit(request(tokens(2, 14), 20));
    bench.schedule(false);
    while bench.coverage.num_preempted == 0 {
        bench.schedule(false);
        if bench.coverage.num_preempted == 0 {
            bench.commit();
        }
    }
    // The younger one's sample of the step before is in flight; now there is room enough.
    assert_eq!(bench.num_in_flight(), 2);
    assert!(bench.abort(older));
    assert!(!bench.schedule(false));
    let num_tokens = bench.reported(younger, 0).tokens.len();
    assert_eq!(bench.commit(), [(younger, 0)]);
    assert!(bench.schedule(false));
    bench.run_to_end(true);
    assert!(bench.reported(younger, 0).tokens.len() > num_tokens);
}

#[test]
fn lengths_are_never_overrun_with_steps_in_flight() {
    let mut bench = Bench::new(config());
    bench.submit(request(tokens(1, 10), 3));
    let mut num_launched = 0;
    while bench.core.has_work() {
        while bench.schedule(false) {
            num_launched += 1;
        }
        bench.commit();
    }
    assert_eq!(num_launched, 3);
}

#[test]
fn aborts_work_in_every_state() {
    // Posted, waiting, in prefill, decoding, with steps in flight, preempted, ended.
    let mut config = config();
    config.num_blocks = 12;
    config.max_num_batched_tokens = 16;
    let mut bench = Bench::new(config);
    let posted = bench.submit(request(tokens(1, 10), 3));
    assert!(bench.abort(posted));
    let waiting = bench.submit(request(tokens(2, 10), 3));
    bench.core.drain().unwrap();
    assert!(bench.abort(waiting));
    let prefilling = bench.submit(request(tokens(3, 40), 3));
    bench.step();
    assert!(bench.abort(prefilling));
    let decoding = bench.submit(request(tokens(4, 10), 20));
    bench.step();
    bench.schedule(false);
    bench.schedule(false);
    assert_eq!(bench.num_in_flight(), 2);
    assert!(bench.abort(decoding));
    assert!(bench.commit().is_empty() && bench.commit().is_empty());
    bench.check_idle();
    let older = bench.submit(request(tokens(5, 14), 30));
    let younger = bench.submit(request(tokens(6, 14), 30));
    while bench.coverage.num_preempted == 0 {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_waiting, 1);
    assert!(bench.abort(younger));
    bench.run_to_end(true);
    assert_eq!(bench.reported(older, 0).tokens.len(), 30);
    assert!(!bench.abort(older));
    assert!(!bench.core.abort(999));
}

#[test]
fn an_abort_in_flight_and_a_new_request_in_its_slot_do_not_mix() {
    let mut config = config();
    config.max_num_seqs = 1;
    let mut bench = Bench::new(config);
    let first = bench.submit(request(tokens(1, 10), 20));
    bench.step();
    bench.schedule(false);
    assert!(bench.abort(first));
    let second = bench.submit(request(tokens(2, 10), 20));
    // Launched before the results for the slot's former owner are in.
    assert!(bench.schedule(false));
    assert!(bench.commit().is_empty());
    assert_eq!(bench.commit(), [(second, 0)]);
    bench.run_to_end(true);
}

#[test]
fn other_threads_may_submit_and_abort_while_steps_run() {
    let mut config = config();
    config.num_blocks = 60;
    let mut core = oneloop_core::Core::new(config, None).unwrap();
    let inbox = core.inbox().clone();
    let poster = std::thread::spawn(move || {
        let mut num_aborted = 0;
        for number in 0..2_000 {
            let handle = inbox.submit(request(tokens(number, 12), 4)).unwrap();
            if number % 3 == 0 {
                num_aborted += u64::from(inbox.abort(handle));
            }
        }
        num_aborted
    });
    let mut slab = crate::support::slab::Slab::new(core.layout());
    slab.array_mut::<i32>("output_token").fill(7);
    while !poster.is_finished() || core.has_work() {
        if let Some(step_id) = core.schedule(slab.bytes_mut()).unwrap() {
            core.commit(step_id, slab.bytes()).unwrap();
        }
    }
    let num_aborted = poster.join().unwrap();
    core.audit().unwrap();
    let stats = core.stats();
    assert_eq!(stats.num_submitted, 2_000);
    assert_eq!(stats.num_aborted, num_aborted);
    assert_eq!(stats.num_finished_length, 2_000 - num_aborted);
}
