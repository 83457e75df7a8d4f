//! The recorder: copies what goes in and out of the core, on the loop's thread.

use std::sync::Arc;

use super::columns::StepReader;
use super::event::{Beams, Event, Submission, TraceEnd};
use super::queue::{Pending, TraceQueue};
use crate::batch::flags;
use crate::sched::{RequestSpec, Scheduler};

/// What the core is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Drain,
    Schedule,
    Commit,
    Fail,
    ResetCache,
    SetPriority,
}

impl Call {
    pub(super) const ALL: [Self; 6] = [
        Self::Drain,
        Self::Schedule,
        Self::Commit,
        Self::Fail,
        Self::ResetCache,
        Self::SetPriority,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Schedule => "schedule",
            Self::Commit => "commit",
            Self::Fail => "fail",
            Self::ResetCache => "reset_prefix_cache",
            Self::SetPriority => "set_priority",
        }
    }
}

/// Events go through it to the queue, as long as somebody writes them.
#[derive(Debug)]
pub(crate) struct Recorder {
    queue: Arc<TraceQueue>,
    pending: Pending,
    reader: StepReader,
    call: Call,
    has_ended: bool,
}

impl Recorder {
    pub(crate) fn new(scheduler: &Scheduler) -> Self {
        Self {
            queue: Arc::default(),
            pending: Pending::default(),
            reader: StepReader::new(scheduler.layout()),
            call: Call::Drain,
            has_ended: false,
        }
    }

    pub(crate) fn queue(&self) -> &Arc<TraceQueue> {
        &self.queue
    }

    /// Whether more is to be recorded.
    pub(crate) fn is_open(&self) -> bool {
        !self.has_ended
    }

    /// What follows happens in this call.
    pub(crate) fn enter(&mut self, call: Call) {
        self.call = call;
    }

    pub(crate) fn submitted(&mut self, spec: &RequestSpec) {
        let (sampling, stopping) = (&spec.sampling, &spec.stopping);
        self.pending.push(Event::Submitted(Box::new(Submission {
            request: spec.handle,
            n: spec.num_sequences,
            priority: spec.priority,
            name_space: spec.root_key,
            max_tokens: stopping.max_tokens,
            min_tokens: stopping.min_tokens,
            flags: flags::of(sampling),
            num_logprobs: sampling.num_logprobs,
            num_prompt_logprobs: spec.num_prompt_logprobs,
            pooling: spec.pooling,
            num_picks: sampling.picks.len() as u32,
            num_bias: sampling.bias.len() as u32,
            num_banned: sampling.banned.len() as u32,
            final_only: spec.final_only,
            beams: spec.beam_search.map(|search| Beams {
                length_penalty: search.length_penalty.to_bits(),
                early_stopping: search.early_stopping,
            }),
            prompt: spec.prompt.clone(),
        })));
    }

    pub(crate) fn aborted(&mut self, request: u64) {
        self.pending.push(Event::Aborted(request));
    }

    pub(crate) fn prioritized(&mut self, request: u64, priority: i64) {
        self.pending.push(Event::Prioritized { request, priority });
    }

    pub(crate) fn ended(&mut self, requests: &[u64]) {
        for &request in requests {
            self.pending.push(Event::Ended(request));
        }
    }

    /// A step was written into the slab, or there was none.
    pub(crate) fn scheduled(&mut self, scheduler: &Scheduler, slab: Option<&[u8]>) {
        let event = slab.map_or(Event::Idle, |slab| {
            let step = self.reader.read(slab, |slot| scheduler.sequence_in(slot));
            Event::Scheduled(Box::new(step))
        });
        self.pending.push(event);
    }

    pub(crate) fn committed(&mut self, step_id: u64, scheduler: &mut Scheduler) {
        let (outcomes, chosen) = scheduler.take_outcomes();
        self.pending.push(Event::Committed {
            step_id,
            outcomes,
            chosen,
        });
    }

    pub(crate) fn failed(&mut self, step_id: u64) {
        self.pending.push(Event::Failed { step_id });
    }

    pub(crate) fn cache_reset(&mut self, was_done: bool) {
        self.pending.push(Event::CacheReset(was_done));
    }

    pub(crate) fn poisoned(&mut self) {
        let during = self.call.name();
        self.pending.push(Event::Poisoned { during });
    }

    /// Lets the writer have what was recorded. Never waits.
    pub(crate) fn hand_over(&mut self) {
        if !self.queue.offer(&mut self.pending) {
            self.has_ended = true;
            self.pending = Pending::default();
        }
    }

    /// Ends the trace.
    pub(crate) fn close(&mut self) {
        if !self.has_ended {
            self.has_ended = true;
            self.queue.finish(&mut self.pending, TraceEnd::Closed);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.close();
    }
}
