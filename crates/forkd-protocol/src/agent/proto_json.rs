//! proto3's JSON, as clients of different languages write it: numbers as strings, enums as numbers, `null` for a
//! default, base64 in either alphabet.

use std::fmt;

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    prelude::BASE64_STANDARD,
};
use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

/// Reads a field whose `null` means the default.
pub(super) fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    d: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(d)?.unwrap_or_default())
}

/// Reads a number, or a string with one.
pub(super) fn number<'de, D: Deserializer<'de>, T: TryFrom<u64> + Default>(d: D) -> Result<T, D::Error> {
    Ok(some_number(d)?.unwrap_or_default())
}

/// Reads a number, a string with one, or `null`.
pub(super) fn some_number<'de, D: Deserializer<'de>, T: TryFrom<u64>>(d: D) -> Result<Option<T>, D::Error> {
    match d.deserialize_any(Number)? {
        None => Ok(None),
        Some(number) => T::try_from(number).map(Some).map_err(|_| {
            D::Error::invalid_value(Unexpected::Unsigned(number), &"a number that this field can hold")
        }),
    }
}

struct Number;

impl Visitor<'_> for Number {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number that is not negative, or a string with one")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Some(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
        // 2^53: above it a float is not exact.
        let whole = number.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(&number);
        if whole { Ok(Some(number as u64)) } else { Err(E::invalid_value(Unexpected::Float(number), &self)) }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        text.parse().map(Some).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}

/// Reads the name of an enum's value, or its number as decimal digits.
pub(super) fn enum_value<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    struct Name;
    impl Visitor<'_> for Name {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the name or the number of an enum's value")
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<String, E> {
            Ok(name.to_owned())
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<String, E> {
            Ok(number.to_string())
        }

        fn visit_unit<E: Error>(self) -> Result<String, E> {
            Ok(String::new())
        }
    }
    d.deserialize_any(Name)
}

/// Bytes as base64, in an optional field.
pub(super) mod base64_option {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::{ANY_PADDING, BASE64_STANDARD, Engine};

    pub(in super::super) fn serialize<S: Serializer>(
        bytes: &Option<Vec<u8>>,
        s: S,
    ) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => s.serialize_str(&BASE64_STANDARD.encode(bytes)),
            None => s.serialize_none(),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Option<Vec<u8>>, D::Error> {
        let Some(mut text) = Option::<String>::deserialize(d)? else { return Ok(None) };
        if text.contains(['-', '_']) {
            text = text.replace('-', "+").replace('_', "/");
        }
        ANY_PADDING.decode(text).map(Some).map_err(D::Error::custom)
    }
}

/// proto3's JSON reads base64 with and without padding.
const ANY_PADDING: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A 64-bit number as a decimal string.
pub(super) mod decimal {
    use serde::{Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(number: &u64, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(number)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        super::number(d)
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;

    #[test]
    fn numbers_come_as_strings_and_enums_as_numbers() {
        for text in [r#"{"process":{"pid":7},"signal":9}"#, r#"{"process":{"pid":"7"},"signal":"9"}"#] {
            let request: SendSignalRequest = serde_json::from_str(text).unwrap();
            assert_eq!((request.process.pid, request.signal.as_str()), (Some(7), "9"), "{text}");
        }
        let list = |depth: &str| {
            serde_json::from_str::<ListDirRequest>(&format!(r#"{{"path":"/","depth":{depth}}}"#))
        };
        for (depth, read) in [("3", 3), ("\"3\"", 3), ("3.0", 3), ("null", 0)] {
            assert_eq!(list(depth).unwrap().depth, read, "{depth}");
        }
        for depth in ["-1", "1.5", "\"x\"", "4294967296", "true", "[]"] {
            assert!(list(depth).is_err(), "{depth}");
        }
    }

    #[test]
    fn null_is_the_default_and_unknown_fields_are_ignored() {
        let text = r#"{"process":{"cmd":"true","args":null,"envs":null,"cwd":null,"new":[1]},"tag":null,
                       "pty":{"size":{"cols":"80","rows":24,"more":1}},"stdin":null,"another":{}}"#;
        let request: StartRequest = serde_json::from_str(text).unwrap();
        assert_eq!(request.process.cmd, "true");
        assert_eq!(request.pty.unwrap().size, PtySize { cols: 80, rows: 24 });
        assert_eq!((request.tag, request.stdin), (None, None));
        let watch: WatchDirRequest =
            serde_json::from_str(r#"{"path":"x","recursive":null,"include_entry":true}"#).unwrap();
        assert!(watch.include_entry && !watch.recursive);
        let watcher: WatcherRef = serde_json::from_str(r#"{"watcher_id":"w1"}"#).unwrap();
        assert_eq!(watcher.watcher_id, "w1");
    }

    #[test]
    fn base64_is_read_in_both_alphabets_with_and_without_padding() {
        for text in ["+/+/+w==", "-_-_-w==", "-_-_-w", "+/+/+w"] {
            let input: ProcessInput = serde_json::from_str(&format!(r#"{{"stdin":"{text}"}}"#)).unwrap();
            assert_eq!(input.stdin.unwrap(), [0xfb, 0xff, 0xbf, 0xfb], "{text}");
        }
        assert!(serde_json::from_str::<ProcessInput>(r#"{"stdin":"!"}"#).is_err());
    }
}
