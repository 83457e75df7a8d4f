//! What is found in the prefix cache, and what must not be.

use oneloop_core::SubmitRequest;

use crate::support::driver::Bench;
use crate::{config, request, tokens};

/// Tokens the second of two equal prompts finds, after the first has ended.
fn found(first: SubmitRequest, second: SubmitRequest) -> u32 {
    let mut bench = Bench::new(config());
    bench.submit(first);
    bench.run_to_end(true);
    let handle = bench.submit(second);
    bench.run_to_end(true);
    bench.reported(handle, 0).num_cached_tokens
}

#[test]
fn full_blocks_of_a_common_prefix_are_found() {
    let first = tokens(1, 40);
    let mut second = first[..22].to_vec();
    second.push((first[22] + 1) % 50);
    assert_eq!(found(request(first, 1), request(second, 1)), 20);
}

#[test]
fn at_least_one_token_is_computed() {
    assert_eq!(
        found(request(tokens(1, 40), 1), request(tokens(1, 40), 1)),
        36
    );
    assert_eq!(
        found(request(tokens(1, 41), 1), request(tokens(1, 41), 1)),
        40
    );
    assert_eq!(found(request(tokens(1, 4), 1), request(tokens(1, 4), 1)), 0);
}

#[test]
fn salt_adapter_and_order_of_sums_keep_prompts_apart() {
    let plain = || request(tokens(1, 40), 1);
    let salted = |salt: &[u8]| SubmitRequest {
        cache_salt: salt.to_vec(),
        ..plain()
    };
    let adapted = |adapter| SubmitRequest { adapter, ..plain() };
    assert_eq!(found(salted(b"a"), salted(b"a")), 36);
    let in_order = |adapter| SubmitRequest {
        deterministic: true,
        ..adapted(adapter)
    };
    assert_eq!(found(adapted(2), adapted(2)), 36);
    assert_eq!(found(in_order(2), in_order(2)), 36);
    for (first, second) in [
        (plain(), salted(b"a")),
        (salted(b"a"), salted(b"b")),
        (salted(b"a"), salted(b"a\0")),
        (plain(), adapted(0)),
        (adapted(0), adapted(1)),
        (adapted(1), salted(&1i32.to_le_bytes())),
        (plain(), in_order(-1)),
        (in_order(-1), plain()),
        (adapted(1), in_order(1)),
        (in_order(-1), salted(&1u64.to_le_bytes())),
    ] {
        assert_eq!(found(first, second), 0);
    }
}

#[test]
fn generated_tokens_are_found_in_the_next_turn() {
    // Of 29 or 30 tokens the last was sampled and never computed; 28 are full blocks, the last of which the sequence's
    // very last row completes or not.
    for max_tokens in [19, 20] {
        let mut bench = Bench::new(config());
        let first = bench.submit(request(tokens(1, 10), max_tokens));
        bench.run_to_end(true);
        let mut history = tokens(1, 10);
        history.extend(&bench.reported(first, 0).tokens);
        history.extend([1, 2, 3]);
        let second = bench.submit(request(history, 1));
        bench.run_to_end(true);
        assert_eq!(bench.reported(second, 0).num_cached_tokens, 28);
    }
}

#[test]
fn what_an_earlier_row_of_the_same_step_computes_is_found() {
    let mut bench = Bench::new(config());
    let handles: Vec<u64> = (0..4)
        .map(|_| bench.submit(request(tokens(1, 30), 2)))
        .collect();
    bench.step();
    assert_eq!(bench.core.stats().num_prefix_hit_tokens, 3 * 28);
    bench.run_to_end(true);
    assert_eq!(bench.reported(handles[3], 0).num_cached_tokens, 28);
    assert_eq!(bench.core.stats().num_prefix_query_tokens, 4 * 30);
    assert_eq!(bench.core.stats().num_prompt_tokens, 4 * 30);
}

#[test]
fn what_a_running_prefill_computes_in_the_same_step_is_found() {
    let mut bench = Bench::new(config());
    bench.submit(request(tokens(1, 200), 1));
    bench.step();
    // 64 tokens of the first step and half of the second step's; the second prompt shares no more of the first.
    let mut prompt = tokens(1, 96);
    prompt.extend(tokens(2, 10));
    let second = bench.submit(request(prompt, 1));
    assert_eq!(bench.step(), [(second, 0)]);
    assert_eq!(bench.reported(second, 0).num_cached_tokens, 96);
    bench.run_to_end(true);
}

#[test]
fn the_cache_can_be_off_and_can_be_emptied() {
    let mut off = config();
    off.enable_prefix_caching = false;
    let mut bench = Bench::new(off);
    bench.submit(request(tokens(1, 40), 1));
    bench.submit(request(tokens(1, 40), 1));
    bench.run_to_end(true);
    assert_eq!(
        (
            bench.core.stats().num_cached_blocks,
            bench.core.stats().num_prefix_query_tokens
        ),
        (0, 0)
    );

    let mut bench = Bench::new(config());
    bench.submit(request(tokens(1, 40), 3));
    bench.step();
    assert!(!bench.core.reset_prefix_cache(), "blocks are in use");
    bench.run_to_end(true);
    assert_eq!(bench.core.stats().num_cached_blocks, 10);
    assert!(bench.core.reset_prefix_cache());
    assert_eq!(
        (
            bench.core.stats().num_cached_blocks,
            bench.core.stats().num_free_blocks
        ),
        (0, 256)
    );
    let handle = bench.submit(request(tokens(1, 40), 1));
    bench.run_to_end(true);
    assert_eq!(bench.reported(handle, 0).num_cached_tokens, 0);
}

#[test]
fn the_end_of_the_least_recently_used_sequence_is_evicted_first() {
    let mut small = config();
    small.num_blocks = 30;
    let mut bench = Bench::new(small);
    bench.submit(request(tokens(1, 40), 1));
    bench.run_to_end(true);
    bench.submit(request(tokens(2, 40), 1));
    bench.run_to_end(true);
    // 10 blocks each are cached; 16 new ones take the 10 free ones and 6 of the oldest.
    bench.submit(request(tokens(3, 62), 1));
    bench.run_to_end(true);
    let first = bench.submit(request(tokens(1, 40), 1));
    bench.run_to_end(true);
    assert_eq!(bench.reported(first, 0).num_cached_tokens, 16);
}

#[test]
fn a_preempted_sequence_finds_its_own_blocks() {
    let mut small = config();
    small.num_blocks = 12;
    let mut bench = Bench::new(small);
    // 6 blocks each at admission; the older grows and takes the younger one's place.
    let older = bench.submit(request(tokens(1, 18), 24));
    let younger = bench.submit(request(tokens(2, 18), 8));
    let mut num_computed = Vec::new();
    while bench.core.has_work() {
        if bench.schedule(false)
            && bench.last_header("num_admitted") > 0
            && bench.coverage.num_preempted > 0
        {
            num_computed.push(bench.last_slab().ints("row_num_computed", 2).to_vec());
        }
        bench.commit();
    }
    assert!(bench.coverage.num_preempted > 0);
    assert_eq!(
        bench.reported(younger, 0).tokens.len() + bench.reported(older, 0).tokens.len(),
        32
    );
    assert!(
        num_computed.iter().flatten().any(|&count| count > 0),
        "{num_computed:?}"
    );
}

#[test]
fn steps_say_whether_a_row_wants_the_fixed_order() {
    const FIXED_ORDER: i64 = 32;
    let mut bench = Bench::new(config());
    let in_order = SubmitRequest {
        deterministic: true,
        ..request(tokens(1, 100), 3)
    };
    bench.submit(request(tokens(2, 10), 30));
    assert!(bench.schedule(false));
    assert_eq!(bench.last_header("flags") & FIXED_ORDER, 0);
    bench.commit();
    bench.submit(in_order);
    let mut flags = Vec::new();
    while bench.schedule(false) {
        flags.push(bench.last_header("flags") & FIXED_ORDER);
        bench.commit();
    }
    // Two chunks of the prompt, of which the first is not sampled, then two tokens more.
    let first_without = flags.iter().position(|&flag| flag == 0).unwrap();
    assert!(first_without >= 4, "{flags:?}");
    assert!(flags[first_without..].iter().all(|&flag| flag == 0));
}
