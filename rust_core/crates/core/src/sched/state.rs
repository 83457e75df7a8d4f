//! The scheduler's state.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::prompt_results::LaunchedResults;
use super::queue::WaitQueue;
use super::request::Request;
use super::sequence::{Rank, Sequence};
use super::share::Candidate;
use super::slots::Slots;
use super::snapshot::RecentSteps;
use super::waiters::Waiters;
use crate::batch::SlabLayout;
use crate::config::CoreConfig;
use crate::grammar::Binding;
use crate::kv::{BlockKey, BlockPool, BlockRef, BuildKeyBits, PrefixHasher};
use crate::text::Vocabulary;
use crate::trace::{Chosen, Outcome};

/// A running sequence under its importance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub(super) rank: Rank,
    pub(super) sequence: u32,
}

/// A row of the step being planned.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlannedRow {
    pub(super) sequence: u32,
    pub(super) num_tokens: u32,
}

/// A row of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchedRow {
    pub(super) sequence: u32,
    pub(super) life: u64,
    pub(super) admission: u64,
    /// Tokens with KV after the step.
    pub(super) num_computed: u32,
}

/// A sample of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchedSample {
    pub(super) sequence: u32,
    /// Where the log-probabilities of the tokens that it names begin, if it names any.
    pub(super) first_pick: u32,
    pub(super) life: u64,
}

/// A sample of a step in flight that may get a mask.
#[derive(Debug, Clone, Copy)]
pub(super) struct MaskedSample {
    /// Among the step's samples.
    pub(super) position: u32,
    pub(super) output_index: u32,
    pub(super) binding: Binding,
}

/// A step in flight.
#[derive(Debug, Default)]
pub(super) struct LaunchedStep {
    pub(super) step_id: u64,
    pub(super) rows: Vec<LaunchedRow>,
    pub(super) samples: Vec<LaunchedSample>,
    pub(super) masked: Vec<MaskedSample>,
    /// Whether the masks depend on tokens of earlier steps.
    pub(super) masks_wait: bool,
    pub(super) results: Vec<LaunchedResults>,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_field_names, reason = "the names of the statistics")]
pub(crate) struct Counters {
    pub(crate) num_steps: u64,
    pub(crate) num_preemptions: u64,
    pub(crate) num_prefix_query_tokens: u64,
    pub(crate) num_prefix_hit_tokens: u64,
    pub(crate) num_prompt_tokens: u64,
    pub(crate) num_generation_tokens: u64,
    pub(crate) num_submitted: u64,
    pub(crate) num_finished_stop: u64,
    pub(crate) num_finished_length: u64,
    pub(crate) num_aborted: u64,
    pub(crate) num_errored: u64,
}

/// What happened since the last step was written.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SinceLastStep {
    pub(super) num_preempted: u32,
    pub(super) num_finished: u32,
}

/// Buffers that every step uses anew, kept for their memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) plan: Vec<PlannedRow>,
    pub(super) wanting: Vec<Candidate>,
    pub(super) hits: Vec<u32>,
    pub(super) block: Vec<i32>,
    /// Blocks that the step being planned copies, held until it is.
    pub(super) copied: Vec<BlockRef>,
    pub(super) spare_steps: Vec<LaunchedStep>,
}

/// More would only wait for each other: a batch's masks take a few of them well below a step's time.
const MAX_MASK_THREADS: usize = 8;

/// The first waiting sequence could not be admitted for want of blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct StarvedHead {
    pub(super) life: u64,
    /// Available blocks it waits for.
    pub(super) num_needed: u32,
}

/// All requests, sequences, blocks and slots.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(super) config: Arc<CoreConfig>,
    pub(super) layout: SlabLayout,
    pub(super) vocabulary: Option<Arc<Vocabulary>>,
    pub(super) hasher: PrefixHasher,
    pub(super) pool: BlockPool,
    pub(super) slots: Slots,
    pub(super) queue: WaitQueue,
    /// Sequences that wait out of the queue.
    pub(super) waiters: Waiters,
    /// Key of a block that is about to be computed → the running sequence that will.
    pub(super) fronts: hashbrown::HashMap<BlockKey, u32, BuildKeyBits>,
    /// In order of importance.
    pub(super) running: Vec<Running>,
    pub(super) sequences: Vec<Sequence>,
    pub(super) vacant_sequences: Vec<u32>,
    pub(super) requests: Vec<Request>,
    pub(super) vacant_requests: Vec<u32>,
    pub(super) by_handle: HashMap<u64, u32>,
    /// Handles of requests that ended since the inbox was told.
    pub(super) ended: Vec<u64>,
    pub(super) in_flight: VecDeque<LaunchedStep>,
    pub(super) starved_head: Option<StarvedHead>,
    /// Source of lives and admissions.
    pub(super) last_draw: u64,
    pub(super) counters: Counters,
    pub(super) since_last_step: SinceLastStep,
    pub(super) scratch: Scratch,
    pub(super) recent: RecentSteps,
    /// What became of the samples of the last commit, where somebody wants to know.
    pub(super) outcomes: Option<Vec<Outcome>>,
    /// With what beams go on, by the last commit; only while outcomes are noted.
    pub(super) chosen: Vec<Chosen>,
    /// Threads that masks are computed on.
    pub(super) num_mask_threads: usize,
}

impl Scheduler {
    pub(crate) fn new(
        config: Arc<CoreConfig>,
        layout: SlabLayout,
        vocabulary: Option<Arc<Vocabulary>>,
        hasher: PrefixHasher,
    ) -> Self {
        let max_num_seqs = config.max_num_seqs as usize;
        Self {
            pool: BlockPool::new(&config),
            slots: Slots::new(config.max_num_seqs),
            layout,
            vocabulary,
            hasher,
            queue: WaitQueue::default(),
            waiters: Waiters::default(),
            // Twice the most entries there can be, so that it never grows.
            fronts: hashbrown::HashMap::with_capacity_and_hasher(
                2 * max_num_seqs,
                BuildKeyBits::default(),
            ),
            running: Vec::with_capacity(max_num_seqs),
            sequences: Vec::with_capacity(max_num_seqs),
            vacant_sequences: Vec::new(),
            requests: Vec::with_capacity(max_num_seqs),
            vacant_requests: Vec::new(),
            by_handle: HashMap::with_capacity(max_num_seqs),
            ended: Vec::new(),
            in_flight: VecDeque::with_capacity(config.max_steps_in_flight as usize),
            starved_head: None,
            last_draw: 0,
            counters: Counters::default(),
            since_last_step: SinceLastStep::default(),
            scratch: Scratch {
                block: vec![0; config.block_size as usize],
                ..Scratch::default()
            },
            recent: RecentSteps::default(),
            outcomes: None,
            chosen: Vec::new(),
            num_mask_threads: std::thread::available_parallelism()
                .map_or(1, std::num::NonZero::get)
                .min(MAX_MASK_THREADS),
            config,
        }
    }

    /// A number never drawn before.
    pub(super) fn draw(&mut self) -> u64 {
        self.last_draw += 1;
        self.last_draw
    }

    pub(crate) fn layout(&self) -> &SlabLayout {
        &self.layout
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sequences that hold a slot, and sequences that wait for one.
    pub(crate) fn num_running_and_waiting(&self) -> (u64, u64) {
        let num_running = u64::from(self.config.max_num_seqs - self.slots.num_free());
        let counters = &self.counters;
        let num_ended = counters.num_finished_stop
            + counters.num_finished_length
            + counters.num_aborted
            + counters.num_errored;
        (
            num_running,
            counters.num_submitted - num_ended - num_running,
        )
    }

    /// Waiting sequences that wait for what a running one is about to compute.
    pub(crate) fn num_deferred(&self) -> usize {
        self.waiters.len()
    }

    pub(crate) fn num_steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty() && self.in_flight.is_empty()
    }

    pub(crate) fn num_live_requests(&self) -> usize {
        self.by_handle.len()
    }

    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    pub(crate) fn reset_prefix_cache(&mut self) -> bool {
        self.pool.reset()
    }

    /// From now on each commit leaves the outcomes of its samples to be taken.
    pub(crate) fn note_outcomes(&mut self) {
        self.outcomes = Some(Vec::new());
    }

    /// Outcomes of the samples of the last commit, in their order, and with what beams go on.
    pub(crate) fn take_outcomes(&mut self) -> (Vec<Outcome>, Vec<Chosen>) {
        let outcomes = self.outcomes.as_mut().map(std::mem::take);
        (
            outcomes.unwrap_or_default(),
            std::mem::take(&mut self.chosen),
        )
    }

    /// Request and index of the sequence that holds a slot.
    pub(crate) fn sequence_in(&self, slot: i32) -> (u64, u32) {
        self.slots.owner(slot as u32).map_or((0, 0), |id| {
            let rank = self.sequences[id as usize].rank;
            (rank.arrival, rank.index)
        })
    }

    /// Handles of requests that ended and were not taken.
    pub(crate) fn ended(&self) -> &[u64] {
        &self.ended
    }

    /// Handles of the requests that ended since the last call.
    pub(crate) fn take_ended(&mut self) -> std::vec::Drain<'_, u64> {
        self.ended.drain(..)
    }
}
