//! A trace's events, run through a scheduler, each decision compared with the one that was recorded.

use std::collections::VecDeque;
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::TraceError;
use super::bytes::Input;
use super::columns::StepReader;
use super::decode::EventReader;
use super::event::{Chosen, Event, Outcome, Step, Submission, TraceEnd};
use super::frame::FrameReader;
use crate::batch::{NUM_LOGPROB_COLUMNS, SLAB_ALIGNMENT, SlabLayout, flags};
use crate::config::CoreConfig;
use crate::error::Error;
use crate::guard::caught;
use crate::kv::{PrefixHasher, random_key};
use crate::request::BeamSearch;
use crate::sched::{RequestSpec, Sampling, Scheduler, Stopping};

/// Where the replay first decided otherwise than the recorded core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The step that was being decided, or whose results were taken.
    pub step_id: u64,
    /// What differs.
    pub field: String,
    /// As recorded.
    pub expected: String,
    /// As replayed.
    pub got: String,
}

/// What was replayed so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplaySummary {
    /// Version of the core that wrote the trace.
    pub release: String,
    /// Events of all kinds, each as recorded.
    pub num_events: u64,
    /// Requests taken up.
    pub num_requests: u64,
    /// Steps scheduled.
    pub num_steps: u64,
    /// Tokens computed by them.
    pub num_tokens: u64,
    /// Sequences preempted.
    pub num_preemptions: u64,
    /// Why the trace ends; `None` before its end, and where it has none: the process was killed.
    pub end: Option<TraceEnd>,
    /// In which call the recorded core panicked.
    pub poisoned_during: Option<&'static str>,
    /// Nothing after it is replayed.
    pub difference: Option<Difference>,
}

/// Reads a trace and replays it, event by event.
#[derive(Debug)]
pub struct Replay<R> {
    frames: FrameReader<R>,
    payload: Vec<u8>,
    /// Bytes of the payload that were read.
    position: usize,
    events: EventReader,
    machine: Machine,
    summary: ReplaySummary,
}

impl<R: Read> Replay<R> {
    /// Reads the trace's head.
    pub fn open(input: R) -> Result<Self, TraceError> {
        let (frames, head) = FrameReader::open(input)?;
        let machine = Machine::new(&head.config);
        Ok(Self {
            frames,
            payload: Vec::new(),
            position: 0,
            events: EventReader::new(&head.config, machine.scheduler.layout()),
            machine,
            summary: ReplaySummary {
                release: head.release,
                ..ReplaySummary::default()
            },
        })
    }

    /// What was replayed so far.
    pub fn summary(&self) -> &ReplaySummary {
        &self.summary
    }

    /// Replays the next event and returns it. `None` at the end of the trace, and after a difference.
    pub fn advance(&mut self) -> Result<Option<Event>, TraceError> {
        if self.summary.difference.is_some() || self.summary.end.is_some() {
            return Ok(None);
        }
        let Some(event) = self.next_event()? else {
            return Ok(None);
        };
        // What the recorded core did after a panic was to end everything.
        if self.summary.poisoned_during.is_none() {
            let machine = &mut self.machine;
            let replayed = caught(|| machine.replay(&event))
                .unwrap_or_else(|message| Err(machine.differs("panic", "none".into(), message)));
            self.summary.difference = replayed.err();
        }
        if self.summary.difference.is_none() {
            self.count(&event);
        }
        Ok(Some(event))
    }

    fn next_event(&mut self) -> Result<Option<Event>, TraceError> {
        while self.position == self.payload.len() {
            let Some(payload) = self.frames.next()? else {
                return Ok(None);
            };
            (self.payload, self.position) = (payload, 0);
        }
        let mut input = Input::new(&self.payload[self.position..]);
        let event = self.events.read(&mut input);
        self.position = self.payload.len() - input.len();
        event
            .map(Some)
            .map_err(|problem| self.frames.damaged(problem))
    }

    fn count(&mut self, event: &Event) {
        let summary = &mut self.summary;
        summary.num_events += 1;
        match event {
            Event::Submitted(_) => summary.num_requests += 1,
            Event::Scheduled(step) => {
                summary.num_steps += 1;
                summary.num_tokens += step.header_value("num_tokens") as u64;
                summary.num_preemptions += step.header_value("num_preempted") as u64;
            }
            Event::Poisoned { during } => summary.poisoned_during = Some(during),
            Event::End(end) => summary.end = Some(*end),
            _ => {}
        }
    }
}

/// The scheduler, and the parts of an executor that it needs.
#[derive(Debug)]
struct Machine {
    config: CoreConfig,
    scheduler: Scheduler,
    hasher: PrefixHasher,
    reader: StepReader,
    slab: AlignedSlab,
    /// Requests that have ended and whose end was not compared yet.
    ended: VecDeque<u64>,
    step_id: u64,
}

impl Machine {
    fn new(config: &CoreConfig) -> Self {
        // One more than the recorded one: the token that ends a sequence where the recorded one was stopped.
        let mut own = config.clone();
        own.vocab_size += 1;
        let hasher = PrefixHasher::new(&random_key());
        let layout = SlabLayout::new(&own);
        let slab = AlignedSlab::new(&layout);
        let reader = StepReader::new(&layout);
        let mut scheduler = Scheduler::new(Arc::new(own), layout, None, hasher.clone());
        scheduler.note_outcomes();
        Self {
            config: config.clone(),
            scheduler,
            hasher,
            reader,
            slab,
            ended: VecDeque::new(),
            step_id: 0,
        }
    }

    fn replay(&mut self, event: &Event) -> Result<(), Difference> {
        self.compare_ended(event)?;
        match event {
            Event::Submitted(submission) => self.submit(submission),
            Event::Aborted(request) => self.scheduler.abort(*request),
            Event::Prioritized { request, priority } => {
                if !self.scheduler.set_priority(*request, *priority) {
                    let got = "no such request".to_owned();
                    return Err(self.differs("priority", request.to_string(), got));
                }
            }
            Event::Scheduled(step) => self.schedule(Some(step))?,
            Event::Idle => self.schedule(None)?,
            Event::Committed {
                step_id,
                outcomes,
                chosen,
            } => self.commit(*step_id, outcomes, chosen)?,
            Event::Failed { step_id } => self.fail(*step_id)?,
            Event::CacheReset(expected) => {
                let got = self.scheduler.reset_prefix_cache();
                if got != *expected {
                    let (expected, got) = (expected.to_string(), got.to_string());
                    return Err(self.differs("cache reset", expected, got));
                }
            }
            Event::Poisoned { during } => self.reproduce_panic(during)?,
            Event::Ended(_) | Event::End(_) => {}
        }
        self.ended.extend(self.scheduler.take_ended());
        Ok(())
    }

    /// Requests end in the recorded order, and all that have ended were recorded to have.
    fn compare_ended(&mut self, event: &Event) -> Result<(), Difference> {
        let expected = match event {
            Event::Ended(request) => Some(*request),
            // What ends with a panic is not compared.
            Event::Poisoned { .. } | Event::End(_) => return Ok(()),
            _ => None,
        };
        let got = self.ended.pop_front();
        if got != expected {
            let shown =
                |request: Option<u64>| request.map_or("none".to_owned(), |id| id.to_string());
            return Err(self.differs("request that ended", shown(expected), shown(got)));
        }
        Ok(())
    }

    fn submit(&mut self, submission: &Submission) {
        let prompt_keys = if self.config.enable_prefix_caching {
            let block_size = self.config.block_size as usize;
            self.hasher
                .blocks(submission.name_space, &submission.prompt, block_size)
        } else {
            Vec::new()
        };
        let has = |bit: u32| submission.flags & bit != 0;
        self.scheduler.add(RequestSpec {
            handle: submission.request,
            num_sequences: submission.n,
            priority: submission.priority,
            submitted_at: Instant::now(),
            prompt: submission.prompt.clone(),
            root_key: submission.name_space,
            prompt_keys,
            final_only: submission.final_only,
            has_seed: true,
            num_prompt_logprobs: submission.num_prompt_logprobs,
            pooling: submission.pooling,
            beam_search: submission.beams.map(|beams| BeamSearch {
                length_penalty: f64::from_bits(beams.length_penalty),
                early_stopping: beams.early_stopping,
            }),
            sampling: Sampling {
                temperature: if has(flags::NOT_GREEDY) { 1.0 } else { 0.0 },
                repetition_penalty: if has(flags::PENALTIES) { 2.0 } else { 1.0 },
                num_logprobs: submission.num_logprobs,
                bias: vec![(0, 0.0); submission.num_bias as usize],
                banned: vec![0; submission.num_banned as usize],
                picks: vec![0; submission.num_picks as usize],
                fixed_order: has(flags::FIXED_ORDER),
                ..Sampling::default()
            },
            stopping: Stopping {
                max_tokens: submission.max_tokens,
                min_tokens: submission.min_tokens,
                num_unstoppable: 0,
                stop_token_ids: vec![self.config.vocab_size as i32],
                ..Stopping::default()
            },
            rules: None,
        });
    }

    fn schedule(&mut self, expected: Option<&Step>) -> Result<(), Difference> {
        self.step_id = expected.map_or(self.step_id + 1, Step::step_id);
        let scheduled = self.scheduler.schedule(self.slab.bytes_mut());
        let got = scheduled.map_err(|error| self.refused(&error))?.map(|_| {
            self.reader
                .read(self.slab.bytes(), |slot| self.scheduler.sequence_in(slot))
        });
        let found = match (expected, &got) {
            (Some(expected), Some(got)) => expected.first_difference(got),
            (None, None) => None,
            (expected, got) => {
                let shown = |step: Option<&Step>| match step {
                    Some(step) => format!("{} tokens", step.header_value("num_tokens")),
                    None => "nothing to run".to_owned(),
                };
                Some(("step".into(), shown(expected), shown(got.as_ref())))
            }
        };
        found.map_or(Ok(()), |(field, expected, got)| {
            Err(self.differs(&field, expected, got))
        })
    }

    fn commit(
        &mut self,
        step_id: u64,
        expected: &[Outcome],
        expected_choices: &[Chosen],
    ) -> Result<(), Difference> {
        self.step_id = step_id;
        self.write_results(expected);
        let committed = self.scheduler.commit(step_id, self.slab.bytes());
        committed.map_err(|error| self.refused(&error))?;
        let (got, choices) = self.scheduler.take_outcomes();
        if choices != expected_choices {
            let (expected, got) = (format!("{expected_choices:?}"), format!("{choices:?}"));
            return Err(self.differs("beams", expected, got));
        }
        let num_samples = expected.len().max(got.len());
        let shown =
            |outcome: Option<&Outcome>| outcome.map_or("none".to_owned(), |o| format!("{o:?}"));
        match (0..num_samples).find(|&index| expected.get(index) != got.get(index)) {
            None => Ok(()),
            Some(index) => Err(self.differs(
                &format!("outcome[{index}]"),
                shown(expected.get(index)),
                shown(got.get(index)),
            )),
        }
    }

    /// What the executor has found for the samples of a step.
    fn write_results(&mut self, outcomes: &[Outcome]) {
        let stop = self.config.vocab_size as i32;
        for (position, outcome) in outcomes.iter().enumerate() {
            self.slab.output_tokens_mut()[position] = match outcome {
                Outcome::Dropped | Outcome::Candidates(_) => 0,
                Outcome::Failed => -1,
                Outcome::Stopped => stop,
                Outcome::Token(token) => *token,
            };
            if let Outcome::Candidates(candidates) = outcome {
                // The first column is the sampled token's.
                let first = position * NUM_LOGPROB_COLUMNS + 1;
                for (column, candidate) in (first..).zip(candidates) {
                    self.slab.logprob_tokens_mut()[column] = candidate.token.unwrap_or(stop);
                    self.slab.logprobs_mut()[column] = f32::from_bits(candidate.logprob);
                }
            }
        }
    }

    fn fail(&mut self, step_id: u64) -> Result<(), Difference> {
        self.step_id = step_id;
        let failed = self.scheduler.fail(step_id, "the step failed");
        failed.map_err(|error| self.refused(&error)).map(|_| ())
    }

    /// A recorded panic: whether the same call panics here too. What a commit was given is not known then.
    fn reproduce_panic(&mut self, during: &str) -> Result<(), Difference> {
        if during != "schedule" {
            return Ok(());
        }
        let (scheduler, slab) = (&mut self.scheduler, &mut self.slab);
        match caught(|| scheduler.schedule(slab.bytes_mut()).is_ok()) {
            Err(_) => Ok(()),
            Ok(_) => Err(self.differs("panic", "a panic in schedule".into(), "none".into())),
        }
    }

    fn refused(&self, error: &Error) -> Difference {
        self.differs("call", "done".into(), error.to_string())
    }

    fn differs(&self, field: &str, expected: String, got: String) -> Difference {
        Difference {
            step_id: self.step_id,
            field: field.into(),
            expected,
            got,
        }
    }
}

/// A slab in ordinary memory.
#[derive(Debug)]
struct AlignedSlab {
    memory: Vec<u8>,
    start: usize,
    num_bytes: usize,
    output_tokens: Range<usize>,
    logprob_tokens: Range<usize>,
    logprobs: Range<usize>,
}

impl AlignedSlab {
    fn new(layout: &SlabLayout) -> Self {
        let memory = vec![0; layout.num_bytes + SLAB_ALIGNMENT];
        let bytes_of = |name: &str| {
            let field = layout.fields.iter().find(|field| field.name == name);
            field.map_or(0..0, |field| {
                field.offset..field.offset + field.length * field.dtype.num_bytes()
            })
        };
        Self {
            start: memory.as_ptr().align_offset(SLAB_ALIGNMENT),
            memory,
            num_bytes: layout.num_bytes,
            output_tokens: bytes_of("output_token"),
            logprob_tokens: bytes_of("output_logprob_token"),
            logprobs: bytes_of("output_logprob"),
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.num_bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.num_bytes]
    }

    fn output_tokens_mut(&mut self) -> &mut [i32] {
        let range = self.output_tokens.clone();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[range])
    }

    fn logprob_tokens_mut(&mut self) -> &mut [i32] {
        let range = self.logprob_tokens.clone();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[range])
    }

    fn logprobs_mut(&mut self) -> &mut [f32] {
        let range = self.logprobs.clone();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[range])
    }
}
