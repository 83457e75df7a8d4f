//! One streamed reply's way to its socket.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};

use oneloop_core::TokenLogprobs;

use super::waiting::{Frame, Waiting};
use crate::logprobs::lock;

/// What came of a lane's turn to send.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// All that waited.
    All,
    /// A part: it must be queued again.
    Part,
    /// Not all: the socket has just stalled.
    Stalled,
}

/// An attached reply: what waits to be sent, where to, and what was counted of its tokens.
pub(super) struct Lane {
    frame: Frame,
    /// A descriptor of our own: the number of another's may mean another connection from one moment to the next.
    socket: OwnedFd,
    /// What is not sent yet, by steps.
    waiting: Waiting,
    /// Whether it stands in the queue.
    is_queued: bool,
    /// What the socket did not take.
    unsent: Vec<u8>,
    /// The socket is full or broken: nothing is sent any more.
    is_stalled: bool,
    pub(super) num_tokens: u64,
    pub(super) last_token_at: f64,
}

impl Lane {
    pub(super) fn new(frame: Frame, socket: OwnedFd, last_token_at: f64) -> Self {
        Self {
            frame,
            socket,
            waiting: Waiting::default(),
            is_queued: false,
            unsent: Vec::new(),
            is_stalled: false,
            num_tokens: 0,
            last_token_at,
        }
    }

    /// Whether its events show log-probabilities.
    pub(super) fn shows_logprobs(&self) -> bool {
        self.frame.logprobs.is_some()
    }

    /// Adds what a step brought, its tokens being counted, to what waits. True when the lane must be queued.
    pub(super) fn add<'a>(
        &mut self,
        text: &str,
        logprobs: Option<impl Iterator<Item = TokenLogprobs<'a>>>,
    ) -> bool {
        self.waiting.push(text, self.num_tokens, logprobs);
        !text.is_empty() && !std::mem::replace(&mut self.is_queued, true)
    }

    /// Sends what waits, an event per step, in one write.
    ///
    /// bytes: a buffer to build the events in.
    pub(super) fn send(&mut self, bytes: &mut Vec<u8>) -> Sent {
        self.is_queued = false;
        if self.is_stalled || self.waiting.is_empty() {
            return Sent::All;
        }
        bytes.clear();
        self.frame.push(bytes, &mut self.waiting);
        let num_sent = send_now(&self.socket, bytes);
        if num_sent < bytes.len() {
            self.unsent.extend_from_slice(&bytes[num_sent..]);
            self.is_stalled = true;
            return Sent::Stalled;
        }
        self.is_queued = !self.waiting.is_empty();
        if self.is_queued {
            Sent::Part
        } else {
            Sent::All
        }
    }

    /// What was not sent, as it goes on the wire. Of a client that is behind it is one event, however many steps.
    pub(super) fn into_unsent(mut self) -> Vec<u8> {
        if self.is_stalled {
            self.waiting.merge();
        }
        while !self.waiting.is_empty() {
            self.frame.push(&mut self.unsent, &mut self.waiting);
        }
        if let Some(logprobs) = &self.frame.logprobs {
            self.waiting.leave_rest(&mut lock(&logprobs.encoder));
        }
        self.unsent
    }
}

/// How many of the bytes the socket takes at once. Errors count as none: the socket's owner will meet them.
fn send_now(socket: &OwnedFd, bytes: &[u8]) -> usize {
    loop {
        // SAFETY: the descriptor is open for as long as it is owned, and the bytes are borrowed for the call.
        let sent = unsafe {
            libc::send(
                socket.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        match usize::try_from(sent) {
            Ok(sent) => return sent,
            Err(_) if std::io::Error::last_os_error().kind() == ErrorKind::Interrupted => {}
            Err(_) => return 0,
        }
    }
}
