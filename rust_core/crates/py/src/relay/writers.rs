//! The threads that write to the sockets, and the queue between them and the event loop.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::lane::{Lane, Scratch, signal};

/// Lanes that a thread takes from the queue at a time: a write takes some µs, the queue's lock a tenth of one.
const LANES_AT_ONCE: usize = 8;

pub(super) struct Writers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    stalled: Mutex<Vec<u64>>,
    /// Made readable when a lane has stalled.
    signal: File,
}

#[derive(Default)]
struct Queue {
    lanes: VecDeque<Arc<Lane>>,
    num_idle: usize,
    is_closing: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Lists and numbers: nothing can be left half done by a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writers {
    pub(super) fn start(num_threads: usize, signal: File) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            stalled: Mutex::default(),
            signal,
        });
        let writers = Self {
            shared: Arc::clone(&shared),
            threads: Mutex::default(),
        };
        for _ in 0..num_threads {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new()
                .name("oneloop-write".to_owned())
                .spawn(move || shared.write())?;
            locked(&writers.threads).push(thread);
        }
        Ok(writers)
    }

    /// Queues lanes that have something to send.
    pub(super) fn queue(&self, lanes: Vec<Arc<Lane>>) {
        if lanes.is_empty() {
            return;
        }
        let num_wanted = lanes.len().div_ceil(LANES_AT_ONCE);
        let mut queue = locked(&self.shared.queue);
        queue.lanes.extend(lanes);
        let num_woken = queue.num_idle.min(num_wanted);
        drop(queue);
        for _ in 0..num_woken {
            self.shared.changed.notify_one();
        }
    }

    /// Requests whose lanes have stalled since the last call.
    pub(super) fn take_stalled(&self) -> Vec<u64> {
        std::mem::take(&mut *locked(&self.shared.stalled))
    }

    /// Ends the threads; lanes in the queue are not sent. Idempotent.
    pub(super) fn close(&self) {
        let mut queue = locked(&self.shared.queue);
        queue.is_closing = true;
        queue.lanes.clear();
        drop(queue);
        self.shared.changed.notify_all();
        for thread in locked(&self.threads).drain(..) {
            // An Err is a panic of the thread, which then writes no more: nothing is left to do.
            let _ = thread.join();
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// A thread's life.
    fn write(&self) {
        let mut scratch = Scratch::default();
        let mut lanes = Vec::with_capacity(LANES_AT_ONCE);
        while self.take(&mut lanes) {
            for lane in lanes.drain(..) {
                if !lane.send(&mut scratch) {
                    locked(&self.stalled).push(lane.request);
                    signal(&self.signal);
                }
            }
        }
    }

    /// Waits for lanes to send. False at the end.
    fn take(&self, lanes: &mut Vec<Arc<Lane>>) -> bool {
        let mut queue = locked(&self.queue);
        while queue.lanes.is_empty() && !queue.is_closing {
            queue.num_idle += 1;
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
            queue.num_idle -= 1;
        }
        let count = queue.lanes.len().min(LANES_AT_ONCE);
        lanes.extend(queue.lanes.drain(..count));
        !queue.is_closing
    }
}
