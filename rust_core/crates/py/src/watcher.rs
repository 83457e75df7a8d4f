//! `CompletionWatcher`: a thread that watches a word in host memory which a device writes, and wakes an event loop.
//!
//! Polling needs neither the GIL nor a call into the driver, so no step waits for a Python thread to get its turn and
//! no host callback delays the device's next kernel.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::descriptor::duplicate;

const WORD_BYTES: usize = size_of::<i64>();
/// The first moments are polled without a nap: a step that is all but done is seen at once.
const SPIN: Duration = Duration::from_micros(5);
/// A nap is this share of the wait so far, so a short step is never missed by more than a few percent of its length.
const NAP_SHARE: u32 = 64;
const MIN_NAP: Duration = Duration::from_micros(3);
/// A step that has taken this long is a long prefill or will never end: the naps grow with it.
const LONG_WAIT: Duration = Duration::from_millis(50);
const LONG_NAP_SHARE: u32 = 2500;
const MAX_LONG_NAP: Duration = Duration::from_millis(1);

/// Watches one word and writes a descriptor whenever it grows.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct CompletionWatcher {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    word: Word,
    // The export keeps the word's memory alive and in place until the thread has ended: see `Drop`.
    _memory: PyUntypedBuffer,
}

struct Shared {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Clone, Copy)]
struct Orders {
    /// The highest number that was announced.
    expected: i64,
    closing: bool,
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        // Plain numbers: nothing can be left half done by a panic.
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An aligned 64-bit word whose memory the watcher's buffer export keeps in place.
#[derive(Clone, Copy)]
struct Word(NonNull<i64>);

// SAFETY: the word is only ever read, atomically; its memory outlives every thread that holds it (see `Drop`).
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    /// What the device has written last. Acquire: whatever it wrote before is visible afterwards.
    fn load(self) -> i64 {
        // SAFETY: aligned (checked by `new`) and valid for as long as the export lives. The other writer is a device or
        // a foreign thread that stores whole words; nothing in this process writes it other than atomically.
        unsafe { AtomicI64::from_ptr(self.0.as_ptr()) }.load(Ordering::Acquire)
    }
}

#[pymethods]
impl CompletionWatcher {
    #[new]
    #[pyo3(signature = (word, fd, *, max_nap_us = 20))]
    fn new(word: &Bound<'_, PyAny>, fd: i32, max_nap_us: u32) -> PyResult<Self> {
        let memory = PyUntypedBuffer::get(word)?;
        if memory.len_bytes() != WORD_BYTES || !memory.buf_ptr().addr().is_multiple_of(WORD_BYTES) {
            return Err(PyValueError::new_err(format!(
                "word: a buffer of {} bytes at {}, instead of one aligned 64-bit integer",
                memory.len_bytes(),
                memory.buf_ptr().addr()
            )));
        }
        let word = NonNull::new(memory.buf_ptr().cast::<i64>())
            .map(Word)
            .ok_or_else(|| PyValueError::new_err("word: the buffer has no memory"))?;
        let signal = duplicate(fd)?;
        let seen = word.load();
        let shared = Arc::new(Shared {
            orders: Mutex::new(Orders {
                expected: seen,
                closing: false,
            }),
            changed: Condvar::new(),
        });
        let watch = Watch {
            shared: Arc::clone(&shared),
            word,
            seen,
            signal: File::from(signal),
            max_nap: Duration::from_micros(max_nap_us.into()),
        };
        let thread = thread::Builder::new()
            .name("oneloop-watch".to_owned())
            .spawn(move || watch.run())?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
            word,
            _memory: memory,
        })
    }

    /// A step with this number was launched: watch until the word reaches it.
    fn expect(&self, number: i64) -> PyResult<()> {
        let mut orders = self.shared.orders();
        if orders.closing {
            return Err(PyValueError::new_err("the watcher is closed"));
        }
        if number > orders.expected {
            orders.expected = number;
            drop(orders);
            self.shared.changed.notify_one();
        }
        Ok(())
    }

    /// The word as it is now.
    #[getter]
    fn completed(&self) -> i64 {
        self.word.load()
    }

    /// End the thread; the word is read no more by it. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }
}

impl CompletionWatcher {
    fn end(&self) {
        self.shared.orders().closing = true;
        self.shared.changed.notify_one();
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // An Err is a panic of the thread, which then watches no more: nothing is left to do.
            let _ = thread.join();
        }
    }
}

impl Drop for CompletionWatcher {
    /// Ends the thread before the fields go, the export of the word's memory among them.
    fn drop(&mut self) {
        self.end();
    }
}

/// What the thread works with.
struct Watch {
    shared: Arc<Shared>,
    word: Word,
    seen: i64,
    signal: File,
    max_nap: Duration,
}

impl Watch {
    fn run(mut self) {
        lower_timer_slack();
        while self.wait_for_orders() {
            let now = self.poll();
            if now > self.seen {
                self.seen = now;
                // An eventfd whose counter is full is readable, which is all that is wanted; when the descriptor is
                // broken, nobody listens.
                let _ = self.signal.write(&1_u64.to_ne_bytes());
            }
        }
    }

    /// Parks until a number beyond the last one seen is expected. False at the end.
    fn wait_for_orders(&self) -> bool {
        let orders = self
            .shared
            .changed
            .wait_while(self.shared.orders(), |orders| {
                !orders.closing && orders.expected <= self.seen
            })
            .unwrap_or_else(PoisonError::into_inner);
        !orders.closing
    }

    /// Polls until the word grows (then it is returned) or the watcher is closed.
    fn poll(&self) -> i64 {
        let start = Instant::now();
        loop {
            let now = self.word.load();
            if now > self.seen {
                return now;
            }
            let waited = start.elapsed();
            if waited < SPIN || self.max_nap.is_zero() {
                std::hint::spin_loop();
            } else {
                thread::sleep(nap(waited, self.max_nap));
            }
            if self.shared.orders().closing {
                return now;
            }
        }
    }
}

/// How long to sleep between two looks at the word after having waited this long.
fn nap(waited: Duration, max_nap: Duration) -> Duration {
    if waited < LONG_WAIT {
        (waited / NAP_SHARE).clamp(MIN_NAP, max_nap.max(MIN_NAP))
    } else {
        (waited / LONG_NAP_SHARE).clamp(max_nap.min(MAX_LONG_NAP), MAX_LONG_NAP)
    }
}

/// Lets this thread's naps end within a microsecond of their time instead of the usual 50.
#[cfg(target_os = "linux")]
fn lower_timer_slack() {
    const NANOSECONDS: libc::c_ulong = 1_000;
    // SAFETY: takes numbers only, and changes nothing but this thread's timers.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS, 0, 0, 0);
    }
}

#[cfg(not(target_os = "linux"))]
fn lower_timer_slack() {}
