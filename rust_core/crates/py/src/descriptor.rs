//! File descriptors that callers hand over by number.
#![allow(unsafe_code)] // two calls about a number

use std::io::Error;
use std::os::fd::{FromRawFd, OwnedFd};

/// A descriptor of our own for the same file, so that closing the caller's cannot redirect what we write to another.
pub(crate) fn duplicate(fd: i32) -> Result<OwnedFd, Error> {
    // SAFETY: no memory is passed; a number that is no open descriptor makes the call fail.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the call has just opened it, so nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
