//! The core's door for callers that must survive its bugs: a panic ends every request and is reported as an error.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::engine::Core;
use crate::error::Error;

impl Core {
    /// Runs `call`. Should it panic, the core is poisoned and the panic's message comes back as [`Error::Poisoned`].
    pub fn guarded<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let payload = match catch_unwind(AssertUnwindSafe(|| call(self))) {
            Ok(result) => return result,
            Err(payload) => payload,
        };
        let message = message(payload.as_ref());
        // The state may be broken enough to panic again; the core refuses work either way.
        drop(catch_unwind(AssertUnwindSafe(|| self.poison(&message))));
        Err(Error::Poisoned(message))
    }
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
    use crate::request::SubmitRequest;

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
