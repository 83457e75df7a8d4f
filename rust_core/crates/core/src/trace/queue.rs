//! The hand-over from the loop's thread to the writer's: bounded, and never waited for by the loop.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::event::{Event, TraceEnd};

/// Events that wait for the writer take so much memory at most.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// The writer gathers events for so long…
const GATHERING: Duration = Duration::from_millis(50);
/// …or until they take so much memory.
const URGENT_BYTES: usize = 1 << 20;

/// Where events wait for the thread that writes them.
#[derive(Debug)]
pub struct TraceQueue {
    state: Mutex<State>,
    changed: Condvar,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<Event>,
    num_bytes: usize,
    end: Option<TraceEnd>,
}

/// What the writer takes at once.
#[derive(Debug)]
pub struct Batch {
    /// In order.
    pub events: Vec<Event>,
    /// Set in the last batch.
    pub end: Option<TraceEnd>,
}

/// Events on the loop's thread that are not handed over yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    events: Vec<Event>,
    num_bytes: usize,
}

impl Pending {
    pub(super) fn push(&mut self, event: Event) {
        self.num_bytes += event.num_bytes();
        self.events.push(event);
    }
}

impl Default for TraceQueue {
    fn default() -> Self {
        Self::with_room(MAX_WAITING_BYTES)
    }
}

impl TraceQueue {
    /// A queue that holds about `max_bytes` bytes of events.
    pub(super) fn with_room(max_bytes: usize) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            max_bytes,
        }
    }

    /// Hands over what is pending, unless the writer is just taking. False when the trace has ended: nothing more of it
    /// is written.
    pub(super) fn offer(&self, pending: &mut Pending) -> bool {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        self.append(&mut state, pending)
    }

    /// Hands over the rest and ends the trace. Waits for the writer's hold on the queue, which is short.
    pub(super) fn finish(&self, pending: &mut Pending, end: TraceEnd) {
        let mut state = self.lock();
        if self.append(&mut state, pending) {
            state.end = Some(end);
            self.changed.notify_all();
        }
    }

    fn append(&self, state: &mut State, pending: &mut Pending) -> bool {
        if state.end.is_some() {
            return false;
        }
        let num_before = state.num_bytes;
        if num_before + pending.num_bytes > self.max_bytes {
            state.end = Some(TraceEnd::Behind);
            self.changed.notify_all();
            return false;
        }
        state.num_bytes += pending.num_bytes;
        state.events.append(&mut pending.events);
        pending.num_bytes = 0;
        if num_before == 0 || (num_before < URGENT_BYTES && state.num_bytes >= URGENT_BYTES) {
            self.changed.notify_all();
        }
        true
    }

    /// Waits for events and takes them; for some time more, so that few batches are made. For the writer's thread.
    pub fn take(&self) -> Batch {
        let is_open = |state: &mut State| state.end.is_none();
        let state = self.lock();
        let waited = self
            .changed
            .wait_while(state, |state| is_open(state) && state.events.is_empty());
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(state, GATHERING, |state| {
            is_open(state) && state.num_bytes < URGENT_BYTES
        });
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.num_bytes = 0;
        Batch {
            events: std::mem::take(&mut state.events),
            end: state.end,
        }
    }

    /// The writer takes no more: from now on the loop records nothing.
    pub fn refuse(&self) {
        let mut state = self.lock();
        state.end = Some(TraceEnd::Refused);
        state.events = Vec::new();
        self.changed.notify_all();
    }

    /// Nothing in the locked sections panics midway.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
