//! `Core`: the one owner of requests, blocks and slots, and `Inbox`, its door for other threads.

use std::sync::Arc;

use crate::batch::SlabLayout;
use crate::config::CoreConfig;
use crate::delta::Deltas;
use crate::error::Error;
use crate::request::SubmitRequest;
use crate::text::Vocabulary;

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

/// Where any thread posts requests and aborts; the core takes them up when it schedules, commits or drains.
#[derive(Debug)]
pub struct Inbox {}

impl Inbox {
    /// Checks a request and queues it. Returns its handle (> 0, never reused).
    pub fn submit(&self, request: SubmitRequest) -> Result<u64, Error> {
        todo!()
    }

    /// Ends a request at the core's next turn. False when the handle is unknown or has ended. Idempotent.
    pub fn abort(&self, request: u64) -> bool {
        todo!()
    }
}

/// Owns requests, block tables and batch rows. One thread at a time; only its [`Inbox`] is shared.
#[derive(Debug)]
pub struct Core {}

impl Core {
    /// `vocabulary` `None`: deltas carry ids and no text, and stop strings are refused.
    pub fn new(config: CoreConfig, vocabulary: Option<Arc<Vocabulary>>) -> Result<Self, Error> {
        todo!()
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &CoreConfig {
        todo!()
    }

    /// Where the slab's fields lie.
    pub fn layout(&self) -> &SlabLayout {
        todo!()
    }

    /// The door for other threads.
    pub fn inbox(&self) -> &Arc<Inbox> {
        todo!()
    }

    /// See [`Inbox::submit`].
    pub fn submit(&self, request: SubmitRequest) -> Result<u64, Error> {
        self.inbox().submit(request)
    }

    /// See [`Inbox::abort`].
    pub fn abort(&self, request: u64) -> bool {
        self.inbox().abort(request)
    }

    /// Takes up what was posted, without scheduling.
    pub fn drain(&mut self) -> Result<(), Error> {
        todo!()
    }

    /// Writes the next step into the slab; `None` when nothing can run now.
    pub fn schedule(&mut self, slab: &mut [u8]) -> Result<Option<u64>, Error> {
        todo!()
    }

    /// Takes the results of the oldest step in flight.
    pub fn commit(&mut self, step_id: u64, slab: &[u8]) -> Result<Deltas, Error> {
        todo!()
    }

    /// The oldest step in flight failed: its requests end with this message, what it wrote is forgotten.
    pub fn fail(&mut self, step_id: u64, message: &str) -> Result<Deltas, Error> {
        todo!()
    }

    /// Ends every request with this message and accepts no more.
    pub fn poison(&mut self, message: &str) -> Deltas {
        todo!()
    }

    /// Whether anything is posted, waiting, running or in flight.
    pub fn has_work(&self) -> bool {
        todo!()
    }

    /// A snapshot of gauges and counters.
    pub fn stats(&self) -> Stats {
        todo!()
    }

    /// Forgets all cached blocks. False (and nothing done) while blocks are referenced.
    pub fn reset_prefix_cache(&mut self) -> bool {
        todo!()
    }

    /// Checks every conservation law. O(state).
    pub fn audit(&self) -> Result<(), Error> {
        todo!()
    }
}
