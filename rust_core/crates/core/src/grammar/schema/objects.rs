//! Keywords about objects.

use serde_json::{Map, Value};

use super::Walk;
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_COUNTED_PROPERTIES, MAX_PROPERTIES};

impl Walk<'_> {
    pub(super) fn objects(
        &mut self,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        self.count("minProperties", members, made)?;
        self.count("maxProperties", members, made)?;
        if let Some(value) = members.get("properties") {
            let properties = self.at("properties", |walk| walk.properties(value))?;
            made.insert("properties".to_owned(), properties);
        }
        if let Some(value) = members.get("patternProperties") {
            let properties = self.at("patternProperties", |walk| walk.pattern_properties(value))?;
            made.insert("patternProperties".to_owned(), properties);
        }
        let required = match members.get("required") {
            // Draft 3 and confusions with it: a property that says of itself that it is required.
            None => Vec::new(),
            Some(value) => self.at("required", |walk| walk.required(value))?,
        };
        let additional = match members.get("additionalProperties") {
            Some(value) => Some(self.at("additionalProperties", |walk| walk.schema(value))?),
            None if self.closed_objects && members.contains_key("properties") => {
                Some(Value::Bool(false))
            }
            None => None,
        };
        self.note_open(made, &required, additional.as_ref());
        if let Some(additional) = additional {
            made.insert("additionalProperties".to_owned(), additional);
        }
        self.check_counts(made, required.len())?;
        if !required.is_empty() {
            made.insert("required".to_owned(), Value::from(required));
        }
        Ok(())
    }

    fn properties(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let Some(properties) = value.as_object() else {
            return self.refuse("must be an object");
        };
        if properties.len() > MAX_PROPERTIES {
            return self.refuse(format!("may have at most {MAX_PROPERTIES} entries"));
        }
        let mut made = Map::new();
        for (name, schema) in properties {
            made.insert(name.clone(), self.at(name, |walk| walk.schema(schema))?);
        }
        Ok(Value::Object(made))
    }

    fn pattern_properties(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let Some(properties) = value.as_object() else {
            return self.refuse("must be an object");
        };
        let mut made = Map::new();
        for (pattern, schema) in properties {
            let (pattern, schema) = self.at(pattern, |walk| {
                Ok((walk.searched(pattern)?, walk.schema(schema)?))
            })?;
            if made.insert(pattern, schema).is_some() {
                return self.refuse("two patterns mean the same");
            }
        }
        Ok(Value::Object(made))
    }

    fn required(&self, value: &Value) -> Result<Vec<String>, GrammarError> {
        let names = value
            .as_array()
            .map(|names| names.iter().map(Value::as_str));
        let Some(names) = names.and_then(Iterator::collect::<Option<Vec<&str>>>) else {
            return self.refuse("must be a list of names");
        };
        let mut distinct: Vec<String> = Vec::with_capacity(names.len());
        let mut seen = std::collections::HashSet::new();
        distinct.extend(
            names
                .into_iter()
                .filter(|name| seen.insert(*name))
                .map(str::to_owned),
        );
        Ok(distinct)
    }

    /// The engine tells further keys from named ones by how they are spelled. Were a letter allowed as `\u0061` too, a
    /// named property could come in disguise, with any value.
    fn note_open(
        &mut self,
        made: &Map<String, Value>,
        required: &[String],
        additional: Option<&Value>,
    ) {
        let has = |name: &str| {
            made.get(name)
                .and_then(Value::as_object)
                .is_some_and(|map| !map.is_empty())
        };
        let patterns = has("patternProperties");
        let named = has("properties") || !required.is_empty();
        let open = additional != Some(&Value::Bool(false));
        if (named && (open || patterns)) || (patterns && open) {
            self.plain_escapes = true;
        }
    }

    /// Further properties are counted as they are written, and the same one may come twice: only one of them counts for
    /// sure.
    fn check_counts(
        &mut self,
        made: &Map<String, Value>,
        num_required: usize,
    ) -> Result<(), GrammarError> {
        let num_named = made
            .get("properties")
            .and_then(Value::as_object)
            .map_or(0, Map::len);
        let is_counted = made.contains_key("minProperties") || made.contains_key("maxProperties");
        if is_counted && num_named > MAX_COUNTED_PROPERTIES {
            return self.refuse(format!(
                "minProperties and maxProperties are supported beside at most {MAX_COUNTED_PROPERTIES} properties"
            ));
        }
        let min = made
            .get("minProperties")
            .and_then(Value::as_u64)
            .unwrap_or(0);
        if min > num_required as u64 + 1 {
            return self.at("minProperties", |walk| {
                walk.refuse("is supported up to one more than there are required properties; name more as required")
            });
        }
        Ok(())
    }
}
