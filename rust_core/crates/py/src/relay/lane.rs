//! One streamed reply's way to its socket.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};

use oneloop_core::text::push_json_string;

/// The constant bytes of a reply's text events.
pub(super) struct Frame {
    /// Before the text's JSON string.
    pub(super) before: Box<[u8]>,
    /// After it.
    pub(super) after: Box<[u8]>,
    /// Whether the body goes in HTTP chunks.
    pub(super) is_chunked: bool,
}

impl Frame {
    /// Appends an event with this text.
    fn push(&self, out: &mut Vec<u8>, text: &str) {
        // Room for the chunk's length, which is known only afterwards: sixteen digits and a line end.
        const HEAD: usize = 18;
        let start = out.len();
        if self.is_chunked {
            out.extend_from_slice(&[0; HEAD]);
        }
        let body = out.len();
        out.extend_from_slice(&self.before);
        push_json_string(out, text);
        out.extend_from_slice(&self.after);
        if self.is_chunked {
            let head = format!("{:x}\r\n", out.len() - body);
            let unused = HEAD - head.len();
            out[start + unused..body].copy_from_slice(head.as_bytes());
            out.drain(start..start + unused);
            out.extend_from_slice(b"\r\n");
        }
    }
}

/// An attached reply: what waits to be sent, where to, and what was counted of its tokens.
pub(super) struct Lane {
    frame: Frame,
    /// A descriptor of our own: the number of another's may mean another connection from one moment to the next.
    socket: OwnedFd,
    /// Text that is not sent yet: one step's, or several merged.
    waiting: String,
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
            waiting: String::new(),
            is_queued: false,
            unsent: Vec::new(),
            is_stalled: false,
            num_tokens: 0,
            last_token_at,
        }
    }

    /// Adds text to what waits. True when it must be queued.
    pub(super) fn add(&mut self, text: &str) -> bool {
        self.waiting.push_str(text);
        !text.is_empty() && !std::mem::replace(&mut self.is_queued, true)
    }

    /// Sends what waits, as one event in one write. False when the socket has just stalled.
    ///
    /// bytes: a buffer to build the event in.
    pub(super) fn send(&mut self, bytes: &mut Vec<u8>) -> bool {
        self.is_queued = false;
        if self.is_stalled || self.waiting.is_empty() {
            return true;
        }
        bytes.clear();
        self.frame.push(bytes, &self.waiting);
        self.waiting.clear();
        let num_sent = send_now(&self.socket, bytes);
        self.unsent.extend_from_slice(&bytes[num_sent..]);
        self.is_stalled = num_sent < bytes.len();
        !self.is_stalled
    }

    /// What was not sent, as it goes on the wire.
    pub(super) fn into_unsent(mut self) -> Vec<u8> {
        if !self.waiting.is_empty() {
            self.frame.push(&mut self.unsent, &self.waiting);
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
