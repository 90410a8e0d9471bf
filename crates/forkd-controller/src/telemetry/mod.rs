//! The daemon's telemetry: [`metrics`], the audit log of requests ([`audit`]), [`events`] of objects, and traces of
//! durations ([`otlp`]). Gauges of the current state are in `api/metrics.rs`.
//!
//! Other modules report to it; it reads and changes nothing itself. Each module reports an operation once, at the
//! place that performs it. Telemetry must never delay or fail an operation.

pub(crate) mod audit;
pub(crate) mod events;
pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod prometheus;

use std::sync::Arc;

use audit::Audit;
use events::Events;
use metrics::Metrics;

use crate::config::Config;
use crate::error::Result;
use crate::telemetry::otlp::Traces;

/// All telemetry of the daemon.
#[derive(Debug)]
pub(crate) struct Telemetry {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) audit: Audit,
    pub(crate) events: Events,
    pub(crate) traces: Traces,
}

impl Telemetry {
    /// Must be called in a runtime. Fails if the audit log cannot be opened.
    pub(crate) fn open(config: &Config) -> Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::new());
        let path = config.audit_log.clone().unwrap_or_else(|| config.data_dir.join("audit.log"));
        Ok(Arc::new(Telemetry {
            audit: Audit::open(path, metrics.clone())?,
            events: Events::new(metrics.clone())?,
            traces: Traces::open(config.otlp_endpoint.as_deref(), metrics.clone())?,
            metrics,
        }))
    }

    /// Writes out everything that is pending.
    pub(crate) async fn close(&self) {
        tokio::join!(self.audit.close(), self.traces.close());
    }
}
