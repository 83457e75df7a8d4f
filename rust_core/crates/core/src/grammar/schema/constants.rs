//! `const` and `enum`.

use serde_json::Value;

use super::Walk;
use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_EXACT_NUMBER;

impl Walk<'_> {
    pub(super) fn enumeration(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let Some(values) = value.as_array().filter(|values| !values.is_empty()) else {
            return self.refuse("must be a list of values, not an empty one");
        };
        self.count_enum_values(values.len())?;
        let mut made = Vec::with_capacity(values.len());
        for (index, value) in values.iter().enumerate() {
            made.push(self.at(index, |walk| walk.constant(value))?);
        }
        Ok(Value::Array(made))
    }

    /// A constant as the engine is to write it: 1.0 is 1, and 0.0 is 0.
    pub(super) fn constant(&mut self, value: &Value) -> Result<Value, GrammarError> {
        match value {
            Value::Null | Value::Bool(_) => Ok(value.clone()),
            Value::Number(number) => {
                let float = number.as_f64().unwrap_or(f64::INFINITY);
                if float.abs() >= MAX_EXACT_NUMBER {
                    return self.refuse("numbers beyond 2^53 are not exact in JSON; use a string");
                }
                Ok(if float.fract() == 0.0 {
                    Value::from(float as i64)
                } else {
                    value.clone()
                })
            }
            Value::String(text) => {
                let unspellable = |letter: char| {
                    letter < ' ' && !"\n\r\t\u{8}\u{c}".contains(letter) || letter == '\u{7f}'
                };
                if text.contains(unspellable) && self.control_character.is_none() {
                    self.control_character = Some(self.place());
                }
                Ok(value.clone())
            }
            Value::Array(items) => {
                self.count_enum_values(items.len())?;
                let mut made = Vec::with_capacity(items.len());
                for (index, item) in items.iter().enumerate() {
                    made.push(self.at(index, |walk| walk.constant(item))?);
                }
                Ok(Value::Array(made))
            }
            Value::Object(members) => {
                self.count_enum_values(members.len())?;
                let mut made = serde_json::Map::new();
                for (name, member) in members {
                    made.insert(name.clone(), self.at(name, |walk| walk.constant(member))?);
                }
                Ok(Value::Object(made))
            }
        }
    }
}
