//! `StreamRelay`: streamed text goes from a commit to the sockets without an object of Python's per token.
//!
//! The event loop starts a reply and ends it. In between its tokens' text is added to the reply's lane when a step is
//! delivered, and the loop has what waits encoded and sent in slices, a batch of sockets per call.
#![allow(unsafe_code)] // one system call: see `lane.rs`

mod lane;
mod waiting;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::deltas::{Delta, Deltas};
use crate::descriptor::duplicate;
use crate::logprobs::LogprobsEncoder;
use lane::{Lane, Sent};
use waiting::{Frame, Logprobs, Usage};

/// The lanes, and what the event loop wants to know of their tokens.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct StreamRelay {
    state: Mutex<State>,
}

struct State {
    lanes: HashMap<u64, Lane>,
    /// Requests whose lanes have something to send, each once; some may be detached by now.
    queue: VecDeque<u64>,
    gaps: Gaps,
    /// Where events are built.
    bytes: Vec<u8>,
}

/// Times between tokens, by bucket.
struct Gaps {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    total: f64,
}

impl Gaps {
    /// Counts `count` gaps of this length. A bound is inclusive, as in Python's `bisect_left`.
    fn observe(&mut self, gap: f64, count: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < gap);
        self.counts[bucket] += count;
        self.total += gap * count as f64;
    }
}

impl State {
    /// Gives a delta to its lane. False when it has none, or when it is more than its events show.
    fn take(
        &mut self,
        deltas: &oneloop_core::Deltas,
        delta: &oneloop_core::Delta,
        now: f64,
    ) -> bool {
        if delta.finish_reason.is_some() {
            return false;
        }
        let Some(lane) = self.lanes.get_mut(&delta.request) else {
            return false;
        };
        let logprobs = deltas.logprobs(delta);
        if logprobs.is_some() && !lane.shows_logprobs() {
            return false;
        }
        let num_tokens = deltas.token_ids(delta).len() as u64;
        if num_tokens > 0 {
            let gap = (now - lane.last_token_at) / num_tokens as f64;
            self.gaps.observe(gap, num_tokens);
            lane.last_token_at = now;
            lane.num_tokens += num_tokens;
        }
        if lane.add(deltas.text(delta), logprobs) {
            self.queue.push_back(delta.request);
        }
        true
    }

    /// Sends until the time is up, at least one; returns the requests whose sockets have stalled.
    fn send(&mut self, until: Instant) -> Vec<u64> {
        let mut stalled = Vec::new();
        while let Some(request) = self.queue.pop_front() {
            if let Some(lane) = self.lanes.get_mut(&request) {
                match lane.send(&mut self.bytes) {
                    Sent::All => {}
                    Sent::Part => self.queue.push_back(request),
                    Sent::Stalled => stalled.push(request),
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        stalled
    }
}

impl StreamRelay {
    fn state(&self) -> MutexGuard<'_, State> {
        // Text, counters, maps: nothing can be left half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StreamRelay {
    #[new]
    fn new(gap_bounds: Vec<f64>) -> PyResult<Self> {
        if !gap_bounds.is_sorted() {
            return Err(PyValueError::new_err("gap_bounds: not in ascending order"));
        }
        Ok(Self {
            state: Mutex::new(State {
                lanes: HashMap::new(),
                queue: VecDeque::new(),
                gaps: Gaps {
                    counts: vec![0; gap_bounds.len() + 1],
                    bounds: gap_bounds,
                    total: 0.0,
                },
                bytes: Vec::new(),
            }),
        })
    }

    /// Open a lane for a request's only sequence.
    #[pyo3(signature = (request, fd, before, after, *, chunked, last_token_at, logprobs = None, usage = None))]
    #[allow(clippy::too_many_arguments)] // by name, in Python
    fn attach(
        &self,
        request: u64,
        fd: i32,
        before: &[u8],
        after: &[u8],
        chunked: bool,
        last_token_at: f64,
        logprobs: Option<(&[u8], Bound<'_, LogprobsEncoder>)>,
        usage: Option<(&[u8], &[u8], u64, u64)>,
    ) -> PyResult<()> {
        let lanes = &mut self.state().lanes;
        if lanes.contains_key(&request) {
            return Err(PyValueError::new_err(format!(
                "request: {request} has a lane already"
            )));
        }
        let frame = Frame {
            before: before.into(),
            logprobs: logprobs.map(|(before, encoder)| Logprobs {
                before: before.into(),
                encoder: Arc::clone(&encoder.get().inner),
            }),
            after: after.into(),
            usage: usage.map(|(between, after, prompt, earlier)| Usage {
                between: between.into(),
                after: after.into(),
                num_prompt_tokens: prompt,
                num_earlier_tokens: earlier,
            }),
            is_chunked: chunked,
        };
        lanes.insert(request, Lane::new(frame, duplicate(fd)?, last_token_at));
        Ok(())
    }

    /// Give deltas to their lanes; return those that have none, and those that are more than its events show.
    fn deliver(&self, deltas: &Bound<'_, Deltas>, now: f64) -> Vec<Delta> {
        let inner = deltas.get().inner();
        let mut state = self.state();
        let entries = inner.entries().iter().enumerate();
        let others = entries.filter(|(_, delta)| !state.take(inner, delta, now));
        others
            .map(|(position, _)| Delta::new(deltas.clone().unbind(), position))
            .collect()
    }

    /// Send what waits, for about `max_s` seconds: (requests whose sockets took no more, whether something still waits).
    fn send(&self, py: Python<'_>, max_s: f64) -> PyResult<(Vec<u64>, bool)> {
        let slice = Duration::try_from_secs_f64(max_s)
            .map_err(|error| PyValueError::new_err(format!("max_s: {error}")))?;
        Ok(py.detach(|| {
            let mut state = self.state();
            let stalled = state.send(Instant::now() + slice);
            (stalled, !state.queue.is_empty())
        }))
    }

    /// Close a request's lane: (what was not sent, as it goes on the wire; tokens it took; time of the last).
    fn detach<'py>(
        &self,
        py: Python<'py>,
        request: u64,
    ) -> Option<(Bound<'py, PyBytes>, u64, f64)> {
        let lane = self.state().lanes.remove(&request)?;
        let (num_tokens, last_token_at) = (lane.num_tokens, lane.last_token_at);
        Some((
            PyBytes::new(py, &lane.into_unsent()),
            num_tokens,
            last_token_at,
        ))
    }

    /// (counts per bucket, sum) of the times between tokens since the last call.
    fn take_gaps(&self) -> (Vec<u64>, f64) {
        let gaps = &mut self.state().gaps;
        let fresh = vec![0; gaps.counts.len()];
        (
            std::mem::replace(&mut gaps.counts, fresh),
            std::mem::take(&mut gaps.total),
        )
    }
}
