//! The core's door for callers that must survive its bugs: a panic is reported as an error and leaves nothing half done.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::engine::Core;
use crate::error::Error;
use crate::inbox::Inbox;
use crate::request::SubmitRequest;
use crate::sched::Snapshot;

impl Core {
    /// Runs `call`. Should it panic, the core is poisoned and the panic's message comes back as [`Error::Poisoned`].
    pub fn guarded<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        match caught(|| call(self)) {
            Ok(result) => result,
            Err(message) => {
                // The state may be broken enough to panic again; the core refuses work either way.
                drop(caught(|| self.poison(&message)));
                Err(Error::Poisoned(message))
            }
        }
    }
}

impl Core {
    /// [`Self::snapshot`], where a panic is an error of this call alone: it changes nothing.
    pub fn snapshot_guarded(
        &self,
        max_sequences: usize,
        max_letters: u32,
    ) -> Result<Snapshot, Error> {
        caught(|| self.snapshot(max_sequences, max_letters)).map_err(Error::Snapshot)
    }
}

impl Inbox {
    /// [`Self::submit`], where a panic is an error of this request alone: nothing is posted before it is checked.
    pub fn submit_guarded(&self, request: SubmitRequest) -> Result<u64, Error> {
        caught(|| self.submit(request)).unwrap_or_else(|message| Err(Error::Internal(message)))
    }
}

/// The result of `call`, or the message of its panic.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| message(payload.as_ref()))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CoreConfig;

    fn core_with_two_requests() -> (Core, Vec<u64>) {
        let core = Core::new(CoreConfig::new(16, 100), None).unwrap();
        let handles = (0..2)
            .map(|_| core.submit(SubmitRequest::new(vec![1, 2, 3])).unwrap())
            .collect();
        (core, handles)
    }

    #[test]
    fn a_panic_ends_every_request_and_comes_back_as_an_error() {
        let (mut core, handles) = core_with_two_requests();
        let slot = 7;
        let outcome: Result<(), Error> = core.guarded(|_| panic!("slot {slot} is taken"));
        let poisoned = Error::Poisoned("slot 7 is taken".into());
        assert_eq!(outcome, Err(poisoned.clone()));
        assert_eq!(core.stats().num_errored, 2);
        assert!(!core.has_work());
        assert!(handles.iter().all(|&handle| !core.abort(handle)));
        assert_eq!(
            core.submit(SubmitRequest::new(vec![1])),
            Err(poisoned.clone())
        );
        assert_eq!(core.guarded(Core::drain), Err(poisoned));
    }

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(caught(|| -> u8 { panic!("plain") }), Err("plain".into()));
        assert_eq!(
            caught(|| -> u8 { panic!("{} and more", 1) }),
            Err("1 and more".into())
        );
        let other = caught(|| -> u8 { std::panic::panic_any(5) });
        assert_eq!(other, Err("a panic without a message".into()));
        assert_eq!(caught(|| 5), Ok(5));
    }

    #[test]
    fn errors_and_results_pass() {
        let (mut core, _) = core_with_two_requests();
        assert_eq!(core.guarded(|_| Ok(5)), Ok(5));
        let error = Error::Slab("misaligned".into());
        assert_eq!(
            core.guarded(|_| -> Result<(), Error> { Err(error.clone()) }),
            Err(error)
        );
        assert_eq!(core.submit(SubmitRequest::new(vec![1])).unwrap(), 3);
    }
}
