//! Lists that are read only if they are short.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

/// Reads a list of at most `MAX` items and stops at the first one more. Items may take many times the room in
/// memory that they take in a message, so a limit on the message's length is not enough.
pub(crate) fn bounded_vec<'de, D, T, const MAX: usize>(list: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    list.deserialize_seq(BoundedVec::<T, MAX>(PhantomData))
}

struct BoundedVec<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for BoundedVec<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut read = Vec::new();
        while let Some(next) = list.next_element()? {
            if read.len() >= MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            read.push(next);
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_is_too_long_is_refused_at_the_first_one_too_many() {
        let read = |text: &str| bounded_vec::<_, u8, 3>(&mut serde_json::Deserializer::from_str(text));
        assert!(read("[]").unwrap().is_empty());
        assert_eq!(read("[1,2,3]").unwrap(), [1, 2, 3]);
        // What follows is not even looked at.
        let error = read("[1,2,3,4,what").unwrap_err().to_string();
        assert!(error.contains("at most 3"), "{error}");
    }
}
