//! The daemon's log as JSON: one object per line, with the fields of the line and, under its name, the
//! fields of each of its spans. So `.request.id` is the id of the request that a line is about.

use std::fmt::{self, Write};

use forkd_controller::clock;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Writes lines and the fields of spans.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let about = event.metadata();
        let ts = clock::timestamp_ms(clock::now_ms());
        write!(writer, "{{\"ts\":\"{ts}\",\"level\":\"{}\",\"target\":", about.level())?;
        string(&mut writer, about.target())?;
        let mut fields = Fields { text: String::new() };
        event.record(&mut fields);
        if !fields.text.is_empty() {
            write!(writer, ",{}", fields.text)?;
        }
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            writer.write_str(",")?;
            string(&mut writer, span.name())?;
            let extensions = span.extensions();
            let fields = extensions.get::<FormattedFields<N>>().map_or("", |fields| fields.fields.as_str());
            write!(writer, ":{{{fields}}}")?;
        }
        writer.write_str("}\n")
    }
}

impl<'a> FormatFields<'a> for Json {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'a>, fields: R) -> fmt::Result {
        let mut written = Fields { text: String::new() };
        fields.record(&mut written);
        writer.write_str(&written.text)
    }

    fn add_fields(
        &self,
        current: &'a mut FormattedFields<Self>,
        fields: &tracing::span::Record<'_>,
    ) -> fmt::Result {
        if !current.fields.is_empty() {
            current.fields.push(',');
        }
        self.format_fields(current.as_writer(), fields)
    }
}

/// Fields as the inside of a JSON object.
struct Fields {
    text: String,
}

impl Fields {
    fn add(&mut self, field: &Field, value: impl fmt::Display) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
        // Writing to a string does not fail.
        let _ = string(&mut self.text, field.name());
        let _ = write!(self.text, ":{value}");
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let mut quoted = String::new();
        let _ = string(&mut quoted, value);
        self.add(field, quoted);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no infinities and no NaN.
        self.add(field, serde_json::Value::from(value));
    }
}

fn string(writer: &mut impl Write, text: &str) -> fmt::Result {
    // A string always serialises.
    writer.write_str(&serde_json::to_string(text).map_err(|_| fmt::Error)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Readers of the log rely on a line's fields, their order and their spelling. Only the time is not
    /// compared.
    #[test]
    fn a_line_is_as_it_was() {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .event_format(Json)
            .fmt_fields(Json)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "forkd", count = 3u64, share = 0.5, ok = true, "alone");
            // As the daemon's API opens it for every request.
            let span = tracing::info_span!("request", id = "r1", method = %"GET", path = "/v1/sandboxes");
            span.in_scope(
                || tracing::warn!(target: "forkd", sandbox = "sb1", error = ?"x\ny", "it \"broke\""),
            );
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let masked: String = text
            .lines()
            .map(|line| {
                let (before, rest) = line.split_once("\"ts\":\"").expect(line);
                let (time, after) = rest.split_once('"').expect(line);
                assert!(time.len() == "2026-01-01T00:00:00.000Z".len() && time.ends_with('Z'), "{time}");
                format!("{before}\"ts\":\"TIME\"{after}\n")
            })
            .collect();
        assert_eq!(masked, include_str!("log_format.golden.jsonl"));
    }

    #[test]
    fn every_line_is_an_object_and_says_whose_request_it_is_about() {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .event_format(Json)
            .fmt_fields(Json)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let span =
                tracing::info_span!("request", id = "r1", path = %"/a\"b", late = tracing::field::Empty);
            span.in_scope(|| {
                span.record("late", 7u64);
                tracing::warn!(count = 3u64, share = f64::NAN, ok = true, error = ?"x\ny", "it \"broke\"");
            });
            tracing::info!("alone");
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
        assert_eq!(lines.len(), 2);
        let first = &lines[0];
        assert_eq!(first["message"], "it \"broke\"");
        assert_eq!(
            (&first["level"], &first["count"], &first["ok"]),
            (&"WARN".into(), &3.into(), &true.into())
        );
        assert_eq!(first["share"], serde_json::Value::Null);
        assert_eq!(first["request"]["id"], "r1");
        assert_eq!((&first["request"]["path"], &first["request"]["late"]), (&"/a\"b".into(), &7.into()));
        assert_eq!((&lines[1]["message"], &lines[1]["request"]), (&"alone".into(), &serde_json::Value::Null));
    }
}
