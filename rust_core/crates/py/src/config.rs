//! Sizes and policies of a core.

use oneloop_core::Policy;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::Int;
use crate::error::{ConfigError, to_py};

/// Sizes and policies of a `Core`, checked when it is made.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct CoreConfig {
    pub(crate) inner: oneloop_core::CoreConfig,
}

fn count(field: &str, Int(value): Int) -> PyResult<u32> {
    u32::try_from(value)
        .map_err(|_| ConfigError::new_err(format!("{field}: {value} is out of range")))
}

#[pymethods]
impl CoreConfig {
    #[new]
    #[allow(clippy::too_many_arguments)] // keyword arguments of one Python call
    #[pyo3(signature = (*, num_blocks, block_size = Int(16), max_num_seqs = Int(256),
                        max_num_batched_tokens = Int(2048), mixed_step_tokens = None, max_model_len = Int(2048),
                        vocab_size, hidden_size = Int(0),
                        enable_prefix_caching = true, policy = "fcfs", max_steps_in_flight = Int(2),
                        seed = Int(0), hash_key = None),
           text_signature = "(*, num_blocks, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048, \
                             mixed_step_tokens=None, max_model_len=2048, vocab_size, hidden_size=0, enable_prefix_caching=True, policy='fcfs', \
                             max_steps_in_flight=2, seed=0, hash_key=None)")]
    fn new(
        num_blocks: Int,
        block_size: Int,
        max_num_seqs: Int,
        max_num_batched_tokens: Int,
        mixed_step_tokens: Option<Int>,
        max_model_len: Int,
        vocab_size: Int,
        hidden_size: Int,
        enable_prefix_caching: bool,
        policy: &str,
        max_steps_in_flight: Int,
        seed: Int,
        hash_key: Option<&[u8]>,
    ) -> PyResult<Self> {
        let policy = match policy {
            "fcfs" => Policy::Fcfs,
            "priority" => Policy::Priority,
            other => {
                return Err(ConfigError::new_err(format!(
                    "policy: {other:?} is unknown; use \"fcfs\" or \"priority\""
                )));
            }
        };
        let key = |key: &[u8]| {
            <[u8; 16]>::try_from(key).map_err(|_| {
                ConfigError::new_err(format!("hash_key: {} bytes instead of 16", key.len()))
            })
        };
        let inner = oneloop_core::CoreConfig {
            num_blocks: count("num_blocks", num_blocks)?,
            block_size: count("block_size", block_size)?,
            max_num_seqs: count("max_num_seqs", max_num_seqs)?,
            max_num_batched_tokens: count("max_num_batched_tokens", max_num_batched_tokens)?,
            mixed_step_tokens: mixed_step_tokens
                .map(|value| count("mixed_step_tokens", value))
                .transpose()?,
            max_model_len: count("max_model_len", max_model_len)?,
            vocab_size: count("vocab_size", vocab_size)?,
            hidden_size: count("hidden_size", hidden_size)?,
            enable_prefix_caching,
            policy,
            max_steps_in_flight: count("max_steps_in_flight", max_steps_in_flight)?,
            seed: u64::try_from(seed.0)
                .map_err(|_| ConfigError::new_err(format!("seed: {} is negative", seed.0)))?,
            hash_key: hash_key.map(key).transpose()?,
        };
        inner.validate().map_err(to_py)?;
        Ok(Self { inner })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.inner.block_size
    }

    #[getter]
    fn max_num_seqs(&self) -> u32 {
        self.inner.max_num_seqs
    }

    #[getter]
    fn max_num_batched_tokens(&self) -> u32 {
        self.inner.max_num_batched_tokens
    }

    #[getter]
    fn mixed_step_tokens(&self) -> Option<u32> {
        self.inner.mixed_step_tokens
    }

    #[getter]
    fn max_model_len(&self) -> u32 {
        self.inner.max_model_len
    }

    #[getter]
    fn vocab_size(&self) -> u32 {
        self.inner.vocab_size
    }

    #[getter]
    fn hidden_size(&self) -> u32 {
        self.inner.hidden_size
    }

    #[getter]
    fn enable_prefix_caching(&self) -> bool {
        self.inner.enable_prefix_caching
    }

    #[getter]
    fn policy(&self) -> &'static str {
        match self.inner.policy {
            Policy::Fcfs => "fcfs",
            Policy::Priority => "priority",
        }
    }

    #[getter]
    fn max_steps_in_flight(&self) -> u32 {
        self.inner.max_steps_in_flight
    }

    #[getter]
    fn seed(&self) -> u64 {
        self.inner.seed
    }

    #[getter]
    fn hash_key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.inner.hash_key.map(|key| PyBytes::new(py, &key))
    }
}
