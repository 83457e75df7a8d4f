//! Requests with n > 1.

use crate::support::driver::Bench;
use crate::{config, request, tokens};

#[test]
fn the_prompt_is_computed_once_and_n_tokens_come_from_one_row() {
    let mut bench = Bench::new(config());
    let mut three = request(tokens(1, 30), 5);
    three.n = 3;
    let handle = bench.submit(three);
    assert!(bench.schedule(false));
    assert_eq!(bench.last_header("num_rows"), 1);
    assert_eq!(bench.last_header("num_tokens"), 30);
    assert_eq!(bench.last_header("num_samples"), 3);
    assert_eq!(bench.last_header("num_forks"), 2);
    assert_eq!(
        bench.last_slab().ints("sample_token_index", 3),
        [29, 29, 29]
    );
    assert_eq!(bench.last_slab().ints("fork_num_blocks", 2), [8, 8]);
    assert_eq!(bench.core.stats().num_used_blocks, 8);
    assert_eq!(bench.commit(), [(handle, 0), (handle, 1), (handle, 2)]);
    bench.run_to_end(true);
    let outputs: Vec<_> = (0..3)
        .map(|index| bench.reported(handle, index).tokens.clone())
        .collect();
    assert!(
        outputs[0] != outputs[1] && outputs[1] != outputs[2],
        "siblings have seeds of their own"
    );
}

#[test]
fn a_partial_block_is_copied_for_all_but_one() {
    for (prompt_len, num_copies) in [(30, 2), (32, 0)] {
        let mut bench = Bench::new(config());
        let mut three = request(tokens(1, prompt_len), 5);
        three.n = 3;
        bench.submit(three);
        bench.step();
        assert!(bench.schedule(false));
        assert_eq!(bench.last_header("num_cow"), num_copies);
        assert_eq!(
            bench.last_header("num_block_deltas"),
            if num_copies > 0 { 2 } else { 3 }
        );
        bench.run_to_end(true);
    }
}

#[test]
fn the_first_sequence_is_that_of_n_1() {
    let outputs = [1, 3].map(|n| {
        let mut bench = Bench::new(config());
        let mut request = request(tokens(1, 30), 20);
        request.n = n;
        let handle = bench.submit(request);
        bench.run_to_end(true);
        bench.reported(handle, 0).tokens.clone()
    });
    assert_eq!(outputs[0], outputs[1]);
}

#[test]
fn siblings_end_on_their_own() {
    let mut bench = Bench::new(config());
    let mut four = request(tokens(1, 9), 60);
    four.n = 4;
    four.eos_token_ids = (0..5).collect();
    let handle = bench.submit(four);
    let mut num_live = Vec::new();
    while bench.core.has_work() {
        bench.schedule(false);
        bench.commit();
        num_live.push(bench.core.stats().num_running);
    }
    assert!((0..4).all(|index| bench.reported(handle, index).finish.is_some()));
    num_live.dedup();
    assert!(num_live.len() > 2, "all ended together: {num_live:?}");
}

#[test]
fn slots_are_taken_for_all_at_admission() {
    let mut narrow = config();
    narrow.max_num_seqs = 4;
    narrow.max_num_batched_tokens = 8;
    let mut bench = Bench::new(narrow);
    bench.submit(request(tokens(1, 4), 3));
    let mut four = request(tokens(2, 20), 3);
    four.n = 4;
    bench.submit(four);
    bench.step();
    assert_eq!(
        (
            bench.core.stats().num_running,
            bench.core.stats().num_waiting
        ),
        (1, 4)
    );
    while bench.core.stats().num_waiting > 0 {
        bench.step();
    }
    assert_eq!(bench.core.stats().num_running, 4);
    bench.run_to_end(true);
}

#[test]
fn an_abort_during_prefill_frees_all_slots() {
    let mut bench = Bench::new(config());
    let mut four = request(tokens(1, 200), 3);
    four.n = 4;
    let handle = bench.submit(four);
    bench.step();
    assert_eq!(bench.core.stats().num_running, 4);
    assert!(bench.abort(handle));
    bench.check_idle();
    bench.submit(request(tokens(2, 4), 1));
    assert!(bench.schedule(false));
    // The slot that is taken again at once is not reported as freed.
    assert_eq!(bench.last_header("num_freed"), 3);
    bench.run_to_end(true);
}
