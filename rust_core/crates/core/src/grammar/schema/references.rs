//! `$ref`: only within the document, nothing is fetched.

use std::collections::{HashMap, VecDeque};

use serde_json::{Map, Value};

use super::Walk;
use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_SUBSCHEMAS;

/// What was referred to so far.
#[derive(Debug, Default)]
pub(super) struct References<'a> {
    /// Name under `$defs` of a place in the document.
    names: HashMap<String, String>,
    /// Named, and not yet made: (name, place, schema).
    pending: VecDeque<(String, String, &'a Value)>,
    /// Places of `$anchor`s and of ids that are only a fragment; `None`: the name is there twice.
    anchors: HashMap<&'a str, Option<(String, &'a Value)>>,
    /// The document's own `$id`, without fragment.
    id: &'a str,
    /// Where a schema within has an `$id`, so that references mean something else below it.
    embedded: Option<String>,
}

impl<'a> References<'a> {
    pub(super) fn new(document: &'a Value) -> Result<Self, GrammarError> {
        let id = document
            .get("$id")
            .or_else(|| document.get("id"))
            .and_then(Value::as_str)
            .unwrap_or_default();
        let mut references = Self {
            id: id.split('#').next().unwrap_or_default(),
            ..Self::default()
        };
        references.find_anchors(document)?;
        Ok(references)
    }

    pub(super) fn next_pending(&mut self) -> Option<(String, String, &'a Value)> {
        self.pending.pop_front()
    }

    /// The name of a place, and from its first use on the schema there is pending.
    fn name(&mut self, place: String, target: &'a Value) -> String {
        if let Some(name) = self.names.get(&place) {
            return name.clone();
        }
        let name = self.names.len().to_string();
        self.names.insert(place.clone(), name.clone());
        self.pending.push_back((name.clone(), place, target));
        name
    }

    /// Looks through everything that could be a schema, however deep, without recursion.
    fn find_anchors(&mut self, document: &'a Value) -> Result<(), GrammarError> {
        let mut waiting = vec![("#".to_owned(), document, true)];
        let mut num_seen = 0;
        while let Some((place, value, is_schema)) = waiting.pop() {
            num_seen += 1;
            if num_seen > 64 * MAX_SUBSCHEMAS {
                return Err(GrammarError::at("#", "the schema is too large"));
            }
            match value {
                Value::Object(members) => {
                    if is_schema {
                        self.note(&place, members, value);
                    }
                    for (name, member) in members {
                        if is_schema
                            && matches!(name.as_str(), "const" | "enum" | "default" | "examples")
                        {
                            continue;
                        }
                        // Below these, names are the client's: "$id" may be a property.
                        let names = is_schema
                            && matches!(
                                name.as_str(),
                                "properties"
                                    | "patternProperties"
                                    | "$defs"
                                    | "definitions"
                                    | "dependentSchemas"
                            );
                        waiting.push((format!("{place}/{}", escaped(name)), member, !names));
                    }
                }
                Value::Array(items) => {
                    for (index, item) in items.iter().enumerate() {
                        waiting.push((format!("{place}/{index}"), item, true));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn note(&mut self, place: &str, members: &'a Map<String, Value>, schema: &'a Value) {
        let text = |name: &str| members.get(name).and_then(Value::as_str);
        for name in [text("$anchor"), text("$dynamicAnchor")]
            .into_iter()
            .flatten()
        {
            self.anchors
                .entry(name)
                .and_modify(|known| *known = None)
                .or_insert_with(|| Some((place.to_owned(), schema)));
        }
        let id = text("$id").or_else(|| text("id"));
        if place != "#" && self.embedded.is_none() && id.is_some() {
            self.embedded = Some(place.to_owned());
        }
    }
}

impl<'a> Walk<'a> {
    /// The reference as the engine is to see it.
    pub(super) fn reference(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let (place, target) = self.resolved(value)?;
        let name = self.references.name(place, target);
        Ok(Value::String(format!("#/$defs/{name}")))
    }

    /// Where a reference leads, and what is there.
    pub(super) fn resolved(&self, value: &Value) -> Result<(String, &'a Value), GrammarError> {
        let Some(reference) = value.as_str() else {
            return self.refuse("must be a string");
        };
        let (document, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        if !document.is_empty() && document != self.references.id {
            return self.refuse(
                "only references within the schema (\"#/…\") are supported; nothing is fetched",
            );
        }
        if let Some(place) = &self.references.embedded {
            return self.refuse(format!(
                "references are not supported beside an id within the schema ({place})"
            ));
        }
        let Some(fragment) = percent_decoded(fragment) else {
            return self.refuse("is no valid reference");
        };
        self.target(&fragment)
    }

    fn target(&self, fragment: &str) -> Result<(String, &'a Value), GrammarError> {
        if fragment.is_empty() {
            return Ok(("#".to_owned(), self.document));
        }
        if !fragment.starts_with('/') {
            return match self.references.anchors.get(fragment) {
                Some(Some((place, target))) => Ok((place.clone(), *target)),
                Some(None) => self.refuse("this anchor is there more than once"),
                None => self.refuse("there is no such anchor in the schema"),
            };
        }
        match self.document.pointer(fragment) {
            Some(target @ (Value::Object(_) | Value::Bool(_))) => {
                Ok((format!("#{fragment}"), target))
            }
            Some(_) => self.refuse("what it points to is no schema"),
            None => self.refuse("points to nothing in the schema"),
        }
    }
}

/// A name as a JSON pointer has it.
pub(super) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, tail @ ..] = rest {
        rest = tail;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = rest.get(..2)?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}
