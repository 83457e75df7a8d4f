//! Keywords about numbers.

use serde_json::{Map, Value};

use super::Walk;
use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_EXACT_NUMBER;

/// Digits behind the point of a bound: the engine compares digits, as many as 64 bits hold.
const MAX_FRACTION_DIGITS: usize = 17;
/// `multipleOf` as an integer once its point is moved.
const MAX_MULTIPLE: u32 = 10_000;

/// What was seen of numbers in the whole schema: bounds meet when schemas are merged.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Exclusive bounds that are integers.
    exclusive: Vec<(f64, String)>,
    /// Bounds that are none.
    fractions: Vec<f64>,
    multiples: Vec<(u32, String)>,
}

impl Seen {
    /// Refuses what the engine gets wrong once it has merged it.
    pub(super) fn check(&self) -> Result<(), GrammarError> {
        for (bound, place) in &self.exclusive {
            // It takes the bound itself for allowed, where the other bound has the same digits before the point.
            if self
                .fractions
                .iter()
                .any(|other| (other - bound).abs() < 1.0)
            {
                return Err(GrammarError::at(
                    place.clone(),
                    "an exclusive bound together with a fractional bound less than 1 from it is not supported",
                ));
            }
        }
        let mut product = 1u32;
        for (multiple, place) in &self.multiples {
            product = match product.checked_mul(*multiple) {
                Some(product) => product,
                None => {
                    return Err(GrammarError::at(
                        place.clone(),
                        "too many different values of multipleOf",
                    ));
                }
            };
        }
        Ok(())
    }
}

impl Walk<'_> {
    pub(super) fn numbers(
        &mut self,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        self.bound("minimum", "exclusiveMinimum", members, made)?;
        self.bound("maximum", "exclusiveMaximum", members, made)?;
        if let Some(value) = members.get("multipleOf") {
            let multiple = self.at("multipleOf", |walk| walk.multiple(value))?;
            made.insert("multipleOf".to_owned(), multiple);
        }
        Ok(())
    }

    /// One side. Draft 4's `"exclusiveMinimum": true` becomes a number.
    fn bound(
        &mut self,
        inclusive: &str,
        exclusive: &str,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let bound = members.get(inclusive);
        let (bound, strict) = match members.get(exclusive) {
            None | Some(Value::Bool(false)) => (bound, None),
            Some(Value::Bool(true)) => (None, bound),
            Some(value) => (bound, Some(value)),
        };
        if let Some(value) = bound {
            let number = self.at(inclusive, |walk| walk.number(value))?;
            self.note_fraction(number);
            made.insert(inclusive.to_owned(), Value::from(number));
        }
        if let Some(value) = strict {
            let number = self.at(exclusive, |walk| walk.number(value))?;
            self.note_fraction(number);
            if number.fract() == 0.0 {
                let place = format!("{}/{exclusive}", self.place());
                self.numbers.exclusive.push((number, place));
            }
            made.insert(exclusive.to_owned(), Value::from(number));
        }
        Ok(())
    }

    fn note_fraction(&mut self, number: f64) {
        if number.fract() != 0.0 {
            self.numbers.fractions.push(number);
        }
    }

    fn number(&self, value: &Value) -> Result<f64, GrammarError> {
        let Some(number) = value.as_f64().filter(|number| number.is_finite()) else {
            return self.refuse("must be a number");
        };
        if number.abs() >= MAX_EXACT_NUMBER {
            return self.refuse("must be within ±2^53, where integers are exact; leave it out");
        }
        let digits = format!("{number}");
        let fraction = digits
            .split_once('.')
            .map_or(0, |(_, fraction)| fraction.len());
        if fraction > MAX_FRACTION_DIGITS {
            return self.refuse(format!(
                "may have at most {MAX_FRACTION_DIGITS} digits behind the point"
            ));
        }
        // Not -0.
        Ok(number + 0.0)
    }

    fn multiple(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let number = self.number(value)?;
        if number <= 0.0 {
            return self.refuse("must be above 0");
        }
        let digits = format!("{number}");
        let (whole, fraction) = digits.split_once('.').unwrap_or((&digits, ""));
        let multiple = format!("{whole}{fraction}")
            .parse::<u32>()
            .unwrap_or(u32::MAX);
        if multiple > MAX_MULTIPLE || fraction.len() > 4 {
            return self.refuse(format!(
                "may have at most 4 digits behind the point, and be at most {MAX_MULTIPLE} without it"
            ));
        }
        // All on the scale of 4 digits, so that what the engine multiplies is bounded by what is multiplied here.
        let scaled = multiple * 10u32.pow(4 - fraction.len() as u32);
        let several = self
            .numbers
            .multiples
            .iter()
            .any(|(other, _)| *other != scaled);
        if several || self.numbers.multiples.is_empty() {
            let place = self.place();
            self.numbers.multiples.push((scaled, place));
        }
        Ok(value.clone())
    }
}
