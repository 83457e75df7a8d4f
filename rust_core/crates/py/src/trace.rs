//! The schedule trace's files: the writer that a thread runs, and the replay.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use oneloop_core::{Replay, ReplaySummary, TraceEncoder, TraceEnd, TraceError, TraceQueue};
use pyo3::prelude::*;

use crate::error::trace_error;

/// Writes what a core records, on the thread that calls `run()`.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct TraceWriter {
    queue: Arc<TraceQueue>,
    sink: Mutex<Option<Sink>>,
}

struct Sink {
    file: File,
    encoder: TraceEncoder,
    num_bytes: u64,
}

impl TraceWriter {
    /// Makes the file (an older one is replaced); only its owner may read it. `begin` starts the recording.
    pub(crate) fn create(
        path: &PathBuf,
        begin: impl FnOnce() -> PyResult<(Arc<TraceQueue>, TraceEncoder)>,
    ) -> PyResult<Self> {
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)?;
        // An older file keeps its mode; what is no file (a pipe, a device) is not ours to change.
        if file.metadata()?.is_file() {
            file.set_permissions(Permissions::from_mode(0o600))?;
        }
        let (queue, encoder) = begin()?;
        Ok(Self {
            queue,
            sink: Mutex::new(Some(Sink {
                file,
                encoder,
                num_bytes: 0,
            })),
        })
    }
}

#[pymethods]
impl TraceWriter {
    /// Write until the trace ends. (steps, bytes, what went wrong or None).
    fn run(&self, py: Python<'_>) -> (u64, u64, Option<String>) {
        py.detach(|| {
            let sink = self
                .sink
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let Some(mut sink) = sink else {
                return (0, 0, Some("the trace is written already".to_owned()));
            };
            let _refusing = Refusing(&self.queue);
            let problem = sink.run(&self.queue);
            (sink.encoder.num_steps(), sink.num_bytes, problem)
        })
    }
}

/// When the writer is done, for whatever reason, nothing more is recorded.
struct Refusing<'a>(&'a TraceQueue);

impl Drop for Refusing<'_> {
    fn drop(&mut self) {
        self.0.refuse();
    }
}

impl Sink {
    fn run(&mut self, queue: &TraceQueue) -> Option<String> {
        let mut bytes = self.encoder.opening();
        loop {
            if let Err(error) = self.file.write_all(&bytes) {
                self.drop_broken_frame();
                return Some(error.to_string());
            }
            self.num_bytes += bytes.len() as u64;
            let batch = queue.take();
            let end = batch.end;
            bytes = self.encoder.encode(batch);
            if let Some(end) = end {
                let written = self.file.write_all(&bytes);
                if let Err(error) = written {
                    self.drop_broken_frame();
                    return Some(error.to_string());
                }
                self.num_bytes += bytes.len() as u64;
                return (end != TraceEnd::Closed).then(|| end.to_string());
            }
        }
    }

    /// What was written of the last frames is no use; what comes before stays a sound trace.
    fn drop_broken_frame(&mut self) {
        // Nothing is lost if the system refuses this too: readers see where the frame breaks off.
        if self.file.set_len(self.num_bytes).is_ok() {
            drop(self.file.seek(SeekFrom::End(0)));
        }
    }
}

/// Where a replay first decided otherwise than the recorded core.
#[pyclass(module = "oneloop_core", frozen, get_all)]
pub(crate) struct TraceDifference {
    step_id: u64,
    field: String,
    expected: String,
    got: String,
}

/// Replays a trace's file.
#[pyclass(module = "oneloop_core")]
pub(crate) struct TraceReplay {
    inner: Replay<BufReader<File>>,
}

impl TraceReplay {
    fn summary(&self) -> &ReplaySummary {
        self.inner.summary()
    }
}

#[pymethods]
impl TraceReplay {
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        let file = File::open(path)?;
        let inner = Replay::open(BufReader::new(file)).map_err(|error| trace_error(&error))?;
        Ok(Self { inner })
    }

    /// Replay until this step is scheduled, or to the end.
    #[pyo3(signature = (until = None))]
    fn run(&mut self, py: Python<'_>, until: Option<u64>) -> PyResult<()> {
        let is_done = |summary: &ReplaySummary| until.is_some_and(|step| summary.num_steps >= step);
        let inner = &mut self.inner;
        py.detach(|| -> Result<(), TraceError> {
            while !is_done(inner.summary()) && inner.advance()?.is_some() {}
            Ok(())
        })
        .map_err(|error| trace_error(&error))
    }

    /// Replay the next event and describe it; None at the end of the trace and after a difference.
    fn advance(&mut self) -> PyResult<Option<String>> {
        let event = self.inner.advance().map_err(|error| trace_error(&error))?;
        Ok(event.map(|event| event.to_string()))
    }

    #[getter]
    fn release(&self) -> &str {
        &self.summary().release
    }

    #[getter]
    fn num_events(&self) -> u64 {
        self.summary().num_events
    }

    #[getter]
    fn num_requests(&self) -> u64 {
        self.summary().num_requests
    }

    #[getter]
    fn num_steps(&self) -> u64 {
        self.summary().num_steps
    }

    #[getter]
    fn num_tokens(&self) -> u64 {
        self.summary().num_tokens
    }

    #[getter]
    fn num_preemptions(&self) -> u64 {
        self.summary().num_preemptions
    }

    /// Why the trace ends; None before its end, and where it has none.
    #[getter]
    fn end(&self) -> Option<String> {
        self.summary().end.map(|end| end.to_string())
    }

    /// In which call the recorded core panicked.
    #[getter]
    fn poisoned_during(&self) -> Option<&'static str> {
        self.summary().poisoned_during
    }

    #[getter]
    fn difference(&self) -> Option<TraceDifference> {
        self.summary()
            .difference
            .as_ref()
            .map(|difference| TraceDifference {
                step_id: difference.step_id,
                field: difference.field.clone(),
                expected: difference.expected.clone(),
                got: difference.got.clone(),
            })
    }
}
