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
