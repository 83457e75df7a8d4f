//! `StreamRelay`: streamed text goes from a commit to the sockets without passing through Python.
//!
//! The event loop starts a reply and ends it. In between its tokens' text is added to the reply's lane when a step is
//! delivered, and threads of our own encode and send it, so that a write, which costs more than everything else that
//! happens to a token, neither takes the loop's time nor needs the GIL.
#![allow(unsafe_code)] // one system call: see `lane.rs`

mod lane;
mod writers;

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::deltas::{Delta, Deltas};
use crate::watcher::duplicate;
use lane::{Frame, Lane};
use writers::Writers;

/// Lanes, the threads that serve them, and what the event loop wants to know of their tokens.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct StreamRelay {
    writers: Writers,
    state: Mutex<State>,
}

struct State {
    lanes: HashMap<u64, Attached>,
    gaps: Gaps,
}

/// A lane, and what was counted of its tokens.
struct Attached {
    lane: Arc<Lane>,
    num_tokens: u64,
    last_token_at: f64,
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

impl StreamRelay {
    fn state(&self) -> MutexGuard<'_, State> {
        // Counters and a map: nothing can be left half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StreamRelay {
    #[new]
    #[pyo3(signature = (fd, gap_bounds, *, num_threads = 1))]
    fn new(fd: i32, gap_bounds: Vec<f64>, num_threads: usize) -> PyResult<Self> {
        if !gap_bounds.is_sorted() {
            return Err(PyValueError::new_err("gap_bounds: not in ascending order"));
        }
        if num_threads == 0 {
            return Err(PyValueError::new_err("num_threads: at least one is needed"));
        }
        Ok(Self {
            writers: Writers::start(num_threads, File::from(duplicate(fd)?))?,
            state: Mutex::new(State {
                lanes: HashMap::new(),
                gaps: Gaps {
                    counts: vec![0; gap_bounds.len() + 1],
                    bounds: gap_bounds,
                    total: 0.0,
                },
            }),
        })
    }

    /// Open a lane for a request's only sequence.
    #[pyo3(signature = (request, fd, before, after, *, chunked, last_token_at))]
    fn attach(
        &self,
        request: u64,
        fd: i32,
        before: &[u8],
        after: &[u8],
        chunked: bool,
        last_token_at: f64,
    ) -> PyResult<()> {
        let mut state = self.state();
        if state.lanes.contains_key(&request) {
            return Err(PyValueError::new_err(format!(
                "request: {request} has a lane already"
            )));
        }
        let frame = Frame {
            before: before.into(),
            after: after.into(),
            is_chunked: chunked,
        };
        let attached = Attached {
            lane: Arc::new(Lane::new(request, frame, duplicate(fd)?)),
            num_tokens: 0,
            last_token_at,
        };
        state.lanes.insert(request, attached);
        Ok(())
    }

    /// Send the text of deltas that have a lane and end nothing; return the others.
    fn deliver(&self, deltas: &Bound<'_, Deltas>, now: f64) -> Vec<Delta> {
        let inner = deltas.get().inner();
        let mut others = Vec::new();
        let mut ready = Vec::new();
        let mut state = self.state();
        let State { lanes, gaps } = &mut *state;
        for (position, delta) in inner.entries().iter().enumerate() {
            let is_plain = delta.finish_reason.is_none() && inner.logprobs(delta).is_none();
            let attached = if is_plain {
                lanes.get_mut(&delta.request)
            } else {
                None
            };
            let Some(attached) = attached else {
                others.push(Delta::new(deltas.clone().unbind(), position));
                continue;
            };
            let num_tokens = inner.token_ids(delta).len() as u64;
            if num_tokens > 0 {
                gaps.observe(
                    (now - attached.last_token_at) / num_tokens as f64,
                    num_tokens,
                );
                attached.last_token_at = now;
                attached.num_tokens += num_tokens;
            }
            let text = inner.text(delta);
            if !text.is_empty() && attached.lane.add(text) {
                ready.push(Arc::clone(&attached.lane));
            }
        }
        drop(state);
        self.writers.queue(ready);
        others
    }

    /// Close a request's lane: (what was not sent, as it goes on the wire; tokens it took; time of the last).
    fn detach<'py>(
        &self,
        py: Python<'py>,
        request: u64,
    ) -> Option<(Bound<'py, PyBytes>, u64, f64)> {
        let attached = self.state().lanes.remove(&request)?;
        // A write may be under way: a few µs, for which giving up the GIL would cost more.
        let left = attached.lane.close();
        Some((
            PyBytes::new(py, &left),
            attached.num_tokens,
            attached.last_token_at,
        ))
    }

    /// Requests whose sockets took no more since the last call.
    fn take_stalled(&self) -> Vec<u64> {
        self.writers.take_stalled()
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

    /// End the threads. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.writers.close());
    }
}
