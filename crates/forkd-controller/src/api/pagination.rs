//! Lists in pages: `limit`, `cursor`, and the cursor of the next page.
//!
//! A cursor is the position of the last entry of a page, in an order that never changes. So entries that appear or go
//! between two pages move no other entry. Without a limit, the list is complete.

use axum::Json;
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use forkd_protocol::names::percent;
use serde::Serialize;

use crate::error::{Error, Result};

/// The most entries of one page.
const MAX_LIMIT: usize = 1000;
/// Longer than any position.
const MAX_CURSOR: usize = 128;

/// The requested part of a list, and all other query parameters.
#[derive(Debug)]
pub(crate) struct Page {
    path: String,
    params: Vec<(String, String)>,
    limit: Option<usize>,
    cursor: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Page {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        let query = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
        let Query(params) = query.map_err(|rejection| Error::invalid(rejection.body_text()))?;
        Page::new(parts.uri.path().to_owned(), params)
    }
}

impl Page {
    fn new(path: String, params: Vec<(String, String)>) -> Result<Self> {
        let mut page = Page { path, params, limit: None, cursor: None };
        if let Some(text) = page.one("limit")? {
            let limit = text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
            let refused = || Error::invalid(format!("limit is {text:?}; it must be 1 to {MAX_LIMIT}"));
            page.limit = Some(limit.ok_or_else(refused)?);
        }
        if let Some(cursor) = page.one("cursor")? {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            if !(1..=MAX_CURSOR).contains(&cursor.len()) || !cursor.bytes().all(plain) {
                return Err(Error::invalid("cursor must be the X-Next-Cursor of the previous page"));
            }
            page.cursor = Some(cursor.to_owned());
        }
        Ok(page)
    }

    /// All values of a parameter.
    pub(crate) fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.params.iter().filter(move |(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// The value of a parameter that may be given once.
    pub(crate) fn one(&self, name: &str) -> Result<Option<&str>> {
        let mut values = self.all(name);
        match (values.next(), values.next()) {
            (value, None) => Ok(value),
            _ => Err(Error::invalid(format!("{name} is given more than once; give it once"))),
        }
    }

    /// The page as a response. `show` converts each entry of `all`. `place` gives its position: ascending in the
    /// order of `all`, unique, and made of letters, digits, `.`, `_` and `-` only.
    pub(crate) fn answer<S, T: Serialize>(
        &self,
        all: Vec<S>,
        place: impl Fn(&S) -> String,
        show: impl Fn(&S) -> T,
    ) -> Response {
        let after = |item: &S| self.cursor.as_ref().is_none_or(|cursor| place(item) > *cursor);
        let mut items: Vec<S> = all.into_iter().filter(after).collect();
        let mut next = None;
        if let Some(limit) = self.limit
            && items.len() > limit
        {
            items.truncate(limit);
            next = items.last().map(place);
        }
        let mut response = Json(items.iter().map(show).collect::<Vec<_>>()).into_response();
        if let Some(cursor) = next {
            let link = format!("<{}>; rel=\"next\"", self.address(&cursor));
            let headers = response.headers_mut();
            for (name, value) in [("x-next-cursor", cursor), (header::LINK.as_str(), link)] {
                if let (Ok(name), Ok(value)) =
                    (header::HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value))
                {
                    headers.insert(name, value);
                }
            }
        }
        response
    }

    /// The URL of the same request for the entries after `cursor`.
    fn address(&self, cursor: &str) -> String {
        let others = self.params.iter().filter(|(name, _)| name != "cursor");
        let mut pairs: Vec<String> =
            others.map(|(name, value)| format!("{}={}", percent(name), percent(value))).collect();
        pairs.push(format!("cursor={cursor}"));
        format!("{}?{}", self.path, pairs.join("&"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(params: &[(&str, &str)]) -> Result<Page> {
        let params = params.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Page::new("/v1/things".into(), params.collect())
    }

    #[test]
    fn pages_one_after_the_other_are_the_list_also_when_something_goes_meanwhile() {
        let all: Vec<String> = (0..10).map(|number| format!("t{number}")).collect();
        let header = |response: &Response, name: &str| {
            response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
        };
        let (mut cursor, mut pages) = (None, 0);
        loop {
            let mut params = vec![("limit", "4"), ("label", "a=b c")];
            params.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
            // The entry of the cursor has been removed.
            let there = all.iter().filter(|it| Some(it.as_str()) != cursor.as_deref()).cloned().collect();
            let response = page(&params).unwrap().answer(there, String::clone, String::clone);
            pages += 1;
            let Some(next) = header(&response, "x-next-cursor") else {
                assert!(header(&response, "link").is_none());
                break;
            };
            let link = header(&response, "link").unwrap();
            assert_eq!(link, format!("</v1/things?limit=4&label=a%3Db%20c&cursor={next}>; rel=\"next\""));
            assert_eq!(next, all[pages * 4 - 1]);
            cursor = Some(next);
        }
        assert_eq!(pages, 3);
    }

    #[test]
    fn what_is_no_page_is_refused() {
        for params in [
            &[("limit", "0")][..],
            &[("limit", "1001")],
            &[("limit", "-1")],
            &[("limit", "")],
            &[("limit", "1"), ("limit", "2")],
            &[("cursor", "")],
            &[("cursor", "a b")],
            &[("cursor", "\u{e4}")],
            &[("cursor", &"x".repeat(129))],
        ] {
            assert!(page(params).is_err(), "{params:?}");
        }
        page(&[("limit", "1000"), ("cursor", "0-sb1"), ("unknown", "x")]).unwrap();
    }
}
