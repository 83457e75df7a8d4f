//! `Core`: the one owner of requests, blocks and slots.

use std::sync::Arc;

use crate::batch::SlabLayout;
use crate::config::CoreConfig;
use crate::delta::Deltas;
use crate::error::Error;
use crate::inbox::{Inbox, Posted};
use crate::kv::{PrefixHasher, random_key};
use crate::request::SubmitRequest;
use crate::sched::{Scheduler, Snapshot};
use crate::text::Vocabulary;
use crate::trace::{Call, Recorder, TraceQueue};

/// A snapshot. Gauges first, then counters since the core was made. Sequences are counted, not requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)] // named and explained one by one in the stub
pub struct Stats {
    pub num_running: u64,
    pub num_waiting: u64,
    pub num_total_blocks: u64,
    pub num_free_blocks: u64,
    pub num_cached_blocks: u64,
    pub num_used_blocks: u64,
    pub num_steps_in_flight: u64,
    pub num_steps: u64,
    pub num_preemptions: u64,
    pub num_prefix_query_tokens: u64,
    pub num_prefix_hit_tokens: u64,
    pub num_prompt_tokens: u64,
    pub num_generation_tokens: u64,
    pub num_submitted: u64,
    pub num_finished_stop: u64,
    pub num_finished_length: u64,
    pub num_aborted: u64,
    pub num_errored: u64,
}

/// Owns requests, block tables and batch rows. One thread at a time; only its [`Inbox`] is shared.
#[derive(Debug)]
pub struct Core {
    config: Arc<CoreConfig>,
    inbox: Arc<Inbox>,
    scheduler: Scheduler,
    posted: Posted,
    poisoned: Option<String>,
    recorder: Option<Recorder>,
}

impl Core {
    /// `vocabulary` `None`: deltas carry ids and no text, and stop strings are refused.
    pub fn new(config: CoreConfig, vocabulary: Option<Arc<Vocabulary>>) -> Result<Self, Error> {
        config.validate()?;
        let config = Arc::new(config);
        let hasher = PrefixHasher::new(&config.hash_key.unwrap_or_else(random_key));
        let layout = SlabLayout::new(&config);
        Ok(Self {
            inbox: Arc::new(Inbox::new(
                config.clone(),
                vocabulary.clone(),
                hasher.clone(),
            )),
            scheduler: Scheduler::new(config.clone(), layout, vocabulary, hasher),
            config,
            posted: Posted::default(),
            poisoned: None,
            recorder: None,
        })
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// Where the slab's fields lie.
    pub fn layout(&self) -> &SlabLayout {
        self.scheduler.layout()
    }

    /// The door for other threads.
    pub fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// See [`Inbox::submit`].
    pub fn submit(&self, request: SubmitRequest) -> Result<u64, Error> {
        self.inbox.submit(request)
    }

    /// See [`Inbox::abort`].
    pub fn abort(&self, request: u64) -> bool {
        self.inbox.abort(request)
    }

    /// Gives a live request another priority, from the next step on. False, and nothing is done, when it has ended, or
    /// where the policy has no priorities.
    pub fn set_priority(&mut self, request: u64, priority: i64) -> Result<bool, Error> {
        self.enter(Call::SetPriority)?;
        let was_done = self.scheduler.set_priority(request, priority);
        if was_done {
            record(&mut self.recorder, |recorder| {
                recorder.prioritized(request, priority);
            });
        }
        Ok(was_done)
    }

    /// See [`Inbox::end_thinking`].
    pub fn end_thinking(&self, request: u64, token_ids: &[i64]) -> Result<bool, Error> {
        self.inbox.end_thinking(request, token_ids)
    }

    /// Takes up what was posted, without scheduling.
    pub fn drain(&mut self) -> Result<(), Error> {
        self.enter(Call::Drain)?;
        Ok(())
    }

    /// Writes the next step into the slab; `None` when nothing can run now.
    ///
    /// Returns the step's id. The slab must have the layout's size and alignment; only its input part is written.
    pub fn schedule(&mut self, slab: &mut [u8]) -> Result<Option<u64>, Error> {
        self.enter(Call::Schedule)?;
        let step_id = self.scheduler.schedule(slab)?;
        let scheduler = &self.scheduler;
        let written = step_id.is_some().then_some(&*slab);
        record(&mut self.recorder, |recorder| {
            recorder.scheduled(scheduler, written);
        });
        Ok(step_id)
    }

    /// Takes the results of the oldest step in flight: tokens, stops, text.
    ///
    /// Fails, and changes nothing, when another step is the oldest or the slab is not one.
    pub fn commit(&mut self, step_id: u64, slab: &[u8]) -> Result<Deltas, Error> {
        self.enter(Call::Commit)?;
        let deltas = self.scheduler.commit(step_id, slab)?;
        let scheduler = &mut self.scheduler;
        record(&mut self.recorder, |recorder| {
            recorder.committed(step_id, scheduler);
        });
        self.report_ended();
        Ok(deltas)
    }

    /// Writes the masks of a step in flight into its slab; how many samples have one that binds.
    ///
    /// Due where the header's `num_masked` is not 0, once before the step is sampled; where its `masks_wait` is set only
    /// after all earlier steps were committed. Fails, and changes nothing, before, and when the step is not in flight.
    /// What goes wrong in a constraint ends its sequence with the step's commit.
    pub fn fill_masks(&mut self, step_id: u64, slab: &mut [u8]) -> Result<u32, Error> {
        self.check_poison()?;
        self.scheduler.fill_masks(step_id, slab)
    }

    /// The oldest step in flight failed: its requests end with this message, what it was to compute is forgotten.
    pub fn fail(&mut self, step_id: u64, message: &str) -> Result<Deltas, Error> {
        self.enter(Call::Fail)?;
        let deltas = self.scheduler.fail(step_id, message)?;
        record(&mut self.recorder, |recorder| recorder.failed(step_id));
        self.report_ended();
        Ok(deltas)
    }

    /// Ends every request with this message and accepts no more.
    ///
    /// For the caller that has caught a panic of this core: it relies on nothing but the list of live requests.
    pub fn poison(&mut self, message: &str) -> Deltas {
        self.inbox.close(message);
        self.poisoned.get_or_insert_with(|| message.to_owned());
        record(&mut self.recorder, Recorder::poisoned);
        self.take_posted();
        let deltas = self.scheduler.fail_all(message);
        self.report_ended();
        deltas
    }

    /// Whether anything is posted, waiting, running or in flight.
    pub fn has_work(&self) -> bool {
        let (num_posted, has_aborts) = self.inbox.num_posted();
        num_posted > 0 || has_aborts || !self.scheduler.is_idle()
    }

    /// A snapshot of gauges and counters. What is posted and not taken up counts as submitted and waiting.
    pub fn stats(&self) -> Stats {
        let (num_posted, _) = self.inbox.num_posted();
        let (num_running, num_waiting) = self.scheduler.num_running_and_waiting();
        let (pool, counters) = (self.scheduler.pool(), self.scheduler.counters());
        Stats {
            num_running,
            num_waiting: num_waiting + num_posted,
            num_total_blocks: pool.num_total().into(),
            num_free_blocks: pool.num_free().into(),
            num_cached_blocks: pool.num_cached().into(),
            num_used_blocks: pool.num_used().into(),
            num_steps_in_flight: self.scheduler.num_steps_in_flight() as u64,
            num_steps: counters.num_steps,
            num_preemptions: counters.num_preemptions,
            num_prefix_query_tokens: counters.num_prefix_query_tokens,
            num_prefix_hit_tokens: counters.num_prefix_hit_tokens,
            num_prompt_tokens: counters.num_prompt_tokens,
            num_generation_tokens: counters.num_generation_tokens,
            num_submitted: counters.num_submitted + num_posted,
            num_finished_stop: counters.num_finished_stop,
            num_finished_length: counters.num_finished_length,
            num_aborted: counters.num_aborted,
            num_errored: counters.num_errored,
        }
    }

    /// What runs, what waits and why, the last steps and the blocks; `stats` has the totals.
    ///
    /// At most `max_sequences` running and as many waiting sequences, and about `max_letters` letters of the map.
    pub fn snapshot(&self, max_sequences: usize, max_letters: u32) -> Snapshot {
        self.scheduler.snapshot(max_sequences, max_letters)
    }

    /// Waiting sequences that wait for a prefix which a running one is about to compute.
    pub fn num_deferred(&self) -> usize {
        self.scheduler.num_deferred()
    }

    /// Forgets all cached blocks. False (and nothing done) while blocks are referenced.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let was_done = self.scheduler.reset_prefix_cache();
        record(&mut self.recorder, |recorder| {
            recorder.enter(Call::ResetCache);
            recorder.cache_reset(was_done);
        });
        was_done
    }

    /// Records all that happens from now on, to be written by whoever takes it from the queue (see
    /// [`TraceEncoder`](crate::TraceEncoder)).
    ///
    /// Fails when something happened before, or is recorded already.
    pub fn record_trace(&mut self) -> Result<Arc<TraceQueue>, Error> {
        if self.recorder.is_some() || self.stats() != Self::new_stats(&self.config) {
            return Err(Error::config(
                "record_trace",
                "a trace begins with the core: start it once, before the first request",
            ));
        }
        self.scheduler.note_outcomes();
        let recorder = self.recorder.insert(Recorder::new(&self.scheduler));
        Ok(Arc::clone(recorder.queue()))
    }

    /// Ends the trace, if one is recorded.
    pub fn close_trace(&mut self) {
        record(&mut self.recorder, Recorder::close);
    }

    fn new_stats(config: &CoreConfig) -> Stats {
        Stats {
            num_total_blocks: config.num_blocks.into(),
            num_free_blocks: config.num_blocks.into(),
            ..Stats::default()
        }
    }

    /// Checks every conservation law; [`Error::Audit`] names the one that broke. O(state).
    pub fn audit(&self) -> Result<(), Error> {
        self.scheduler.audit()?;
        let stats = self.stats();
        let num_live = self.scheduler.num_live_requests() + self.inbox.num_submits();
        let num_known = self.inbox.num_live();
        if num_live != num_known {
            return Err(Error::Audit(format!(
                "{num_live} requests live but the inbox knows {num_known}"
            )));
        }
        if stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
            != stats.num_total_blocks
        {
            return Err(Error::Audit(
                "free + cached + used blocks differ from the total".into(),
            ));
        }
        Ok(())
    }

    fn check_poison(&self) -> Result<(), Error> {
        match &self.poisoned {
            Some(reason) => Err(Error::Poisoned(reason.clone())),
            None => Ok(()),
        }
    }

    /// The begin of a call: what was posted is taken up.
    fn enter(&mut self, call: Call) -> Result<(), Error> {
        self.check_poison()?;
        record(&mut self.recorder, |recorder| recorder.enter(call));
        self.take_posted();
        Ok(())
    }

    fn take_posted(&mut self) {
        self.inbox.take(&mut self.posted);
        for spec in self.posted.submits.drain(..) {
            record(&mut self.recorder, |recorder| recorder.submitted(&spec));
            self.scheduler.add(spec);
        }
        // They change what may be sampled and nothing that is decided here, so that no trace needs them.
        for (handle, tokens) in self.posted.endings.drain(..) {
            self.scheduler.end_thinking(handle, &tokens);
        }
        for handle in self.posted.aborts.drain(..) {
            record(&mut self.recorder, |recorder| recorder.aborted(handle));
            self.scheduler.abort(handle);
        }
        self.report_ended();
    }

    fn report_ended(&mut self) {
        if self.scheduler.has_ended() {
            let ended = self.scheduler.ended();
            record(&mut self.recorder, |recorder| recorder.ended(ended));
            self.inbox.forget(self.scheduler.take_ended());
        }
    }
}

/// Notes something in the trace, where one is recorded.
#[inline]
fn record(recorder: &mut Option<Recorder>, note: impl FnOnce(&mut Recorder)) {
    if let Some(recorder) = recorder.as_mut().filter(|recorder| recorder.is_open()) {
        note(recorder);
        recorder.hand_over();
    }
}
