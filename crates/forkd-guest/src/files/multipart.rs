//! Bodies of `multipart/form-data`, read as they come: one part after the other, and of each its head and its
//! content. Memory holds one buffer, whatever the body is.

use std::io::{self, Read};

/// The longest boundary (RFC 2046).
const MAX_BOUNDARY: usize = 70;
/// The longest head of a part: a file's path, mostly.
const MAX_PART_HEAD: usize = 16 << 10;
/// Bytes that are held at most: more than a boundary, or the head of a part.
const BUFFER: usize = 64 << 10;
/// The most header lines of a part.
const MAX_LINES: usize = 16;

/// The boundary that a content type of a form names.
pub(super) fn boundary(content_type: &str) -> Option<&str> {
    let (media_type, mut rest) = content_type.split_once(';')?;
    if !media_type.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    loop {
        let (name, value) = rest.split_once('=')?;
        let value = value.trim_start();
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => value.split_at(value.find(';').unwrap_or(value.len())),
        };
        if name.trim().eq_ignore_ascii_case("boundary") {
            let value = value.trim_end();
            let printable = value.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            return ((1..=MAX_BOUNDARY).contains(&value.len()) && printable).then_some(value);
        }
        rest = after.split_once(';')?.1;
    }
}

/// The head of a part.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PartHead {
    /// The field of the form.
    pub(super) name: String,
    /// As the client wrote it.
    pub(super) filename: Option<String>,
}

/// A form under way.
pub(super) struct Form<R> {
    body: R,
    /// What ends a part: a line break, two dashes and the boundary.
    delimiter: Vec<u8>,
    /// Bytes that were read and are not used yet, from `used` on.
    buffer: Vec<u8>,
    used: usize,
    place: Place,
}

/// Where in a form its reader is.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// Before the first delimiter, or in the content of a part.
    Content,
    /// Behind the delimiter that ends a part.
    Delimiter,
    /// Behind the last delimiter.
    End,
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the form is malformed: {what}"))
}

impl<R: Read> Form<R> {
    pub(super) fn new(body: R, boundary: &str) -> Self {
        // The first delimiter may have no line break before it.
        let buffer = b"\r\n".to_vec();
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        Form { body, delimiter, buffer, used: 0, place: Place::Content }
    }

    /// The head of the next part; `None` at the end of the form. Skips what is left of the part before.
    pub(super) fn next_part(&mut self) -> io::Result<Option<PartHead>> {
        let mut rest = [0; 4 << 10];
        while self.place == Place::Content {
            let _skipped = self.read(&mut rest)?;
        }
        if self.place == Place::End {
            return Ok(None);
        }
        // What follows the delimiter: two dashes at the end of the form, else spaces and a line break.
        while self.unused().len() < 2 {
            self.fill()?;
        }
        if self.unused().starts_with(b"--") {
            self.place = Place::End;
            // Nothing that follows matters; read, so that the connection can go on.
            while self.body.read(&mut rest)? > 0 {}
            return Ok(None);
        }
        let head = self.part_head()?;
        self.place = Place::Content;
        Ok(Some(head))
    }

    /// Reads the head, up to the empty line.
    fn part_head(&mut self) -> io::Result<PartHead> {
        let mut head = PartHead::default();
        let mut left = MAX_PART_HEAD;
        let padding = self.line(&mut left)?;
        if !padding.trim_ascii().is_empty() {
            return Err(malformed("a boundary is not at the end of its line"));
        }
        let mut named = false;
        for _ in 0..=MAX_LINES {
            let line = self.line(&mut left)?;
            if line.is_empty() {
                // The content begins here. If it is empty, the delimiter follows at once, and the line break that
                // belongs to it is the one of the empty line.
                self.used -= 2;
                let delimited = self.starts_with_delimiter()?;
                self.used += if delimited { 0 } else { 2 };
                if named {
                    return Ok(head);
                }
                return Err(malformed("a part has no content-disposition of a form"));
            }
            let line = String::from_utf8(line).map_err(|_| malformed("the head of a part is not UTF-8"))?;
            let Some((name, value)) = line.split_once(':') else {
                return Err(malformed("a header line has no colon"));
            };
            if name.trim().eq_ignore_ascii_case("content-disposition") {
                (head, named) = (disposition(value)?, true);
            }
        }
        Err(malformed("a part has too many header lines"))
    }

    /// Whether the unused bytes begin with the delimiter.
    fn starts_with_delimiter(&mut self) -> io::Result<bool> {
        while self.unused().len() < self.delimiter.len() && self.delimiter.starts_with(self.unused()) {
            self.fill()?;
        }
        Ok(self.unused().starts_with(&self.delimiter))
    }

    /// Takes one line, without its end; `left` limits all lines of a head together.
    fn line(&mut self, left: &mut usize) -> io::Result<Vec<u8>> {
        loop {
            if let Some(len) = find(self.unused(), b"\r\n").filter(|len| *len <= *left) {
                let line = self.unused()[..len].to_vec();
                self.used += len + 2;
                *left -= len;
                return Ok(line);
            }
            if self.unused().len() > *left + 1 {
                return Err(malformed("the head of a part is too long"));
            }
            self.fill()?;
        }
    }

    fn unused(&self) -> &[u8] {
        &self.buffer[self.used..]
    }

    /// Reads some more of the body. Keeps the two bytes before the unused ones: a head may step back over them.
    fn fill(&mut self) -> io::Result<()> {
        let keep = self.used.saturating_sub(2);
        self.buffer.drain(..keep);
        self.used -= keep;
        let len = self.buffer.len();
        self.buffer.resize(BUFFER.max(len + 1), 0);
        let read = self.body.read(&mut self.buffer[len..]);
        self.buffer.truncate(len + *read.as_ref().unwrap_or(&0));
        match read? {
            0 => Err(malformed("it ends in the middle")),
            _ => Ok(()),
        }
    }
}

/// The content of the current part.
impl<R: Read> Read for Form<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.place != Place::Content || buf.is_empty() {
            return Ok(0);
        }
        loop {
            // As many bytes as no delimiter can be in.
            let free = match find(self.unused(), &self.delimiter) {
                Some(0) => {
                    self.used += self.delimiter.len();
                    self.place = Place::Delimiter;
                    return Ok(0);
                }
                Some(at) => at,
                None => self.unused().len().saturating_sub(self.delimiter.len() - 1),
            };
            if free > 0 {
                let n = free.min(buf.len());
                buf[..n].copy_from_slice(&self.unused()[..n]);
                self.used += n;
                return Ok(n);
            }
            self.fill()?;
        }
    }
}

/// Where `wanted` begins.
fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = wanted.first()?;
    let mut from = 0;
    while let Some(at) = bytes[from..].iter().position(|byte| byte == first) {
        if bytes[from + at..].starts_with(wanted) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

/// Reads `form-data; name="file"; filename="/a/b"`. A backslash escapes a quote and itself, and is itself before any
/// other character; percent signs are left as they are.
fn disposition(value: &str) -> io::Result<PartHead> {
    let bad = || malformed("a content-disposition is not that of a form");
    let (kind, mut rest) = value.split_once(';').unwrap_or((value, ""));
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return Err(bad());
    }
    let mut head = PartHead::default();
    while !rest.trim().is_empty() {
        let (name, after) = rest.split_once('=').ok_or_else(bad)?;
        let after = after.trim_start();
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted).ok_or_else(bad)?,
            None => {
                let (value, after) = after.split_at(after.find(';').unwrap_or(after.len()));
                (value.trim_end().to_owned(), after)
            }
        };
        match name.trim().to_ascii_lowercase().as_str() {
            "name" => head.name = value,
            "filename" => head.filename = Some(value),
            _ => {}
        }
        rest = match after.trim_start() {
            "" => "",
            after => after.strip_prefix(';').ok_or_else(bad)?,
        };
    }
    Ok(head)
}

/// The text up to the closing quote, and what follows that.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = quoted.char_indices().peekable();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => match chars.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => text.push(escaped),
                None => text.push('\\'),
            },
            char => text.push(char),
        }
    }
    None
}

/// Fuzz body: whatever the body, and however it is cut, its parts end; they are no longer than the body, and the
/// same for each cut.
pub fn fuzz_multipart(data: &[u8]) {
    struct Cut<'d>(&'d [u8], usize);
    impl Read for Cut<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            let most = buf.len().min(self.1);
            self.0.read(&mut buf[..most])
        }
    }
    let parts = |cut: usize| {
        let mut form = Form::new(Cut(data, cut), "b");
        let mut parts = Vec::new();
        let ended = loop {
            match form.next_part() {
                Ok(Some(head)) => {
                    let mut content = Vec::new();
                    let read = form.read_to_end(&mut content);
                    parts.push((head, content));
                    if read.is_err() {
                        break false;
                    }
                }
                Ok(None) => break true,
                Err(_) => break false,
            }
        };
        let length: usize = parts.iter().map(|(_, content)| content.len()).sum();
        assert!(length <= data.len(), "the parts are longer than the body");
        (parts, ended)
    };
    let whole = parts(usize::MAX);
    for cut in [1, 3] {
        let (parts, ended) = parts(cut);
        // What a broken form gives before its error may depend on the cut.
        assert!(ended == whole.1 && (!ended || parts == whole.0), "the cut matters");
    }
    let _ = boundary(&String::from_utf8_lossy(data));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(body: &str) -> io::Result<Vec<(PartHead, String)>> {
        let mut form = Form::new(body.as_bytes(), "b");
        let mut parts = Vec::new();
        while let Some(head) = form.next_part()? {
            let mut content = String::new();
            form.read_to_string(&mut content)?;
            parts.push((head, content));
        }
        Ok(parts)
    }

    fn file(filename: &str) -> PartHead {
        PartHead { name: "file".into(), filename: Some(filename.into()) }
    }

    const FILE: &str = "Content-Disposition: form-data; name=\"file\"; filename=";

    #[test]
    fn parts_come_in_order_with_their_content_as_it_is() {
        let body = format!(
            "preamble\r\n--b\r\n{FILE}\"/a/b.txt\"\r\nContent-Type: text/plain\r\n\r\none\r\n--b1\r\n-\r\n--b  \r\n\
             {FILE}\"\"\r\n\r\n\r\n--b\r\n{FILE}x\r\n\r\n\r\n\r\n--b\r\ncontent-disposition:form-data;name=note\r\n\r\n\
             two\r\n--b--\r\nepilogue"
        );
        // A delimiter is one with anything behind it: clients choose one that is not in the content.
        assert!(parts(&body).is_err());
        let body = body.replace("\r\n--b1\r\n-", "\r\n-b1\r\n--");
        let expected = [
            (file("/a/b.txt"), "one\r\n-b1\r\n--".to_string()),
            (file(""), String::new()),
            (file("x"), "\r\n".to_string()),
            (PartHead { name: "note".into(), filename: None }, "two".to_string()),
        ];
        assert_eq!(parts(&body).unwrap(), expected);
        fuzz_multipart(body.as_bytes());
        assert_eq!(parts("--b--").unwrap(), []);
    }

    #[test]
    fn a_part_without_content_may_end_at_its_empty_line() {
        let body = format!("--b\r\n{FILE}\"e\"\r\n\r\n--b--\r\n");
        assert_eq!(parts(&body).unwrap(), [(file("e"), String::new())]);
    }

    #[test]
    fn names_are_kept_as_the_clients_write_them() {
        for (written, name) in [
            (r#""/home/user/a b;c=d.txt""#, "/home/user/a b;c=d.txt"),
            (r#""a\"b\\c\d""#, r#"a"b\c\d"#),
            (r#""a%22b""#, "a%22b"),
            ("\"\u{fc}\"; size=3", "\u{fc}"),
            ("plain ; x=y", "plain"),
        ] {
            let body = format!("--b\r\n{FILE}{written}\r\n\r\nx\r\n--b--\r\n");
            assert_eq!(parts(&body).unwrap()[0].0, file(name), "{written}");
        }
    }

    #[test]
    fn a_boundary_is_found_among_the_parameters() {
        for (content_type, found) in [
            ("multipart/form-data; boundary=abc", Some("abc")),
            ("Multipart/Form-Data; charset=utf-8; Boundary=\"a b\"; x=y", Some("a b")),
            ("multipart/form-data; x=\"boundary=z\"; boundary=q", Some("q")),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data", None),
            ("multipart/mixed; boundary=abc", None),
            ("multipart/form-data; boundary=\"a", None),
        ] {
            assert_eq!(boundary(content_type), found, "{content_type}");
        }
        let long = "x".repeat(MAX_BOUNDARY + 1);
        assert_eq!(boundary(&format!("multipart/form-data; boundary={long}")), None);
    }

    #[test]
    fn what_is_no_form_is_an_error_and_costs_no_memory() {
        for body in [
            String::new(),
            "no boundary".into(),
            "--b".into(),
            "--b\r\n".into(),
            format!("--b\r\n{FILE}\"a\"\r\n\r\nno end"),
            "--b\r\n\r\nno head\r\n--b--".into(),
            "--b\r\nno colon\r\n\r\n\r\n--b--".into(),
            "--b\r\ncontent-disposition: attachment\r\n\r\n\r\n--b--".into(),
            "--b\r\ncontent-disposition: form-data; name=\"x\r\n\r\n\r\n--b--".into(),
            "--bad\r\n".into(),
        ] {
            assert!(parts(&body).is_err(), "{body:?}");
            fuzz_multipart(body.as_bytes());
        }
        let mut form = Form::new(io::Read::chain(&b"--b\r\nx: "[..], io::repeat(b'x')), "b");
        assert!(form.next_part().unwrap_err().to_string().contains("too long"));
        let mut form = Form::new(io::Read::chain(&b"--b\r\n"[..], EndlessHead), "b");
        assert!(form.next_part().is_err());
        assert!(form.buffer.len() <= BUFFER);
    }

    struct EndlessHead;

    impl Read for EndlessHead {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            let n = buf.len().min(5);
            buf[..n].copy_from_slice(&b"a: b\r"[..n]);
            Ok(n)
        }
    }

    #[test]
    fn what_fuzzing_found_stays_harmless() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/multipart");
        let inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{folder} is empty");
        inputs.iter().for_each(|path| fuzz_multipart(&std::fs::read(path).unwrap()));
    }
}
