//! A run that is recorded: random requests, some of them beam searches, and random results.

use crate::batch::{SLAB_ALIGNMENT, SlabLayout};
use crate::config::{CoreConfig, Policy};
use crate::engine::Core;
use crate::request::{BeamSearch, EarlyStopping, SubmitRequest};
use crate::sched::mix;
use crate::trace::Event;

const VOCAB_SIZE: u32 = 300;

/// A pool that is too small for what runs, so that sequences are preempted.
pub(super) fn config() -> CoreConfig {
    let mut config = CoreConfig::new(30, VOCAB_SIZE);
    config.block_size = 4;
    config.max_num_seqs = 8;
    config.max_num_batched_tokens = 24;
    config.max_model_len = 100;
    config.policy = Policy::Priority;
    config
}

/// Some requests are beam searches.
fn random_request(draw: &mut impl FnMut(u64) -> u64) -> SubmitRequest {
    let is_search = draw(7) == 0;
    let len = 4 + draw(if is_search { 8 } else { 30 });
    let prompt = (0..len).map(|index| (index % 7 + draw(2)) as i32);
    let mut request = SubmitRequest::new(prompt.collect());
    request.max_tokens = Some(1 + draw(if is_search { 12 } else { 60 }));
    request.eos_token_ids = vec![5];
    request.n = 1 + draw(4) / 3;
    if is_search {
        request.n = 1 + draw(3);
        let kinds = [
            EarlyStopping::Heuristic,
            EarlyStopping::Always,
            EarlyStopping::Never,
        ];
        request.beam_search = Some(BeamSearch {
            length_penalty: draw(5) as f64 / 2.0 - 1.0,
            early_stopping: kinds[draw(3) as usize],
        });
    }
    request
}

/// Random results: of each sample a token, and likely tokens with their log-probabilities.
fn write_results(slab: &mut [u8], layout: &SlabLayout, draw: &mut impl FnMut(u64) -> u64) {
    let mut of = |name: &str, make: &mut dyn FnMut(usize) -> i32| {
        let found = layout.fields.iter().find(|field| field.name == name);
        let field = found.unwrap();
        let bytes = &mut slab[field.offset..field.offset + 4 * field.length];
        let values: &mut [i32] = bytemuck::cast_slice_mut(bytes);
        for (index, value) in values.iter_mut().enumerate() {
            *value = make(index);
        }
    };
    let first = draw(61) as usize;
    of("output_token", &mut |_| draw(60) as i32);
    // All of a sample are different.
    of("output_logprob_token", &mut |index| {
        ((first + index * 11) % 61) as i32
    });
    of("output_logprob", &mut |_| {
        (-(draw(900) as f32) / 100.0).to_bits() as i32
    });
}

/// Random requests and results, two steps in flight, aborts and a failed step.
pub(super) fn recorded_run(seed: u64) -> Vec<Event> {
    let mut core = Core::new(config(), None).unwrap();
    let queue = core.record_trace().unwrap();
    let mut noise = seed;
    let mut draw = |end: u64| {
        noise = mix(noise);
        noise % end
    };
    let mut slab = vec![0; core.layout().num_bytes + SLAB_ALIGNMENT];
    let start = slab.as_ptr().align_offset(SLAB_ALIGNMENT);
    let slab = &mut slab[start..start + core.layout().num_bytes];
    let mut in_flight = std::collections::VecDeque::new();
    for turn in 0.. {
        if turn >= 400 && !core.has_work() {
            break;
        }
        if turn < 400 && draw(8) == 0 {
            let handle = core.submit(random_request(&mut draw)).unwrap();
            if draw(8) == 0 {
                core.abort(handle - draw(3).min(handle));
            }
            if draw(6) == 0 {
                let priority = draw(5) as i64 - 2;
                core.set_priority(handle - draw(3).min(handle), priority)
                    .unwrap();
            }
        }
        if let Some(step_id) = core.schedule(slab).unwrap() {
            in_flight.push_back(step_id);
        }
        if in_flight.len() > 1 || turn >= 400 {
            let Some(step_id) = in_flight.pop_front() else {
                continue;
            };
            if turn % 130 == 129 {
                core.fail(step_id, "broken").unwrap();
                continue;
            }
            write_results(slab, core.layout(), &mut draw);
            core.commit(step_id, slab).unwrap();
        }
    }
    assert!(core.stats().num_preemptions > 2);
    core.close_trace();
    queue.take().events
}
