//! The core's door: requests are checked here, on the thread that submits them, and posted.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::CoreConfig;
use crate::error::Error;
use crate::kv::PrefixHasher;
use crate::request::SubmitRequest;
use crate::sched::RequestSpec;
use crate::text::Vocabulary;
use crate::validate::{check_marker, validate};

/// Where any thread posts requests and aborts; the core takes them up when it schedules, commits or drains.
#[derive(Debug)]
pub struct Inbox {
    config: Arc<CoreConfig>,
    vocabulary: Option<Arc<Vocabulary>>,
    hasher: PrefixHasher,
    state: Mutex<InboxState>,
}

#[derive(Debug, Default)]
struct InboxState {
    last_handle: u64,
    /// In order of their handles.
    submits: Vec<RequestSpec>,
    /// Requests whose thinking is to end, with the tokens that end it.
    endings: Vec<(u64, Vec<i32>)>,
    aborts: Vec<u64>,
    /// Handles that were given out and have not ended.
    live: HashSet<u64>,
    /// Those of them that are beam searches.
    beams: HashSet<u64>,
    closed: Option<String>,
}

/// What was posted since the last turn.
#[derive(Debug, Default)]
pub(crate) struct Posted {
    pub(crate) submits: Vec<RequestSpec>,
    /// To be applied after the submits.
    pub(crate) endings: Vec<(u64, Vec<i32>)>,
    /// To be applied after the submits.
    pub(crate) aborts: Vec<u64>,
}

impl Inbox {
    pub(crate) fn new(
        config: Arc<CoreConfig>,
        vocabulary: Option<Arc<Vocabulary>>,
        hasher: PrefixHasher,
    ) -> Self {
        Self {
            config,
            vocabulary,
            hasher,
            state: Mutex::default(),
        }
    }

    /// Checks a request and queues it. Returns its handle (> 0, never reused).
    pub fn submit(&self, request: SubmitRequest) -> Result<u64, Error> {
        // All the work is done outside the lock, except that the seed of a request without one needs the handle.
        let mut spec = validate(
            &self.config,
            self.vocabulary.is_some(),
            &self.hasher,
            request,
        )?;
        let mut state = self.lock();
        if let Some(reason) = &state.closed {
            return Err(Error::Poisoned(reason.clone()));
        }
        state.last_handle += 1;
        let handle = state.last_handle;
        spec.set_handle(handle, self.config.seed);
        state.live.insert(handle);
        if spec.beam_search.is_some() {
            state.beams.insert(handle);
        }
        state.submits.push(spec);
        Ok(handle)
    }

    /// Ends a request at the core's next turn; no delta follows. False when the handle is unknown or has ended.
    pub fn abort(&self, request: u64) -> bool {
        let mut state = self.lock();
        let is_live = state.live.remove(&request);
        if is_live {
            state.beams.remove(&request);
            state.aborts.push(request);
        }
        is_live
    }

    /// From the core's next turn on the request's next tokens are these. False when the handle is unknown or has ended.
    pub fn end_thinking(&self, request: u64, token_ids: &[i64]) -> Result<bool, Error> {
        let field = "token_ids";
        if token_ids.is_empty() {
            return Err(Error::request(
                field,
                "is empty; name what ends the thinking",
            ));
        }
        let tokens = check_marker(field, token_ids, &self.config)?;
        let mut state = self.lock();
        if state.beams.contains(&request) {
            return Err(Error::request(
                field,
                "nothing can be forced upon beams; end the request instead",
            ));
        }
        let is_live = state.live.contains(&request);
        if is_live {
            state.endings.push((request, tokens));
        }
        Ok(is_live)
    }

    /// Swaps what was posted with the empty buffers of `posted`.
    pub(crate) fn take(&self, posted: &mut Posted) {
        let mut state = self.lock();
        std::mem::swap(&mut state.submits, &mut posted.submits);
        std::mem::swap(&mut state.endings, &mut posted.endings);
        std::mem::swap(&mut state.aborts, &mut posted.aborts);
    }

    /// These requests have ended.
    pub(crate) fn forget(&self, handles: impl Iterator<Item = u64>) {
        let mut state = self.lock();
        for handle in handles {
            state.live.remove(&handle);
            state.beams.remove(&handle);
        }
    }

    /// Refuses all further requests.
    pub(crate) fn close(&self, reason: &str) {
        self.lock().closed.get_or_insert_with(|| reason.to_owned());
    }

    /// Sequences posted and not taken up, and whether an abort is.
    pub(crate) fn num_posted(&self) -> (u64, bool) {
        let state = self.lock();
        let num_sequences = state
            .submits
            .iter()
            .map(|spec| u64::from(spec.num_sequences))
            .sum();
        (num_sequences, !state.aborts.is_empty())
    }

    /// Requests posted and not taken up.
    pub(crate) fn num_submits(&self) -> usize {
        self.lock().submits.len()
    }

    /// Requests that have not ended: those to be aborted at the next turn included.
    pub(crate) fn num_live(&self) -> usize {
        let state = self.lock();
        state.live.len() + state.aborts.len()
    }

    /// A panic elsewhere cannot leave the state half changed: nothing in the locked sections panics midway.
    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
