//! Core and simulated device in one, with every delta checked against what the sequence must be.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use oneloop_core::text::Vocabulary;
use oneloop_core::{Core, CoreConfig, Delta, Deltas, FinishReason, StopReason, SubmitRequest};

use super::constraints::{Verdict, judge};
use super::device::{Device, Fate, Logits, Oracle};
use super::expected::{check_logprobs, expected_end, expected_token, is_broken};
use super::prompt_results;
use super::slab::Slab;

/// Tokens of the test vocabulary: each is one letter.
pub(crate) const VOCAB_SIZE: u32 = 52;
/// The test vocabulary's only special token.
pub(crate) const SPECIAL: i32 = 51;

/// One letter per token.
pub(crate) fn vocabulary() -> Arc<Vocabulary> {
    let pieces = (0..VOCAB_SIZE as u8).map(|id| [if id < 26 { b'a' + id } else { b'A' + id - 26 }]);
    Arc::new(Vocabulary::new(pieces, &[SPECIAL as u32], false).unwrap())
}

/// The text of these tokens with special ones skipped.
pub(crate) fn text_of(tokens: &[i32]) -> String {
    let letter = |&id: &i32| {
        char::from(if id < 26 {
            b'a' + id as u8
        } else {
            b'A' + id as u8 - 26
        })
    };
    tokens
        .iter()
        .filter(|&&id| id != SPECIAL)
        .map(letter)
        .collect()
}

/// What has been reported of one sequence.
#[derive(Debug, Default, Clone)]
pub(crate) struct Reported {
    pub(crate) tokens: Vec<i32>,
    pub(crate) text: String,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) error: Option<String>,
    pub(crate) num_cached_tokens: u32,
}

/// A live or ended request.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) request: SubmitRequest,
    pub(crate) sequences: Vec<Reported>,
    pub(crate) aborted: bool,
}

/// A step that was launched and not committed.
struct InFlight {
    step_id: u64,
    slab: Slab,
    fails: bool,
    /// It waits for its masks.
    held: Option<Logits>,
}

/// How often the things happened that the tests are about.
#[derive(Debug, Default, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "they are all counts")]
pub(crate) struct Coverage {
    pub(crate) num_steps: u64,
    pub(crate) num_tokens: u64,
    pub(crate) num_preempted: u64,
    pub(crate) num_forks: u64,
    pub(crate) num_cow: u64,
    pub(crate) num_hit_tokens: u64,
    pub(crate) num_failed_steps: u64,
    pub(crate) num_bad_rows: u64,
    /// Sequences that a failed step sent back although they were not in it.
    pub(crate) num_recomputed: u64,
    pub(crate) num_aborted: u64,
    pub(crate) num_stopped: u64,
    pub(crate) num_full: u64,
    /// Changes of priority that were done.
    pub(crate) num_prioritized: u64,
    /// Tokens of all steps.
    pub(crate) num_scheduled: u64,
    /// Steps that left a sequence waiting for what a running one is about to compute.
    pub(crate) num_deferring_steps: u64,
    /// Steps with prompts that hold as much as they may beside streams.
    pub(crate) num_limited_steps: u64,
    /// Samples that a mask bound.
    pub(crate) num_masks: u64,
    /// Steps that waited for masks while the one before was in flight.
    pub(crate) num_held_steps: u64,
    /// Sequences that their grammar ended.
    pub(crate) num_over: u64,
    /// Sequences whose constraints failed.
    pub(crate) num_broken: u64,
    /// Requests that ended with what is said of their prompt.
    pub(crate) num_without_tokens: u64,
}

impl Coverage {
    pub(crate) fn add(&mut self, bench: &Bench) {
        let (stats, seen) = (bench.core.stats(), &bench.coverage);
        self.num_steps += stats.num_steps;
        self.num_tokens += stats.num_generation_tokens;
        self.num_preempted += stats.num_preemptions;
        self.num_forks += seen.num_forks;
        self.num_cow += seen.num_cow;
        self.num_hit_tokens += stats.num_prefix_hit_tokens;
        self.num_failed_steps += seen.num_failed_steps;
        self.num_recomputed += seen.num_recomputed;
        self.num_bad_rows += bench.device.num_bad_rows;
        self.num_aborted += stats.num_aborted;
        self.num_stopped += stats.num_finished_stop;
        self.num_full += stats.num_finished_length;
        self.num_prioritized += seen.num_prioritized;
        self.num_scheduled += seen.num_scheduled;
        self.num_deferring_steps += seen.num_deferring_steps;
        self.num_limited_steps += seen.num_limited_steps;
        self.num_masks += seen.num_masks;
        self.num_held_steps += seen.num_held_steps;
        self.num_over += seen.num_over;
        self.num_broken += seen.num_broken;
        self.num_without_tokens += seen.num_without_tokens;
    }
}

/// The test bench.
pub(crate) struct Bench {
    pub(crate) core: Core,
    pub(crate) device: Device,
    pub(crate) oracle: Oracle,
    pub(crate) known: BTreeMap<u64, Known>,
    in_flight: VecDeque<InFlight>,
    spare: Vec<Slab>,
    next_seed: i64,
    pub(crate) coverage: Coverage,
    /// Sequences by reason: stop, length, abort, error.
    pub(crate) num_ended: [u64; 4],
    pub(crate) audited: bool,
}

impl Bench {
    pub(crate) fn new(config: CoreConfig) -> Self {
        let core = Core::new(config, Some(vocabulary())).unwrap();
        let device = Device::new(core.config(), core.layout());
        Self {
            core,
            device,
            oracle: Oracle::default(),
            known: BTreeMap::new(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            next_seed: 1,
            coverage: Coverage::default(),
            num_ended: [0; 4],
            audited: true,
        }
    }

    pub(crate) fn audit(&self) {
        if self.audited {
            self.core.audit().unwrap();
        }
    }

    /// Submits under a seed of its own.
    pub(crate) fn submit(&mut self, mut request: SubmitRequest) -> u64 {
        request.seed = Some(self.next_seed.wrapping_mul(0x1234_5678_9abc_def1));
        self.next_seed += 1;
        let handle = self.core.submit(request.clone()).unwrap();
        self.oracle.add(handle, &request);
        let sequences = vec![Reported::default(); request.n as usize];
        self.known.insert(
            handle,
            Known {
                request,
                sequences,
                aborted: false,
            },
        );
        self.audit();
        handle
    }

    /// Schedules and launches a step; false when the core had nothing to run.
    ///
    /// Nothing is launched behind a step that waits for its masks.
    pub(crate) fn schedule(&mut self, fails: bool) -> bool {
        if self
            .in_flight
            .back()
            .is_some_and(|step| step.held.is_some())
        {
            return false;
        }
        let mut slab = self
            .spare
            .pop()
            .unwrap_or_else(|| Slab::new(self.core.layout()));
        let num_preempted = self.core.stats().num_preemptions;
        let step_id = self.core.schedule(slab.bytes_mut()).unwrap();
        self.audit();
        let preempted_now = self.core.stats().num_preemptions > num_preempted;
        let Some(step_id) = step_id else {
            self.spare.push(slab);
            return false;
        };
        assert_eq!(slab.header("step_id") as u64, step_id);
        assert!(
            !preempted_now || slab.header("num_admitted") == 0,
            "admitted what another had to give up"
        );
        self.check_size(&slab);
        self.coverage.num_preempted += slab.header("num_preempted") as u64;
        self.coverage.num_forks += slab.header("num_forks") as u64;
        self.coverage.num_cow += slab.header("num_cow") as u64;
        self.coverage.num_failed_steps += u64::from(fails);
        self.coverage.num_scheduled += slab.header("num_tokens") as u64;
        self.coverage.num_deferring_steps += u64::from(self.core.num_deferred() > 0);
        let may_be_bad = self.in_flight.iter().any(|step| step.fails);
        let fate = Fate { fails, may_be_bad };
        let logits = self.device.forward_step(&mut slab, &mut self.oracle, fate);
        let waits = slab.header("masks_wait") == 1;
        assert!(!waits || slab.header("num_masked") > 0);
        let mut step = InFlight {
            step_id,
            slab,
            fails,
            held: Some(logits),
        };
        if waits && !self.in_flight.is_empty() {
            let early = self.core.fill_masks(step_id, step.slab.bytes_mut());
            assert!(early.is_err(), "masks before the tokens they depend on");
            self.coverage.num_held_steps += 1;
        } else {
            self.sample(&mut step);
        }
        self.in_flight.push_back(step);
        true
    }

    /// Samples a step, with its masks if there are any.
    fn sample(&mut self, step: &mut InFlight) {
        let Some(logits) = step.held.take() else {
            return;
        };
        if step.slab.header("num_masked") > 0 {
            let num_bound = self
                .core
                .fill_masks(step.step_id, step.slab.bytes_mut())
                .unwrap();
            self.coverage.num_masks += u64::from(num_bound);
            self.audit();
        }
        self.device
            .sample_step(&mut step.slab, &mut self.oracle, &logits);
    }

    /// A step in which a stream that ran before gets a later token than its first holds no more than a mixed one may.
    fn check_size(&mut self, slab: &Slab) {
        let Some(limit) = self.core.config().mixed_step_tokens.map(i64::from) else {
            return;
        };
        let slots = slab.array::<i32>("row_slot", slab.count("num_single"));
        let admitted = slab.array::<i32>("admitted_slot", slab.count("num_admitted"));
        let sampled = slab.array::<i32>("sample_slot", slab.count("num_samples"));
        let indices = slab.array::<i32>("sample_output_index", slab.count("num_samples"));
        let is_mixed = sampled
            .iter()
            .zip(indices)
            .any(|(slot, &index)| index > 0 && slots.contains(slot) && !admitted.contains(slot));
        let streams = |known: &Known| !known.request.final_only;
        if !is_mixed || !self.known.values().all(streams) {
            return;
        }
        let (num_tokens, num_rows) = (slab.header("num_tokens"), slab.header("num_rows"));
        let most = limit.max(num_rows + (limit + 1) / 2);
        assert!(
            num_tokens <= most,
            "{num_tokens} tokens in {num_rows} rows beside streams, where {most} are allowed"
        );
        self.coverage.num_limited_steps += u64::from(num_tokens == most && num_tokens > num_rows);
    }

    /// The header value of the step that was launched last.
    pub(crate) fn last_header(&self, name: &str) -> i64 {
        self.in_flight.back().unwrap().slab.header(name)
    }

    /// The slab of the step that was launched last.
    pub(crate) fn last_slab(&self) -> &Slab {
        &self.in_flight.back().unwrap().slab
    }

    pub(crate) fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Commits the oldest step in flight, or reports its failure. Returns (handle, index) of each delta.
    pub(crate) fn commit(&mut self) -> Vec<(u64, u32)> {
        let Some(step) = self.in_flight.pop_front() else {
            return Vec::new();
        };
        let num_preempted = self.core.stats().num_preemptions;
        let deltas = if step.fails {
            self.core.fail(step.step_id, "the step failed").unwrap()
        } else {
            self.core.commit(step.step_id, step.slab.bytes()).unwrap()
        };
        self.audit();
        self.coverage.num_recomputed += self.core.stats().num_preemptions - num_preempted;
        for delta in deltas.entries() {
            self.check_delta(delta, &deltas, step.fails);
        }
        self.spare.push(step.slab);
        if let Some(mut next) = self.in_flight.pop_front() {
            self.sample(&mut next);
            self.in_flight.push_front(next);
        }
        deltas
            .entries()
            .iter()
            .map(|delta| (delta.request, delta.index))
            .collect()
    }

    pub(crate) fn set_priority(&mut self, handle: u64, priority: i64) -> bool {
        let was_done = self.core.set_priority(handle, priority).unwrap();
        self.coverage.num_prioritized += u64::from(was_done);
        self.audit();
        was_done
    }

    pub(crate) fn abort(&mut self, handle: u64) -> bool {
        let known = self.known.get_mut(&handle).unwrap();
        let num_live = known
            .sequences
            .iter()
            .filter(|sequence| sequence.finish.is_none())
            .count();
        let is_live = !known.aborted && num_live > 0;
        let aborted = self.core.abort(handle);
        assert_eq!(aborted, is_live, "abort of {handle}");
        assert!(!self.core.abort(handle), "a second abort found something");
        if is_live {
            known.aborted = true;
            self.num_ended[2] += num_live as u64;
            let n = known.request.n as u32;
            // The step that frees the slots is yet to come; the truth is needed no more.
            self.core.drain().unwrap();
            for index in 0..n {
                self.oracle.forget((handle, index));
            }
        }
        self.audit();
        aborted
    }

    /// Schedules one step and commits all that are in flight. Returns (handle, index) of each delta.
    pub(crate) fn step(&mut self) -> Vec<(u64, u32)> {
        self.schedule(false);
        let mut deltas = Vec::new();
        while self.num_in_flight() > 0 {
            deltas.extend(self.commit());
        }
        deltas
    }

    /// What has been reported of the sequence.
    pub(crate) fn reported(&self, handle: u64, index: u32) -> &Reported {
        &self.known[&handle].sequences[index as usize]
    }

    /// Runs until nothing is left to do. Panics if that takes more steps than it can.
    pub(crate) fn run_to_end(&mut self, lookahead: bool) {
        let mut num_idle = 0;
        while self.core.has_work() {
            let launched = self.schedule(false);
            if !launched || !lookahead || !self.schedule(false) {
                self.commit();
            }
            num_idle = if launched || self.num_in_flight() > 0 {
                0
            } else {
                num_idle + 1
            };
            assert!(num_idle < 3, "nothing runs although there is work");
        }
        self.check_idle();
    }

    /// Nothing is held any more and every sequence is accounted for.
    pub(crate) fn check_idle(&self) {
        let stats = self.core.stats();
        assert_eq!(
            (stats.num_running, stats.num_waiting, stats.num_used_blocks),
            (0, 0, 0)
        );
        let ended = [
            stats.num_finished_stop,
            stats.num_finished_length,
            stats.num_aborted,
            stats.num_errored,
        ];
        assert_eq!(ended, self.num_ended);
        assert_eq!(stats.num_submitted, ended.iter().sum::<u64>());
        assert_eq!(stats.num_steps_in_flight, 0);
        for known in self.known.values() {
            let finished = known
                .sequences
                .iter()
                .all(|sequence| sequence.finish.is_some());
            assert!(known.aborted || finished, "a request was forgotten");
        }
    }

    fn check_delta(&mut self, delta: &Delta, deltas: &Deltas, failed: bool) {
        let id = (delta.request, delta.index);
        let known = self
            .known
            .get_mut(&delta.request)
            .expect("a delta for an unknown request");
        assert!(!known.aborted, "a delta after an abort");
        let request = &known.request;
        let reported = &mut known.sequences[delta.index as usize];
        assert_eq!(reported.finish, None, "a delta after the end");
        assert!(delta.num_cached_tokens < request.prompt.len() as u32);
        reported.num_cached_tokens = delta.num_cached_tokens;
        reported.text.push_str(deltas.text(delta));
        if let Some(FinishReason::Error) = delta.finish_reason {
            assert!(deltas.token_ids(delta).is_empty());
            if !failed {
                let truth = &self.oracle.truths[&id];
                let came = truth.tokens[request.prompt.len() + reported.tokens.len()];
                assert!(is_broken(request, &reported.tokens, came), "{delta:?}");
                self.coverage.num_broken += 1;
            }
            reported.finish = delta.finish_reason;
            reported.error = delta.error.as_ref().map(ToString::to_string);
            self.num_ended[3] += 1;
            self.oracle.forget(id);
            return;
        }
        assert!(!failed, "a failed step brought a token");
        assert_eq!(delta.queue_s.is_some(), reported.tokens.is_empty());
        prompt_results::check(request, delta, reported.tokens.is_empty());
        if prompt_results::is_whole_answer(request, delta) {
            assert!(deltas.token_ids(delta).is_empty() && deltas.text(delta).is_empty());
            reported.finish = delta.finish_reason;
            self.num_ended[1] += 1;
            self.coverage.num_without_tokens += 1;
            self.oracle.forget(id);
            return;
        }
        let &[token] = deltas.token_ids(delta) else {
            panic!("a delta without its token")
        };
        let truth = self.oracle.truths.get_mut(&id).unwrap();
        assert_eq!(
            token,
            expected_token(request, &reported.tokens, truth, self.oracle.seeds[&id])
        );
        let prefix = truth.prefix(reported.tokens.len());
        reported.tokens.push(token);
        truth.num_committed += 1;
        check_logprobs(request, (prefix, token), delta, deltas);
        let (finish, reason, text) = expected_end(request, &reported.tokens);
        self.coverage.num_over += u64::from(judge(request, &reported.tokens) == Verdict::Over);
        assert_eq!(
            (delta.finish_reason, &delta.stop_reason),
            (finish, &reason),
            "{:?}",
            reported.tokens
        );
        if finish.is_none() {
            assert!(
                text.starts_with(&reported.text),
                "{} is no start of {text}",
                reported.text
            );
            return;
        }
        assert_eq!(reported.text, text);
        reported.finish = finish;
        reported.stop_reason = reason;
        self.num_ended[usize::from(finish == Some(FinishReason::Length))] += 1;
        self.oracle.forget(id);
    }
}
