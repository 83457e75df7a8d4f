//! `unevaluatedProperties` and `unevaluatedItems`: which members no other keyword speaks of is told beforehand, alternative by
//! alternative.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::Walk;
use super::complement::{dependent, has, size};
use super::keywords::asks_nothing;
use super::values::{all_of, any_of};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_FOLLOWED, MAX_UNEVALUATED_CASES};

/// Branches of an `anyOf`, each set of which may hold.
const MAX_BRANCHES: usize = 4;

/// What is spoken of where some alternatives were taken.
#[derive(Debug, Clone, Default, PartialEq)]
struct Case {
    /// What says that they are: schemas that hold beside the whole.
    taken: Vec<Value>,
    names: BTreeSet<String>,
    patterns: BTreeSet<String>,
    all_properties: bool,
    num_items: usize,
    all_items: bool,
    /// Items that `contains` has found count too, wherever they are.
    has_contains: bool,
}

impl Case {
    fn is_silent(&self) -> bool {
        *self
            == Self {
                taken: self.taken.clone(),
                ..Self::default()
            }
    }

    fn and(&self, other: &Self) -> Self {
        Self {
            taken: self.taken.iter().chain(&other.taken).cloned().collect(),
            names: self.names.union(&other.names).cloned().collect(),
            patterns: self.patterns.union(&other.patterns).cloned().collect(),
            all_properties: self.all_properties || other.all_properties,
            num_items: self.num_items.max(other.num_items),
            all_items: self.all_items || other.all_items,
            has_contains: self.has_contains || other.has_contains,
        }
    }

    fn when(mut self, schema: Value) -> Self {
        self.taken.insert(0, schema);
        self
    }

    fn note(&mut self, members: &Map<String, Value>, is_within: bool) {
        let keys = |name: &str| {
            let map = members.get(name).and_then(Value::as_object);
            map.into_iter().flatten().map(|(name, _)| name.clone())
        };
        self.names.extend(keys("properties"));
        self.patterns.extend(keys("patternProperties"));
        self.all_properties |= members.contains_key("additionalProperties")
            || (is_within && members.contains_key("unevaluatedProperties"));
        let length = |name: &str| {
            let list = members.get(name).and_then(Value::as_array);
            list.map_or(0, Vec::len)
        };
        self.num_items = self
            .num_items
            .max(length("prefixItems"))
            .max(length("items"));
        self.all_items |= members.get("items").is_some_and(|items| !items.is_array())
            || (members.get("items").is_some_and(Value::is_array)
                && members.contains_key("additionalItems"))
            || (is_within && members.contains_key("unevaluatedItems"));
        self.has_contains |= members.contains_key("contains");
    }
}

impl Walk<'_> {
    /// What holds beside the other keywords so that these two do; `true` where they ask nothing.
    pub(super) fn unevaluated(
        &mut self,
        members: &Map<String, Value>,
    ) -> Result<Value, GrammarError> {
        let asked = |name: &str| members.get(name).filter(|value| !asks_nothing(name, value));
        let (properties, items) = (asked("unevaluatedProperties"), asked("unevaluatedItems"));
        if properties.is_none() && items.is_none() {
            return Ok(Value::Bool(true));
        }
        for schema in properties.into_iter().chain(items) {
            if !schema.is_object() && !schema.is_boolean() {
                return self.refuse("unevaluated… must be a schema");
            }
        }
        let cases = self.cases(members, false, 0)?;
        let mut alternatives = Vec::with_capacity(cases.len());
        for case in cases {
            let mut parts = case.taken;
            if let Some(schema) = properties.filter(|_| !case.all_properties) {
                let named = |names: &BTreeSet<String>| -> Map<String, Value> {
                    names
                        .iter()
                        .map(|name| (name.clone(), true.into()))
                        .collect()
                };
                parts.push(json!({
                    "properties": named(&case.names), "patternProperties": named(&case.patterns),
                    "additionalProperties": schema,
                }));
            }
            if let Some(schema) = items.filter(|_| !case.all_items) {
                if case.has_contains {
                    return self.refuse("unevaluatedItems beside contains is not supported");
                }
                let first = vec![Value::Bool(true); case.num_items];
                parts.push(json!({"prefixItems": first, "items": schema}));
            }
            alternatives.push(all_of(parts));
        }
        Ok(any_of(alternatives))
    }

    /// The cases of a schema, one of which is true of every value that is valid by it: of the one that says most.
    ///
    /// `is_within`: it is not the schema itself whose `unevaluated…` are asked for.
    fn cases(
        &mut self,
        members: &Map<String, Value>,
        is_within: bool,
        depth: usize,
    ) -> Result<Vec<Case>, GrammarError> {
        self.spend(1)?;
        if depth > MAX_FOLLOWED {
            return self.refuse("unevaluated… with references within references is not supported");
        }
        let mut own = Case::default();
        own.note(members, is_within);
        let mut cases = vec![own];
        for (name, value) in members {
            self.check_known(name, value)?;
            let more = match (name.as_str(), value) {
                ("$ref", reference) => {
                    let target = self.at("$ref", |walk| walk.resolved(reference))?.1;
                    self.cases_of(target, depth)?
                }
                ("allOf", Value::Array(schemas)) => {
                    let mut all = vec![Case::default()];
                    for schema in schemas {
                        let more = self.cases_of(schema, depth)?;
                        all = self.product(&all, &more)?;
                    }
                    all
                }
                ("anyOf", Value::Array(schemas)) => self.cases_of_any(schemas, depth)?,
                ("oneOf", Value::Array(schemas)) => {
                    let each = self.cases_of_branches(schemas, depth)?;
                    each.into_iter().flatten().collect()
                }
                ("if", condition) => self.cases_of_condition(condition, members, depth)?,
                ("dependentSchemas" | "dependencies", Value::Object(map)) => {
                    let mut all = vec![Case::default()];
                    for (name, asked) in map {
                        let is_there = self.cases_of(&dependent(asked), depth)?;
                        let absent =
                            json!({"properties": {name: false}, "additionalProperties": true});
                        let mut more: Vec<Case> = is_there
                            .into_iter()
                            .map(|case| case.when(has(name)))
                            .collect();
                        more.push(Case::default().when(absent));
                        all = self.product(&all, &more)?;
                    }
                    all
                }
                _ => continue,
            };
            if !more.iter().all(Case::is_silent) {
                cases = self.product(&cases, &more)?;
            }
        }
        Ok(cases)
    }

    fn cases_of(&mut self, schema: &Value, depth: usize) -> Result<Vec<Case>, GrammarError> {
        match schema {
            Value::Object(members) => self.cases(members, true, depth + 1),
            _ => Ok(vec![Case::default()]),
        }
    }

    /// For each branch its cases, where it holds.
    fn cases_of_branches(
        &mut self,
        schemas: &[Value],
        depth: usize,
    ) -> Result<Vec<Vec<Case>>, GrammarError> {
        let mut found = Vec::with_capacity(schemas.len());
        for schema in schemas {
            let cases = self.cases_of(schema, depth)?.into_iter();
            found.push(cases.map(|case| case.when(schema.clone())).collect());
        }
        Ok(found)
    }

    /// Any of the branches may hold together, and then all of them have spoken.
    fn cases_of_any(&mut self, schemas: &[Value], depth: usize) -> Result<Vec<Case>, GrammarError> {
        let each = self.cases_of_branches(schemas, depth)?;
        if each.iter().flatten().all(Case::is_silent) {
            return Ok(vec![Case::default()]);
        }
        if each.len() > MAX_BRANCHES {
            return self.refuse(format!(
                "unevaluated… beside an anyOf of more than {MAX_BRANCHES} is not supported"
            ));
        }
        let mut all = Vec::new();
        for chosen in 1u32..1 << each.len() {
            let mut cases = vec![Case::default()];
            for (_, branch) in each
                .iter()
                .enumerate()
                .filter(|(index, _)| chosen >> index & 1 == 1)
            {
                cases = self.product(&cases, branch)?;
            }
            all.extend(cases);
        }
        Ok(all)
    }

    fn cases_of_condition(
        &mut self,
        condition: &Value,
        members: &Map<String, Value>,
        depth: usize,
    ) -> Result<Vec<Case>, GrammarError> {
        let branch = |name: &str| members.get(name).unwrap_or(&Value::Bool(true));
        let then = self.cases_of(branch("then"), depth)?;
        let holds = self.cases_of(condition, depth)?;
        let holds = self.product(&holds, &then)?;
        let fails = self.cases_of(branch("else"), depth)?;
        if holds.iter().chain(&fails).all(Case::is_silent) {
            return Ok(vec![Case::default()]);
        }
        let is_not = self.complement(condition)?;
        let holds = holds.into_iter().map(|case| case.when(condition.clone()));
        let fails = fails.into_iter().map(|case| case.when(is_not.clone()));
        Ok(holds.chain(fails).collect())
    }

    fn product(&mut self, cases: &[Case], more: &[Case]) -> Result<Vec<Case>, GrammarError> {
        if cases.len() * more.len() > MAX_UNEVALUATED_CASES {
            return self.refuse("unevaluated… beside so many alternatives is not supported");
        }
        let parts = |cases: &[Case]| -> usize {
            let taken = cases.iter().flat_map(|case| &case.taken);
            cases.len() + taken.map(size).sum::<usize>()
        };
        self.spend(parts(cases) * more.len() + parts(more) * cases.len())?;
        let each = cases.iter();
        Ok(each
            .flat_map(|case| more.iter().map(|other| case.and(other)))
            .collect())
    }
}
