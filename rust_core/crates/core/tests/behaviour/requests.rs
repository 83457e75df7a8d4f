//! What `submit` and the configuration refuse, and what they let pass.

use oneloop_core::{BeamSearch, Core, CoreConfig, Error, Policy, SubmitRequest};

use crate::support::constraints::Maze;
use crate::support::driver::vocabulary;
use crate::{config, tokens};

fn core() -> Core {
    Core::new(config(), Some(vocabulary())).unwrap()
}

/// The field that a request is refused for.
fn refused(change: impl FnOnce(&mut SubmitRequest)) -> (&'static str, String) {
    let core = core();
    let mut request = SubmitRequest::new(tokens(1, 10));
    change(&mut request);
    let error = core.submit(request).unwrap_err();
    assert!(!core.has_work(), "a refused request left something behind");
    match error {
        Error::Request { field, problem } => (field, problem),
        other => panic!("{other:?}"),
    }
}

fn accepted(change: impl FnOnce(&mut SubmitRequest)) {
    let mut request = SubmitRequest::new(tokens(1, 10));
    change(&mut request);
    assert!(core().submit(request).unwrap() > 0);
}

#[test]
fn prompts_are_checked() {
    assert_eq!(refused(|r| r.prompt.clear()).0, "prompt_token_ids");
    for id in [-1, 52, i32::MAX, i32::MIN] {
        let (field, problem) = refused(|r| r.prompt[7] = id);
        assert_eq!(field, "prompt_token_ids");
        assert!(problem.contains(&id.to_string()), "{problem}");
    }
    // A context of 256 tokens holds 255 of the prompt and one more.
    let (field, problem) = refused(|r| r.prompt = tokens(1, 256));
    assert_eq!(field, "prompt_token_ids");
    assert!(problem.contains("256 prompt tokens"), "{problem}");
    accepted(|r| r.prompt = tokens(1, 255));
    accepted(|r| r.prompt = vec![0, 51]);
}

#[test]
fn numbers_are_checked() {
    type Change = fn(&mut SubmitRequest, f64);
    let fields: [(&str, Change, f64, f64); 6] = [
        ("temperature", |r, v| r.temperature = v, -0.1, 1e39),
        ("top_p", |r, v| r.top_p = v, 0.0, 1.01),
        ("min_p", |r, v| r.min_p = v, -0.1, 1.01),
        (
            "repetition_penalty",
            |r, v| r.repetition_penalty = v,
            0.0,
            1e39,
        ),
        ("presence_penalty", |r, v| r.presence_penalty = v, -2.1, 2.1),
        (
            "frequency_penalty",
            |r, v| r.frequency_penalty = v,
            -2.1,
            2.1,
        ),
    ];
    for (field, change, low, high) in fields {
        for value in [
            low,
            high,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            -1e308,
            1e308,
        ] {
            let (refused_field, problem) = refused(|r| change(r, value));
            assert_eq!(refused_field, field, "{value}");
            assert!(problem.len() < 100, "a number of 300 digits: {problem}");
        }
        accepted(|r| change(r, 0.5));
    }
    // Positive, but nothing is left of it in 32 bits: the least that they hold.
    for tiny in [5e-324, 1e-300, 1e-46] {
        accepted(|r| r.top_p = tiny);
        accepted(|r| r.repetition_penalty = tiny);
    }
    accepted(|r| r.temperature = 5e-324);
    accepted(|r| r.temperature = -0.0);
}

#[test]
fn counts_are_checked() {
    for n in [0, 17, 1_000_000_000, u64::MAX] {
        assert_eq!(refused(|r| r.n = n).0, "n");
    }
    accepted(|r| r.n = 16);
    assert_eq!(refused(|r| r.max_tokens = Some(0)).0, "max_tokens");
    accepted(|r| r.max_tokens = Some(u64::MAX));
    for min_tokens in [247, 1_000_000_000_000, u64::MAX] {
        assert_eq!(refused(|r| r.min_tokens = min_tokens).0, "min_tokens");
    }
    accepted(|r| r.min_tokens = 246);
    assert_eq!(
        refused(|r| (r.min_tokens, r.max_tokens) = (6, Some(5))).0,
        "min_tokens"
    );
    assert_eq!(refused(|r| r.top_k = 1 << 40).0, "top_k");
    accepted(|r| r.top_k = 1_000_000);
    for logprobs in [21, 1_000_000_000, u64::MAX] {
        assert_eq!(refused(|r| r.logprobs = Some(logprobs)).0, "logprobs");
    }
    accepted(|r| r.logprobs = Some(20));
    let picks = |ids: Vec<i64>, logprobs| {
        move |r: &mut SubmitRequest| (r.logprob_token_ids, r.logprobs) = (ids, logprobs)
    };
    accepted(picks(vec![3; 128], Some(0)));
    for (ids, logprobs) in [
        (vec![3; 129], Some(0)),
        (vec![3], None),
        (vec![-1], Some(0)),
        (vec![52], Some(0)),
    ] {
        assert_eq!(refused(picks(ids, logprobs)).0, "logprob_token_ids");
    }
    accepted(|r| r.seed = Some(i64::MIN));
    assert_eq!(refused(|r| r.adapter = -2).0, "adapter");
}

#[test]
fn lists_are_checked() {
    for id in [-1, 52, 1 << 40, i64::MIN] {
        assert_eq!(
            refused(|r| r.stop_token_ids = vec![1, id]).0,
            "stop_token_ids"
        );
        assert_eq!(
            refused(|r| r.eos_token_ids = vec![1, id]).0,
            "eos_token_ids"
        );
        assert_eq!(
            refused(|r| r.logit_bias = vec![(1, 0.0), (id, 0.0)]).0,
            "logit_bias"
        );
    }
    for value in [f64::NAN, f64::INFINITY, 100.5, -101.0, 1e300] {
        assert_eq!(refused(|r| r.logit_bias = vec![(1, value)]).0, "logit_bias");
    }
    accepted(|r| r.logit_bias = (0..52).map(|id| (id, 100.0)).collect());
    assert_eq!(
        refused(|r| r.logit_bias = vec![(1, 0.0), (2, 0.0), (1, 1.0)]).0,
        "logit_bias"
    );
    assert_eq!(
        refused(|r| r.logit_bias = vec![(1, 0.0); 1_000_000]).0,
        "logit_bias"
    );
    assert_eq!(
        refused(|r| r.stop_token_ids = vec![1; 1_000_000]).0,
        "stop_token_ids"
    );
    assert_eq!(refused(|r| r.stop = vec!["a".into(); 100_000]).0, "stop");
    assert_eq!(refused(|r| r.stop = vec!["a".repeat(10 << 20)]).0, "stop");
    assert_eq!(
        refused(|r| r.stop = vec!["a".into(), String::new()]).0,
        "stop"
    );
    assert_eq!(
        refused(|r| (r.stop, r.detokenize) = (vec!["a".into()], false)).0,
        "stop"
    );
    assert_eq!(refused(|r| r.cache_salt = vec![0; 129]).0, "cache_salt");
    accepted(|r| r.cache_salt = vec![0; 128]);
    let without_text = Core::new(config(), None).unwrap();
    let mut request = SubmitRequest::new(tokens(1, 10));
    request.stop = vec!["a".into()];
    assert!(matches!(
        without_text.submit(request),
        Err(Error::Request { field: "stop", .. })
    ));
}

/// Two beams of a few tokens.
fn with_beams(request: &mut SubmitRequest) {
    (request.n, request.max_tokens) = (2, Some(5));
    request.beam_search = Some(BeamSearch {
        length_penalty: 1.0,
        ..BeamSearch::default()
    });
}

#[test]
fn what_binds_tokens_binds_no_beams() {
    type Change = fn(&mut SubmitRequest);
    accepted(with_beams);
    let bindings: [(&str, Change); 4] = [
        ("grammar", |r| r.grammar = Some(Maze::shared(1))),
        ("allowed_token_ids", |r| {
            r.allowed_token_ids = Some(vec![1, 2]);
        }),
        ("bad_words", |r| r.bad_words = vec![vec![3]]),
        ("thinking_budget", |r| {
            (r.thinking_budget, r.thinking_end) = (Some(3), vec![4]);
        }),
    ];
    for (field, bind) in bindings {
        accepted(bind);
        let (named, problem) = refused(|r| {
            with_beams(r);
            bind(r);
        });
        assert_eq!(named, field);
        assert!(problem.contains("beam"), "{problem}");
    }
}

#[test]
fn nothing_is_forced_upon_beams() {
    let mut core = core();
    let mut request = SubmitRequest::new(tokens(1, 10));
    with_beams(&mut request);
    let handle = core.submit(request).unwrap();
    let refusal = core.end_thinking(handle, &[3]).unwrap_err();
    assert!(
        matches!(&refusal, Error::Request { field: "token_ids", problem } if problem.contains("beam"))
    );
    assert!(core.abort(handle));
    assert!(!core.end_thinking(handle, &[3]).unwrap());
    core.drain().unwrap();
}

#[test]
fn lists_of_all_siblings_must_fit_into_one_slab() {
    let mut config = config();
    config.vocab_size = 2_000;
    config.max_num_seqs = 64;
    let core = Core::new(config, None).unwrap();
    let mut request = SubmitRequest::new(tokens(1, 10));
    request.logit_bias = (0..1_024).map(|id| (id, 1.0)).collect();
    request.n = 16;
    core.submit(request.clone()).unwrap();
    request.n = 17;
    assert!(matches!(
        core.submit(request),
        Err(Error::Request {
            field: "logit_bias",
            ..
        })
    ));
}

#[test]
fn what_can_never_fit_the_pool_is_refused() {
    let mut config = config();
    config.num_blocks = 10;
    let core = Core::new(config, None).unwrap();
    let submit = |prompt_len, max_tokens| {
        let mut request = SubmitRequest::new(tokens(1, prompt_len));
        request.max_tokens = max_tokens;
        core.submit(request)
    };
    // 40 tokens of KV, and the last token needs none.
    submit(20, Some(21)).unwrap();
    submit(40, Some(1)).unwrap();
    submit(40, None).unwrap();
    let Err(Error::Request {
        field: "max_tokens",
        problem,
    }) = submit(20, Some(22))
    else {
        panic!("it cannot fit")
    };
    assert!(
        problem.contains("11 KV blocks") && problem.contains("10"),
        "{problem}"
    );
    assert!(matches!(
        submit(41, None),
        Err(Error::Request {
            field: "prompt_token_ids",
            ..
        })
    ));
}

#[test]
fn without_max_tokens_the_pool_bounds_the_output() {
    let mut config = config();
    config.num_blocks = 10;
    let mut bench = crate::support::driver::Bench::new(config);
    let mut request = SubmitRequest::new(tokens(1, 20));
    request.max_tokens = Some(21);
    let handle = bench.submit(request);
    bench.run_to_end(true);
    assert_eq!(bench.reported(handle, 0).tokens.len(), 21);
}

#[test]
fn handles_are_positive_and_grow() {
    let core = core();
    let handles: Vec<u64> = (0..10)
        .map(|_| core.submit(SubmitRequest::new(vec![1])).unwrap())
        .collect();
    assert!(handles[0] > 0 && handles.windows(2).all(|pair| pair[0] < pair[1]));
}

#[test]
fn configurations_are_checked() {
    type Change = fn(&mut CoreConfig);
    let cases: [(&str, Change); 12] = [
        ("num_blocks", |c| c.num_blocks = 0),
        ("num_blocks", |c| c.num_blocks = u32::MAX),
        ("block_size", |c| c.block_size = 0),
        ("max_num_seqs", |c| c.max_num_seqs = 0),
        ("max_num_batched_tokens", |c| c.max_num_batched_tokens = 15),
        ("max_num_batched_tokens", |c| {
            c.max_num_batched_tokens = u32::MAX;
        }),
        ("mixed_step_tokens", |c| c.mixed_step_tokens = Some(0)),
        ("mixed_step_tokens", |c| {
            c.mixed_step_tokens = Some(u32::MAX);
        }),
        ("max_model_len", |c| c.max_model_len = 1),
        ("max_model_len", |c| c.max_model_len = u32::MAX),
        ("vocab_size", |c| c.vocab_size = 0),
        ("max_steps_in_flight", |c| c.max_steps_in_flight = 0),
    ];
    for (expected, change) in cases {
        let mut config = config();
        change(&mut config);
        match Core::new(config, None) {
            Err(Error::Config { field, .. }) => assert_eq!(field, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn the_layout_is_aligned_and_has_no_overlap() {
    let mut config = config();
    config.max_num_seqs = 13;
    config.policy = Policy::Priority;
    config.hidden_size = 5;
    let core = Core::new(config, None).unwrap();
    let layout = core.layout();
    let mut end = 0;
    for field in &layout.fields {
        assert!(
            field.offset.is_multiple_of(64) && field.offset >= end && field.length > 0,
            "{}",
            field.name
        );
        end = field.offset + field.length * field.dtype.num_bytes();
    }
    assert!(end <= layout.num_bytes && layout.num_bytes.is_multiple_of(64));
    let first_output = layout
        .fields
        .iter()
        .find(|field| field.name.starts_with("output_"))
        .unwrap();
    assert_eq!(first_output.offset, layout.input_bytes);
}

#[test]
fn requests_without_a_seed_get_different_ones() {
    let mut core = core();
    for _ in 0..3 {
        core.submit(SubmitRequest::new(vec![1, 2])).unwrap();
    }
    let mut slab = crate::support::slab::Slab::new(core.layout());
    core.schedule(slab.bytes_mut()).unwrap().unwrap();
    let mut seeds = slab.array::<i64>("admitted_seed", 3).to_vec();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
}
