//! One streamed reply's way to its socket.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};

use oneloop_core::text::push_json_string;

/// Bytes of events that are enough for one write: an ordinary connection's buffer takes them at once.
const LARGE_WRITE: usize = 16 << 10;

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
    /// Appends one event per text, all of them in one chunk; stops once `LARGE_WRITE` bytes are there.
    ///
    /// Returns how many texts went in, at least one.
    fn push<'a>(&self, out: &mut Vec<u8>, texts: impl Iterator<Item = &'a str>) -> usize {
        // Room for the chunk's length, which is known only afterwards: sixteen digits and a line end.
        const HEAD: usize = 18;
        let start = out.len();
        if self.is_chunked {
            out.extend_from_slice(&[0; HEAD]);
        }
        let body = out.len();
        let mut count = 0;
        for text in texts {
            out.extend_from_slice(&self.before);
            push_json_string(out, text);
            out.extend_from_slice(&self.after);
            count += 1;
            if out.len() - body >= LARGE_WRITE {
                break;
            }
        }
        if self.is_chunked {
            let head = format!("{:x}\r\n", out.len() - body);
            let unused = HEAD - head.len();
            out[start + unused..body].copy_from_slice(head.as_bytes());
            out.drain(start..start + unused);
            out.extend_from_slice(b"\r\n");
        }
        count
    }
}

/// Texts of several steps, in one piece.
#[derive(Default)]
struct Texts {
    joined: String,
    /// Where each ends.
    ends: Vec<u32>,
}

impl Texts {
    fn push(&mut self, text: &str) {
        if !text.is_empty() {
            self.joined.push_str(text);
            self.ends.push(self.joined.len() as u32);
        }
    }

    fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, &end)| &self.joined[start as usize..end as usize])
    }

    /// Forgets the first `count`.
    fn pop_front(&mut self, count: usize) {
        if count == self.ends.len() {
            self.joined.clear();
            self.ends.clear();
            return;
        }
        let gone = self.ends[count - 1];
        self.joined.drain(..gone as usize);
        self.ends.drain(..count);
        self.ends.iter_mut().for_each(|end| *end -= gone);
    }
}

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
    /// Text that is not sent yet, by steps.
    waiting: Texts,
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
            waiting: Texts::default(),
            is_queued: false,
            unsent: Vec::new(),
            is_stalled: false,
            num_tokens: 0,
            last_token_at,
        }
    }

    /// Adds a step's text to what waits. True when the lane must be queued.
    pub(super) fn add(&mut self, text: &str) -> bool {
        self.waiting.push(text);
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
        let count = self.frame.push(bytes, self.waiting.iter());
        self.waiting.pop_front(count);
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
        if self.is_stalled && !self.waiting.is_empty() {
            let whole = std::iter::once(self.waiting.joined.as_str());
            self.frame.push(&mut self.unsent, whole);
            return self.unsent;
        }
        while !self.waiting.is_empty() {
            let count = self.frame.push(&mut self.unsent, self.waiting.iter());
            self.waiting.pop_front(count);
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
