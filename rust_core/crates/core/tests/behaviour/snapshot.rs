//! The snapshot says what runs, what waits, and why.

use oneloop_core::{WaitingSequence, WaitsFor};

use crate::property::{Habits, random_config, random_operation};
use crate::support::driver::Bench;
use crate::support::rng::Rng;
use crate::{config, request, tokens};

fn waiting(bench: &Bench) -> Vec<WaitingSequence> {
    bench.core.snapshot(100, 100).waiting
}

fn reasons(bench: &Bench) -> Vec<(u64, WaitsFor)> {
    waiting(bench)
        .iter()
        .map(|sequence| (sequence.request, sequence.waits_for))
        .collect()
}

#[test]
fn an_idle_core_has_nothing_to_show() {
    let bench = Bench::new(config());
    let snapshot = bench.core.snapshot(10, 64);
    assert!(
        snapshot.running.is_empty() && snapshot.waiting.is_empty() && snapshot.steps.is_empty()
    );
    assert_eq!(
        (snapshot.kv_map, snapshot.blocks_per_letter),
        (".".repeat(64), 4)
    );
}

#[test]
fn what_runs_is_told_with_its_numbers() {
    let mut bench = Bench::new(config());
    let mut first = request(tokens(1, 30), 9);
    first.n = 2;
    first.ignore_eos = true;
    let handle = bench.submit(first);
    bench.submit(request(tokens(2, 100), 5));
    for _ in 0..2 {
        bench.step();
    }
    let snapshot = bench.core.snapshot(100, 256);
    let shown: Vec<_> = snapshot
        .running
        .iter()
        .map(|s| {
            (
                s.request,
                s.index,
                s.num_prompt_tokens,
                s.num_output_tokens,
                s.num_owed_tokens,
            )
        })
        .collect();
    let long = bench.core.stats().num_generation_tokens == 4;
    assert_eq!(shown[..2], [(handle, 0, 30, 2, 1), (handle, 1, 30, 2, 1)]);
    assert!(
        long && shown[2].1 == 0 && shown[2].3 == 0 && shown[2].4 > 1,
        "{shown:?}"
    );
    assert!(snapshot.kv_map.contains('u') && snapshot.kv_map.contains('s'));
    assert_eq!(
        snapshot.kv_map.matches(['u', 's']).count() as u64,
        bench.core.stats().num_used_blocks
    );
    let steps: Vec<_> = snapshot
        .steps
        .iter()
        .map(|s| (s.step_id, s.num_tokens, s.took_s.is_some()))
        .collect();
    assert_eq!(steps.len(), 2);
    assert_eq!((steps[0].0, steps[0].1, steps[0].2), (1, 64, true));
    assert_eq!(snapshot.steps[0].num_admitted, 3);
}

#[test]
fn a_step_in_flight_has_not_ended() {
    let mut bench = Bench::new(config());
    bench.submit(request(tokens(1, 8), 3));
    bench.schedule(true);
    assert_eq!(bench.core.snapshot(1, 1).steps[0].took_s, None);
    bench.commit();
    assert!(bench.core.snapshot(1, 1).steps[0].took_s.is_some());
}

#[test]
fn the_last_steps_are_kept() {
    let mut bench = Bench::new(config());
    let mut long = request(tokens(1, 8), 200);
    long.ignore_eos = true;
    bench.submit(long);
    for _ in 0..100 {
        bench.step();
    }
    let steps: Vec<u64> = bench
        .core
        .snapshot(1, 1)
        .steps
        .iter()
        .map(|step| step.step_id)
        .collect();
    assert!(steps.into_iter().eq(37..=100));
}

#[test]
fn who_waits_for_rows_and_who_for_its_turn() {
    let mut config = config();
    config.max_num_seqs = 2;
    let mut bench = Bench::new(config);
    let handles: Vec<u64> = (0..4)
        .map(|text| bench.submit(request(tokens(text, 8), 50)))
        .collect();
    bench.core.drain().unwrap();
    assert_eq!(reasons(&bench)[0], (handles[0], WaitsFor::NextStep));
    bench.step();
    let slots = WaitsFor::Slots { needed: 1, free: 0 };
    let turn = WaitsFor::Turn {
        request: handles[2],
    };
    assert_eq!(reasons(&bench), [(handles[2], slots), (handles[3], turn)]);
}

#[test]
fn who_waits_for_blocks() {
    let mut config = config();
    config.num_blocks = 20;
    let mut bench = Bench::new(config);
    bench.submit(request(tokens(1, 50), 5));
    let second = bench.submit(request(tokens(2, 50), 5));
    bench.step();
    // 13 blocks of its own and a margin of one; the first took 13 of 20.
    let blocks = WaitsFor::Blocks {
        needed: 14,
        available: 7,
    };
    assert_eq!(reasons(&bench), [(second, blocks)]);
}

#[test]
fn who_waits_for_a_prefix() {
    let mut bench = Bench::new(config());
    let first = bench.submit(request(tokens(1, 200), 5));
    let second = bench.submit(request(tokens(1, 204), 5));
    bench.step();
    bench.step();
    let prefix = WaitsFor::Prefix {
        request: first,
        index: 0,
        num_blocks: 50,
    };
    assert_eq!(reasons(&bench), [(second, prefix)]);
}

#[test]
fn a_preempted_sequence_waits_for_its_result_then_for_blocks() {
    let mut config = config();
    config.num_blocks = 12;
    let mut bench = Bench::new(config);
    for text in 0..2 {
        let mut long = request(tokens(text, 16), 30);
        long.ignore_eos = true;
        bench.submit(long);
    }
    let mut seen = Vec::new();
    for _ in 0..40 {
        bench.schedule(false);
        seen.extend(
            waiting(&bench)
                .iter()
                .filter(|s| s.num_preemptions > 0)
                .map(|s| s.waits_for),
        );
        if bench.num_in_flight() == 2 {
            bench.commit();
        }
    }
    assert!(seen.contains(&WaitsFor::Results), "{seen:?}");
    assert!(
        seen.iter()
            .any(|reason| matches!(reason, WaitsFor::Blocks { .. })),
        "{seen:?}"
    );
}

#[test]
fn lists_are_cut() {
    let mut config = config();
    config.max_num_seqs = 4;
    let mut bench = Bench::new(config);
    let handles: Vec<u64> = (0..30)
        .map(|text| bench.submit(request(tokens(text, 8), 50)))
        .collect();
    bench.step();
    let snapshot = bench.core.snapshot(3, 7);
    let running: Vec<u64> = snapshot.running.iter().map(|s| s.request).collect();
    let waiting: Vec<u64> = snapshot.waiting.iter().map(|s| s.request).collect();
    assert_eq!(
        (running.as_slice(), waiting.as_slice()),
        (&handles[..3], &handles[4..7])
    );
    assert!(snapshot.kv_map.len() <= 7);
}

/// Whatever the state: the letters count what the statistics count, and every reason names somebody who is there.
#[test]
fn random_runs_are_shown_as_they_are() {
    let mut seen = [0; 6];
    for seed in 1..=30 {
        let mut rng = Rng(seed);
        let config = random_config(&mut rng);
        let mut bench = Bench::new(config.clone());
        bench.audited = false;
        let habits = Habits {
            max_live: 40,
            steps_per_failure: 50,
        };
        for _ in 0..600 {
            random_operation(&mut rng, &mut bench, &config, habits);
            bench.core.drain().unwrap();
            check(&bench, &mut seen);
        }
    }
    assert!(seen.iter().all(|&count| count > 20), "{seen:?}");
}

fn check(bench: &Bench, seen: &mut [u64; 6]) {
    let (snapshot, stats) = (bench.core.snapshot(1000, u32::MAX), bench.core.stats());
    assert_eq!(snapshot.blocks_per_letter, 1);
    let count = |letters: &[char]| snapshot.kv_map.matches(letters).count() as u64;
    let counted = [count(&['.']), count(&['c']), count(&['u', 's'])];
    assert_eq!(
        counted,
        [
            stats.num_free_blocks,
            stats.num_cached_blocks,
            stats.num_used_blocks
        ]
    );
    let is_running = |request: u64| snapshot.running.iter().any(|s| s.request == request);
    let is_waiting = |request: u64| snapshot.waiting.iter().any(|s| s.request == request);
    for sequence in &snapshot.waiting {
        let index = match sequence.waits_for {
            WaitsFor::NextStep => 0,
            WaitsFor::Results => 1,
            WaitsFor::Slots { needed, free } => {
                assert!(needed > free);
                2
            }
            WaitsFor::Blocks { needed, available } => {
                assert!(needed > available);
                3
            }
            WaitsFor::Prefix { request, .. } => {
                assert!(is_running(request));
                4
            }
            WaitsFor::Turn { request } => {
                assert!(is_waiting(request));
                5
            }
        };
        seen[index] += 1;
    }
}
