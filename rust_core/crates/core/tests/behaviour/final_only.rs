//! Requests that ask for one delta at the end: the same steps as ever, and the sum of what the deltas would have been.

use std::collections::BTreeMap;

use oneloop_core::{Core, CoreConfig, Deltas, FinishReason, StopReason, SubmitRequest};

use crate::property::{random_config, random_request};
use crate::support::driver::vocabulary;
use crate::support::rng::Rng;
use crate::support::slab::Slab;

/// Everything that was said of one sequence.
#[derive(Debug, Default, PartialEq)]
struct Said {
    tokens: Vec<i32>,
    text: String,
    logprobs: Vec<(i32, Vec<i32>, Vec<u32>)>,
    finish: Option<FinishReason>,
    stop_reason: Option<StopReason>,
    error: Option<String>,
    num_cached_tokens: u32,
    num_waits: u32,
    num_deltas: u32,
}

type Story = BTreeMap<(u64, u32), Said>;

fn listen(story: &mut Story, deltas: &Deltas) {
    for delta in deltas.entries() {
        let said = story.entry((delta.request, delta.index)).or_default();
        assert_eq!(said.finish, None, "a delta after the end");
        said.tokens.extend_from_slice(deltas.token_ids(delta));
        said.text.push_str(deltas.text(delta));
        for token in deltas.logprobs(delta).into_iter().flatten() {
            let bits = token.logprobs.iter().map(|value| value.to_bits());
            said.logprobs
                .push((token.rank, token.token_ids.to_vec(), bits.collect()));
        }
        said.finish = delta.finish_reason;
        said.stop_reason.clone_from(&delta.stop_reason);
        said.error = delta.error.as_ref().map(ToString::to_string);
        said.num_cached_tokens = delta.num_cached_tokens;
        said.num_waits += u32::from(delta.queue_s.is_some());
        said.num_deltas += 1;
    }
}

/// Two cores that differ in nothing but how they tell; every step of the one must be a step of the other.
struct Twins {
    cores: [Core; 2],
    in_flight: Vec<(u64, [Slab; 2])>,
    stories: [Story; 2],
}

impl Twins {
    fn new(config: &CoreConfig) -> Self {
        let core = || Core::new(config.clone(), Some(vocabulary())).unwrap();
        Self {
            cores: [core(), core()],
            in_flight: Vec::new(),
            stories: [Story::new(), Story::new()],
        }
    }

    fn submit(&mut self, request: &SubmitRequest) -> u64 {
        let [step_by_step, whole] = [false, true].map(|final_only| SubmitRequest {
            final_only,
            ..request.clone()
        });
        let handle = self.cores[0].submit(step_by_step).unwrap();
        assert_eq!(self.cores[1].submit(whole).unwrap(), handle);
        handle
    }

    fn abort(&mut self, handle: u64) {
        let [first, second] = &self.cores;
        assert_eq!(first.abort(handle), second.abort(handle));
    }

    /// Schedules a step whose samples are random, in both.
    fn schedule(&mut self, rng: &mut Rng) -> bool {
        let mut slabs = [0, 1].map(|twin: usize| Slab::new(self.cores[twin].layout()));
        let steps =
            [0, 1].map(|twin: usize| self.cores[twin].schedule(slabs[twin].bytes_mut()).unwrap());
        assert_eq!(steps[0], steps[1]);
        let input_bytes = self.cores[0].layout().input_bytes;
        assert!(slabs[0].bytes()[..input_bytes] == slabs[1].bytes()[..input_bytes]);
        let Some(step_id) = steps[0] else {
            return false;
        };
        let seed = rng.bits();
        for slab in &mut slabs {
            let mut rng = Rng(seed);
            for token in slab.array_mut::<i32>("output_token") {
                *token = if rng.once_in(200) {
                    -1
                } else {
                    rng.within(0, 40) as i32
                };
            }
            for field in ["output_rank", "output_logprob_token"] {
                for value in slab.array_mut::<i32>(field) {
                    *value = rng.within(1, 30) as i32;
                }
            }
            for field in ["output_logprob", "pick_logprob"] {
                for value in slab.array_mut::<f32>(field) {
                    *value = -(rng.within(0, 1000) as f32) / 64.0;
                }
            }
        }
        self.in_flight.push((step_id, slabs));
        true
    }

    fn commit(&mut self, fails: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let (step_id, slabs) = self.in_flight.remove(0);
        for (twin, slab) in slabs.iter().enumerate() {
            let core = &mut self.cores[twin];
            let deltas = if fails {
                core.fail(step_id, "the step failed").unwrap()
            } else {
                core.commit(step_id, slab.bytes()).unwrap()
            };
            core.audit().unwrap();
            listen(&mut self.stories[twin], &deltas);
        }
    }
}

#[test]
fn one_delta_says_what_many_would_have_said() {
    let (mut num_gathered, mut num_preempted, mut num_failed) = (0, 0, 0);
    for seed in 0..150 {
        let mut rng = Rng(seed);
        let mut config = random_config(&mut rng);
        // Who waits for the end only is no stream, so this would set the twins apart.
        config.mixed_step_tokens = None;
        let mut twins = Twins::new(&config);
        let mut handles = Vec::new();
        for _ in 0..200 {
            match rng.within(0, 9) {
                0 | 1 => handles.push(twins.submit(&random_request(&mut rng, &config))),
                2 if rng.once_in(4) && !handles.is_empty() => {
                    let handle = rng.pick(&handles);
                    twins.abort(handle);
                }
                3..6 => drop(twins.schedule(&mut rng)),
                _ => twins.commit(rng.once_in(60)),
            }
        }
        while twins.cores[0].has_work() {
            twins.schedule(&mut rng);
            twins.commit(false);
        }
        assert!(!twins.cores[1].has_work());
        num_preempted += twins.cores[0].stats().num_preemptions;
        let [step_by_step, whole] = twins.stories;
        for (id, mut said) in whole {
            assert!(said.num_deltas == 1 && said.finish.is_some());
            num_gathered += u32::from(said.tokens.len() > 3);
            num_failed += u32::from(said.error.is_some() && !said.tokens.is_empty());
            said.num_deltas = step_by_step[&id].num_deltas;
            assert_eq!(said, step_by_step[&id], "seed {seed}");
        }
        // Only those that were aborted say nothing at the end.
        assert!(step_by_step.values().all(|said| said.num_waits == 1));
    }
    assert!(num_gathered > 500 && num_preempted > 100 && num_failed > 10);
}
