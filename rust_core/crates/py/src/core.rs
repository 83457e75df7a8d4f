//! `Core`: the scheduler behind a lock that one thread holds at a time, and its inbox, which needs no lock.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oneloop_core::{BeamSearch, EarlyStopping, Error, Inbox, Pooling, SubmitRequest, TraceEncoder};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::{Float, Int};
use crate::config::CoreConfig;
use crate::deltas::Deltas;
use crate::error::{refuse, to_py};
use crate::grammar::Grammar;
use crate::slab::{SlabBuffer, SlabLayout};
use crate::snapshot::Snapshot;
use crate::token_ids::token_ids;
use crate::trace::TraceWriter;
use crate::vocab::Vocabulary;

/// Owns requests, block tables and batch rows.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct Core {
    inner: Mutex<oneloop_core::Core>,
    inbox: Arc<Inbox>,
    config: Py<CoreConfig>,
    layout: Py<SlabLayout>,
    slab_bytes: usize,
}

impl Core {
    /// Runs `call` without the GIL. A panic in it poisons the core and becomes an error.
    fn with_core<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut oneloop_core::Core) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.lock().guarded(call)).map_err(to_py)
    }

    /// Never wait for it with the GIL held: the holder may need the GIL to go on.
    fn lock(&self) -> MutexGuard<'_, oneloop_core::Core> {
        // `guarded` lets no panic through, and marks the core itself when one happened.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (config, vocabulary = None))]
    fn new(
        py: Python<'_>,
        config: Bound<'_, CoreConfig>,
        vocabulary: Option<&Vocabulary>,
    ) -> PyResult<Self> {
        let vocabulary = vocabulary.map(|vocabulary| Arc::clone(&vocabulary.inner));
        let inner = config.get().inner.clone();
        // Without the GIL: a pool of a million blocks takes its time.
        let core = py.detach(|| oneloop_core::Core::new(inner, vocabulary)).map_err(to_py)?;
        Ok(Self {
            inbox: Arc::clone(core.inbox()),
            layout: Py::new(py, SlabLayout::new(py, core.layout())?)?,
            slab_bytes: core.layout().num_bytes,
            config: config.unbind(),
            inner: Mutex::new(core),
        })
    }

    #[getter]
    fn config(&self, py: Python<'_>) -> Py<CoreConfig> {
        self.config.clone_ref(py)
    }

    #[getter]
    fn layout(&self, py: Python<'_>) -> Py<SlabLayout> {
        self.layout.clone_ref(py)
    }

    /// Queue a request; returns its handle. Any thread, at any moment.
    // Keyword arguments of one Python call.
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)]
    #[pyo3(signature = (prompt_token_ids, *, max_tokens = None, min_tokens = Int(0), n = Int(1),
                        temperature = Float(1.0), top_k = Int(0), top_p = Float(1.0), min_p = Float(0.0),
                        repetition_penalty = Float(1.0), presence_penalty = Float(0.0),
                        frequency_penalty = Float(0.0), seed = None, logprobs = None, logprob_token_ids = Vec::new(), prompt_logprobs = None,
                        pooling = None, beam_search = None, logit_bias = Vec::new(),
                        stop = Vec::new(), stop_token_ids = Vec::new(), eos_token_ids = Vec::new(),
                        ignore_eos = false, include_stop_str_in_output = false, skip_special_tokens = true, shown_special_ids = Vec::new(),
                        detokenize = true, final_only = false, grammar = None, grammar_after = Vec::new(),
                        allowed_token_ids = None, bad_words = Vec::new(), thinking_budget = None,
                        thinking_end = Vec::new(), priority = Int(0), cache_salt = b"".as_slice(), adapter = Int(-1),
                        deterministic = false),
           text_signature = "($self, prompt_token_ids, *, max_tokens=None, min_tokens=0, n=1, temperature=1.0, \
                             top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, \
                             frequency_penalty=0.0, seed=None, logprobs=None, logprob_token_ids=(), prompt_logprobs=None, pooling=None, beam_search=None, logit_bias=(), stop=(), \
                             stop_token_ids=(), eos_token_ids=(), ignore_eos=False, \
                             include_stop_str_in_output=False, skip_special_tokens=True, shown_special_ids=(), detokenize=True, \
                             final_only=False, grammar=None, grammar_after=(), allowed_token_ids=None, bad_words=(), \
                             thinking_budget=None, thinking_end=(), priority=0, cache_salt=b'', adapter=-1, \
                             deterministic=False)")]
    fn submit(
        &self,
        prompt_token_ids: &Bound<'_, PyAny>,
        max_tokens: Option<Int>,
        min_tokens: Int,
        n: Int,
        temperature: Float,
        top_k: Int,
        top_p: Float,
        min_p: Float,
        repetition_penalty: Float,
        presence_penalty: Float,
        frequency_penalty: Float,
        seed: Option<Bound<'_, PyAny>>,
        logprobs: Option<Int>,
        logprob_token_ids: Vec<Int>,
        prompt_logprobs: Option<Int>,
        pooling: Option<&str>,
        beam_search: Option<(Float, &str)>,
        logit_bias: Vec<(Int, Float)>,
        stop: Vec<Bound<'_, PyString>>,
        stop_token_ids: Vec<Int>,
        eos_token_ids: Vec<Int>,
        ignore_eos: bool,
        include_stop_str_in_output: bool,
        skip_special_tokens: bool,
        shown_special_ids: Vec<Int>,
        detokenize: bool,
        final_only: bool,
        grammar: Option<&Grammar>,
        grammar_after: Vec<Int>,
        allowed_token_ids: Option<Vec<Int>>,
        bad_words: Vec<Vec<Int>>,
        thinking_budget: Option<Int>,
        thinking_end: Vec<Int>,
        priority: Int,
        cache_salt: &[u8],
        adapter: Int,
        deterministic: bool,
    ) -> PyResult<u64> {
        let unsigned =
            |field, value: Option<Int>| value.map(|value| value.unsigned(field)).transpose();
        let request = SubmitRequest {
            prompt: token_ids(prompt_token_ids, |position, id| {
                refuse(
                    "prompt_token_ids",
                    &format!("id {id} at position {position} is out of range"),
                )
            })?,
            max_tokens: unsigned("max_tokens", max_tokens)?,
            min_tokens: min_tokens.unsigned("min_tokens")?,
            n: n.unsigned("n")?,
            temperature: temperature.0,
            top_k: top_k.unsigned("top_k")?,
            top_p: top_p.0,
            min_p: min_p.0,
            repetition_penalty: repetition_penalty.0,
            presence_penalty: presence_penalty.0,
            frequency_penalty: frequency_penalty.0,
            seed: seed.map(|seed| exact_seed(&seed)).transpose()?,
            logprobs: unsigned("logprobs", logprobs)?,
            logprob_token_ids: numbers(logprob_token_ids),
            prompt_logprobs: unsigned("prompt_logprobs", prompt_logprobs)?,
            pooling: pooling.map(pooling_named).transpose()?,
            beam_search: beam_search.map(beam_search_of).transpose()?,
            logit_bias: logit_bias
                .into_iter()
                .map(|(Int(id), Float(value))| (id, value))
                .collect(),
            stop: stop.into_iter().map(stop_string).collect::<PyResult<_>>()?,
            stop_token_ids: numbers(stop_token_ids),
            eos_token_ids: numbers(eos_token_ids),
            ignore_eos,
            include_stop_str_in_output,
            skip_special_tokens,
            shown_special_ids: shown_special_ids.into_iter().map(|Int(id)| id).collect(),
            detokenize,
            final_only,
            grammar: grammar.map(|grammar| grammar.inner.clone()),
            grammar_after: numbers(grammar_after),
            allowed_token_ids: allowed_token_ids.map(numbers),
            bad_words: bad_words.into_iter().map(numbers).collect(),
            thinking_budget: unsigned("thinking_budget", thinking_budget)?,
            thinking_end: numbers(thinking_end),
            priority: priority.0,
            cache_salt: cache_salt.to_vec(),
            adapter: i32::try_from(adapter.0)
                .map_err(|_| refuse("adapter", &format!("{} is out of range", adapter.0)))?,
            deterministic,
        };
        prompt_token_ids
            .py()
            .detach(|| self.inbox.submit_guarded(request))
            .map_err(to_py)
    }

    /// End a request at once, in whatever state. Any thread, at any moment.
    fn abort(&self, py: Python<'_>, request: Int) -> bool {
        u64::try_from(request.0).is_ok_and(|request| py.detach(|| self.inbox.abort(request)))
    }

    /// The request's next tokens are these, unless its thinking has ended. Any thread, at any moment.
    #[allow(clippy::needless_pass_by_value)] // a Python argument
    fn end_thinking(&self, py: Python<'_>, request: Int, token_ids: Vec<Int>) -> PyResult<bool> {
        let token_ids = numbers(token_ids);
        let Ok(request) = u64::try_from(request.0) else {
            return Ok(false);
        };
        py.detach(|| self.inbox.end_thinking(request, &token_ids))
            .map_err(to_py)
    }

    /// Apply what `submit()` and `abort()` queued without scheduling a step.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.with_core(py, oneloop_core::Core::drain)
    }

    /// Write the next step into the slab; returns its id, or None when nothing can run now.
    fn schedule(&self, slab: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let mut slab_buffer = SlabBuffer::new(slab, self.slab_bytes)?;
        let bytes = slab_buffer.bytes_mut()?;
        self.with_core(slab.py(), |core| core.schedule(bytes))
    }

    /// Take the results of the oldest step in flight.
    fn commit(&self, step_id: Int, slab: &Bound<'_, PyAny>) -> PyResult<Deltas> {
        let slab_buffer = SlabBuffer::new(slab, self.slab_bytes)?;
        let (step_id, bytes) = (step_handle(step_id), slab_buffer.bytes());
        Ok(self
            .with_core(slab.py(), |core| core.commit(step_id, bytes))?
            .into())
    }

    /// Write the masks of a step in flight into its slab; how many samples have one that binds.
    fn fill_masks(&self, step_id: Int, slab: &Bound<'_, PyAny>) -> PyResult<u32> {
        let mut slab_buffer = SlabBuffer::new(slab, self.slab_bytes)?;
        let (step_id, bytes) = (step_handle(step_id), slab_buffer.bytes_mut()?);
        self.with_core(slab.py(), |core| core.fill_masks(step_id, bytes))
    }

    /// The oldest step in flight failed: its requests end with this message.
    fn fail(&self, py: Python<'_>, step_id: Int, message: &str) -> PyResult<Deltas> {
        let step_id = step_handle(step_id);
        Ok(self
            .with_core(py, |core| core.fail(step_id, message))?
            .into())
    }

    /// Give a live request another priority; the policy must be by priority.
    fn set_priority(&self, py: Python<'_>, request: Int, priority: Int) -> PyResult<bool> {
        let Ok(request) = u64::try_from(request.0) else {
            return Ok(false);
        };
        self.with_core(py, |core| core.set_priority(request, priority.0))
    }

    /// Whether anything is queued, waiting, running or in flight.
    fn has_work(&self, py: Python<'_>) -> PyResult<bool> {
        self.with_core(py, |core| Ok(core.has_work()))
    }

    /// A snapshot of gauges and counters.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.with_core(py, |core| Ok(core.stats().into()))
    }

    /// What runs, what waits and why, the last steps and the blocks.
    #[pyo3(signature = (max_sequences = 100, max_letters = 1024))]
    fn snapshot(
        &self,
        py: Python<'_>,
        max_sequences: usize,
        max_letters: u32,
    ) -> PyResult<Snapshot> {
        let snapshot = py.detach(|| self.lock().snapshot_guarded(max_sequences, max_letters));
        Ok(snapshot.map_err(to_py)?.into())
    }

    /// Forget all cached blocks. False (and nothing done) while blocks are referenced.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<bool> {
        self.with_core(py, |core| Ok(core.reset_prefix_cache()))
    }

    /// Record everything from here on; a thread that runs the writer puts it into the file.
    #[allow(clippy::needless_pass_by_value)] // a Python argument
    fn record_trace(&self, py: Python<'_>, path: PathBuf) -> PyResult<TraceWriter> {
        TraceWriter::create(&path, || {
            let queue = self.with_core(py, oneloop_core::Core::record_trace)?;
            Ok((queue, TraceEncoder::new(&self.config.get().inner)))
        })
    }

    /// End the trace, if one is recorded.
    fn close_trace(&self, py: Python<'_>) -> PyResult<()> {
        self.with_core(py, |core| {
            core.close_trace();
            Ok(())
        })
    }

    /// Check every conservation law.
    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.with_core(py, |core| core.audit())
    }
}

fn numbers(ids: Vec<Int>) -> Vec<i64> {
    ids.into_iter().map(|Int(id)| id).collect()
}

/// A seed keeps every bit, so one beyond 64 bits cannot be replaced by the nearest.
fn exact_seed(seed: &Bound<'_, PyAny>) -> PyResult<i64> {
    let Int(nearest) = seed.extract()?;
    if seed.eq(nearest)? {
        Ok(nearest)
    } else {
        Err(refuse("seed", "does not fit 64 bits"))
    }
}

fn beam_search_of((Float(length_penalty), name): (Float, &str)) -> PyResult<BeamSearch> {
    let early_stopping = match name {
        "heuristic" => EarlyStopping::Heuristic,
        "always" => EarlyStopping::Always,
        "never" => EarlyStopping::Never,
        other => {
            return Err(refuse(
                "beam_search",
                &format!("{other:?} is none of \"heuristic\", \"always\" and \"never\""),
            ));
        }
    };
    Ok(BeamSearch {
        length_penalty,
        early_stopping,
    })
}

fn pooling_named(name: &str) -> PyResult<Pooling> {
    match name {
        "last" => Ok(Pooling::Last),
        "mean" => Ok(Pooling::Mean),
        other => Err(refuse(
            "pooling",
            &format!("{other:?} is neither \"last\" nor \"mean\""),
        )),
    }
}

#[allow(clippy::needless_pass_by_value)] // made for map
fn stop_string(string: Bound<'_, PyString>) -> PyResult<String> {
    let text = string
        .to_str()
        .map_err(|_| refuse("stop", "a string holds a lone surrogate"))?;
    Ok(text.to_owned())
}

/// No step has id `u64::MAX`, so a negative id is refused like any other wrong one.
fn step_handle(Int(step_id): Int) -> u64 {
    u64::try_from(step_id).unwrap_or(u64::MAX)
}

macro_rules! stats {
    ($($name:ident),* $(,)?) => {
        /// A snapshot. Gauges first, then counters since the core was made.
        #[pyclass(module = "oneloop_core", frozen, get_all)]
        pub(crate) struct Stats { $($name: u64),* }

        impl From<oneloop_core::Stats> for Stats {
            fn from(stats: oneloop_core::Stats) -> Self {
                let oneloop_core::Stats { $($name),* } = stats;
                Self { $($name),* }
            }
        }

        #[pymethods]
        impl Stats {
            fn __repr__(&self) -> String {
                let fields = [$(format!(concat!(stringify!($name), "={}"), self.$name)),*];
                format!("Stats({})", fields.join(", "))
            }
        }
    };
}

stats! {
    num_running, num_waiting, num_total_blocks, num_free_blocks, num_cached_blocks, num_used_blocks,
    num_steps_in_flight, num_steps, num_preemptions, num_prefix_query_tokens, num_prefix_hit_tokens,
    num_prompt_tokens, num_generation_tokens, num_submitted, num_finished_stop, num_finished_length,
    num_aborted, num_errored,
}
