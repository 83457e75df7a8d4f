//! Masks and what they decide: scripted tokens, without a device.

use std::collections::HashMap;
use std::sync::Arc;

use oneloop_core::{
    Automaton, Constraint, ConstraintSource, Core, Failure, FinishReason, SharedGrammar,
    SubmitRequest,
};

use crate::support::constraints::Maze;
use crate::support::driver::{VOCAB_SIZE, vocabulary};
use crate::support::slab::Slab;
use crate::{config, request};

const EOS: i64 = 25;

fn core() -> Core {
    Core::new(config(), Some(vocabulary())).unwrap()
}

fn ask() -> SubmitRequest {
    let mut request = request(vec![1, 2, 3], 9);
    request.eos_token_ids = vec![EOS];
    request
}

/// The words: each state takes one token of a list.
fn grammar(states: &[&[(u32, u32)]]) -> SharedGrammar {
    let states = states.iter().map(|moves| moves.iter().copied().collect());
    SharedGrammar(Arc::new(
        Automaton::new(states.collect::<Vec<HashMap<_, _>>>()).unwrap(),
    ))
}

/// A step in flight and what its first sample may be; `None`: anything.
struct Step {
    slab: Slab,
    step_id: u64,
}

impl Step {
    fn schedule(core: &mut Core) -> Self {
        let mut slab = Slab::new(core.layout());
        let step_id = core.schedule(slab.bytes_mut()).unwrap().unwrap();
        Self { slab, step_id }
    }

    fn is_masked(&self) -> bool {
        self.slab.header("num_masked") > 0
    }

    fn waits(&self) -> bool {
        self.slab.header("masks_wait") == 1
    }

    /// Tokens that the sample may become.
    fn choices(&mut self, core: &mut Core, position: usize) -> Option<Vec<i32>> {
        core.fill_masks(self.step_id, self.slab.bytes_mut())
            .unwrap();
        let mask = self.slab.mask(position)?;
        let is_set = |&id: &i32| mask[id as usize / 32] >> (id % 32) & 1 == 1;
        Some((0..VOCAB_SIZE as i32).filter(is_set).collect())
    }

    fn commit(&mut self, core: &mut Core, tokens: &[i32]) -> Vec<End> {
        self.slab.array_mut::<i32>("output_token")[..tokens.len()].copy_from_slice(tokens);
        let deltas = core.commit(self.step_id, self.slab.bytes()).unwrap();
        let end = |delta: &oneloop_core::Delta| (delta.finish_reason, delta.error.clone());
        deltas.entries().iter().map(end).collect()
    }
}

type End = (Option<FinishReason>, Option<Arc<Failure>>);

const GOES_ON: End = (None, None);
const STOP: End = (Some(FinishReason::Stop), None);

/// Runs one request step by step with these tokens: per token its choices, and how it ended.
fn run(core: &mut Core, script: &[i32]) -> (Vec<Option<Vec<i32>>>, End) {
    let (mut choices, mut end) = (Vec::new(), GOES_ON);
    for &token in script {
        let mut step = Step::schedule(core);
        choices.push(step.is_masked().then(|| step.choices(core, 0)).flatten());
        [end] = step.commit(core, &[token]).try_into().unwrap();
        core.audit().unwrap();
    }
    (choices, end)
}

fn all_but(banned: &[i32]) -> Vec<i32> {
    let is_free = |id: &i32| !banned.contains(id);
    (0..VOCAB_SIZE as i32).filter(is_free).collect()
}

fn failure_of(end: &End) -> &Failure {
    assert_eq!(end.0, Some(FinishReason::Error));
    end.1.as_deref().unwrap()
}

fn error_of(end: &End) -> &str {
    &failure_of(end).message
}

#[test]
fn a_grammar_that_lets_nothing_follow_ends_the_sequence() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1), (5, 1)], &[(7, 2)], &[]]));
    asked.min_tokens = 5; // counts for stops, not for what a grammar ends
    core.submit(asked).unwrap();
    let (choices, end) = run(&mut core, &[5, 7]);
    assert_eq!(choices, [Some(vec![4, 5]), Some(vec![7])]);
    assert_eq!(end, STOP);
    assert!(!core.has_work());
}

#[test]
fn a_token_that_must_not_come_ends_its_sequence_alone() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1)], &[]]));
    core.submit(asked).unwrap();
    core.submit(ask()).unwrap();
    let mut step = Step::schedule(&mut core);
    assert_eq!(step.choices(&mut core, 0), Some(vec![4]));
    assert_eq!(step.slab.mask(1), None);
    let ends = step.commit(&mut core, &[6, 6]);
    assert!(error_of(&ends[0]).contains("token id 6"), "{ends:?}");
    assert!(!failure_of(&ends[0]).is_of_request, "{ends:?}");
    assert_eq!(ends[1], GOES_ON);
    assert_eq!(core.stats().num_errored, 1);
    core.audit().unwrap();
}

/// Fails in one way or another.
struct Faulty {
    panics: bool,
}

impl ConstraintSource for Faulty {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Self { ..*self })
    }
}

impl Constraint for Faulty {
    fn fill_mask(&mut self, _: &mut [u32]) -> Result<(), String> {
        assert!(!self.panics, "a bug in the grammar");
        Err("it is too large".into())
    }

    fn advance(&mut self, _: u32) -> Result<(), Failure> {
        Ok(())
    }

    fn is_over(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        self.start()
    }
}

#[test]
fn a_constraint_that_fails_or_panics_ends_its_sequence_alone() {
    for (panics, message) in [(false, "it is too large"), (true, "a bug in the grammar")] {
        let mut core = core();
        let mut asked = ask();
        asked.grammar = Some(SharedGrammar(Arc::new(Faulty { panics })));
        core.submit(asked).unwrap();
        core.submit(ask()).unwrap();
        let mut step = Step::schedule(&mut core);
        assert_eq!(step.choices(&mut core, 0), None);
        // Even EOS is no way out.
        let ends = step.commit(&mut core, &[EOS as i32, 6]);
        assert!(error_of(&ends[0]).contains(message), "{ends:?}");
        assert_eq!(failure_of(&ends[0]).is_of_request, !panics, "{ends:?}");
        assert_eq!(ends[1], GOES_ON);
        Step::schedule(&mut core).commit(&mut core, &[3]);
        core.audit().unwrap();
    }
}

#[test]
fn masks_wait_for_the_token_before_them_and_for_nothing_else() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1)], &[(5, 2)], &[(6, 2)]]));
    core.submit(asked).unwrap();
    let mut first = Step::schedule(&mut core);
    assert!(first.is_masked() && !first.waits());
    assert_eq!(first.choices(&mut core, 0), Some(vec![4]));
    let mut second = Step::schedule(&mut core);
    assert!(second.is_masked() && second.waits());
    let early = core.fill_masks(second.step_id, second.slab.bytes_mut());
    assert!(early.is_err());
    // Who comes meanwhile has no token before: its mask would not wait.
    first.commit(&mut core, &[4]);
    assert_eq!(second.choices(&mut core, 0), Some(vec![5]));
    assert!(core.fill_masks(77, second.slab.bytes_mut()).is_err());
}

#[test]
fn allowed_tokens_and_single_bad_words_need_no_token() {
    let mut core = core();
    let mut asked = ask();
    asked.allowed_token_ids = Some(vec![3, 4, 9]);
    asked.bad_words = vec![vec![4], vec![9, 3]];
    core.submit(asked).unwrap();
    let mut first = Step::schedule(&mut core);
    assert_eq!(first.choices(&mut core, 0), Some(vec![3, 9]));
    let second = Step::schedule(&mut core);
    assert!(second.waits(), "9 may come, and 3 is banned behind it");
    first.commit(&mut core, &[3]);
    drop(second);
    let mut other = Core::new(config(), None).unwrap();
    let mut asked = ask();
    asked.allowed_token_ids = Some(vec![3]);
    other.submit(asked).unwrap();
    let mut first = Step::schedule(&mut other);
    let mut second = Step::schedule(&mut other);
    assert!(second.is_masked() && !second.waits());
    assert_eq!(second.choices(&mut other, 0), Some(vec![3]));
    assert_eq!(first.choices(&mut other, 0), Some(vec![3]));
}

#[test]
fn a_bad_word_is_banned_where_it_would_be_complete() {
    let mut core = core();
    let mut asked = ask();
    asked.bad_words = vec![vec![1, 2, 3]];
    core.submit(asked).unwrap();
    let (choices, _) = run(&mut core, &[1, 1, 2, 4, 2, 3]);
    let bound: Vec<bool> = choices.iter().map(Option::is_some).collect();
    assert_eq!(bound, [false, false, false, true, false, false]);
    assert!(!choices[3].as_ref().unwrap().contains(&3));
    assert_eq!(choices[3].as_ref().unwrap().len(), VOCAB_SIZE as usize - 1);
}

#[test]
fn a_grammar_waits_for_the_end_of_the_thinking() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1)], &[]]));
    asked.grammar_after = vec![8, 9];
    core.submit(asked).unwrap();
    let (choices, end) = run(&mut core, &[9, 8, 9, 4]);
    let thinking = Some(all_but(&[EOS as i32]));
    let all = [thinking.clone(), thinking.clone(), thinking, Some(vec![4])];
    assert_eq!(choices, all);
    assert_eq!(end, STOP);
}

#[test]
fn nothing_ends_the_text_before_its_grammar_holds() {
    let waits = SubmitRequest {
        grammar: Some(grammar(&[&[(4, 1)], &[]])),
        grammar_after: vec![8],
        stop_token_ids: vec![6, 8],
        ..ask()
    };
    let mut core = core();
    core.submit(waits.clone()).unwrap();
    // Two steps ahead: their masks are those of a text that still thinks, and need not wait.
    let mut steps: Vec<Step> = (0..2).map(|_| Step::schedule(&mut core)).collect();
    assert!(steps.iter().all(Step::is_masked));
    assert!(!steps[0].waits());
    for (step, token) in steps.iter_mut().zip([1, 2]) {
        assert_eq!(step.choices(&mut core, 0), Some(all_but(&[6, EOS as i32])));
        assert_eq!(step.commit(&mut core, &[token]), [GOES_ON]);
    }
    // What ends the thinking may end the text as well: that is what was asked.
    let mut step = Step::schedule(&mut core);
    step.choices(&mut core, 0);
    assert_eq!(step.commit(&mut core, &[8]), [STOP]);
    // A device that does not keep to the mask is found out.
    core.submit(waits.clone()).unwrap();
    let (_, end) = run(&mut core, &[EOS as i32]);
    assert!(error_of(&end).contains("token id 25"), "{end:?}");
    let ignoring = SubmitRequest {
        ignore_eos: true,
        stop_token_ids: Vec::new(),
        ..waits
    };
    core.submit(ignoring).unwrap();
    let (choices, end) = run(&mut core, &[EOS as i32, 8, 4]);
    assert_eq!(choices, [None, None, Some(vec![4])]);
    assert_eq!(end, STOP);
}

/// Whoever only waits for its grammar has one mask together with the others: it is uploaded once, however many they are.
#[test]
fn those_that_think_share_a_mask() {
    let waits = |stops: &[i64]| SubmitRequest {
        grammar: Some(grammar(&[&[(4, 1)], &[]])),
        grammar_after: vec![8],
        stop_token_ids: stops.to_vec(),
        ..ask()
    };
    let mut core = core();
    for stops in [&[][..], &[6], &[], &[6], &[]] {
        core.submit(waits(stops)).unwrap();
    }
    core.submit(SubmitRequest {
        bad_words: vec![vec![1, 2]],
        ..waits(&[])
    })
    .unwrap();
    let end = EOS as i32;
    let masks_of = |step: &Step| step.slab.array::<i64>("mask_header", 2)[1];
    let mut step = Step::schedule(&mut core);
    for (sample, banned) in [&[end][..], &[6, end], &[end], &[6, end], &[end], &[end]]
        .into_iter()
        .enumerate()
    {
        assert_eq!(step.choices(&mut core, sample), Some(all_but(banned)));
    }
    assert_eq!(masks_of(&step), 2);
    // The first and the last have thought; the last may not go on with its bad word, and the others think on.
    step.commit(&mut core, &[8, 1, 1, 1, 1, 1]);
    let mut step = Step::schedule(&mut core);
    let bad = all_but(&[2, end]);
    let expected = [
        vec![4],
        all_but(&[6, end]),
        all_but(&[end]),
        all_but(&[6, end]),
        all_but(&[end]),
        bad,
    ];
    for (sample, choices) in expected.into_iter().enumerate() {
        assert_eq!(step.choices(&mut core, sample), Some(choices), "{sample}");
    }
    assert_eq!(masks_of(&step), 4);
    let ends = step.commit(&mut core, &[4, 8, 8, 8, 8, 8]);
    assert_eq!(ends[0], STOP);
    let mut step = Step::schedule(&mut core);
    assert_eq!(step.choices(&mut core, 0), Some(vec![4]));
    assert_eq!(masks_of(&step), 5, "each grammar has a mask of its own");
}

#[test]
fn thinking_ends_when_its_budget_is_used_up() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1)], &[]]));
    asked.grammar_after = vec![8, 9];
    (asked.thinking_end, asked.thinking_budget) = (vec![8, 9], Some(3));
    let none = SubmitRequest {
        thinking_budget: Some(0),
        ..asked.clone()
    };
    core.submit(asked).unwrap();
    // The begin of the marker is there already.
    let (choices, end) = run(&mut core, &[1, 1, 8, 9, 4]);
    let thinking = Some(all_but(&[EOS as i32]));
    assert_eq!(choices[..3], [thinking.clone(), thinking.clone(), thinking]);
    assert_eq!(choices[3..], [Some(vec![9]), Some(vec![4])]);
    assert_eq!(end, STOP);
    core.submit(none).unwrap();
    let (choices, end) = run(&mut core, &[8, 9, 4]);
    assert_eq!(choices, [Some(vec![8]), Some(vec![9]), Some(vec![4])]);
    assert_eq!(end, STOP);
}

#[test]
fn steps_within_the_budget_are_as_any_other() {
    let mut core = core();
    let mut asked = ask();
    (asked.thinking_end, asked.thinking_budget) = (vec![8], Some(2));
    core.submit(asked).unwrap();
    let mut steps: Vec<Step> = (0..2).map(|_| Step::schedule(&mut core)).collect();
    assert!(steps.iter().all(|step| !step.is_masked()));
    steps[0].commit(&mut core, &[1]);
    let mut third = Step::schedule(&mut core);
    assert!(third.waits());
    steps[1].commit(&mut core, &[8]);
    assert_eq!(third.choices(&mut core, 0), None, "it has ended by itself");
    third.commit(&mut core, &[1]);
    assert!(!Step::schedule(&mut core).is_masked());
}

#[test]
fn the_thinking_of_a_running_request_can_be_ended() {
    let mut core = core();
    let handle = core.submit(ask()).unwrap();
    let mut first = Step::schedule(&mut core);
    assert!(core.end_thinking(handle, &[8, 9]).unwrap());
    // What is being sampled comes first.
    let mut second = Step::schedule(&mut core);
    assert!(second.waits());
    first.commit(&mut core, &[1]);
    assert_eq!(second.choices(&mut core, 0), Some(vec![8]));
    second.commit(&mut core, &[8]);
    let (choices, _) = run(&mut core, &[9, 5]);
    assert_eq!(choices, [Some(vec![9]), None]);
    assert!(!Step::schedule(&mut core).is_masked());
    assert!(!core.end_thinking(77, &[8]).unwrap());
    for wrong in [&[][..], &[-1], &[52], &[1; 65]] {
        assert!(core.end_thinking(handle, wrong).is_err());
    }
}

#[test]
fn thinking_that_has_ended_meanwhile_is_not_ended_again() {
    let mut core = core();
    let handle = core.submit(ask()).unwrap();
    let mut first = Step::schedule(&mut core);
    core.end_thinking(handle, &[8]).unwrap();
    let mut second = Step::schedule(&mut core);
    first.commit(&mut core, &[8]);
    assert_eq!(second.choices(&mut core, 0), None);
    second.commit(&mut core, &[1]);
    assert!(!Step::schedule(&mut core).is_masked());
}

#[test]
fn a_waiting_grammar_holds_when_the_thinking_was_ended() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1)], &[]]));
    asked.grammar_after = vec![8];
    asked.n = 2;
    let handle = core.submit(asked).unwrap();
    core.end_thinking(handle, &[8, 1]).unwrap();
    for expected in [8, 1, 4] {
        let mut step = Step::schedule(&mut core);
        for position in 0..2 {
            assert_eq!(step.choices(&mut core, position), Some(vec![expected]));
        }
        step.commit(&mut core, &[expected, expected]);
    }
    assert_eq!(core.stats().num_finished_stop, 2);
}

#[test]
fn what_contradicts_itself_is_an_error_and_no_endless_wait() {
    let mut core = core();
    let mut asked = ask();
    asked.grammar = Some(grammar(&[&[(4, 1)], &[]]));
    asked.allowed_token_ids = Some(vec![5]);
    core.submit(asked).unwrap();
    let (_, end) = run(&mut core, &[5]);
    assert!(error_of(&end).contains("contradict"), "{end:?}");
    assert!(failure_of(&end).is_of_request, "{end:?}");
    let mut asked = ask();
    asked.allowed_token_ids = Some(vec![EOS]);
    asked.min_tokens = 2;
    core.submit(asked).unwrap();
    let (_, end) = run(&mut core, &[5]);
    assert!(error_of(&end).contains("min_tokens"), "{end:?}");
    assert!(failure_of(&end).is_of_request, "{end:?}");
}

/// Makes a request wrong.
type Spoil = fn(&mut SubmitRequest);

#[test]
fn what_a_client_sends_is_checked() {
    let core = core();
    let wrong: [(&str, Spoil); 11] = [
        ("allowed_token_ids", |r| {
            r.allowed_token_ids = Some(Vec::new());
        }),
        ("allowed_token_ids", |r| {
            r.allowed_token_ids = Some(vec![52]);
        }),
        ("allowed_token_ids", |r| {
            r.allowed_token_ids = Some(vec![0; 53]);
        }),
        ("bad_words", |r| r.bad_words = vec![Vec::new()]),
        ("bad_words", |r| r.bad_words = vec![vec![1, -1]]),
        ("bad_words", |r| r.bad_words = vec![vec![1]; 1025]),
        ("bad_words", |r| r.bad_words = vec![vec![1; 65]]),
        ("bad_words", |r| {
            r.bad_words = (0..52).map(|id| vec![id]).collect();
        }),
        ("grammar_after", |r| r.grammar_after = vec![99]),
        ("thinking_budget", |r| r.thinking_budget = Some(1)),
        ("thinking_budget", |r| {
            (r.thinking_budget, r.thinking_end) = (Some(1), vec![3]);
            r.grammar = Some(Maze::shared(1));
        }),
    ];
    for (field, spoil) in wrong {
        let mut asked = ask();
        spoil(&mut asked);
        let error = core.submit(asked).unwrap_err().to_string();
        assert!(error.starts_with(field), "{field}: {error}");
    }
}

#[test]
fn many_masks_are_computed_on_several_threads_and_stay_apart() {
    let mut config = config();
    config.max_num_seqs = 64;
    let mut core = Core::new(config, None).unwrap();
    for token in 0..50 {
        let mut asked = request(vec![1, 2, 3], 2);
        asked.grammar = Some(grammar(&[&[(token, 1)], &[(51, 1)]]));
        core.submit(asked).unwrap();
    }
    let mut num_seen = 0;
    while num_seen < 50 {
        let mut step = Step::schedule(&mut core);
        for position in 0..step.slab.count("num_samples") {
            if step.slab.ints("sample_output_index", position + 1)[position] == 0 {
                assert_eq!(step.choices(&mut core, position), Some(vec![num_seen]));
                num_seen += 1;
            }
        }
        let tokens: Vec<i32> = (0..step.slab.count("num_samples"))
            .map(|position| step.choices(&mut core, position).unwrap()[0])
            .collect();
        step.commit(&mut core, &tokens);
    }
    assert_eq!(core.stats().num_errored, 0);
}
