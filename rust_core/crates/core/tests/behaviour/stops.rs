//! Where a sequence ends, and with which text: scripted tokens, without a device.

use oneloop_core::{Core, FinishReason, StopReason, SubmitRequest};

use crate::config;
use crate::support::driver::{SPECIAL, vocabulary};
use crate::support::slab::Slab;

/// What came of a request whose model returns these tokens: tokens taken, text, finish and stop reason.
fn generate(
    request: SubmitRequest,
    script: &[i32],
) -> (usize, String, Option<FinishReason>, Option<StopReason>) {
    let mut core = Core::new(config(), Some(vocabulary())).unwrap();
    core.submit(request).unwrap();
    let mut slab = Slab::new(core.layout());
    let (mut num_tokens, mut text) = (0, String::new());
    for &token in script {
        let step_id = core.schedule(slab.bytes_mut()).unwrap().unwrap();
        slab.array_mut::<i32>("output_token")[0] = token;
        let deltas = core.commit(step_id, slab.bytes()).unwrap();
        let [delta] = deltas.entries() else {
            panic!("one sequence")
        };
        num_tokens += deltas.token_ids(delta).len();
        text.push_str(deltas.text(delta));
        if delta.finish_reason.is_some() {
            assert!(!core.has_work());
            return (
                num_tokens,
                text,
                delta.finish_reason,
                delta.stop_reason.clone(),
            );
        }
    }
    (num_tokens, text, None, None)
}

const STOP: Option<FinishReason> = Some(FinishReason::Stop);
const EOS: i64 = 25;

/// Tokens are letters: 0 = a … 25 = z, 26 = A.
fn ask(max_tokens: u64) -> SubmitRequest {
    let mut request = crate::request(vec![1, 2, 3], max_tokens);
    request.eos_token_ids = vec![EOS];
    request
}

#[test]
fn eos_is_a_token_without_text() {
    assert_eq!(generate(ask(9), &[0, 1, 25]), (3, "ab".into(), STOP, None));
    let kept = SubmitRequest {
        include_stop_str_in_output: true,
        ..ask(9)
    };
    assert_eq!(generate(kept, &[0, 1, 25]), (3, "abz".into(), STOP, None));
    let ignored = SubmitRequest {
        ignore_eos: true,
        ..ask(3)
    };
    assert_eq!(
        generate(ignored, &[0, 25, 1]),
        (3, "azb".into(), Some(FinishReason::Length), None)
    );
}

#[test]
fn a_stop_token_is_reported_and_eos_goes_first() {
    let stop = SubmitRequest {
        stop_token_ids: vec![4, EOS],
        ..ask(9)
    };
    assert_eq!(
        generate(stop.clone(), &[0, 4]),
        (2, "a".into(), STOP, Some(StopReason::Token(4)))
    );
    assert_eq!(
        generate(stop.clone(), &[0, 25]),
        (2, "a".into(), STOP, None)
    );
    let ignored = SubmitRequest {
        ignore_eos: true,
        ..stop
    };
    assert_eq!(
        generate(ignored, &[0, 25]),
        (2, "a".into(), STOP, Some(StopReason::Token(25)))
    );
}

#[test]
fn nothing_stops_before_min_tokens() {
    let least = SubmitRequest {
        min_tokens: 2,
        stop_token_ids: vec![4],
        ..ask(9)
    };
    assert_eq!(
        generate(least.clone(), &[25, 4, 25]),
        (3, "ze".into(), STOP, None)
    );
    let text = SubmitRequest {
        stop: vec!["a".into()],
        ..least
    };
    let expected = Some(StopReason::Text("a".into()));
    assert_eq!(
        generate(text, &[0, 0, 1, 0]),
        (4, "aab".into(), STOP, expected)
    );
}

#[test]
fn a_stop_string_is_cut_off_across_tokens() {
    let stop = SubmitRequest {
        stop: vec!["bc".into(), "x".into()],
        ..ask(9)
    };
    let expected = Some(StopReason::Text("bc".into()));
    assert_eq!(
        generate(stop.clone(), &[0, 1, 2]),
        (3, "a".into(), STOP, expected.clone())
    );
    let kept = SubmitRequest {
        include_stop_str_in_output: true,
        ..stop
    };
    assert_eq!(
        generate(kept, &[0, 1, 2]),
        (3, "abc".into(), STOP, expected)
    );
}

#[test]
fn held_back_text_is_handed_out_at_every_end() {
    let stop = SubmitRequest {
        stop: vec!["bc".into()],
        ..ask(2)
    };
    assert_eq!(
        generate(stop.clone(), &[0, 1]),
        (2, "ab".into(), Some(FinishReason::Length), None)
    );
    let eos = SubmitRequest {
        max_tokens: Some(9),
        ..stop
    };
    assert_eq!(generate(eos, &[1, 25]), (2, "b".into(), STOP, None));
}

#[test]
fn a_stop_string_in_the_last_token_is_a_stop() {
    let stop = SubmitRequest {
        stop: vec!["b".into()],
        ..ask(2)
    };
    assert_eq!(
        generate(stop, &[0, 1]),
        (2, "a".into(), STOP, Some(StopReason::Text("b".into())))
    );
}

#[test]
fn special_tokens_leave_text_only_when_asked() {
    assert_eq!(generate(ask(2), &[SPECIAL, 1]).1, "b");
    let shown = SubmitRequest {
        skip_special_tokens: false,
        ..ask(2)
    };
    assert_eq!(generate(shown, &[SPECIAL, 1]).1, "Zb");
    let silent = SubmitRequest {
        detokenize: false,
        ..ask(2)
    };
    assert_eq!(
        generate(silent, &[SPECIAL, 1]),
        (2, String::new(), Some(FinishReason::Length), None)
    );
}

#[test]
fn the_context_ends_a_sequence() {
    let mut config = config();
    config.max_model_len = 12;
    let mut core = Core::new(config, None).unwrap();
    core.submit(SubmitRequest::new(vec![1; 8])).unwrap();
    let mut slab = Slab::new(core.layout());
    slab.array_mut::<i32>("output_token").fill(1);
    let mut finish = None;
    for _ in 0..4 {
        assert_eq!(finish, None);
        let step_id = core.schedule(slab.bytes_mut()).unwrap().unwrap();
        finish = core.commit(step_id, slab.bytes()).unwrap().entries()[0].finish_reason;
    }
    assert_eq!(finish, Some(FinishReason::Length));
}
