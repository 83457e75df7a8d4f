//! One streamed reply's way to its socket.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use oneloop_core::text::push_json_string;

/// Where an event's constant bytes and its socket are, and what waits to be sent.
///
/// Two locks, so that whoever adds text never waits for a write: `io` is held while the socket is written, `text` for
/// moments only. Where both are taken, `io` comes first.
pub(super) struct Lane {
    pub(super) request: u64,
    frame: Frame,
    text: Mutex<Text>,
    io: Mutex<Io>,
}

#[derive(Default)]
struct Text {
    /// Not sent yet: one step's, or several merged.
    waiting: String,
    /// Whether a writer knows that something waits.
    is_queued: bool,
}

struct Io {
    /// A descriptor of our own; `None` once the lane is closed.
    socket: Option<OwnedFd>,
    /// What the socket did not take.
    unsent: Vec<u8>,
    /// The socket is full or broken: whoever opened the lane takes over.
    is_stalled: bool,
}

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
        // Room for the chunk's length, which is known only afterwards: eight digits and a line end.
        const HEAD: usize = 10;
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under the locks can panic half way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lane {
    pub(super) fn new(request: u64, frame: Frame, socket: OwnedFd) -> Self {
        Self {
            request,
            frame,
            text: Mutex::default(),
            io: Mutex::new(Io {
                socket: Some(socket),
                unsent: Vec::new(),
                is_stalled: false,
            }),
        }
    }

    /// Adds text to what waits. True when a writer must be told.
    pub(super) fn add(&self, added: &str) -> bool {
        let mut text = locked(&self.text);
        text.waiting.push_str(added);
        !std::mem::replace(&mut text.is_queued, true)
    }

    /// Sends what waits, as one event in one write. False when the socket has just stalled.
    ///
    /// scratch: two buffers that the writer's thread keeps.
    pub(super) fn send(&self, scratch: &mut Scratch) -> bool {
        let mut io = locked(&self.io);
        let mut text = locked(&self.text);
        text.is_queued = false;
        let Some(socket) = io.socket.as_ref().filter(|_| !io.is_stalled) else {
            return true;
        };
        scratch.text.clear();
        std::mem::swap(&mut scratch.text, &mut text.waiting);
        drop(text);
        if scratch.text.is_empty() {
            return true;
        }
        scratch.bytes.clear();
        self.frame.push(&mut scratch.bytes, &scratch.text);
        let num_sent = send_now(socket, &scratch.bytes);
        if num_sent == scratch.bytes.len() {
            return true;
        }
        io.unsent.extend_from_slice(&scratch.bytes[num_sent..]);
        io.is_stalled = true;
        false
    }

    /// Closes the lane's descriptor; returns what was not sent, as it goes on the wire. Waits for a write under way.
    pub(super) fn close(&self) -> Vec<u8> {
        let mut io = locked(&self.io);
        io.socket = None;
        let mut left = std::mem::take(&mut io.unsent);
        let text = std::mem::take(&mut locked(&self.text).waiting);
        if !text.is_empty() {
            self.frame.push(&mut left, &text);
        }
        left
    }
}

/// What a writer's thread works with.
#[derive(Default)]
pub(super) struct Scratch {
    text: String,
    bytes: Vec<u8>,
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

/// Makes an eventfd readable.
pub(super) fn signal(mut descriptor: &File) {
    // One whose counter is full is readable already; when it is broken, nobody listens.
    let _ = descriptor.write(&1_u64.to_ne_bytes());
}
