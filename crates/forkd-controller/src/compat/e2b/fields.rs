//! Fields of bodies that the daemon does not know.
//!
//! To ignore such a field could leave open what it is to close: `{"allowInternetAccess": false}`, which is not how
//! clients spell it, would have no effect. So the daemon refuses it, by name.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::Value;

/// Unknown fields that change nothing here. Clients before 2.45 always send `secure`: every sandbox has an access token.
/// Early clients resume with `autoPause`: the sandbox keeps what it was created with.
const WITHOUT_EFFECT: [&str; 2] = ["secure", "autoPause"];

/// All fields of a body that have no place in its type: reading one fails, unless it is absent in all but name.
#[derive(Debug, Default)]
pub(super) struct NoOthers;

impl<'de> Deserialize<'de> for NoOthers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Check)
    }
}

struct Check;

impl<'de> Visitor<'de> for Check {
    type Value = NoOthers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<NoOthers, A::Error> {
        while let Some((name, value)) = fields.next_entry::<String, Value>()? {
            if !is_absent(&value) && !WITHOUT_EFFECT.contains(&name.as_str()) {
                let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
                return Err(A::Error::custom(format!("it has no field `{shown}`; leave that out")));
            }
        }
        Ok(NoOthers)
    }
}

/// Whether a field with this value says nothing. `false` may forbid something.
pub(super) fn is_absent(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_absent),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether a client that sends this for a function asks for nothing.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Bool(false) => true,
        Value::Object(fields) => fields.values().all(is_empty),
        value => is_absent(value),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Known {
        timeout: Option<u64>,
        #[serde(flatten)]
        _others: NoOthers,
    }

    #[test]
    fn an_unknown_field_is_refused_by_name_unless_it_says_nothing() {
        let parse = |value: Value| serde_json::from_value::<Known>(value);
        for good in [
            json!({}),
            json!({"timeout": 5}),
            json!({"timeout": 5, "secure": true, "autoPause": false}),
            json!({"timeout": 5, "secure": false}),
            json!({"timeout": 5, "new": null, "newer": [], "newest": {"on": null}, "text": ""}),
        ] {
            let known = parse(good.clone()).unwrap();
            assert_eq!(known.timeout, good.get("timeout").and_then(Value::as_u64), "{good}");
        }
        for bad in [json!(false), json!(true), json!(0), json!("x"), json!([1]), json!({"on": false})] {
            let error = parse(json!({"timeout": 5, "allowInternetAccess": bad})).unwrap_err();
            assert!(error.to_string().contains("`allowInternetAccess`"), "{error}");
        }
    }
}
